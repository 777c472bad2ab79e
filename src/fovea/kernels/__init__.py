"""Pure tensor functions that layers call. `reference` holds their naive twins.

This module must not import torch: bookkeeping without tensors reads NO_SLOT from it.
"""

from __future__ import annotations

NO_SLOT = -1
"""Number of the slot of a sequence that begins: its state is zero."""
