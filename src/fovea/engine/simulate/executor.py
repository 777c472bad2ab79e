"""Executors without a model: durations come from a cost model, and tokens from a function.

`CostExecutor` runs on a virtual clock, `RealtimeExecutor` in real time, with filler answers. `Noise` disturbs
durations, so that a control can be tested as on a real machine. `recorded_steps` records the steps of a real
engine, so that a cost model can be fitted to them.
"""

from __future__ import annotations

import math
import re
import time
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from fovea.core.sampling import SamplingParams
from fovea.core.settings import check_settings, setting
from fovea.core.trace import geometric
from fovea.engine.cache.embeddings import EmbeddingCache
from fovea.engine.job import SampledToken, SequenceInputs
from fovea.engine.request.tokenizer import ChatTokenizer
from fovea.engine.schedule.plan import EncodeJob, StepPlan, composition_of
from fovea.engine.sequence import NO_DRAFTS, Drafts, Sequence
from fovea.engine.step.executor import SliceQueue, StepResult
from fovea.engine.step.loop import EngineLoop
from fovea.planner.cost import CostModel
from fovea.planner.fit import ImageSample, StepSample

SLICE_DECAY = 0.95
"""A slice is expected to take as long as the slowest recent one, as in `execute.encode_queue`."""
MEAN_TOKENS = 64
"""Mean length of an answer whose request names no length."""
LAG_S = 0.05
"""Largest delay that later steps make up for. Sleeping is exact to milliseconds only, and steps may be
shorter.
"""


class CostExecutor:
    """A simulated executor: it computes nothing and reports the durations of a cost model.

    It implements `step.executor.Executor`.

    cost: the cost model.
    embeddings: the cache into which encoded images are put.
    pick: returns the next token of a sequence.
    """

    def __init__(
        self,
        cost: CostModel,
        embeddings: EmbeddingCache[None],
        pick: Callable[[Sequence], int],
        noise: NoiseSettings | None = None,
    ) -> None:
        """noise: disturbs durations; None: each step lasts exactly as long as the cost model says."""
        self.cost = cost
        self._embeddings = embeddings
        self._pick = pick
        self._noise = Noise(noise or NoiseSettings())
        self._slice_s = 0.0
        self._alive: set[str] = set()
        self._queue: SliceQueue[_Encoding] = SliceQueue(self._alive.__contains__)

    @property
    def encoding(self) -> bool:
        return bool(self._queue.states)

    @property
    def slice_s(self) -> float:
        return self._slice_s

    def add(self, seq: Sequence, inputs: SequenceInputs) -> Drafts:
        self._alive.add(seq.id)
        return NO_DRAFTS

    def remove(self, seq: Sequence) -> None:
        self._alive.discard(seq.id)

    def execute(self, plan: StepPlan, encode_s: float) -> StepResult:
        result = StepResult()
        self._encode(plan, encode_s, result)
        result.sampled = {
            item.seq.id: (SampledToken(self._pick(item.seq)),) for item in plan.work if item.samples
        }
        tokens_s = self.cost.step(composition_of(plan))
        result.seconds = self._noise.disturb(tokens_s) + result.encode_s
        return result

    def late(self) -> None:
        return None

    def _encode(self, plan: StepPlan, seconds: float, result: StepResult) -> None:
        self._queue.update(plan.encode)
        if seconds < 0:
            return

        def advance(job: EncodeJob) -> None:
            key, tokens = job.span.key, job.span.tokens
            slices = self.cost.slices(tokens)
            state = self._queue.states.setdefault(key, _Encoding(tuple(job.holders), slices, slices))
            seconds_of_slice = self._noise.disturb(self.cost.image(tokens) / slices)
            self._slice_s = max(seconds_of_slice, SLICE_DECAY * self._slice_s)
            result.encode_s += seconds_of_slice
            state.left -= 1
            if not state.left:
                del self._queue.states[key]
                size = tokens * self.cost.visual_token_bytes
                self._embeddings.put(key, None, size, {name for name in job.holders if name in self._alive})
                result.encoded[key] = self.cost.image(tokens)

        self._queue.run(
            plan.encode,
            complete=lambda job: job.span.key in result.encoded,
            advance=advance,
            fits=lambda: result.encode_s + self._slice_s <= seconds,
        )


class RealtimeExecutor:
    """A `CostExecutor` whose `execute` returns when the step would be over."""

    def __init__(self, executor: CostExecutor, filler: Filler) -> None:
        self._executor = executor
        self._filler = filler
        self._due = time.monotonic()

    @property
    def encoding(self) -> bool:
        return self._executor.encoding

    @property
    def slice_s(self) -> float:
        return self._executor.slice_s

    def add(self, seq: Sequence, inputs: SequenceInputs) -> Drafts:
        if not len(self._filler):  # the engine was idle, so there is no delay to make up for
            self._due = time.monotonic()
        self._filler.add(seq, inputs.choice)
        return self._executor.add(seq, inputs)

    def remove(self, seq: Sequence) -> None:
        self._filler.remove(seq)
        self._executor.remove(seq)

    def late(self) -> None:
        return None

    def execute(self, plan: StepPlan, encode_s: float) -> StepResult:
        result = self._executor.execute(plan, encode_s)
        # A step begins at the due end of the last one, however long Python took in between.
        seconds = (result.seconds or 0.0) + self._executor.cost.between_s
        self._due = max(self._due, time.monotonic() - LAG_S) + seconds
        time.sleep(max(0.0, self._due - time.monotonic()))
        return result


@dataclass(frozen=True, slots=True)
class NoiseSettings:
    """Size of the disturbances. Raises ConfigError for a value out of range."""

    noise: float = setting(
        0.0,
        "Spread of the durations of steps and slices: standard deviation of their logarithm.",
        low=0,
        high=2,
    )
    stalls: float = setting(0.0, "Share of steps and slices that stall.", low=0, high=1)
    stall_factor: float = setting(5.0, "A stall takes this multiple of the time.", low=1, high=1000)
    noise_seed: int = setting(0, "The same seed gives the same disturbances.", low=0, high=2**31)

    def __post_init__(self) -> None:
        check_settings(self)


class Noise:
    """Disturbs durations: each is multiplied by a log-normal factor with median 1, and a few are stalls."""

    def __init__(self, settings: NoiseSettings) -> None:
        self._settings = settings
        self._random = Random(f"noise {settings.noise_seed}")

    def disturb(self, seconds: float) -> float:
        """Return the disturbed duration of something that takes `seconds` seconds by the cost model."""
        settings = self._settings
        factor = math.exp(self._random.gauss(0.0, settings.noise)) if settings.noise else 1.0
        if settings.stalls and self._random.random() < settings.stalls:
            factor *= settings.stall_factor
        return seconds * factor


@dataclass(slots=True)
class _Encoding:
    """A partly encoded image.

    holders: ids of the sequences that wait for it.
    slices: number of its equal slices.
    left: how many of them remain.
    """

    holders: tuple[str, ...]
    slices: int
    left: int


class Filler:
    """Picks the next token of every answer, by a seed per unfinished sequence."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        texts = {token: tokenizer.decode([token]) for token in range(tokenizer.vocab_size)}
        self._words = [token for token, text in texts.items() if re.fullmatch(" [a-z]{3,}", text)]
        self._end = min(tokenizer.eos_ids)
        self._seeds: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._seeds)

    def add(self, seq: Sequence, choice: int) -> None:
        """Choose a sequence's answer by its seed: the request's own, or else a digest of its prompt.

        Equal requests get equal answers. Choices of one request differ.
        """
        own = (
            seq.sampling.seed if seq.sampling.seed is not None else zlib.crc32(repr(seq.prompt_ids).encode())
        )
        self._seeds[seq.id] = zlib.crc32(f"{own} {choice}".encode())

    def remove(self, seq: Sequence) -> None:
        self._seeds.pop(seq.id, None)

    def token(self, seq: Sequence) -> int:
        """Return the next token: a word, or the end of the answer."""
        seed, number = self._seeds[seq.id], len(seq.output_ids)
        if number >= _length(seed, seq.sampling):
            return self._end
        return self._words[zlib.crc32(f"{seed} {number}".encode()) % len(self._words)]


def _length(seed: int, sampling: SamplingParams) -> int:
    """Return the number of words of an answer, drawn at random if the request names no length."""
    if sampling.max_tokens is not None:
        return sampling.max_tokens
    return max(1, sampling.min_tokens, geometric(Random(seed), MEAN_TOKENS))


@dataclass(slots=True)
class StepRecord:
    """The steps of an engine, as they were seen.

    steps: composition and duration of each step that computed tokens, without the encoder's time.
    images: visual tokens, slices and duration of each encoded image.
    between: seconds from the end of each step to the start of the next one.
    """

    steps: list[StepSample] = field(default_factory=list)
    images: list[ImageSample] = field(default_factory=list)
    between: list[float] = field(default_factory=list)


def _counted(slices: Generator[Any, Any, Any], counts: list[int]) -> Generator[None, None, Any]:
    """Compute every call of an encoder by itself, and add the number of slices to `counts` at the end."""
    answer, count = None, 1
    while True:
        try:
            call = slices.send(answer)
            answer = None
            steps = iter((None,)) if call is None else call.alone()
        except StopIteration as stop:
            counts.append(count)
            return stop.value
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                answer = stop.value
                break
            count += 1
            yield


@contextmanager
def recorded_steps(loop: EngineLoop, model: Any) -> Generator[StepRecord]:
    """Record the steps of an engine's loop within the context.

    The durations are those of the executor's calls. On CUDA, work that it only launches is not in them.

    loop: of the engine, idle at the start and at the end of the context.
    model: the model, whose `encode_slices` is counted.
    """
    record = StepRecord()
    executor = loop.stepper.executor
    execute, encode = executor.execute, model.encode_slices
    ended = 0.0
    counts: list[int] = []

    def counted(image: Any) -> Generator[None, None, Any]:
        return _counted(encode(image), counts)

    def observed(plan: Any, encode_s: float = float("inf")) -> Any:
        nonlocal ended
        made_of = composition_of(plan)
        visual = {job.span.key: job.span.tokens for job in plan.encode}
        counts.clear()
        started = time.perf_counter()
        if ended:
            record.between.append(started - ended)
        result = execute(plan, encode_s)
        ended = time.perf_counter()
        if made_of:
            record.steps.append(StepSample(made_of, ended - started - result.encode_s))
        for (key, seconds), slices in zip(result.encoded.items(), counts, strict=False):
            record.images.append(ImageSample(visual[key], slices, seconds))
        return result

    # Both are found as attributes of the instance before those of its class.
    executor.execute, model.encode_slices = observed, counted  # type: ignore[method-assign]
    try:
        yield record
    finally:
        del executor.execute, model.encode_slices
