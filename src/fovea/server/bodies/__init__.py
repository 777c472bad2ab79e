"""Request bodies: how many bytes of them may be in memory, and how they become values."""
