"""Calls a sampler as the runner does, and returns one token or error per sequence."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from fovea.engine.job import SampledToken
from fovea.engine.sample.sampler import Sampler
from fovea.engine.sequence import Sequence
from fovea.engine.step.executor import StepResult


def sample(sampler: Sampler, logits: Tensor, sequences: Seq[Sequence]) -> list[SampledToken | Exception]:
    """Choose one token for each sequence, none of which has drafts. The logits stay as they are."""
    result = StepResult()
    sampler.sample(logits.clone(), [(seq, 0) for seq in sequences], result)
    picks: list[SampledToken | Exception] = []
    for seq in sequences:
        if seq.id in result.failures:
            picks.append(result.failures[seq.id])
        else:
            (pick,) = result.sampled[seq.id]
            picks.append(pick)
    return picks
