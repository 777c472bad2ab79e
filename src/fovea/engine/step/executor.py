"""The protocol of an executor, which carries out the stepper's plans with a model or with a cost model.

`SliceQueue` is the order in which real and simulated encoders encode images, slice by slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from fovea.engine.job import PromptToken, SampledToken, SequenceInputs
from fovea.engine.schedule.plan import EncodeJob, StepPlan
from fovea.engine.sequence import Drafts, Sequence


@dataclass(slots=True)
class StepResult:
    """The result of one step.

    sampled: the new tokens of each sequence that got any, by sequence id: the accepted drafts and one more.
    prompts: log probabilities of tokens of prompts, for the sequences that want them, by sequence id.
    drafts: tokens that are expected to follow these, by sequence id; the next step verifies them.
    failures: the error of each sequence whose image could not be encoded, or for which no token could be
        chosen, by sequence id. The other sequences of the step are not affected.
    encoded: for each image whose encoding ended in this step, by span key, the seconds that the encoder spent
        on it in all steps.
    projected: the seconds of these in the projector, for the images whose encoder has one of its own.
    encode_s: seconds of this step that went into encoding. On CUDA the encoder runs beside the decoder, and
        in a step with tokens this is only the time that it took to launch the encoder.
    seconds: duration of the step by the executor's own clock; None: the caller measures it.
    """

    sampled: dict[str, Seq[SampledToken]] = field(default_factory=dict)
    prompts: dict[str, list[PromptToken]] = field(default_factory=dict)
    drafts: dict[str, Drafts] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)
    encoded: dict[str, float] = field(default_factory=dict)
    projected: dict[str, float] = field(default_factory=dict)
    encode_s: float = 0.0
    seconds: float | None = None


class StepOutOfMemory(Exception):
    """A step does not fit into the device's memory. Nothing of it counts, and a smaller one may fit."""


class LostRank(Exception):
    """One of the processes that compute steps together has gone, or does not answer. No step can run."""


NO_SLICE = -1.0
"""Seconds of encoding in a step that begins no slice of an image."""


class Executor(Protocol):
    """Carries out step plans. The scheduler alone decides which sequence goes next.

    Two classes implement it: `execute.runner.Runner` computes a plan with a model,
    `simulate.executor.CostExecutor` says how long a plan would take.
    """

    @property
    def encoding(self) -> bool:
        """Whether an image is partly encoded."""
        ...

    @property
    def slice_s(self) -> float:
        """Seconds that the next slice of an image may take, judged by the latest ones; 0: none is known."""
        ...

    def add(self, seq: Sequence, inputs: SequenceInputs) -> Drafts:
        """Prepare a sequence before it enters the scheduler. It may raise; then the sequence is not added.

        Returns the tokens with which its answer is expected to begin, as drafts.
        """
        ...

    def remove(self, seq: Sequence) -> None:
        """Free everything that belongs to a sequence. An unknown sequence is ignored."""
        ...

    def execute(self, plan: StepPlan, encode_s: float) -> StepResult:
        """Compute the plan's tokens, and encode its images for about `encode_s` seconds.

        At least one slice is encoded if there is an image, unless `encode_s` is NO_SLICE.

        Raises StepOutOfMemory if the device's memory is not enough.

        A sequence whose token is late gets none. It has nothing to compute until `late` returns the token.
        """
        ...

    def late(self) -> StepResult | None:
        """Return the tokens of earlier steps that were late and are ready now; None: there are none."""
        ...


LaunchedT = TypeVar("LaunchedT")


class AsyncExecutor(Executor, Protocol[LaunchedT]):
    """An executor whose device computes a step while the host finishes the one before it.

    `execute` is `launch` and `finish`.
    """

    @property
    def runs_ahead(self) -> bool:
        """Whether `follow` is worth while: the device computes while the host does something else."""
        ...

    def launch(self, plan: StepPlan, encode_s: float) -> LaunchedT:
        """Begin to compute a plan. Raises the errors of `execute`."""
        ...

    def follow(self, launched: LaunchedT, plan: StepPlan) -> LaunchedT | None:
        """Begin to compute the step after a launched one, see `Scheduler.follow`.

        Returns None if that needs tokens on the host.
        """
        ...

    def finish(self, launched: LaunchedT) -> StepResult:
        """Wait for the result of a launched step. Raises the errors of `execute`."""
        ...


class PartlyEncoded(Protocol):
    """The state of an image between two slices.

    holders: ids of the sequences that wait for it.
    """

    holders: tuple[str, ...]


State = TypeVar("State", bound=PartlyEncoded)


class SliceQueue(Generic[State]):
    """The partly encoded images.

    alive: tells whether the sequence with an id still exists.
    states: by image key.
    """

    def __init__(self, alive: Callable[[str], bool]) -> None:
        self.states: dict[str, State] = {}
        self._alive = alive

    def update(self, jobs: Iterable[EncodeJob]) -> list[State]:
        """Replace the holders of each image by those of its job, and drop images that no sequence waits for.

        An image without a job stays as long as one of its holders exists. Returns the dropped states.
        """
        wanted = {job.span.key: job for job in jobs}
        dropped = []
        for key, state in list(self.states.items()):
            if key in wanted:
                state.holders = tuple(wanted[key].holders)
            elif not any(map(self._alive, state.holders)):
                dropped.append(self.states.pop(key))
        return dropped

    def run(
        self,
        jobs: Seq[EncodeJob],
        *,
        complete: Callable[[EncodeJob], bool],
        advance: Callable[[EncodeJob], None],
        fits: Callable[[], bool],
    ) -> None:
        """Continue partly encoded images first, then begin others. At least one slice is computed.

        complete: tells whether an image is encoded, or has failed.
        advance: computes one slice of an image.
        fits: tells whether one more slice ends in time.
        """
        first = True
        for job in sorted(jobs, key=lambda job: job.span.key not in self.states):
            while not complete(job):
                if not first and not fits():
                    return
                advance(job)
                first = False
