"""An executor without a model: durations come from a cost model, and tokens from a function."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from fovea.engine.cache.embeddings import EmbeddingCache
from fovea.engine.events import SampledToken
from fovea.engine.job import SequenceInputs
from fovea.engine.schedule.composition import composition_of
from fovea.engine.schedule.plan import EncodeJob, StepPlan
from fovea.engine.sequence import Sequence
from fovea.engine.simulate.noise import Noise, NoiseSettings
from fovea.engine.step.executor import StepResult
from fovea.engine.step.slice_queue import SliceQueue
from fovea.planner.cost import CostModel

SLICE_DECAY = 0.95
"""A slice is expected to take as long as the slowest recent one, as in `execute.encode_queue`."""


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

    def add(self, seq: Sequence, inputs: SequenceInputs) -> Seq[int]:
        self._alive.add(seq.id)
        return ()

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
