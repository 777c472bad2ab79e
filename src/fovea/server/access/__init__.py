"""Who may ask, how much, and what is written down about it."""
