"""Chooses a backend for each request, with a reason."""
