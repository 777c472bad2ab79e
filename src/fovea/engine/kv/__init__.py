"""Books of the KV pool: blocks, prefixes, moves to host memory. It must not import torch."""
