"""Ask several engines the same questions in turn, compare their answers, and tell how fast they decode.

All engines share the weights. They take turns with each question, in an order that rotates, so that other
work on the machine disturbs all of them alike. An answer that differs from that of the first engine, in a
token or in the probability of one, ends the run (`Differs`).
"""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from fovea import Engine
from fovea.core.types import AnswerBuilder, Completion, Prompt
from fovea.engine.config import EngineConfig
from fovea.engine.load import LoadedModel, load_model
from fovea.engine.speculate.answers import AnswerStore, EarlierAnswers
from fovea.engine.speculate.hints import Hints

ROOT = Path(__file__).resolve().parent.parent
OFF = "off"
ALL = "all"
ALL_DRAFTERS = "all of them"
"""The engine with all drafters by their names. `auto` lets them rest where looking is not cheap."""
ALWAYS = "layer, always"
"""The engine whose layer drafts in every step, whether that pays or not."""
GREEDY: dict[str, Any] = {"temperature": 0.0}
RESAMPLES = 2000


class Differs(Exception):
    """Speculation has changed an answer."""


class Answer(NamedTuple):
    """One answer.

    first_s: seconds from the arrival of the request to its first token.
    decode_s: seconds from its first token to its last.
    steps: steps in which it decoded.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    first_s: float
    decode_s: float
    steps: int


Told = tuple[tuple[int, ...], tuple[float | None, ...]]
"""The tokens of an answer, and their log probabilities."""


class Ratio(NamedTuple):
    """A quotient with the 95% interval of a bootstrap."""

    value: float
    low: float
    high: float


class FixedAnswers(AnswerStore):
    """A store that takes no more answers once `fixed` is set, so that a question can be asked again."""

    fixed = False

    def add(self, key: Any, tokens: Sequence[int]) -> None:
        if not self.fixed:
            super().add(key, tokens)


class Engines:
    """Engines over the same weights, by name. The first one is `off`.

    stores: the earlier answers of those that have the drafter `answers`.
    hints: the drafter that knows answers about the same image, of those that have it.
    """

    def __init__(
        self, model: str, drafters: Mapping[str, str], own: Mapping[str, Any], **settings: Any
    ) -> None:
        """drafters: the setting `speculate` of each further engine.

        own: further settings of these engines. settings: those of all engines.
        """
        self.loaded: LoadedModel = load_model(model, EngineConfig.of(**settings))
        self.engines = {OFF: Engine(self.loaded, EngineConfig.of(**settings, speculate="off"))}
        self.stores: dict[str, FixedAnswers] = {}
        self.hints: dict[str, Hints] = {}
        for name, speculate in drafters.items():
            config = EngineConfig.of(**settings, speculate=speculate, **own)
            self.engines[name] = Engine(self.loaded, config)
            self._prepare(name, config.speculation.answer_cache_mib << 19)

    def _prepare(self, name: str, store_bytes: int) -> None:
        """Give an engine a store of answers that can be fixed. store_bytes: as the engine's own has."""
        speculator = self.engines[name].parts.speculator
        assert speculator is not None
        for drafter in speculator.drafters:
            if isinstance(drafter, Hints):
                self.hints[name] = drafter
            elif isinstance(drafter, EarlierAnswers):
                self.stores[name] = FixedAnswers(store_bytes)
        speculator.drafters = tuple(
            EarlierAnswers(self.stores[name]) if isinstance(drafter, EarlierAnswers) else drafter
            for drafter in speculator.drafters
        )

    def forget_hints(self) -> None:
        """Forget the answers about images, so that a question that is asked again finds none of itself."""
        for name, hints in self.hints.items():
            self.engines[name].loop.call(hints.clear)

    def fix(self) -> None:
        """Take no more answers into the stores."""
        for store in self.stores.values():
            store.fixed = True

    def __getitem__(self, name: str) -> Engine:
        return self.engines[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self.engines.values():
            engine.shutdown()


def ask(engine: Engine, prompt: Prompt | str, **options: Any) -> tuple[Answer, str]:
    """Return an answer and its text. The engine is otherwise idle."""
    before = engine.stats()["decode_steps"]
    made = engine.generate(prompt, **GREEDY, logprobs=True, **options)
    steps = engine.stats()["decode_steps"] - before
    timings = made.timings
    return Answer(*_told(made), timings.ttft, timings.decode, round(steps)), made.text


def _told(made: Completion) -> Told:
    return made.token_ids[0], tuple(each.logprob for each in made.logprobs[0])


@dataclass
class Turn:
    """The answers to one question, by engine: one for each pass.

    opening: nothing before it was asked about its images, so its first token is timed.
    """

    kind: str
    opening: bool
    answers: dict[str, list[Answer]] = field(default_factory=dict)

    def seconds(self, name: str) -> float:
        """Median seconds from the first token to the last."""
        return statistics.median(each.decode_s for each in self.answers[name])


class Question(NamedTuple):
    """A conversation of some kind. ask: asks an engine all of it."""

    kind: str
    ask: Callable[[Engine], list[Answer]]


def compare(
    engines: Engines,
    questions: Iterable[Question],
    passes: int,
    *,
    once: Sequence[str] = (),
    seen: Callable[[Question], None] = lambda question: None,
) -> list[Turn]:
    """Ask all engines all questions, and return the answers to each. Raises Differs.

    passes: how often each question is asked. once: engines that are asked only in the first pass.
    seen: is told each question when all engines have answered it.
    """
    turns: list[Turn] = []
    for number, question in enumerate(questions):
        group: list[Turn] = []
        for turn in range(passes):
            engines.forget_hints()
            names = [name for name in engines.engines if not (turn and name in once)]
            for name in rotated(names, number + turn):
                for place, answer in enumerate(question.ask(engines[name])):
                    if place == len(group):
                        group.append(Turn(question.kind, opening=place == 0))
                    group[place].answers.setdefault(name, []).append(answer)
        for each in group:
            check_equal(each)
        turns += group
        seen(question)
    return turns


Item = TypeVar("Item")


def rotated(names: Sequence[Item], by: int) -> list[Item]:
    """Return the names in an order that begins further on."""
    by %= len(names)
    return [*names[by:], *names[:by]]


def check_equal(turn: Turn) -> None:
    """Raise Differs unless every answer equals that of `off` in the same pass."""
    for name, answers in turn.answers.items():
        for number, (answer, expected) in enumerate(zip(answers, turn.answers[OFF], strict=False)):
            if answer[:2] != expected[:2]:
                what = "tokens" if answer.tokens != expected.tokens else "log probabilities"
                raise Differs(
                    f"{turn.kind}, pass {number}: {what} of {name} differ from those of {OFF}: "
                    f"{answer[:2]}, {expected[:2]}"
                )


def summary(turns: Sequence[Turn], names: Sequence[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the figures of every kind, and of all of them: by kind, by engine.

    tokens_per_step: tokens after the first, over steps that decoded.
    speed: tokens per second from the first token to the last, over those of `off`.
    first: time to the first token over that of `off`, with its interval. A conversation's first question.
    """
    kinds = dict.fromkeys(turn.kind for turn in turns)
    groups = {kind: [turn for turn in turns if turn.kind == kind] for kind in kinds} | {ALL: list(turns)}
    return {kind: {name: _cell(group, name) for name in names} for kind, group in groups.items()}


def _cell(turns: Sequence[Turn], name: str) -> dict[str, Any]:
    answers = [answer for turn in turns for answer in turn.answers[name]]
    tokens = sum(len(answer.tokens) - 1 for answer in answers)
    steps = sum(answer.steps for answer in answers)
    opening = [turn for turn in turns if turn.opening]
    return {
        "answers": len(turns),
        "tokens": sum(len(turn.answers[name][0].tokens) for turn in turns) / len(turns),
        "tokens_per_step": tokens / steps if steps else 1.0,
        "tokens_per_s": sum(len(turn.answers[name][0].tokens) - 1 for turn in turns)
        / max(1e-9, sum(turn.seconds(name) for turn in turns)),
        "speed": quotient([(turn.seconds(OFF), turn.seconds(name)) for turn in turns])._asdict(),
        "first": middle(
            [turn.answers[name][0].first_s / turn.answers[OFF][0].first_s for turn in opening]
        )._asdict(),
    }


def quotient(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """Return the sum of the first numbers over that of the second ones. The bootstrap draws pairs."""
    values = np.array(pairs)
    chosen = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    sums = values[chosen].sum(1)
    return _interval(values[:, 0].sum() / max(1e-9, values[:, 1].sum()), sums[:, 0] / (sums[:, 1] + 1e-9))


def middle(ratios: Sequence[float]) -> Ratio:
    """Return the median. The bootstrap draws ratios."""
    values = np.array(ratios)
    chosen = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    return _interval(np.median(values), np.median(values[chosen], axis=1))


def of_medians(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Return the ratio of two medians. The bootstrap draws rounds, in which both were measured."""
    first, second = np.array(above), np.array(below)
    chosen = np.random.default_rng(0).integers(0, len(first), (RESAMPLES, len(first)))
    drawn = np.median(first[chosen], axis=1) / np.median(second[chosen], axis=1)
    return _interval(np.median(first) / np.median(second), drawn)


def _interval(value: Any, drawn: Any) -> Ratio:
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Ratio(float(value), float(low), float(high))


class Crowd(NamedTuple):
    """Tokens per second of several streams together, and the answers in the order of the questions."""

    tokens_per_s: float
    answers: list[Told]


def crowd(engine: Engine, requests: Sequence[tuple[Prompt, Mapping[str, Any]]], streams: int) -> Crowd:
    """Ask an engine many questions, so many at a time."""

    async def everyone() -> list[Told]:
        waiting = list(enumerate(requests))[::-1]
        done: dict[int, Told] = {}

        async def one() -> None:
            while waiting:
                number, (prompt, options) = waiting.pop()
                builder = AnswerBuilder(1)
                async for delta in engine.stream(prompt, **GREEDY, logprobs=True, **options):
                    builder.add(delta)
                done[number] = _told(builder.build())

        await asyncio.gather(*(one() for _ in range(streams)))
        return [done[number] for number in sorted(done)]

    started = time.perf_counter()
    answers = asyncio.run(everyone())
    seconds = time.perf_counter() - started
    return Crowd(sum(len(tokens) for tokens, _ in answers) / seconds, answers)


def crowds(
    engines: Engines,
    requests: Sequence[tuple[Prompt, Mapping[str, Any]]],
    streams: int,
    repeats: int,
    names: Sequence[str] = (),
    *,
    exact: bool = True,
) -> dict[str, list[float]]:
    """Ask the engines in turn, and return the tokens per second of each round. Raises Differs.

    The first round warms up, and does not count. names: of the engines; (): all.
    exact: log probabilities are compared, too.
    """
    names = names or list(engines.engines)
    rates: dict[str, list[float]] = {name: [] for name in names}
    for number in range(repeats + 1):
        answers: dict[str, list[Told]] = {}
        for name in rotated(names, number):
            engines.forget_hints()
            result = crowd(engines[name], requests, streams)
            answers[name] = result.answers
            if number:
                rates[name].append(result.tokens_per_s)
        for name, told in answers.items():
            _check_crowd(told, answers[OFF], f"{streams} streams, round {number}, {name}", exact)
    return rates


def _check_crowd(told: list[Told], expected: list[Told], where: str, exact: bool) -> None:
    for place, (one, other) in enumerate(zip(told, expected, strict=True)):
        if one[0] != other[0]:
            raise Differs(
                f"{where}: tokens of answer {place} differ from those of {OFF}: {one[0]}, {other[0]}"
            )
        if exact and one[1] != other[1]:
            raise Differs(f"{where}: log probabilities of answer {place} differ from those of {OFF}")


def draft_counts(engine: Engine) -> dict[str, float]:
    """Return the counts of drafts since the engine's start."""
    stats = engine.stats()
    names = ("verifications", "draft_tokens", "accepted_draft_tokens", "drafts_left_out")
    labelled = {key: value for key, value in stats.items() if key.startswith("drafter_") and ":" in key}
    return {name: stats[name] for name in names} | labelled


def machine(threads: int) -> str:
    """Date, commit, machine and its other load, as the beginning of a sentence about a section."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "a CPU")
    return (
        f"{datetime.now(UTC):%Y-%m-%d} at {commit or 'no commit'}: {cpu}, {threads} threads on "
        f"{os.cpu_count()} cores, {platform.system()}, load {os.getloadavg()[0]:.1f} at the start"
    )
