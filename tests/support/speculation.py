"""Engines that speculate as often as they can, with drafts that are known to be right or wrong."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from fovea import Engine
from fovea.engine.job import SequenceInputs
from fovea.engine.sequence import Drafts, Sequence
from fovea.engine.speculate import speculator as speculators
from fovea.engine.speculate.drafter import Drafter
from fovea.engine.speculate.speculator import Speculator
from fovea.engine.speculate.texts import LONGEST, NOTHING, Continuation

Question = tuple[tuple[int, ...], tuple[str, ...], int, str]
ENDLESS: dict[str, Any] = {
    "stop": (), "stop_token_ids": (), "max_tokens": None, "min_tokens": 0, "ignore_eos": True,
    "include_stop_str_in_output": False, "logprobs": False, "top_logprobs": 0, "prompt_logprobs": None,
}  # fmt: skip
"""Parameters that decide about an answer's end, and how it is reported. Here none ends it."""


def question(seq: Sequence, inputs: SequenceInputs) -> Question:
    """Name a sequence by its prompt, the number of the choice, and the parameters that choose its tokens."""
    sampling = repr(replace(seq.sampling, **ENDLESS))
    return tuple(seq.prompt_ids), tuple(span.key for span in seq.spans), inputs.choice, sampling


class Known:
    """Answers by their questions, learnt from engines that generate them. The longest one counts.

    wrong: share of wrong drafts.
    """

    def __init__(self, wrong: float = 0.4) -> None:
        self.wrong = wrong
        self._answers: dict[Question, list[int]] = {}

    @contextmanager
    def learning(self, engine: Engine) -> Iterator[None]:
        """Learn the answers that an engine gives in the block, with the tokens that clients do not see."""
        runner, met = engine.runner, list[tuple[Question, Sequence]]()
        add = runner.add

        def note(seq: Sequence, inputs: SequenceInputs) -> Drafts:
            met.append((question(seq, inputs), seq))
            return add(seq, inputs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "add", note)
            yield
        for name, seq in met:
            if len(seq.output_ids) > len(self._answers.get(name, ())):
                self._answers[name] = list(seq.output_ids)

    def answer(self, seq: Sequence, inputs: SequenceInputs) -> list[int]:
        return list(self._answers.get(question(seq, inputs), ()))

    def edited(self, seq: Sequence, inputs: SequenceInputs) -> tuple[int, ...]:
        """An answer with some tokens more, less, or others: a prediction that is nearly right."""
        tokens, dice = self.answer(seq, inputs), Random(len(seq.prompt_ids))
        for at in range(len(tokens) - 3, 0, -9):
            tokens[at : at + dice.randint(0, 2)] = dice.choices(tokens, k=dice.randint(0, 2))
        return tuple(tokens)


class Guesses:
    """A drafter that knows the answers, and makes mistakes. It always makes the same ones."""

    name = "guesses"

    def __init__(self, known: Known) -> None:
        self._known = known
        self._answers: dict[str, list[int]] = {}

    def add(self, seq: Sequence, inputs: SequenceInputs) -> None:
        self._answers[seq.id] = self._known.answer(seq, inputs)

    def draft(self, seq: Sequence, answer: Seq[int], most: int) -> Continuation:
        dice, known = Random(len(answer)), self._answers[seq.id]
        tokens = known[len(answer) :][: dice.randint(0, most)]
        if tokens and dice.random() < self._known.wrong:
            tokens[dice.randrange(len(tokens))] = dice.choice([*known, 5])
        return Continuation(tokens, [1.0] * len(tokens), LONGEST) if tokens else NOTHING

    def remove(self, seq: Sequence) -> None:
        self._answers.pop(seq.id, None)

    def clear(self) -> None:
        """It knows nothing of earlier answers."""


class Predictions(Speculator):
    """A speculator whose sequences have the predictions of `Known.edited`."""

    known: Known

    def add(self, seq: Sequence, inputs: SequenceInputs) -> None:
        super().add(seq, replace(inputs, prediction=self.known.edited(seq, inputs)))


@contextmanager
def eager(engine: Engine, *drafters: Drafter, predictions: Known | None = None) -> Iterator[None]:
    """Let an engine compute all drafts in the block, whatever they cost and however often they were wrong.

    drafters: used in place of the engine's own; none: its own.
    predictions: what the answers of its requests are expected to be.
    """
    speculator = engine.parts.speculator
    assert speculator is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.loop.stepper.drafts, "choose", lambda sequences: None)
        patch.setattr(engine.loop.stepper.drafts, "pays_to_compute", lambda *figures: True)
        for computed in speculator.computed:
            patch.setattr(computed, "least_chance", 0.0)
        patch.setattr(speculators, "LEAST_CHANCE", 0.0)
        if drafters:
            patch.setattr(speculator, "drafters", drafters)
        if predictions is not None:
            patch.setattr(speculator, "__class__", Predictions)
            patch.setattr(speculator, "known", predictions, raising=False)
        yield
    assert engine.runner._speculator is speculator, "a drafter failed"
