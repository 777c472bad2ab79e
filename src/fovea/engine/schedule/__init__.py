"""Scheduling: which sequences and images the next step works on. A step plan is a value without tensors."""
