"""A/B experiments: which variant answers, what is recorded about it, and when the numbers decide."""
