"""Batches: requests in a file, answered one after the other in the background, on disk."""
