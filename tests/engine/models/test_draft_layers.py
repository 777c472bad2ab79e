"""EAGLE-3 and MTP layers in engines: drafts are those of the definition, and answers do not change."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from fovea import AnswerFormat, Engine
from fovea.core.media import Image
from fovea.core.types import ChatPrompt
from fovea.engine.grammar import guide
from fovea.engine.grammar.guide import Guide
from fovea.engine.job import SequenceInputs
from fovea.engine.layers.mixers import mrope_axes
from fovea.engine.load import resolve
from fovea.engine.sequence import Sequence as Answer
from fovea.engine.speculate.texts import Continuation
from tests.support.checkpoints import write
from tests.support.draft_layers import (
    Definition,
    Plain,
    PlainEagle3,
    PlainMTP,
    Target,
    add_mtp,
    draft_always,
    eagle3,
)
from tests.support.engines import all_at_once, ask, assert_idle, engine, picture
from tests.support.programs import need_kernels
from tests.support.thorough import examples, others_slow

TOKENS = 12
TAPS = (1, 2, 3)
INTERLEAVED = (0, 1, 2, 0, 1, 2, 0, 0)
"""Coordinates of the rotary frequencies of the tiny Qwen3-VL: its sections are 4, 2 and 2."""
QUESTIONS: dict[str, tuple[str, Sequence[Image]]] = {
    "text": ("the red circle is left of the blue square", ()),
    "picture": ("What is in the image?", (picture(1),)),
    "again": ("Describe the picture, please.", (picture(1),)),
    "two": ("compare", (picture(1), picture(3, 64, 128))),
}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
Ids = tuple[int, ...]


class Case(NamedTuple):
    """A target with a layer.

    settings: of engines that draft with it.
    definition: the layer's. It knows all texts.
    texts: prompt and answer of each question, by an engine without speculation.
    answers: the answers.
    """

    folder: Path
    settings: dict[str, Any]
    definition: Definition
    texts: list[Ids]
    answers: dict[str, Ids]

    def engine(self, **more: Any) -> Engine:
        return engine(self.folder, **{"speculate": "layer", "speculative_tokens": 3, **self.settings, **more})


LAYERS = ("eagle3", "mtp", "mtp_moe", "mtp_moe_apart")


@pytest.fixture(scope="module", params=others_slow(LAYERS, ("eagle3", "mtp_moe")))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    plain: Plain
    own: dict[str, Any] = {}
    if kind == "eagle3":
        write("qwen3_vl", folder)
        files = eagle3(folder, vocabulary=200, eagle_aux_hidden_state_layer_ids=[*TAPS], rope_theta=None)
        own = {"draft_layer": str(files.write(folder / "elsewhere"))}
        target = Target(folder)
        plain = PlainEagle3(target, files, TAPS, INTERLEAVED, theta=500000.0)
    else:
        write("qwen3_5" if kind == "mtp" else "qwen3_5_moe", folder)
        add_mtp(folder, fused=kind != "mtp_moe_apart")
        target = Target(folder)
        plain = PlainMTP(target)
    texts, answers, definition = [], {}, Definition(target, plain)
    with engine(folder, prefix_cache=False) as machine:
        for name, (_, images) in QUESTIONS.items():
            answers[name] = machine.generate(prompt(name), **GREEDY).token_ids[0]
            ids = machine.parts.preparer.builder.build(prompt(name)).ids
            texts.append((*ids, *answers[name]))
            definition.add(texts[-1], images)
    assert len(set(answers.values())) == len(answers)
    return Case(folder, own, definition, texts, answers)


def prompt(name: str) -> ChatPrompt:
    text, images = QUESTIONS[name]
    return ask(text, *images)


def together(machine: Engine, names: Sequence[str], *, apart: bool = False) -> dict[str, Ids]:
    """Return the answers to questions that come at once. apart: they share no prefixes with each other.

    The last row of a shared prefix has the token that followed it in the earlier text, so drafts after it are
    not those of the definition if the texts differ from there on.
    """
    with ThreadPoolExecutor(len(names)) as pool, all_at_once(machine, len(names)):
        jobs = {
            name: pool.submit(machine.generate, prompt(name), **GREEDY, cache_salt=name if apart else "")
            for name in names
        }
        return {name: job.result().token_ids[0] for name, job in jobs.items()}


class Known:
    """A drafter that knows the answers, and is often wrong. Accepted drafts make steps with several rows."""

    name = "prompt"

    def __init__(self, texts: Sequence[Ids], right: float = 0.7) -> None:
        self.texts, self.right, self.random = texts, right, Random(3)

    def add(self, seq: Answer, inputs: SequenceInputs) -> None:
        pass

    def draft(self, seq: Answer, answer: Sequence[int], most: int) -> Continuation:
        begin = (*seq.prompt_ids, *answer)
        whole = next((text for text in self.texts if text[: len(begin)] == begin), ())
        tokens = [
            token if self.random.random() < self.right else 7
            for token in whole[len(begin) : len(begin) + self.random.randint(0, most)]
        ]
        return Continuation(tokens, [1.0] * len(tokens), 4)

    def remove(self, seq: Answer) -> None:
        pass

    def clear(self) -> None:
        pass


SCHEDULES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "in chunks that end inside images": {"max_step_tokens": 7},
    "without prefix cache, in blocks of five tokens": {"prefix_cache": False, "block_size": 5},
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_drafts_are_those_of_the_definition(
    case: Case, schedule: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Questions come together, and then again, when the prefix cache has their prompts."""
    names = list(case.answers)
    with case.engine(**schedule) as machine:
        log = draft_always(machine, monkeypatch)
        for _ in range(2):
            assert together(machine, names) == case.answers
        assert_idle(machine)
        assert machine.stats()["draft_tokens"] > 60
    drafts = log.take()
    assert len(drafts) >= 2 * len(names) * (TOKENS - 2)
    case.definition.check(drafts)


def test_drafts_after_a_prefix_that_was_in_host_memory(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    tight = {"block_size": 4, "kv_blocks": 16, "kv_host_mib": 1, "embed_cache_mib": 0}
    with case.engine(**tight) as machine:
        log = draft_always(machine, monkeypatch)
        for name in ("picture", "text", "two", "picture", "two"):
            assert together(machine, [name], apart=True) == {name: case.answers[name]}
        assert machine.stats()["kv_host_loads"] > 0
        assert_idle(machine)
    case.definition.check(log.take())


def test_drafts_after_accepted_and_refused_ones(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    with case.engine(max_step_tokens=16) as machine:
        log = draft_always(machine, monkeypatch)
        assert machine.parts.speculator is not None
        machine.parts.speculator.drafters = (Known(case.texts),)
        assert together(machine, list(case.answers)) == case.answers
        assert machine.stats()["accepted_draft_tokens"] > 10
        assert_idle(machine)
    case.definition.check(log.take())


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_drafts_after_preemption(case: Case, prefix_cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["picture", "again", "text", "two"]
    tight = {"block_size": 4, "kv_blocks": max(map(len, case.texts)) // 2 - 3, "max_step_tokens": 64}
    with case.engine(prefix_cache=prefix_cache, **tight) as machine:
        log = draft_always(machine, monkeypatch)
        assert together(machine, names, apart=True) == case.answers
        assert machine.stats()["preemptions"] > 0
        assert_idle(machine)
    case.definition.check(log.take())


@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    names=st.lists(st.sampled_from(sorted(QUESTIONS)), min_size=1, max_size=3, unique=True),
    step=st.integers(4, 40),
    size=st.sampled_from([1, 3, 16]),
    right=st.floats(0, 1),
    most=st.integers(1, 6),
)
def test_drafts_under_any_schedule(
    case: Case, names: list[str], step: int, size: int, right: float, most: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        options = {"max_step_tokens": step, "block_size": size, "speculative_tokens": most}
        with case.engine(kv_blocks=1024, **options) as machine:
            log = draft_always(machine, patch)
            assert machine.parts.speculator is not None
            machine.parts.speculator.drafters = (Known(case.texts, right),)
            for _ in range(2):
                assert together(machine, names, apart=True) == {name: case.answers[name] for name in names}
            assert_idle(machine)
        case.definition.check(log.take())


@pytest.mark.kernels
@pytest.mark.parametrize("architecture", ["bundled", "qwen3_5"])
def test_drafts_on_the_kernels_for_cpus(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16: answers and their logprobs keep their bits, and drafts are near the definition."""
    need_kernels()
    plain: Plain
    options: dict[str, Any] = {}
    if architecture == "bundled":
        files = eagle3("fovea-tiny", vocabulary=200)
        options = {"draft_layer": str(files.write(tmp_path))}
        folder = resolve("fovea-tiny")
        target = Target(folder)
        axes = mrope_axes((12, 10, 10), interleaved=True)
        plain = PlainEagle3(target, files, (1, 3, 4), axes)
    else:
        folder = add_mtp(write(architecture, tmp_path, dtype=torch.bfloat16))
        target = Target(folder)
        plain = PlainMTP(target)
    definition, found = Definition(target, plain), []
    texts: list[Ids] = []
    native: dict[str, Any] = {
        "dtype": "bfloat16",
        "kernels": "native",
        "device": "cpu",
        "threads": 1,
        "kv_blocks": 256,
    }
    drafting = {"speculate": "layer", "speculative_tokens": 3, **options}
    for speculation in ({"speculate": "off"}, drafting):
        with Engine.from_pretrained(str(folder), **{**native, **speculation}) as machine:
            log = None
            if speculation["speculate"] != "off":
                log = draft_always(machine, monkeypatch)
                assert machine.parts.speculator is not None
                machine.parts.speculator.drafters = (Known(texts),)
            written = []
            for name in ("picture", "text"):
                answer = machine.generate(prompt(name), **GREEDY, logprobs=True)
                written.append([(token.id, token.logprob) for token in answer.logprobs[0]])
                if log is None:
                    ids = machine.parts.preparer.builder.build(prompt(name)).ids
                    texts.append((*ids, *answer.token_ids[0]))
            found.append(written)
            assert_idle(machine)
    assert found[0] == found[1]
    assert log is not None
    for text, name in zip(texts, ("picture", "text"), strict=True):
        definition.add(text, QUESTIONS[name][1])
    definition.check(log.take(), tolerance=0.02)


def test_drafts_after_tokens_that_a_guide_delays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their row was computed steps before they were known."""
    files = eagle3("fovea-tiny", vocabulary=200)
    target, look = Target(resolve("fovea-tiny")), Guide.look
    axes = mrope_axes((12, 10, 10), interleaved=True)
    definition = Definition(target, PlainEagle3(target, files, (1, 3, 4), axes))

    def slow(guide: Guide, *args: Any) -> Any:
        time.sleep(0.01)
        return look(guide, *args)

    monkeypatch.setattr(guide, "GRACE_S", 0.0)
    monkeypatch.setattr(Guide, "look", slow)
    layer = str(files.write(tmp_path))
    with engine(resolve("fovea-tiny"), speculate="layer", speculative_tokens=3, draft_layer=layer) as machine:
        log = draft_always(machine, monkeypatch)
        form = AnswerFormat.regex("[a-z]{40}")
        answer = machine.generate(prompt("picture"), temperature=0, max_tokens=TOKENS, format=form)
        ids = machine.parts.preparer.builder.build(prompt("picture")).ids
        assert_idle(machine)
    definition.add((*ids, *answer.token_ids[0]), QUESTIONS["picture"][1])
    definition.check(log.take())
