"""Several tokens of one answer in one step: the same bits as one step for each, on every kind of kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest
from torch import Tensor

from fovea import AnswerFormat, Engine
from fovea.core.types import Completion
from fovea.engine.sample.sampler import Pending, Row
from fovea.engine.sequence import Drafts
from fovea.engine.step.executor import StepResult
from fovea.evaluation.scenes import HELD_OUT_SEED, generate
from fovea.kernels.native.build import library
from tests.support.engines import all_at_once, assert_idle
from tests.support.programs import need_kernels
from tests.support.thorough import is_thorough, others_slow

pytestmark = pytest.mark.kernels

KINDS = ("describe", "reading", "json", "listing")
OBJECTS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "objects": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "shape": {"type": "string", "maxLength": 12},
                    "color": {"enum": ["red", "dark red", "blue"]},
                },
                "required": ["shape", "color"],
                "additionalProperties": False,
            },
            "maxItems": 3,
        }
    },
    "required": ["objects"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["none", "int8", "int4"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The bundled model on the C++ kernels; without these, in float32 on torch's."""
    native = {"dtype": "bfloat16", "kernels": "native", "quantization": request.param}
    if request.param != "none":
        need_kernels()
    settings = native if library() is not None else {"dtype": "float32"}
    with Engine.from_pretrained(
        "fovea-tiny", kv_cache_mib=16, threads=1, device="cpu", speculate="off", **settings
    ) as machine:
        yield machine


def written(engine: Engine, answer: Completion) -> list[tuple[int, float]]:
    """The ids and logprobs of an answer. Only Fovea's own kernels add in one order for any number of rows."""
    exact = library() is not None
    return [(token.id, token.logprob if exact else 0.0) for token in answer.logprobs[0]]


def ask(engine: Engine, kind: str, **extra: Any) -> Completion:
    (sample,) = generate(HELD_OUT_SEED, 1, (kind,))
    options = {"temperature": 0, "max_tokens": 60, "logprobs": True, **extra}
    return engine.generate(sample.turns[0].question, sample.images, **options)  # type: ignore[arg-type]


class Guesses:
    """A sampler that also proposes drafts: the known answer, with a wrong token now and then."""

    def __init__(self, engine: Engine, answer: Sequence[int]) -> None:
        self.sampler = engine.runner.sampler
        self.answer, self.random = answer, Random(7)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def launch(self, logits: Tensor, rows: Sequence[Row], **options: Any) -> Pending:
        pending = self.sampler.launch(logits, rows, **options)
        finish = pending.finish

        def guess(result: StepResult) -> None:
            finish(result)
            self.guess(rows, result)

        pending.finish = guess  # type: ignore[method-assign]
        return pending

    def guess(self, rows: Sequence[Row], result: StepResult) -> None:
        for seq in {seq.id: seq for seq, _ in rows}.values():
            at = len(seq.output_ids) + len(result.sampled[seq.id])
            guess = list(self.answer[at : at + self.random.randint(0, 9)])
            if guess and self.random.random() < 0.4:
                guess[self.random.randrange(len(guess))] = 5
            result.drafts[seq.id] = Drafts.certain(guess)


@pytest.mark.parametrize("kind", others_slow(KINDS, ["describe", "json"]))
def test_verified_drafts_have_the_bits_of_single_steps(
    engine: Engine, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.clear_caches()
    alone = ask(engine, kind, ignore_eos=True)
    engine.clear_caches()
    steps, before = engine.stats()["engine_steps"], engine.stats()["accepted_draft_tokens"]
    monkeypatch.setattr(engine.runner, "sampler", Guesses(engine, alone.token_ids[0]))
    guessed = ask(engine, kind, ignore_eos=True)
    assert written(engine, guessed) == written(engine, alone)
    assert guessed.text == alone.text
    assert engine.stats()["accepted_draft_tokens"] - before > 20
    assert engine.stats()["engine_steps"] - steps < 45
    assert_idle(engine)


def test_forced_tokens_change_neither_text_nor_logprobs(engine: Engine) -> None:
    form = AnswerFormat.json_schema(OBJECTS)
    answers, steps = [], []
    kinds = KINDS if is_thorough() else KINDS[::2]
    for drafts in (16, 0):
        engine.clear_caches()
        engine.runner.sampler._guides.most_drafts = drafts
        before = engine.stats()["engine_steps"]
        answers.append([ask(engine, kind, format=form) for kind in kinds])
        steps.append(engine.stats()["engine_steps"] - before)
    engine.runner.sampler._guides.most_drafts = 16
    forced, single = answers
    assert [written(engine, answer) for answer in forced] == [written(engine, answer) for answer in single]
    assert all(answer.finish_reasons == ("stop",) for answer in forced)
    assert steps[0] * 1.5 < steps[1]
    assert_idle(engine)


def test_an_answer_with_a_form_is_the_same_alone_and_in_company(engine: Engine) -> None:
    from concurrent.futures import ThreadPoolExecutor

    form = AnswerFormat.json_schema(OBJECTS)
    forms, most = [form, None, form, None], 60 if is_thorough() else 32
    alone = []
    for kind, wanted in zip(KINDS, forms, strict=True):
        engine.clear_caches()
        alone.append(written(engine, ask(engine, kind, format=wanted, max_tokens=most)))
    engine.clear_caches()
    with ThreadPoolExecutor(4) as pool, all_at_once(engine, 4):
        together = list(
            pool.map(
                lambda job: written(engine, ask(engine, job[0], format=job[1], max_tokens=most)),
                zip(KINDS, forms, strict=True),
            )
        )
    assert together == alone
