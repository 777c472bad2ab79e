"""Caches of encoder outputs and encoded regions; an entry that is missing is computed again.

It must not import torch.
"""
