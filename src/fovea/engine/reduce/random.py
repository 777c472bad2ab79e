"""Random tokens: one of the two baselines for all other methods."""

from __future__ import annotations

from random import Random

import torch

from fovea.engine.reduce.base import ReducedTokens, ReductionInput, pick_tokens


def choose(image: ReductionInput, keep: int) -> ReducedTokens:
    """Draw with Python's generator: it hashes the seed with SHA-512, so all machines draw the same tokens."""
    numbers = Random(f"visual tokens {image.seed}").sample(range(image.count), keep)
    return pick_tokens(image, torch.tensor(numbers, device=image.embeds.device))
