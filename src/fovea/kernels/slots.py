"""A number that bookkeeping and kernels share. This module must not import torch."""

NOTHING = -1
"""Number of the slot of a sequence that begins: its state is zero."""
