"""Any tokens: the second of the two methods that any other has to beat."""

from __future__ import annotations

from random import Random

import torch

from fovea.engine.reduce.base import Reduced, Seen, picked


def choose(seen: Seen, keep: int) -> Reduced:
    """Python's generator, which hashes the seed with SHA-512, so that every machine and device draws the same."""
    drawn = Random(f"visual tokens {seen.seed}").sample(range(seen.count), keep)
    return picked(seen, torch.tensor(drawn, device=seen.embeds.device))
