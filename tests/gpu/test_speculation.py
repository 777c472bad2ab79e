"""Speculation on CUDA: tokens are those of single steps, and so are the bits as long as steps are padded."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from fovea import Engine
from fovea.engine.job import SequenceInputs
from fovea.engine.sequence import Sequence
from fovea.engine.speculate.texts import Continuation
from fovea.evaluation.scenes import HELD_OUT_SEED, generate
from tests.support import gpu
from tests.support.draft_layers import random_eagle3

pytestmark = gpu.MARKS
KINDS = gpu.either(("describe", "json", "reading"), ("reading",))
LENGTH = gpu.either(40, 4)


class Guesses:
    """A drafter that knows the answers, and is wrong now and then."""

    name = "prompt"

    def __init__(self) -> None:
        self.answers: dict[tuple[int, ...], list[int]] = {}
        self.random = Random(3)

    def add(self, seq: Sequence, inputs: SequenceInputs) -> None:
        pass

    def draft(self, seq: Sequence, answer: list[int], most: int) -> Continuation:
        known = self.answers.get(tuple(seq.prompt_ids), [])
        tokens = known[len(answer) : len(answer) + 3]
        tokens = [token if self.random.random() < 0.8 else 5 for token in tokens]
        return Continuation(tokens, [0.9] * len(tokens), 4)

    def remove(self, seq: Sequence) -> None:
        self.answers[tuple(seq.prompt_ids)] = list(seq.output_ids)

    def clear(self) -> None:
        pass


def answers(engine: Engine, **options: Any) -> list[list[tuple[int, float]]]:
    engine.clear_caches()  # products of a prompt behind a cached prefix have fewer rows
    written = []
    for number, kind in enumerate(KINDS):
        (sample,) = generate(HELD_OUT_SEED + number, 1, (kind,))
        answer = engine.generate(
            sample.turns[0].question,
            sample.images,
            max_tokens=LENGTH,
            ignore_eos=True,
            logprobs=True,
            **{"temperature": 0, **options},
        )
        written.append([(token.id, token.logprob or 0.0) for token in answer.logprobs[0]])
    return written


def compute_all(engine: Engine) -> None:
    """Let steps compute all drafts, whatever they cost."""
    budget = engine.loop.stepper.drafts
    budget.choose, budget.pays_to_compute = (lambda sequences: None), (lambda *figures: True)  # type: ignore[method-assign]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 7}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=gpu.NEEDS_CUDA)])
def test_drafts_change_no_bit_of_a_single_answer(dtype: str, options: dict[str, Any]) -> None:
    """Steps of up to eight rows are padded to eight, so each product has the same number of rows."""
    with gpu.engine_of("fovea-tiny", dtype=dtype, decode_graphs="auto", speculate="prompt") as engine:
        assert engine.parts.speculator is not None
        compute_all(engine)
        drafters, engine.parts.speculator.drafters = engine.parts.speculator.drafters, ()
        alone = answers(engine, **options)
        guesses = Guesses()
        engine.parts.speculator.drafters = (guesses,)
        answers(engine, **options)  # the answers become known
        steps = engine.stats()["engine_steps"]
        drafted = answers(engine, **options)
        engine.parts.speculator.drafters = drafters
        assert [[token for token, _ in each] for each in drafted] == [[t for t, _ in each] for each in alone]
        differing = [
            place
            for one, other in zip(drafted, alone, strict=True)
            for place, pair in enumerate(zip(one, other, strict=True))
            if pair[0] != pair[1]
        ]
        # In float32 the last bits can differ: these products are others for other numbers of rows.
        assert not differing or dtype == "float32", (
            f"log probabilities of {len(differing)} tokens, the first at {differing[:9]}"
        )
        assert engine.stats()["accepted_draft_tokens"] > gpu.either(20, 0)
        assert engine.stats()["engine_steps"] - steps < gpu.either(len(KINDS) * LENGTH, 1000)


@pytest.mark.parametrize("drafters", ["layer", "model"])
def test_computed_drafts_change_no_token(tmp_path: Path, drafters: str) -> None:
    """The layer's states come from recorded graphs. Here its weights are random, so most drafts are wrong."""
    settings: dict[str, Any] = {"dtype": "float32", "decode_graphs": "auto", "speculative_tokens": 3}
    with gpu.engine_of("fovea-tiny", speculate="off", **settings) as engine:
        alone = answers(engine)
    layer = random_eagle3(tmp_path / "eagle3")
    settings |= {"draft_layer": str(layer), "draft_model": "fovea-tiny"}
    with gpu.engine_of("fovea-tiny", speculate=drafters, **settings) as engine:
        compute_all(engine)
        for computed in engine.parts.speculator.computed if engine.parts.speculator else ():
            computed.least_chance = 0.0  # type: ignore[attr-defined]
        drafted = answers(engine)
        stats = engine.stats()
    assert [[token for token, _ in each] for each in drafted] == [[t for t, _ in each] for each in alone]
    assert stats["draft_tokens"] + stats["drafts_left_out"] > 0 or drafters == "layer"
