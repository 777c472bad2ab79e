"""Copies from the host to a device that wait for nothing."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to the device.

    A copy to a GPU from memory that is not pinned would wait for all work that was launched before it.
    """
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
