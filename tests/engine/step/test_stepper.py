"""One step over an executor without tensors: plan, execute, apply, and the failures of each part."""

from __future__ import annotations

from typing import Any

import pytest

from fovea.engine.job import SampledToken, SequenceInputs
from fovea.engine.kv.manager import Move
from fovea.engine.schedule.itl_limit import FEWEST_TOKENS, FIRST_TOKENS, IDLE_STEP_S, BatchRule
from fovea.engine.schedule.plan import EncodeJob, StepPlan, Work
from fovea.engine.schedule.scheduler import Scheduler
from fovea.engine.sequence import NO_DRAFTS, Drafts, Sequence, Status
from fovea.engine.step.executor import NO_SLICE, StepResult
from fovea.engine.step.stepper import Step, Stepper
from tests.support.brains import image, scheduler, sequence

IMAGE_BYTES = 10
IMAGE_S = 0.5
TOKEN = 7


class FakeExecutor:
    """Samples TOKEN everywhere, and encodes every image in the step that plans it."""

    def __init__(self, brain: Scheduler) -> None:
        self.embeddings = brain.embeddings
        self.encoding = False
        self.slice_s = 0.0
        self.waits = False  # whether images wait in a step of NO_SLICE
        self.inputs: dict[str, SequenceInputs] = {}
        self.refused: set[str] = set()
        self.broken: set[str] = set()
        self.encode_s: list[float] = []

    def add(self, seq: Sequence, inputs: SequenceInputs) -> Drafts:
        self.inputs[seq.id] = inputs
        if seq.id in self.refused:
            raise ValueError("no such choice")
        return NO_DRAFTS

    def remove(self, seq: Sequence) -> None:
        self.inputs.pop(seq.id, None)

    def late(self) -> None:
        return None

    def execute(self, plan: StepPlan, encode_s: float) -> StepResult:
        self.encode_s.append(encode_s)
        result = StepResult()
        for job in plan.encode:
            key = job.span.key
            if self.waits and encode_s < 0:
                continue
            if key in self.broken:
                result.failures.update(dict.fromkeys(job.holders, ValueError(key)))
                continue
            self.embeddings.put(key, key, IMAGE_BYTES, set(job.holders))
            result.encoded[key] = IMAGE_S
            result.encode_s += IMAGE_S
        result.sampled = {
            item.seq.id: [SampledToken(TOKEN)]
            for item in plan.work
            if item.samples and item.seq.id not in result.failures
        }
        return result


class Engine:
    """A stepper over a fake executor, and a clock that stands still unless a test moves it."""

    def __init__(self, **settings: Any) -> None:
        self.scheduler = scheduler(**settings)
        self.executor = FakeExecutor(self.scheduler)
        self.stepper = Stepper(self.scheduler, self.executor)
        self.now = 0.0

    def add(self, *sequences: Sequence) -> None:
        for seq in sequences:
            self.stepper.add(seq, SequenceInputs())

    def step(self, seconds: float = 0.01) -> Step:
        step = self.stepper.plan(self.now)
        if step.plan:
            self.stepper.apply(step, self.executor.execute(step.plan, step.encode_s), seconds)
        return step


def test_a_step_plans_executes_and_folds() -> None:
    engine, seq = Engine(), sequence("a", 9)
    engine.add(seq)
    assert not engine.stepper.idle
    step = engine.step()
    assert [(item.seq, item.start, item.count) for item in step.plan.work] == [(seq, 0, 9)]
    assert (step.composition.decodes, step.composition.prompt_tokens, step.expired) == (0, 9, ())
    assert (seq.computed_tokens, seq.output_ids, seq.decoding) == (9, [TOKEN], True)
    step = engine.step()
    assert (step.composition.decodes, step.composition.prompt_tokens) == (1, 0)
    assert seq.output_ids == [TOKEN, TOKEN]
    assert (engine.stepper.steps, engine.stepper.computed_tokens) == (2, 10)
    engine.stepper.finish(seq, "length")
    engine.stepper.finish(seq, "stop")
    assert (seq.finish_reason, engine.stepper.idle, engine.executor.inputs) == ("length", True, {})
    engine.scheduler.check_integrity()


def test_an_idle_stepper_plans_nothing() -> None:
    step = Engine().step()
    assert (bool(step.plan), step.encode_s, step.involved) == (False, 0.0, set())


def test_an_image_is_encoded_for_the_seconds_of_its_step_and_counted() -> None:
    engine, seq = Engine(), sequence("a", [1, ("cat", 4), 2])
    engine.add(seq)
    step = engine.step()
    assert [job.span.key for job in step.plan.encode] == ["cat"]
    assert engine.executor.encode_s == [step.encode_s]
    assert step.encode_s > 0
    assert (engine.stepper.encoded_images, engine.stepper.encode_seconds) == (1, IMAGE_S)
    while not seq.output_ids:
        engine.step()
    assert engine.stepper.encoded_images == 1


def test_a_failed_image_ends_its_sequences_and_no_others() -> None:
    engine = Engine()
    first, second = (sequence(name, [1, ("broken", 4), 2]) for name in "ab")
    text = sequence("c", 6)
    engine.executor.broken.add("broken")
    engine.add(first, second, text)
    engine.step()
    assert [seq.finish_reason for seq in (first, second, text)] == ["error", "error", None]
    assert list(engine.stepper.sequences) == list(engine.executor.inputs) == ["c"]
    assert (engine.stepper.encoded_images, text.output_ids) == (0, [TOKEN])
    engine.stepper.finish(text, "length")
    engine.scheduler.check_integrity()


def test_a_failure_of_a_sequence_that_has_ended_meanwhile_is_no_error() -> None:
    engine, seq = Engine(), sequence("a", [1, ("broken", 4), 2])
    engine.executor.broken.add("broken")
    engine.add(seq)
    step = engine.stepper.plan(0.0)
    result = engine.executor.execute(step.plan, step.encode_s)
    engine.stepper.finish(seq, "abort")
    engine.stepper.apply(step, result, 0.01)
    assert (seq.finish_reason, engine.stepper.idle) == ("abort", True)
    engine.scheduler.check_integrity()


def test_expired_sequences_end_before_the_step_is_planned() -> None:
    engine = Engine()
    late, patient = sequence("late", 6, deadline=5.0), sequence("patient", 6)
    engine.add(late, patient)
    engine.step()
    engine.now = 5.5
    step = engine.step()
    assert step.expired == (late,)
    assert (late.status, late.finish_reason, late.output_ids) == (Status.FINISHED, "error", [TOKEN])
    assert [item.seq for item in step.plan.work] == [patient]
    assert list(engine.executor.inputs) == ["patient"]


def test_when_all_sequences_expire_the_plan_is_empty() -> None:
    engine, seq = Engine(), sequence("late", 6, deadline=5.0)
    engine.add(seq)
    engine.now = 6.0
    step = engine.step()
    assert (step.expired, bool(step.plan), engine.stepper.idle) == ((seq,), False, True)
    engine.scheduler.check_integrity()


def test_apply_updates_the_step_times() -> None:
    """The first chunk has a fixed size. The seconds that it took give the size of the next ones."""
    engine, seq = Engine(blocks=512, max_step_tokens=1024), sequence("a", 900)
    engine.add(seq)
    assert engine.step(seconds=1e-3 * FIRST_TOKENS).composition.prompt_tokens == FIRST_TOKENS
    second = engine.step(seconds=100.0).composition.prompt_tokens
    assert second == pytest.approx(2 * IDLE_STEP_S / 1e-3, rel=0.3), "the longest step without decodes"
    assert FEWEST_TOKENS < engine.step().composition.prompt_tokens < second, "one long step counts twice"


def test_the_time_between_steps_counts_unless_the_engine_was_idle() -> None:
    """A client waits for it, too."""
    engine, seq = Engine(), sequence("a", 4, max_tokens=9)
    engine.add(seq)
    gaps: list[float] = []
    engine.stepper.batch.observe = gaps.append  # type: ignore[method-assign]
    for engine.now in (1.0, 2.0, 3.5):
        engine.step(seconds=0.5)
    assert gaps == [1.0, 1.5]
    engine.stepper.finish(seq, "length")
    engine.add(sequence("b", 4, max_tokens=9))
    for engine.now in (100.0, 101.0):
        engine.step(seconds=0.5)
    assert gaps == [1.0, 1.5, 1.0]


def test_a_target_that_cannot_hold_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(target_itl_ms=100, blocks=512)
    for name in "ab":
        seq = sequence(name, 4, max_tokens=300)
        engine.add(seq)
        for _ in range(150):
            engine.now += 1.0
            engine.step(seconds=0.4)
        engine.stepper.finish(seq, "length")
    (record,) = caplog.records
    assert "target_itl_ms is 100 and cannot hold: a step with a single decode takes" in record.getMessage()
    assert engine.stepper.control_stats()["target_itl_possible"] == 0


def test_no_slice_begins_in_a_step_without_time_for_one() -> None:
    engine = Engine(target_itl_ms=100, blocks=512)
    engine.add(sequence("stream", 4, max_tokens=999))
    for number in range(200):
        engine.now += 0.09
        engine.step(seconds=0.13 if number == 198 else 0.08)  # so the next step may not be late, too
    engine.executor.slice_s = 0.05
    engine.add(sequence("image", [1, ("cat", 4), 2], arrival=1.0))
    engine.now += 0.09
    engine.step(seconds=0.08)
    assert engine.executor.encode_s[-1] == NO_SLICE


def test_an_image_whose_slices_never_fit_begins_in_a_step_that_may_be_late() -> None:
    engine = Engine(target_itl_ms=100, blocks=512)
    engine.add(sequence("stream", 4, max_tokens=999))
    for _ in range(200):
        engine.now += 0.08
        engine.step(seconds=0.08)
    engine.stepper.times._fit.costs = [0.08, 0.0, 0.0, 0.0, 0.0, 0.0]  # chunks of prompts always fit
    engine.executor.slice_s = 0.05
    engine.executor.waits = True
    engine.add(sequence("image", [1, ("cat", 4), 2], arrival=1.0))
    for _ in range(25):  # 95% of the steps keep the target, so one of 20 may be late
        engine.now += 0.08
        engine.step(seconds=0.08)
    assert max(engine.executor.encode_s[-25:]) >= 0


def test_the_stepper_learns_times_of_images_and_first_tokens() -> None:
    engine, seq = Engine(target_ttft_ms=10), sequence("a", [1, ("cat", 4), 2], max_tokens=3)
    first = engine.stepper.first_tokens
    engine.add(sequence("b", 4, max_tokens=1))
    engine.step()
    first.enter(seq, 0.0, first.expect(seq))
    engine.add(seq)
    assert first.queued.prompt_tokens == 6
    while not seq.output_ids:
        engine.step()
    assert first.queued.prompt_tokens == 0
    assert engine.stepper.image_times.seconds(4) == pytest.approx(IMAGE_S)


def test_apply_updates_the_batch_control() -> None:
    """The batch control bounds the number of sequences that run, by the durations of earlier steps."""
    brain = scheduler()
    executor = FakeExecutor(brain)
    stepper = Stepper(brain, executor, BatchRule(0.01, 8))
    allowed = stepper.batch.allowed()
    for name in "abc":
        stepper.add(sequence(name, 4, max_tokens=99), SequenceInputs())
    for _ in range(20):
        step = stepper.plan(0.0)
        stepper.apply(step, executor.execute(step.plan, step.encode_s), 1.0)
    assert stepper.batch.allowed() < allowed


def test_a_sequence_that_the_executor_refuses_leaves_nothing_behind() -> None:
    engine = Engine()
    engine.executor.refused.add("a")
    with pytest.raises(ValueError, match="no such choice"):
        engine.add(sequence("a", 4))
    assert (engine.stepper.sequences, engine.executor.inputs, engine.stepper.idle) == ({}, {}, True)
    engine.scheduler.check_integrity()


def test_a_step_names_all_sequences_that_a_failure_concerns() -> None:
    """Computed sequences, those that wait for an image, and owners of moved blocks."""
    plan = StepPlan(
        work=(Work(sequence("computes", 4), 0, 4),),
        encode=(EncodeJob(image(0, 4, "cat"), ["waits", "also waits"]),),
        moves=(Move("load", 0, 1, 4, owner="moves"), Move("save", 1, 0, 4)),
    )
    assert Step(plan).involved == {"computes", "waits", "also waits", "moves"}


def test_an_abandoned_step_is_forgotten_and_its_halves_are_tried() -> None:
    engine = Engine()
    first, second = sequence("a", 6), sequence("b", [9, 8, 7], arrival=1.0)
    engine.add(second, first)
    assert engine.stepper.abandon(engine.stepper.plan(0.0)) is None
    assert (engine.stepper.steps, first.computed_tokens, second.computed_tokens) == (0, 0, 0)
    step = engine.stepper.plan(0.0)
    assert step.involved == {"a"}, "the one that arrived first is tried first"
    assert engine.stepper.abandon(step) == "a", "it failed alone"
    engine.stepper.finish(first, "error")
    assert engine.step().involved == {"b"}
    assert second.output_ids == [TOKEN]
    engine.stepper.finish(second, "length")
    engine.scheduler.check_integrity()


def test_the_stepper_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, fovea.engine.step.stepper; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
