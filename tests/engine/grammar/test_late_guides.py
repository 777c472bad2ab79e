"""Guides that take long: their answers are left out of steps, the others go on, and nothing is lost.

A client sent a grammar in which one text can be read in 80 ways per letter. Each of its tokens took a second,
in the engine's thread, so that answers of other clients took 27 seconds instead of 0.1.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from fovea import AnswerFormat, Engine
from fovea.core.errors import FoveaError, InvalidRequest
from fovea.core.sampling import SamplingParams
from fovea.engine.grammar import guide as module
from fovea.engine.grammar.compiler import Grammar
from fovea.engine.grammar.definition import compile_format
from fovea.engine.grammar.guide import LONGEST_LOOK_S, Ahead, Guide, Guides
from fovea.engine.grammar.trial import END, byte_vocabulary
from fovea.engine.job import SampledToken
from fovea.engine.sample.sampler import Sampler
from fovea.engine.sequence import Drafts, Sequence
from fovea.engine.step.executor import StepResult
from tests.support.engines import assert_idle

QUESTION = "List the objects."
SCHEMA = {
    "type": "object",
    "properties": {"shape": {"enum": ["circle", "square"]}, "count": {"type": "integer", "maximum": 9}},
    "required": ["shape", "count"],
    "additionalProperties": False,
}
FORMS = [
    AnswerFormat.json_schema(SCHEMA),
    AnswerFormat.choice(["a circle", "a square", "a circus"]),
    AnswerFormat.regex("[a-z]{1,12}( [a-z]{3}){2}"),
]


class Gate:
    """Stops the looks of guides of one kind of form until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        look = Guide.look

        def stopped(guide: Guide, *args: Any) -> Ahead:
            if guide.kind == kind:
                self.reached.set()
                assert self._open.wait(60)
            return look(guide, *args)

        monkeypatch.setattr(Guide, "look", stopped)
        monkeypatch.setattr(module, "LONGEST_LOOK_S", 1e9)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def shut(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Gate]]:
    """Shuts a gate for guides of a kind of form. A test that fails leaves none shut for the next one."""
    gates: list[Gate] = []

    def gate(kind: str) -> Gate:
        gates.append(Gate(monkeypatch, kind))
        return gates[-1]

    yield gate
    for shut in gates:
        shut.open()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained("fovea-tiny", device="cpu", threads=1, kv_cache_mib=16) as machine:
        yield machine


def ask(engine: Engine, form: AnswerFormat | None = None, **params: Any) -> str:
    params = {"max_tokens": 60, "temperature": 1.2, "seed": 4} | params
    return engine.generate(QUESTION, format=form, **params).text


def test_another_answer_takes_as_many_steps_beside_a_guide_that_is_stuck(
    engine: Engine, shut: Callable[[str], Gate]
) -> None:
    """Without drafts: an answer takes fewer steps with them, and whether they pay depends on the machine."""
    expected = ask(engine, FORMS[2])
    stepper = engine.loop.stepper
    before = stepper.steps
    plain = ask(engine, ignore_eos=True, speculate=False)
    alone = stepper.steps - before
    gate = shut("regex")
    late: list[str] = []
    client = threading.Thread(target=lambda: late.append(ask(engine, FORMS[2])))
    client.start()
    assert gate.reached.wait(60)
    before = stepper.steps
    assert ask(engine, ignore_eos=True, speculate=False) == plain
    assert stepper.steps - before <= alone + 1, "one step more may compute the prompt of the late answer"
    assert not late
    gate.open()
    client.join(60)
    assert late == [expected]
    assert_idle(engine)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kind)
def test_answers_are_the_same_if_every_guide_is_late(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, form: AnswerFormat
) -> None:
    """With forced tokens as drafts, and with several choices."""
    expected = [ask(engine, form, seed=seed) for seed in range(3)]
    monkeypatch.setattr(module, "GRACE_S", 0.0)
    assert [ask(engine, form, seed=seed) for seed in range(3)] == expected
    assert ask(engine, form, n=2, seed=1) == expected[1]
    assert_idle(engine)


def test_a_client_that_leaves_while_its_guide_is_stuck(engine: Engine, shut: Callable[[str], Gate]) -> None:
    gate = shut("regex")

    def leave() -> None:
        with suppress(FoveaError):
            ask(engine, FORMS[2])

    leaving = threading.Thread(target=leave)
    leaving.start()
    assert gate.reached.wait(60)
    engine.loop.call(lambda: engine.loop.board.cancel(list(engine.loop.board.jobs)))
    leaving.join(60)
    gate.open()
    assert_idle(engine)


def form(pattern: str, kind: str = "regex") -> Grammar:
    return Grammar(compile_format(AnswerFormat.regex(pattern), byte_vocabulary()), kind)


def test_a_late_token_is_that_of_its_own_logits(shut: Callable[[str], Gate]) -> None:
    """The step's other sequences get theirs. The late one gets it when its guide is ready, cut at the end."""
    gate = shut("late")
    sampler = Sampler(frozenset({END}), most_drafts=4)
    rows = [Sequence(name, [1], SamplingParams(temperature=0), 9) for name in ("late", "guided", "free")]
    sampler.add(rows[0], 0, form("[xy]", "late"))
    sampler.add(rows[1], 0, form("[ab]c"))
    sampler.add(rows[2], 0)
    logits = torch.zeros(3, END + 1)
    logits[0, ord("y")], logits[1, ord("b")], logits[2, ord("q")] = 1.0, 1.0, 1.0
    result = StepResult()
    sampler.sample(logits, [(row, 0) for row in rows], result)
    assert result.sampled == {"guided": [SampledToken(ord("b"))], "free": [SampledToken(ord("q"))]}
    assert result.drafts == {"guided": Drafts.certain([ord("c")])}
    assert not result.failures
    assert sampler.late() is None
    again = StepResult()
    sampler.sample(logits[:1], [(rows[0], 0)], again)
    assert again == StepResult(), "it was preempted, and its prompt was computed again"
    gate.open()
    found = None
    while found is None:
        found = sampler.late()
    assert found.sampled == {"late": [SampledToken(ord("y"), final=True)]}
    assert sampler.late() is None


def test_a_guide_that_takes_too_long_ends_its_answer_alone() -> None:
    """The error says which kind of form it was. The clock is the test's own."""
    now = 0.0
    guides = Guides(clock=lambda thread: now)
    opened, begun = threading.Event(), threading.Event()

    class Stuck(Guide):
        def look(self, *args: Any) -> Ahead:
            begun.set()
            assert opened.wait(60)
            return super().look(*args)

    guides.add("good", form("a"))
    guides._guides["bad"] = Stuck(form("a")._matcher, "grammar")
    guides.look("bad", ())
    assert begun.wait(60)
    rows = [(Sequence(name, [1], SamplingParams(), 9), 0) for name in ("good", "bad")]
    failures: dict[str, Exception] = {}
    masks, late = guides.masks(rows, END + 1, failures)
    assert masks is not None
    assert masks.rows == [0]
    assert late == {"bad"}
    assert not failures
    now = LONGEST_LOOK_S + 0.1
    masks, late = guides.masks(rows, END + 1, failures)
    opened.set()
    assert masks is not None
    assert not late
    assert set(failures) == {"bad"}
    error = failures["bad"]
    assert isinstance(error, InvalidRequest)
    assert error.code == "format_failed"
    assert "the grammar is too ambiguous" in error.message
