"""Speculation changes no bit: tokens, texts and log probabilities are those of an engine without it.

Every case asks an engine without speculation, one question at a time. Then all questions arrive at once at an
engine that speculates: with the engine's own drafters, which have seen the answers, with drafts that are
right and wrong by design, and with predictions that are nearly right.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fovea import AnswerFormat, Engine
from fovea.core.protocols import CacheStage
from fovea.core.types import ChatPrompt, Client, Completion, TokenPrompt
from fovea.engine.config import EngineConfig
from fovea.engine.grammar.guide import Ahead, Guides
from fovea.engine.load import LoadedModel, load_model
from fovea.engine.request.prepare import Preparer
from fovea.evaluation.scenes import HELD_OUT_SEED, generate
from fovea.kernels.native.build import library
from tests.engine.test_drafts import OBJECTS
from tests.engine.test_native_families import FAMILIES
from tests.support.draft_layers import random_eagle3
from tests.support.engines import all_at_once, ask, assert_idle, picture
from tests.support.programs import need_kernels
from tests.support.speculation import Guesses, Known, eager
from tests.support.thorough import is_thorough, others_slow

pytestmark = pytest.mark.kernels

DRAFTS = 8
"""Most drafts of a sequence. A step of the tests may have more tokens than the ITL limit allows."""
Options = Mapping[str, Any]
Ending = Callable[[Completion], Options]
"""Options that follow from the answer without them: where it is to end."""
Written = tuple[Any, ...]
Prompt = tuple[ChatPrompt | TokenPrompt | str, Any]
"""A question and its images."""


def half(done: Completion) -> int:
    return len(done.token_ids[0]) // 2


OPTIONS: dict[str, Options | Ending] = {
    "greedy": {},
    "seed": {"temperature": 1.0, "seed": 11},
    "narrow": {"temperature": 0.8, "seed": 3, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
    "choices": {"temperature": 1.0, "seed": 5, "n": 2},
    "equal choices": {"n": 2},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "penalties, seed": {"repetition_penalty": 1.2, "frequency_penalty": 0.9, "temperature": 1, "seed": 2},
    "bad words": {"bad_words": ("circle", "the", "is", "left of", '"')},
    "bias": {"logit_bias": {50: 4.0, 60: -9.0, 70: 2.5}, "temperature": 1.0, "seed": 6},
    "allowed": {"allowed_token_ids": tuple(range(0, 400, 3)), "temperature": 1.0, "seed": 7},
    "ends": {"ignore_eos": False},
    "no logprobs": {"logprobs": False, "top_logprobs": 0},
    "prompt logprobs": {"prompt_logprobs": 1},
    "stop string": lambda done: {"stop": (done.text[(at := len(done.text) // 2) : at + 3] or "x",)},
    "kept stop string": lambda done: {
        "stop": (done.text[(at := len(done.text) // 3) : at + 2] or "x",), "include_stop_str_in_output": True,
    },
    "stop token": lambda done: {"stop_token_ids": (done.token_ids[0][half(done)],)},
    "late stop token": lambda done: {
        "stop_token_ids": (done.token_ids[0][2],), "min_tokens": half(done), "ignore_eos": False,
    },
    "length": lambda done: {"max_tokens": half(done)},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
    "minimum": {"min_tokens": 30, "ignore_eos": False},
    "json": {"format": AnswerFormat.json_schema(OBJECTS)},
    "json, seed": {"format": AnswerFormat.json_schema(OBJECTS), "temperature": 1.0, "seed": 8},
    "regex": {"format": AnswerFormat.regex("([a-z]{2,9} ){4}(yes|no, never)"), "temperature": 1.2, "seed": 9},
    "choice": {"format": AnswerFormat.choice(["a red circle", "a red square", "nothing at all"])},
}  # fmt: skip
FREE = [name for name in OPTIONS if name not in ("json", "json, seed", "regex", "choice")]
GRAMMARS = ("json", "json, seed", "regex", "choice")
ENDINGS = ("stop string", "kept stop string", "stop token", "late stop token", "length", "two tokens")
"""Groups whose requests run together."""
GROUPS: dict[str, Seq[str]] = {
    "drawn": ("greedy", "seed", "narrow", "choices", "equal choices", "no logprobs"),
    "adjusted": ("penalties", "penalties, seed", "bad words", "bias", "allowed", "minimum"),
    "endings": (*ENDINGS, "ends", "one token", "prompt logprobs"),
    "grammars": GRAMMARS,
    "mixed": ("greedy", "seed", "penalties", "bad words", "stop string", "json", "regex", "choices"),
    "plain": ("greedy", "seed"),
}
ARRANGED: dict[str, Options] = {
    "together": {},
    "chunks of 7": {"max_step_tokens": 7},
    "preempted": {"max_step_tokens": 64},
    "no caches": {"prefix_cache": False, "embed_cache_mib": 0, "max_step_tokens": 23},
    "padded": {"decode_graphs": "padded"},
    "host memory": {"kv_host_mib": 1, "kv_blocks": 12, "block_size": 16},
    "few states": {"state_cache_mib": 1, "state_spacing": 4, "max_step_tokens": 9},
    "no forced drafts": {"max_draft_tokens": 0},
    "late guides": {},
}
"""Settings that change no answer, beside speculation."""
MEANINGS: dict[str, Options] = {
    "plain": {},
    "int8 kv": {"kv_dtype": "int8"},
    "snap": {"kv_keep": "snap:160"},
    "window": {"kv_keep": "window:128"},
    "text": {"kv_keep": "text:0.5"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
"""Settings that change answers, so that the engine without speculation has them, too."""
KEPT = ("snap", "window", "text")
WORDS = "the red circle is left of the blue square and what is above this one " * 8


@dataclass(frozen=True)
class Case:
    """A question, a model and settings, by their names in the tables above."""

    model: str = "bundled"
    group: str = "plain"
    arranged: str = "together"
    meaning: str = "plain"

    def __str__(self) -> str:
        return f"{self.model}-{self.group}-{self.arranged}-{self.meaning}"


def prompts(case: Case) -> list[Prompt]:
    if case.meaning in KEPT:
        first = ask("Describe the picture. " + WORDS, picture(1, 320, 256), picture(2, 256, 192))
        return [(first, ()), (ask(WORDS, picture(3, 256, 192)), ())]
    if case.model != "bundled":
        texts = ask("the red circle is left of the blue square"), ask("What is it?", picture(4, 160, 128))
        return [(text, ()) for text in texts]
    return [scene(kind) for kind in ("describe", "reading", "listing")[: 3 if is_thorough() else 2]]


def scene(kind: str) -> Prompt:
    (sample,) = generate(HELD_OUT_SEED, 1, (kind,))
    return sample.turns[0].question, sample.images


def settings(case: Case, **more: Any) -> Options:
    """Settings for the C++ kernels; without these, for float32 on torch's."""
    kernels = {"dtype": "bfloat16", "kernels": "native"} if library() is not None else {"dtype": "float32"}
    base = {"device": "cpu", "threads": 1, "kv_blocks": 256} | kernels
    return base | dict(MEANINGS[case.meaning]) | more


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> Callable[[Case], LoadedModel]:
    @cache
    def load(name: str, meaning: str) -> LoadedModel:
        path = "fovea-tiny" if name == "bundled" else str(checkpoint(name))
        return load_model(path, EngineConfig.of(**settings(Case(meaning=meaning))))

    return lambda case: load(case.model, case.meaning)


@contextmanager
def running(model: LoadedModel, **options: Any) -> Iterator[Engine]:
    with Engine(model, EngineConfig.of(**options)) as machine:
        yield machine
        assert_idle(machine)


def written(done: Completion) -> Written:
    """All that a client sees of an answer, but what caches and the clock decide.

    Only Fovea's own kernels add in one order for any number of rows. Without them, numbers may differ.
    """
    exact, usage = library() is not None, done.usage
    tokens = [
        [(item.id, item.text, item.offset, item.hidden, *((item.logprob, item.top) if exact else ()))
         for item in choice]
        for choice in done.logprobs
    ]  # fmt: skip
    counts = usage.prompt, usage.completion, usage.image, usage.reasoning, usage.dropped
    scored = done.prompt_logprobs if exact else ()
    return done.token_ids, done.texts, done.finish_reasons, done.stops, counts, scored, tokens


def first_difference(one: Any, other: Any) -> Any:
    """The first part in which two answers differ, with its places; None: they are equal."""
    if one == other:
        return None
    if (
        isinstance(one, Seq)
        and isinstance(other, Seq)
        and not isinstance(one, str)
        and len(one) == len(other)
    ):
        at, pair = next(
            (at, pair) for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]
        )
        return at, first_difference(*pair)
    return one, other


Request = tuple[Prompt, dict[str, Any]]


def answer(machine: Engine, request: Request) -> Completion:
    (prompt, images), options = request
    base = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "logprobs": True, "top_logprobs": 2}
    return machine.generate(prompt, images, **{**base, **options})


def together(machine: Engine, requests: Seq[Request]) -> list[Written]:
    with ThreadPoolExecutor(len(requests)) as pool, all_at_once(machine, len(requests)):
        return [written(done) for done in pool.map(lambda request: answer(machine, request), requests)]


def prepared(machine: Engine, case: Case) -> list[Request]:
    requests: list[Request] = []
    longer = {"max_tokens": 70} if case.meaning in KEPT else {}  # another point of `keep` is in the answer
    for prompt in prompts(case):
        endless = answer(machine, (prompt, {}))
        for options in map(OPTIONS.__getitem__, GROUPS[case.group]):
            requests.append((prompt, longer | dict(options(endless) if callable(options) else options)))
    return requests


class Drafted:
    """Drafts that an engine computed since this object was made."""

    def __init__(self, machine: Engine) -> None:
        self._machine = machine
        self._before = self._counts()

    def _counts(self) -> tuple[float, float]:
        stats = self._machine.stats()
        return stats["draft_tokens"], stats["accepted_draft_tokens"]

    @property
    def accepted(self) -> float:
        return self._counts()[1] - self._before[1]

    @property
    def refused(self) -> float:
        return self._counts()[0] - self._before[0] - self.accepted


def check(case: Case, loaded: LoadedModel, **computed: Any) -> None:
    """Compare the answers of a case with and without speculation.

    computed: settings of a drafter that computes drafts, which is used alone; none: those that find drafts.
    """
    if (case.model, case.meaning) != ("bundled", "plain") or case.arranged == "padded":
        need_kernels()
    known = Known()
    with running(loaded, **settings(case)) as machine, known.learning(machine):
        requests = prepared(machine, case)
        alone = [answer(machine, request) for request in requests]
        expected = [written(done) for done in alone]
    more = {"speculate": "auto", "speculative_tokens": DRAFTS, **ARRANGED[case.arranged], **computed}
    if case.arranged == "preempted":  # room for one of the longest answers, and a little more
        longest = max(done.usage.prompt + len(ids) for done in alone for ids in done.token_ids)
        more["block_size"] = size = 16 if case.meaning in KEPT else 4  # whole blocks are kept
        more["kv_blocks"] = longest // size + 32 // size
    with running(loaded, **settings(case, **more)) as machine:

        def compare(when: str, rounds: int = 1) -> Drafted:
            drafted = Drafted(machine)
            for _ in range(rounds):
                found = together(machine, requests)
                for request, one, other in zip(requests, found, expected, strict=True):
                    assert first_difference(one, other) is None, f"{when}: {request[1]}"
            return drafted

        with eager(machine):
            drafted = compare("drafters of the engine", 2)
        if computed:
            assert drafted.refused > 5
            assert drafted.accepted > 5 or more["speculate"] == "layer", "its weights are random"
        else:
            assert drafted.accepted > 0
            with eager(machine, Guesses(known)):
                drafted = compare("right and wrong drafts")
                assert min(drafted.accepted, drafted.refused) > (0 if case.arranged == "late guides" else 5)
            machine.clear_caches("answers")
            with eager(machine, predictions=known):
                assert compare("predictions").accepted > 0
        compare("drafts that are worth their rows")
        assert case.arranged != "preempted" or machine.stats()["preemptions"] > 0


EVERYWHERE = ("together", "chunks of 7", "preempted", "no caches", "padded")
"""Arrangements that every model takes."""
CASES = list(dict.fromkeys([
    *(Case(group=group, arranged=arranged) for group in GROUPS for arranged in EVERYWHERE),
    Case(group="mixed", arranged="host memory"),
    *(Case(group="grammars", arranged=arranged) for arranged in ("no forced drafts", "late guides")),
    *(Case(meaning=meaning, arranged=arranged) for meaning in MEANINGS for arranged in EVERYWHERE[:3]),
    *(Case(model=family, arranged=arranged) for family in FAMILIES for arranged in EVERYWHERE
      if (family, arranged) != ("mllama", "padded")),
    *(Case(model=family, arranged="few states") for family in ("qwen3_5", "lfm2_vl")),
    *(Case(model="gemma3", meaning="int8 kv", arranged=arranged) for arranged in EVERYWHERE[:2]),
]))  # fmt: skip
DEFAULT = [
    Case(group="drawn"),
    Case(group="adjusted"),
    Case(group="endings"),
    Case(group="mixed", arranged="preempted"),
    Case(group="mixed", arranged="chunks of 7"),
    Case(group="grammars", arranged="late guides"),
    Case(arranged="padded"),
    Case(meaning="int8 kv", arranged="chunks of 7"),
    Case(meaning="snap"),
    Case(model="qwen3_5", arranged="few states"),
    Case(model="lfm2_vl"),
    Case(model="gemma3", arranged="preempted"),
    Case(model="mllama"),
]
"""Each of the others differs from these by one arrangement, number type or family."""


def be_late_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let guides seem to be late at random, however fast they are."""
    dice, ahead = Random(5), Guides.ahead

    def late(guides: Guides, name: str) -> Ahead | None:
        return None if dice.random() < 0.3 else ahead(guides, name)

    monkeypatch.setattr(Guides, "ahead", late)


@pytest.mark.parametrize("case", others_slow(CASES, DEFAULT), ids=str)
def test_speculation_changes_no_bit(
    case: Case, model: Callable[[Case], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    if case.arranged == "late guides":
        be_late_often(monkeypatch)
    check(case, model(case))


COMPUTED = [Case(group=group, arranged=arranged) for group in ("plain", "mixed") for arranged in EVERYWHERE]


@pytest.mark.parametrize("drafter", ["layer", "model"])
@pytest.mark.parametrize("case", others_slow(COMPUTED, [Case(), Case(arranged="preempted")]), ids=str)
def test_computed_drafts_change_no_bit(
    case: Case, drafter: str, model: Callable[[Case], LoadedModel], tmp_path: Path
) -> None:
    """The layer has random weights. The draft model is the model itself, but sees smaller images."""
    used: dict[str, Any] = {"speculate": drafter}
    if drafter == "layer":
        used["draft_layer"] = str(random_eagle3(tmp_path / "eagle3"))
    else:
        used["draft_model"] = "fovea-tiny"
    check(case, model(case), **used)


def test_nothing_changes_behind_the_tokens_that_end_a_models_reasoning(
    model: Callable[[Case], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grammar begins in the middle of an answer, also if a draft says so."""
    case, form = Case(), AnswerFormat.regex("( [a-z]{1,5}){3}[.] yes")
    loaded, known = model(case), Known(wrong=0.3)
    with running(loaded, **settings(case)) as machine:
        ids = answer(machine, (scene("describe"), {})).token_ids[0]
    for marks in (ids[9:10], ids[6:8]):
        monkeypatch.setattr(Preparer, "_reasoning_end", lambda self, prompt, marks=marks: marks)
        requests: list[Request] = [(scene("describe"), {"format": form, **more}) for more in (
            {}, {"temperature": 1.0, "seed": 3}, {"logprobs": False, "top_logprobs": 0})]  # fmt: skip
        with running(loaded, **settings(case)) as machine, known.learning(machine):
            alone = [answer(machine, request) for request in requests]
        end = next(at for at in range(1, 11) if ids[at - len(marks) : at] == marks)
        assert alone[0].token_ids[0][:end] == ids[:end]
        assert alone[0].text.endswith(". yes")
        with running(loaded, **settings(case, speculate="auto", speculative_tokens=DRAFTS)) as machine:
            for drafters in ((), (), (Guesses(known),)):
                drafted = Drafted(machine)
                with eager(machine, *drafters):
                    assert together(machine, requests) == [written(done) for done in alone]
            assert min(drafted.accepted, drafted.refused) > 0


TURNS = ("bundled", "qwen3_5", "lfm2_vl", "gemma3", "mllama")


@pytest.mark.parametrize("name", others_slow(TURNS, ("bundled", "qwen3_5", "gemma3")))
def test_a_turn_behind_an_answer_with_drafts_has_the_same_bits(
    name: str, model: Callable[[Case], LoadedModel]
) -> None:
    """Its prefix was computed as drafts, some of them behind the answer's end."""
    need_kernels()
    case, known = Case(model=name), Known()
    loaded = model(case)
    text = ask(" ".join(WORDS.split()[:40]))
    with running(loaded, **settings(case)) as machine, known.learning(machine):
        ids = asyncio.run(machine.tokenize(text))
        usual = {"max_tokens": 60, "allowed_token_ids": tuple(sorted(set(ids)))}  # which a prompt can hold
        first = answer(machine, ((text, ()), usual))
        told = first.token_ids[0]
        ending = usual | {"stop_token_ids": (told[len(told) // 2],)}
        ended = answer(machine, ((text, ()), ending))
    turns: list[Request] = [
        ((TokenPrompt((*ids, *told[:count], *ids[:5])), ()), {"max_tokens": 12})
        for count in (len(told) // 2, len(told) - 2)
    ]
    with running(loaded, **settings(case, prefix_cache=False)) as machine:
        alone = [written(answer(machine, turn)) for turn in turns]
    chosen = settings(
        case, speculate="auto", speculative_tokens=DRAFTS, block_size=8, state_spacing=8, max_step_tokens=512
    )
    with running(loaded, **chosen) as machine, eager(machine, Guesses(known)):
        assert written(answer(machine, ((text, ()), ending))) == written(ended)
        assert written(answer(machine, turns[0])) == alone[0]
        assert written(answer(machine, ((text, ()), usual))) == written(first)
        done = answer(machine, turns[1])
        assert written(done) == alone[1]
        assert done.usage.cached > len(ids) + 8, "tokens of the answer were cached"


def test_requests_that_are_cancelled_beside_others_and_caches_that_are_cleared(
    model: Callable[[Case], LoadedModel],
) -> None:
    """In a small pool. A client that leaves gets a beginning of its answer, all others the whole one."""
    case, known, dice = Case(), Known(), Random(3)
    loaded = model(case)
    choices: list[Request] = [
        (scene(kind), {"temperature": temperature, "seed": 4})
        for kind in ("describe", "reading") for temperature in (0, 1.0)
    ]  # fmt: skip
    with running(loaded, **settings(case)) as machine, known.learning(machine):
        alone = [answer(machine, request) for request in choices]
    plan = [(dice.randrange(len(choices)), dice.choice([0, 0, 0, 1, 7, 20])) for _ in range(24)]
    stages: list[CacheStage] = ["kv", "encoder", "answers"]

    def drink(machine: Engine, number: int, sips: int) -> tuple[int, ...]:
        ids: list[int] = []
        (prompt, images), options = choices[number]
        request = machine.request(prompt, images, max_tokens=40, ignore_eos=True, logprobs=True, **options)
        with closing(machine.iterate(request)) as deltas:  # type: ignore[type-var]
            for delta in deltas:
                ids += delta.token_ids
                if sips and len(ids) >= sips:
                    break
        return tuple(ids)

    small = {"block_size": 4, "kv_blocks": 64, "max_step_tokens": 64, "embed_cache_mib": 0}
    chosen = settings(case, speculate="auto", speculative_tokens=DRAFTS, **small)
    with Engine(loaded, EngineConfig.of(**chosen)) as machine:
        for drafters in ((), (Guesses(known),)):
            with eager(machine, *drafters), ThreadPoolExecutor(6) as pool:
                running_now = [pool.submit(drink, machine, *each) for each in plan]
                for future in running_now:
                    machine.clear_caches(dice.choice(stages))
                    future.exception()
            for (number, sips), future in zip(plan, running_now, strict=True):
                expected, found = alone[number].token_ids[0], future.result()
                assert (
                    found == expected if not sips else found == expected[: len(found)] and len(found) >= sips
                )
        assert machine.stats()["preemptions"] > 0
        while machine.unfinished:
            time.sleep(0.001)
        assert_idle(machine)
        speculator = machine.parts.speculator
        assert speculator is not None
        assert not speculator._records, "nothing is left of those who went"


A, B = ("a", ""), ("b", "")


class Clients:
    """Asks an engine for several clients, and tells what was drafted for each answer."""

    def __init__(self, machine: Engine) -> None:
        self.machine = machine
        self._count = 0

    def ask(self, client: Client, salt: str = "", kind: str = "describe") -> Counter[str]:
        """Return the drafts of one answer by drafter."""
        before = self._drafts()
        sampling = self.machine.sampling({"temperature": 0, "max_tokens": 40, "ignore_eos": True})
        (text, images), self._count = scene(kind), self._count + 1
        built = self.machine.request(text, images)
        request = replace(built, id=f"r{self._count}", sampling=sampling, client=client, cache_salt=salt)
        ids = [token for delta in self.machine.iterate(request) for token in delta.token_ids]
        assert len(ids) == 40
        return self._drafts() - before

    def _drafts(self) -> Counter[str]:
        names = "drafter_tokens:", "drafter_accepted_tokens:"
        found = self.machine.stats().items()
        return Counter({name: int(count) for name, count in found if name.startswith(names)})


@contextmanager
def clients(loaded: LoadedModel, drafters: str = "hints,answers") -> Iterator[Clients]:
    settings_ = settings(Case(), speculate=drafters, speculative_tokens=DRAFTS)
    with running(loaded, **settings_) as machine, eager(machine):
        yield Clients(machine)


def test_no_answer_changes_what_is_drafted_for_another_client(model: Callable[[Case], LoadedModel]) -> None:
    """Nor for another tenant of the same key, nor with another salt: the speed of answers tells nothing."""
    others = [("a", ""), ("b", "t"), ("", "b")]
    loaded = model(Case())
    with clients(loaded) as alone:
        first = [alone.ask(B) for _ in range(3)]
        salted = [alone.ask(B, "salt") for _ in range(2)]
    assert not first[0].keys() - {""}
    assert first[1].total() > 20
    assert not salted[0]
    with clients(loaded) as beside:
        for _ in range(2):
            for client in others:
                beside.ask(client)
                beside.ask(client, "salt")
                beside.ask(B, "another")
        assert [beside.ask(B) for _ in range(3)] == first
        assert [beside.ask(B, "salt") for _ in range(2)] == salted


@pytest.mark.parametrize("drafter", ["hints", "answers"])
def test_clearing_the_answers_forgets_them(drafter: str, model: Callable[[Case], LoadedModel]) -> None:
    with clients(model(Case()), drafter) as asking:
        assert not asking.ask(A)
        assert asking.ask(A)
        asking.machine.clear_caches("kv", "encoder")
        assert asking.ask(A), "other caches are others"
        asking.machine.clear_caches("answers")
        assert not asking.ask(A)
        assert asking.ask(A)
        asking.machine.clear_caches()
        assert not asking.ask(A)
