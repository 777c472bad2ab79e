"""Bookkeeping of KV blocks as integers: pool, prefixes, moves to host memory. It must not import torch."""
