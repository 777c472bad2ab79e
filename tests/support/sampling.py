"""Calls samplers as the runner does, for requests with all kinds of parameters."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from torch import Tensor

from fovea.core.sampling import SamplingParams
from fovea.engine.grammar.guide import Guides, Masks
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


class FixedGuides(Guides):
    """Guides that allow the same tokens everywhere, and read nothing. allowed: by sequence id."""

    def __init__(self, allowed: dict[str, set[int]]) -> None:
        super().__init__()
        self.allowed = allowed

    def masks(self, rows: Any, size: int, failures: Any) -> tuple[Masks | None, set[str]]:
        places = []
        for number, (seq, _) in enumerate(rows):
            if seq.id in self.allowed:
                flags = np.isin(np.arange(-(-size // 32) * 32), list(self.allowed[seq.id]))
                places.append((number, np.packbits(flags, bitorder="little").view(np.int32)))
        return (Masks.of(places, size) if places else None), set()


MIX: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3, "logprobs": True, "top_logprobs": 5},
    {"seed": 1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"seed": 2, "top_p": 0.9, "logit_bias": {4: 2.0}},
    {"seed": 3, "allowed_token_ids": (4, 9, 17), "logprobs": True},
    {"seed": 4, "top_k": 5, "min_tokens": 9, "stop_token_ids": (5,)},
    {"temperature": 0, "logprobs": True},
]


def mix() -> list[dict[str, Any]]:
    """Requests with all kinds of parameters, with and without a grammar, drafts and bad words."""
    requests = []
    for allowed in (None, {1, 2, 3, 4, 9}):
        for number, params in enumerate(MIX):
            extra = {"allowed": allowed, "drafts": [4, 9][: number % 3], "bad_words": [[7]] * (number % 2)}
            requests.append({"params": params, "prompt": [1, 2, 2], "output": [4, 4], **extra})
    return requests


def start(requests: list[dict[str, Any]], *, batched: bool) -> tuple[Sampler, list[tuple[Sequence, int]]]:
    """A sampler with these requests, and their rows, those with drafts in between."""
    sampler = Sampler(frozenset({3, 999}), batched=batched)
    rows = []
    for number, request in enumerate(requests):
        seq = Sequence(f"s{number}", request["prompt"], SamplingParams(**request["params"]), 99)
        seq.append(request["output"])
        seq.drafts = list(request["drafts"])
        sampler.add(seq, 0, bad_words=request["bad_words"])
        rows += [(seq, drafts) for drafts in range(len(seq.drafts) + 1)]
    allowed = {f"s{i}": each["allowed"] for i, each in enumerate(requests) if each["allowed"]}
    sampler._guides = FixedGuides(allowed)
    return sampler, sorted(rows, key=lambda row: row[0].id[::-1])


def step(sampler: Sampler, rows: list[tuple[Sequence, int]], x: Tensor) -> StepResult:
    result = StepResult()
    sampler.sample(x.clone(), rows, result)
    return result
