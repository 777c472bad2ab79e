"""Synthetic images with questions whose answers are exact by construction.

`generate(seed, count, kinds, sizes)` yields samples. Equal arguments give equal samples on any machine with
the same version of Pillow. Seeds from `HELD_OUT_SEED` (1_000_000_000) on are for evaluation only: no training
run of a bundled model uses them.
"""

from fovea.evaluation.scenes.dataset import ALL_KINDS, DETAIL_KINDS, KINDS, TASK_KINDS, generate
from fovea.evaluation.scenes.scene import HELD_OUT_SEED, Sample, Turn

__all__ = ["ALL_KINDS", "DETAIL_KINDS", "HELD_OUT_SEED", "KINDS", "TASK_KINDS", "Sample", "Turn", "generate"]
