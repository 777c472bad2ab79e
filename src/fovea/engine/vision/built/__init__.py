"""Encoders that are built ahead of time, one per grid of patches."""
