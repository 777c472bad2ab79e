"""Reads a request before anything is forwarded: its model, its images, its size."""
