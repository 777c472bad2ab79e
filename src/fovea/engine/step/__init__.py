"""The engine thread: one step after the other, without tensors. It must not import torch."""
