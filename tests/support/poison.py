"""A loop without a thread and without a model, some of whose sequences make whole steps fail."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from fovea.engine.job import Event, Job, SampledToken, SequenceInputs
from fovea.engine.request.answer import AnswerReader
from fovea.engine.request.tokenizer import ChatTokenizer
from fovea.engine.schedule.plan import StepPlan, Work
from fovea.engine.schedule.scheduler import Scheduler
from fovea.engine.sequence import NO_DRAFTS, Drafts, Sequence
from fovea.engine.simulate.serving import FOLDER, PlainTokenizer
from fovea.engine.step.executor import StepOutOfMemory, StepResult
from fovea.engine.step.loop import EngineLoop
from fovea.engine.step.stepper import Stepper
from tests.support.brains import SlotRunner, rows

SECRET = "/srv/models/secret.safetensors"
Verdict = Callable[[StepPlan], bool]


@cache
def plain_tokenizer() -> ChatTokenizer:
    return ChatTokenizer(PlainTokenizer(FOLDER), None, eos_ids=frozenset())


class SlotExecutor:
    """Executes plans on the slots of a `SlotRunner`, which checks every block that is read.

    fails: tells whether a step fails as a whole: after its images and half of its tokens, and in every other
        failure before its moves.
    overflows: tells whether a step does not fit into memory; it fails like the others.
    fails_alone: tells whether a sequence fails when its token is chosen.
    """

    def __init__(
        self, brain: Scheduler, fails: Verdict, fails_alone: Callable[[Sequence], bool], overflows: Verdict
    ) -> None:
        self.slots = SlotRunner(brain)
        self.fails = fails
        self.overflows = overflows
        self.fails_alone = fails_alone
        self.encoding = False
        self.steps = 0

    def add(self, seq: Sequence, inputs: SequenceInputs) -> Drafts:
        return NO_DRAFTS

    def remove(self, seq: Sequence) -> None:
        pass

    def late(self) -> None:
        return None

    def execute(self, plan: StepPlan, encode_s: float) -> StepResult:
        self.steps += 1
        result, overflows = StepResult(), self.overflows(plan)
        fails = overflows or self.fails(plan)
        error = (
            StepOutOfMemory(f"no room for {SECRET}")
            if overflows
            else RuntimeError(f"a shape does not fit in {SECRET}")
        )
        if fails and not self.steps % 2:
            raise error
        self.slots._copy(plan)
        for job in plan.encode:
            key = job.span.key
            self.slots.scheduler.embeddings.put(key, key, 10, set(job.holders))
            result.encoded[key] = 0.1
        for number, item in enumerate(plan.work):
            if fails and number >= len(plan.work) / 2:
                break
            self.slots._compute(item.seq, item.start, item.stop)
            if item.samples:
                self._choose(item, result)
        if fails:
            raise error
        return result

    def _choose(self, item: Work, result: StepResult) -> None:
        seq = item.seq
        if self.fails_alone(seq):
            result.failures[seq.id] = IndexError(f"no candidate in {SECRET}")
        else:
            result.sampled[seq.id] = [SampledToken(rows(seq)[-1] % 97)]


class PoisonedLoop:
    """A loop whose steps a test runs one by one.

    events: the events of each sequence, by its id.
    """

    def __init__(
        self,
        brain: Scheduler,
        fails: Verdict = lambda plan: False,
        fails_alone: Callable[[Sequence], bool] = lambda seq: False,
        overflows: Verdict = lambda plan: False,
    ) -> None:
        self.brain = brain
        self.executor = SlotExecutor(brain, fails, fails_alone, overflows)
        self.loop = EngineLoop(Stepper(brain, self.executor), plain_tokenizer())
        self.events: dict[str, list[Event]] = {}

    def add(self, *sequences: Sequence) -> None:
        for seq in sequences:
            heard = self.events.setdefault(seq.id, [])
            reader = AnswerReader(plain_tokenizer(), seq.sampling)
            self.loop.board.add([Job(seq, SequenceInputs(), heard.append, reader)])

    def run(self, limit: int = 2000) -> None:
        """Run steps until no sequence is left. Raises what ends the loop."""
        for _ in range(limit):
            if self.loop.stepper.idle:
                self.brain.check_integrity()
                return
            self.loop._step()
        raise AssertionError(f"{limit} steps were not enough")

    def error(self, name: str) -> Exception | None:
        """The error that ended a sequence; None if it has its whole answer."""
        return self.events[name][-1].error
