"""The backends: which there are, how they are, and what they have to do."""
