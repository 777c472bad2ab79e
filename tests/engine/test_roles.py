"""Roles change no bit: tokens, texts and log probabilities are those of one engine that does everything.

Every case asks one engine with the role `all`, one question after the other. Then a team of engines gets the
same questions: first one after the other, then all at once, then again with full caches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fovea import AnswerFormat, Engine
from fovea.core.errors import InvalidRequest
from fovea.core.media import PixelBudget
from fovea.core.types import ChatPrompt, ImagePart, TextPrompt, TokenPrompt
from fovea.engine.config import EngineConfig
from fovea.engine.load import LoadedModel, load_model
from tests.engine.test_native_families import FAMILIES
from tests.engine.test_speculation import Case as Model
from tests.engine.test_speculation import Written, first_difference, settings, written
from tests.support.checkpoints import ARCHITECTURES
from tests.support.engines import ask
from tests.support.programs import need_kernels
from tests.support.reduced import reduced_prompt
from tests.support.roles import TEAMS, Team, drawn, team
from tests.support.thorough import others_slow

pytestmark = pytest.mark.kernels

Question = tuple[ChatPrompt | TextPrompt | TokenPrompt, dict[str, Any]]
"""A prompt and the options of its request."""
BLOCK = 4
WORDS = "the red circle is left of the blue square and what is above this one "
ALL: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks": {"max_step_tokens": 7},
    "preempted": {},
    "large blocks": {"block_size": 16},
    "no caches": {"embed_cache_mib": 0},
    "few states": {"state_cache_mib": 1, "state_spacing": 4, "max_step_tokens": 9},
    "host memory": {"kv_host_mib": 1, "kv_blocks": 80},
    "speculation": {},
    "no room": {"transfer_mib": 1},
}
"""Settings of all engines that change no answer."""
FRONT: dict[str, dict[str, Any]] = {
    "preempted": {"max_step_tokens": 64},
    "speculation": {"speculate": "auto", "speculative_tokens": 8},
}
"""Settings of the engine that answers."""


@dataclass(frozen=True)
class Case:
    """A team, a model, questions and settings, by their names in the tables above."""

    team: str = "prefill"
    model: str = "bundled"
    group: str = "plain"
    arranged: str = "together"
    meaning: str = "plain"

    def __str__(self) -> str:
        return f"{self.team}-{self.model}-{self.group}-{self.arranged}-{self.meaning}"


def many(budget: PixelBudget | None = None) -> ChatPrompt:
    """Several images, one of them twice."""
    return ask("compare them", drawn(2), drawn(3, 64, 128), drawn(2), budget=budget)


def plain(machine: Engine) -> list[Question]:
    return [
        (ask(WORDS), {}),
        (ask("What is in the image?", drawn(1)), {}),
        (ask("Describe the picture, please.", drawn(1)), {}),
        (many(), {}),
    ]


def drawn_lots(machine: Engine) -> list[Question]:
    return [
        (ask("What is in the image?", drawn(1)), {"temperature": 1.0, "seed": 5, "n": 2}),
        (ask(WORDS, drawn(4, 224, 192)), {"temperature": 0.8, "seed": 3, "top_p": 0.9, "top_k": 20}),
        (ask(WORDS), {"repetition_penalty": 1.2, "frequency_penalty": 0.9, "temperature": 1, "seed": 2}),
        (ask("Is it red?", drawn(1)), {"format": AnswerFormat.choice(["a red circle", "nothing at all"])}),
        (ask("Yes or no?", drawn(2)), {"format": AnswerFormat.regex("([a-z]{2,9} ){3}(yes|no)")}),
        (ask("What?", drawn(1)), {"prompt_logprobs": 1}),
    ]


def lengths(machine: Engine) -> list[Question]:
    """Prompts of one token, of whole blocks, and of one token more; and with images at the very end."""
    ids = asyncio.run(machine.tokenize(ask(WORDS)))
    size = machine.parts.kv.block_size
    return [
        (TokenPrompt(tuple(ids[-count:])), {})
        for count in (1, 2, size - 1, size, size + 1, 2 * size, 2 * size + 1)
    ]


def endings(machine: Engine) -> list[Question]:
    """Images at the beginning and at the end of prompts, also inside of blocks."""
    mark = machine.parts.preparer.builder._markers[0]
    found: list[Question] = []
    for count in range(5):
        text = "a b c d e f g h"[: 2 * count]
        found.append((TextPrompt(text + mark, (ImagePart(drawn(1), PixelBudget()),)), {}))
    found.append((TextPrompt(mark + mark, tuple(ImagePart(drawn(n), PixelBudget()) for n in (1, 2))), {}))
    found.append((TextPrompt(mark + "and" + mark, (ImagePart(drawn(5), PixelBudget()),) * 2), {}))
    return found


METHODS = ("uniform", "dart", "dpp_query", "visionzip", "tome", "fastv", "relevance", "views", "resize")


def reduced(machine: Engine) -> list[Question]:
    """Fewer visual tokens by each method that the model has, and all of them."""
    pictures = drawn(6, 256, 192), drawn(7, 160, 128)
    asked = [reduced_prompt("the red circle", *pictures, method=method, keep=0.5) for method in METHODS]
    asked.append(reduced_prompt("the red circle", pictures[0], method="relevance", keep="auto"))
    return [
        (prompt, {}) for prompt in (*asked, ask("What is it?", *pictures)) if is_accepted(machine, prompt)
    ]


def is_accepted(machine: Engine, prompt: ChatPrompt) -> bool:
    try:
        machine.outline(prompt)
    except InvalidRequest:
        return False
    return True


GROUPS: dict[str, Callable[[Engine], list[Question]]] = {
    "plain": plain,
    "drawn": drawn_lots,
    "lengths": lengths,
    "endings": endings,
    "reduced": reduced,
}


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> Callable[[Case], LoadedModel]:
    @cache
    def load(name: str, meaning: str) -> LoadedModel:
        path = "fovea-tiny" if name == "bundled" else str(checkpoint(name))
        return load_model(path, EngineConfig.of(**settings(Model(meaning=meaning))))

    return lambda case: load(case.model, case.meaning)


def reply(machine: Engine, question: Question) -> Written:
    prompt, options = question
    base = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, "logprobs": True, "top_logprobs": 2}
    return written(machine.generate(prompt, **{**base, **options}))


def compare(
    members: Team, questions: Seq[Question], expected: Seq[Written], when: str, *, at_once: bool
) -> None:
    def ask_front(question: Question) -> Written:
        return reply(members.front, question)

    with ThreadPoolExecutor(len(questions) if at_once else 1) as pool:
        found = list(pool.map(ask_front, questions))
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert first_difference(one, other) is None, f"{when}: question {number}"


def check(case: Case, loaded: LoadedModel) -> Mapping[str, float]:
    base = {
        **settings(Model(meaning=case.meaning)),
        "block_size": BLOCK,
        "kv_blocks": 640,
        "speculate": "off",
    }
    base |= ALL[case.arranged]
    with Engine(loaded, EngineConfig.of(**base)) as machine:
        questions = GROUPS[case.group](machine)
        expected = [reply(machine, question) for question in questions]
    # In company one engine gives other answers, too: kernels of torch, for other heads, add in any order, and
    # the method relevance looks at the load.
    exact = case.model in ("bundled", *FAMILIES) and case.group != "reduced"
    front = dict(FRONT.get(case.arranged, {}))
    if case.arranged == "preempted":  # room for the longest answer, and a little more
        longest = max(counts[0] + counts[1] for *_, counts, _, _ in expected)
        front["kv_blocks"] = longest // base["block_size"] + 32 // base["block_size"]
    with team(case.team, loaded, base, **front) as members:
        compare(members, questions, expected, "one after the other", at_once=False)
        stats = dict(members.stats())
        members.front.clear_caches()
        compare(members, questions, expected, "peers have full caches", at_once=exact)
        compare(members, questions, expected, "all have full caches", at_once=False)
        members.front.clear_caches()
        for engine in members.engines.values():
            engine.clear_caches()
        compare(members, questions * 2, expected * 2, "all at once", at_once=exact)
        members.check()
        after = members.stats()
        for kind in ("encode", "prefill"):
            assert after[f"peer_{kind}_failed"] == after[f"peer_{kind}_refused"] == 0, after
        if (case.model, case.group, case.arranged) == ("bundled", "plain", "preempted"):
            assert after["preemptions"] > 0
        if case.arranged != "no caches" and case.group != "lengths":
            assert after["transfers"] > 0
        if "prefill" in case.team and "blocks" in case.arranged:
            assert after["values_adopted"] > 0
        return stats


EVERYWHERE = ("together", "chunks", "preempted", "large blocks")
CASES = list(dict.fromkeys([
    *(Case(name, "bundled", group, arranged) for name in TEAMS for group in GROUPS for arranged in ALL
      if arranged != "few states"),
    *(Case(name, family, group, arranged) for name in TEAMS for family in FAMILIES
      for group in ("plain", "endings", "lengths") for arranged in EVERYWHERE
      if (group, arranged) != ("lengths", "preempted")),
    *(Case(name, family, "plain", "few states") for name in TEAMS for family in ("qwen3_5", "lfm2_vl")),
    *(Case(name, family, group) for name in TEAMS for family in FAMILIES for group in ("drawn", "reduced")),
    *(Case(name, architecture, "endings") for name in TEAMS for architecture in ARCHITECTURES),
    *(Case(name, "bundled", "plain", arranged, meaning) for name in TEAMS
      for arranged in EVERYWHERE for meaning in ("int8 kv", "int8")),
    *(Case(name, family, "plain", "chunks", "int8 kv") for name in TEAMS for family in ("gemma3", "qwen3_5")),
]))  # fmt: skip
DEFAULT = [
    Case("encode", "bundled", "reduced"),
    Case("prefill", "bundled", "drawn", "chunks"),
    Case("prefill", "bundled", "lengths"),
    Case("prefill", "bundled", "endings", "large blocks"),
    Case("encode, prefill", "bundled", "plain", "preempted"),
    Case("encode, prefill", "bundled", "plain", "chunks", "int8 kv"),
    Case("prefill", "qwen3_5", "plain", "few states"),
    Case("prefill", "gemma3", "endings"),
    Case("prefill", "mllama", "plain"),
]


@pytest.mark.parametrize("case", others_slow(CASES, DEFAULT), ids=str)
def test_roles_change_no_bit(case: Case, model: Callable[[Case], LoadedModel]) -> None:
    if (case.model, case.meaning) != ("bundled", "plain"):
        need_kernels()
    check(case, model(case))
