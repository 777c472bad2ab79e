"""One step of the engine, without a clock and without a device.

    plan(now)                       which tokens, and how many seconds of encoding
    executor.execute(...)           computes the step, or estimates its duration
    follow(step, now)               the step after one that still runs, if that is clear already
    apply(step, result, seconds)    notes computed and new tokens, and updates the estimates of step times
    settle(result, now)             notes tokens of earlier steps that were late
    abandon(step)                   in place of apply, if the step failed: who is to blame?
    retreat(step)                   in place of apply, if it did not fit into memory: smaller steps follow

The engine's loop, the simulated server and the virtual clock of `fovea simulate` all run on this one
class.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from fovea.core.measure import Tally
from fovea.core.types import FinishReason
from fovea.engine.job import SequenceInputs
from fovea.engine.schedule.draft_budget import DraftBudget, Use
from fovea.engine.schedule.first_tokens import FirstTokens, LodCosts
from fovea.engine.schedule.itl_limit import FEWEST_TOKENS, BatchControl, DecodeBound, ItlLimit
from fovea.engine.schedule.plan import StepPlan, composition_of, composition_of_decodes
from fovea.engine.schedule.scheduler import BY_ARRIVAL, Scheduler
from fovea.engine.schedule.step_times import ImageTimes, StepTimes
from fovea.engine.sequence import NO_DRAFTS, Sequence
from fovea.engine.step.executor import NO_SLICE, Executor, StepResult
from fovea.observe.table import DISTRIBUTIONS, DRAFT_PLACES, labelled_key
from fovea.planner.cost import Composition

log = logging.getLogger("fovea.engine")
GROW_AFTER = 32
"""Number of steps that fit into memory, after which a lowered limit of their tokens grows."""
IMPOSSIBLE_STEPS = 100
"""A target is reported as impossible after it was so for this many steps with decodes."""


@dataclass(frozen=True, slots=True)
class Step:
    """The decision about one step.

    plan: tokens and images, from the scheduler.
    encode_s: seconds that the encoder may take.
    composition: the amounts of its work.
    expired: sequences whose deadline passed before the step; they are ended already.
    began: time at which it was decided.
    """

    plan: StepPlan
    encode_s: float = 0.0
    composition: Composition = Composition()
    expired: tuple[Sequence, ...] = ()
    began: float = 0.0

    @property
    def involved(self) -> set[str]:
        """Ids of all sequences for which the step computes or moves something."""
        return {
            *(item.seq.id for item in self.plan.work),
            *(holder for job in self.plan.encode for holder in job.holders),
            *(move.owner for move in self.plan.moves if move.owner),
        }


class Stepper:
    """Scheduler, ITL limit and batch control over an executor. For one thread.

    sequences: all unfinished sequences, by id.
    failure_search: the sequences of a failed step, until the guilty one is found.
    memory: the most tokens of a step that fit into the device's memory, as far as that is known.
    steps, computed_tokens, encoded_images, encode_seconds: counters since the start.
    drafts: how many drafts a step computes. draft_counts: counts those that were computed.
    tallies: histograms of steps and images.
    times: predicts durations of steps.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        control: BatchControl | None = None,
        *,
        times: StepTimes | None = None,
        image_times: ImageTimes | None = None,
        first_factor: float | None = None,
        drafts: DraftBudget | None = None,
    ) -> None:
        """Create a stepper without sequences.

        control: limits the number of running sequences; None: `DecodeBound` with the configured target.
        times, image_times: predict durations of steps and images; None: they are learnt.
        first_factor: see `FirstTokens`.
        drafts: decides how many drafts a step computes; None: one that predicts by `times`.
        """
        config = scheduler.config
        self.scheduler = scheduler
        self.executor = executor
        target_s = config.target_itl_ms / 1000
        self.times = times or StepTimes(config.target_percentile)
        self.drafts = drafts or DraftBudget(self.times)
        self.itl_limit = ItlLimit(config.pace, target_s, config.max_step_tokens, self.times)
        self.batch: BatchControl = control or DecodeBound(target_s, config.max_running, self.times)
        self.sequences: dict[str, Sequence] = {}
        self._ended: float | None = None
        self._most = config.max_running
        self._postponed = False  # whether the last step had images, but no time for a slice
        self._impossible_steps = 0
        self._warned = False
        self.image_times = image_times or ImageTimes()
        costs = LodCosts(self.times, self.image_times, scheduler.embeddings.__contains__)
        self.first_tokens = FirstTokens(
            scheduler, self.itl_limit, costs, lambda: self._most, config.target_ttft_ms / 1000, first_factor
        )
        self.failure_search = FailureSearch()
        self.memory = MemoryLimit(config.max_step_tokens)
        self.steps = 0
        self.computed_tokens = 0
        self.draft_counts = DraftCounts()
        self.encoded_images = 0
        self.encode_seconds = 0.0
        self.tallies = StepTallies()

    @property
    def idle(self) -> bool:
        """Whether no sequence runs or waits."""
        return self.scheduler.idle

    def add(self, seq: Sequence, inputs: SequenceInputs) -> None:
        """Add a sequence. If the executor raises, nothing of the sequence is kept."""
        try:
            drafts = self.executor.add(seq, inputs)
        except BaseException:
            self.executor.remove(seq)
            raise
        if self.idle:
            self._ended = None
            self.first_tokens.rest()
        self.sequences[seq.id] = seq
        self.first_tokens.attach(seq)
        self.scheduler.add(seq, drafts)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence at any time and free its blocks, images and inputs. A second call does nothing."""
        self.scheduler.finish(seq, reason)
        self.first_tokens.leave(seq.id)
        if self.sequences.pop(seq.id, None) is not None:
            self.executor.remove(seq)

    def plan(self, now: float) -> Step:
        """Decide the next step.

        Expired sequences are ended first. The plan is empty when nothing can advance.

        now: time on the clock of arrivals and deadlines.
        """
        expired = tuple(self.scheduler.expired(now))
        for seq in expired:
            self.finish(seq, "error")
        if self.idle:
            return Step(StepPlan(), expired=expired, began=now)
        running = self.scheduler.running
        self.drafts.choose(running)
        decodes = composition_of_decodes(running)
        streams = self.scheduler.streams_to_protect
        encoding = self.executor.encoding or self._postponed
        slice_s = self.executor.slice_s if encoding else 0.0
        self._note_whether_possible(decodes)
        allowance = self.itl_limit.allow(decodes, streams, len(self.sequences) - decodes.decodes, slice_s)
        prompts = self.itl_limit.prompt_budget(allowance, encoding=encoding)
        self._most = self.batch.allowed(running, self.scheduler.waiting, self.itl_limit.smallest_s(slice_s))
        if self.memory.lowered and self.failure_search.group is None:
            names = [seq.id for seq in sorted(running, key=BY_ARRIVAL) if seq.decoding]
            if len(names) > self.memory.tokens:
                self.failure_search.take_turns(names, self.memory.tokens)
        plan = self.scheduler.schedule(prompts, self._most, self.failure_search.group, self.memory.tokens)
        if not plan:
            self._ended = None
            self.failure_search.clear(())
        composition = composition_of(plan)
        encode_s = self.itl_limit.encode_s(allowance, composition)
        late = composition and not allowance.forced and encode_s < self.executor.slice_s
        if late:
            encode_s = NO_SLICE
        self._postponed = bool(late and plan.encode)
        return Step(plan, encode_s, composition, expired, now)

    def follow(self, step: Step, now: float) -> Step | None:
        """Decide the step after one that still runs; None: its result is needed first.

        See `Scheduler.follow`. Results of sequences that end meanwhile are dropped by `drop_ended`.
        """
        if self.failure_search.group is not None or self.scheduler.expired(now):
            return None
        plan = self.scheduler.follow(step.plan)
        return None if plan is None else Step(plan, 0.0, composition_of(plan), (), now)

    def drop_ended(self, result: StepResult) -> None:
        """Remove the tokens of sequences that ended before their step did."""
        for seq_id in [seq_id for seq_id in result.sampled if seq_id not in self.sequences]:
            del result.sampled[seq_id]

    def apply(self, step: Step, result: StepResult, seconds: float) -> None:
        """Take in the result of a step. Sequences that failed are ended.

        seconds: duration of the step.
        """
        self.failure_search.clear(step.involved)
        self.memory.succeed()
        self._observe(step, result, seconds)
        self._count_drafts(step, result)
        self.steps += 1
        self.computed_tokens += step.plan.tokens
        self.encoded_images += len(result.encoded)
        self.encode_seconds += sum(result.encoded.values())
        self.tallies.add(step.plan.tokens, len(step.plan.work), result)
        for seq_id in result.failures:
            if seq_id in self.sequences:
                self.finish(self.sequences[seq_id], "error")
        tokens = {seq_id: [pick.token for pick in picks] for seq_id, picks in result.sampled.items()}
        self.scheduler.update(step.plan, tokens, result.drafts)

    def settle(self, result: StepResult, now: float) -> None:
        """Take in the tokens of earlier steps that were late. Sequences that failed are ended."""
        for seq_id in result.failures:
            if seq_id in self.sequences:
                self.finish(self.sequences[seq_id], "error")
        for seq_id, picks in result.sampled.items():
            seq = self.sequences[seq_id]
            if not seq.output_ids:
                self.first_tokens.observe(seq_id, now)
            self.scheduler.settle(seq, [pick.token for pick in picks], result.drafts.get(seq_id, NO_DRAFTS))

    def _use(self, step: Step, result: StepResult) -> Use | None:
        """Return the use of the step's drafts; None: there are no drafters."""
        if not self.drafts.drafters:
            return None
        tokens = plain_tokens = plain_rows = 0
        for item in step.plan.work:
            picks = len(result.sampled.get(item.seq.id, ()))
            forced = min(item.seq.forced, item.draft) if item.seq.drafts else 0
            tokens += picks
            plain_rows += 1 + forced
            plain_tokens += min(picks, 1 + forced)
        return Use(tokens, plain_tokens, plain_rows)

    def _count_drafts(self, step: Step, result: StepResult) -> None:
        """Count the step's drafts. For before the scheduler's update, which changes the sequences."""
        for item in step.plan.work:
            seq = item.seq
            picks = result.sampled.get(seq.id)
            if seq.drafts and item.draft and picks:
                self.draft_counts.add(seq.drafter, min(seq.forced, item.draft), item.draft, len(picks) - 1)
                seq.count_drafts(item.draft, len(picks) - 1)

    def control_stats(self) -> dict[str, float]:
        """Return the figures of ITL limit and admission, by the names of `observe.table`."""
        queued = self.first_tokens.queued
        return {
            "queued_work_seconds": queued.seconds,
            "queued_encode_seconds": sum(queued.encode_s.values()),
            "sequences_allowed": self._most,
            "step_time_margin": self.times.margin.factor,
            "target_itl_possible": not self._impossible_steps,
            "decode_steps": self.itl_limit.late_steps.steps,
            "late_steps": self.itl_limit.late_steps.late,
            "step_tokens_allowed": self.memory.tokens,
            "memory_retries": self.memory.retries,
            "memory_failures": self.memory.failures,
        }

    def _note_whether_possible(self, decodes: Composition) -> None:
        """Log once that the target for gaps cannot hold, when it could not for many steps in a row."""
        if not decodes:
            return
        self._impossible_steps = 0 if self.itl_limit.possible(decodes) else self._impossible_steps + 1
        if self._impossible_steps == IMPOSSIBLE_STEPS and not self._warned:
            self._warned = True
            seconds = self.times.seconds(decodes.mean)
            log.warning(
                "target_itl_ms is %g and cannot hold: a step with a single decode takes %.1f ms, and "
                "%g%% of them at most %.1f ms; the target is ignored as long as that is so",
                1000 * self.itl_limit.target_s,
                1000 * seconds,
                self.times.margin.percentile,
                1000 * seconds * self.times.margin.factor,
            )

    def _observe(self, step: Step, result: StepResult, seconds: float) -> None:
        """Learn from a step. A client also waits for the time since the last step, so it counts, too."""
        between_s = 0.0 if self._ended is None else max(0.0, step.began - self._ended)
        gap_s, composition = seconds + between_s, step.composition
        self._ended = step.began + seconds
        rows = {job.span.key: job.span.encoder_rows for job in step.plan.encode}
        for key, encode_s in result.encoded.items():
            if key in rows:  # not if the device ended it in a step that asked for no image
                self.image_times.observe(rows[key], encode_s)
        for seq_id in result.sampled:
            if not self.sequences[seq_id].output_ids:
                self.first_tokens.observe(seq_id, self._ended)
        if composition.decodes:
            self.itl_limit.late_steps.observe(0 < self.itl_limit.target_s < gap_s)
            self.batch.observe(gap_s)
        self.drafts.observe(composition, gap_s - result.encode_s, self._use(step, result))
        self.times.observe(composition, gap_s - result.encode_s)

    def abandon(self, step: Step) -> str | None:
        """Give up a step that failed as a whole. Its sequences continue, in smaller groups.

        Returns the id of the sequence that is to blame, which the caller then ends; None: not known yet.
        """
        return self.failure_search.fail(self._give_up(step))

    def retreat(self, step: Step) -> str | None:
        """Give up a step that did not fit into the device's memory. The next ones are smaller.

        Its sequences continue in groups of half the size, and a step has half the tokens.
        Returns the id of a sequence that does not fit even alone, and which the caller then ends; None: that
        is not so.
        """
        searching, involved = self.failure_search.group is not None, self._give_up(step)
        if self.memory.shrink(step.plan.tokens, involved, searching=searching):
            if len(involved) == 1:
                self.failure_search.retry(involved[0])
            else:
                self.failure_search.fail(involved)
            return None
        return self.failure_search.fail(involved)

    def _give_up(self, step: Step) -> list[str]:
        """Let the scheduler abandon a step. Returns the ids of its sequences, in the order of arrival."""
        self.scheduler.abandon(step.plan)
        self._ended, self.drafts.drafting_s = None, 0.0
        involved = [self.sequences[name] for name in step.involved if name in self.sequences]
        return [seq.id for seq in sorted(involved, key=BY_ARRIVAL)]


class DraftCounts:
    """Counts drafts: how many were computed, and how many of them were accepted.

    verified: steps of a sequence that computed drafts.
    computed, accepted: drafts by drafter; those that a grammar forces are "grammar".
    places: accepted drafts by their place among the drafts of a step, from 0, up to DRAFT_PLACES.
    """

    def __init__(self) -> None:
        self.verified = 0
        self.computed: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.places: Counter[int] = Counter()

    def add(self, drafter: str, forced: int, computed: int, accepted: int) -> None:
        """Count the drafts of one sequence in a step.

        drafter: of those that are not forced. forced: how many of the first ones are forced.
        """
        self.verified += 1
        self.computed["grammar"] += forced
        self.computed[drafter] += computed - forced
        self.accepted["grammar"] += min(forced, accepted)
        self.accepted[drafter] += max(0, accepted - forced)
        self.places.update(range(min(accepted, DRAFT_PLACES)))

    def stats(self) -> dict[str, float]:
        """Return the counts by the names of `observe.table`."""
        return {
            "verifications": self.verified,
            "draft_tokens": self.computed.total(),
            "accepted_draft_tokens": self.accepted.total(),
            **_by_label("drafter_tokens", self.computed.items()),
            **_by_label("drafter_accepted_tokens", self.accepted.items()),
            **_by_label("accepted_draft_tokens_per_position", self.places.items()),
        }


def _by_label(name: str, counts: Collection[tuple[str | int, int]]) -> dict[str, float]:
    """Return the figures of a counter with a label. counts: (value of the label, count); "" is left out."""
    # Another thread may count meanwhile, so the counts are copied before anything else is done with them.
    return {labelled_key(name, value): count for value, count in tuple(counts) if value != ""}


class FailureSearch:
    """The groups of sequences that are still to be tried, by their ids.

    The error of a whole step does not tell which sequence caused it. So none of them ends yet: the next
    steps take only half of them, then the other half. A group that fails is halved again, and a sequence
    that fails alone is to blame. Sequences in a step that succeeds are cleared. With one guilty sequence
    among n, this takes about 2 * log2(n) steps, and the others lose only that time.
    """

    def __init__(self) -> None:
        self._groups: list[list[str]] = []

    @property
    def group(self) -> frozenset[str] | None:
        """Ids of the only sequences that the next step may take; None: it may take all."""
        return frozenset(self._groups[-1]) if self._groups else None

    def try_next(self, sequence_id: str) -> None:
        """Try one sequence alone in the next steps, before the groups that are waiting."""
        self._groups.append([sequence_id])

    def retry(self, sequence_id: str) -> None:
        """Note that a step of one sequence failed, and try the sequence alone once more."""
        if self._groups:
            self._groups.pop()
        self._groups.append([sequence_id])

    def take_turns(self, names: list[str], size: int) -> None:
        """Let the next steps take so many of these sequences each, in this order."""
        groups = [names[first : first + size] for first in range(0, len(names), size)]
        self._groups += reversed(groups)

    def fail(self, involved: list[str]) -> str | None:
        """Note a failed step. Returns the id of the sequence that is to blame; None: that is not known yet.

        involved: ids of the step's sequences, the least suspicious first; they are tried first.
        """
        if self._groups:
            self._groups.pop()
        if len(involved) < 2:
            return involved[0] if involved else None
        half = (len(involved) + 1) // 2
        self._groups += [involved[half:], involved[:half]]
        return None

    def clear(self, involved: Collection[str]) -> None:
        """Note a step that succeeded.

        A group stays until all of its sequences were in such a step. It also ends when none of its sequences
        can be in a step now, for example because they have ended or wait for memory.

        involved: ids of the step's sequences; empty for a step with nothing to compute.
        """
        if not self._groups:
            return
        rest = [name for name in self._groups.pop() if name not in involved]
        if rest and involved:
            self._groups.append(rest)


class MemoryLimit:
    """The most tokens of a step, after a step did not fit into the device's memory.

    Such a step is halved until it fits. After GROW_AFTER steps that fit, the limit grows by a quarter, until
    it is as large as configured again: most often something else has taken the memory for a while. A sequence
    that does not fit alone, with FEWEST_TOKENS tokens, is tried once more, because everything was freed
    meanwhile that can be computed again. If it fails again, it ends.

    tokens: most tokens of a step now.
    retries: steps that did not fit and were tried again.
    failures: sequences that did not fit even alone.
    """

    def __init__(self, most: int) -> None:
        """most: the configured limit."""
        self.tokens = most
        self.retries = 0
        self.failures = 0
        self._most = most
        self._successes = 0
        self._alone: str | None = None  # the sequence that failed alone last
        self._last_try = False  # whether it did so in the smallest step
        self._before = most  # the limit before the first of these failures

    @property
    def lowered(self) -> bool:
        """Whether the limit is lower than configured."""
        return self.tokens < self._most

    def shrink(self, tokens: int, involved: Seq[str], *, searching: bool) -> bool:
        """Halve the limit after a step that did not fit.

        tokens: its tokens. involved: ids of its sequences.
        searching: the step was a part of a larger one that had not fitted.
        Returns False if the step cannot become smaller. Then its only sequence is to blame.
        """
        self._successes = 0
        alone = involved[0] if len(involved) == 1 else None
        if not searching:
            self._before = self.tokens
        if alone != self._alone or alone is None:
            self._alone, self._last_try = alone, False
        size, smallest = min(tokens, self.tokens), FEWEST_TOKENS if alone else 1
        if size > smallest:
            self.tokens = max(smallest, size // 2)
        elif alone and self._last_try or not involved:
            # It was to blame, and without it the steps were not too large.
            self.tokens, self._alone = max(self.tokens, self._before), None
            self.failures += len(involved)
            return False
        else:
            self._last_try = True
        self.retries += 1
        return True

    def succeed(self) -> None:
        """Note a step that fitted."""
        self._alone = None
        if not self.lowered:
            return
        self._successes += 1
        if self._successes >= GROW_AFTER:
            self._successes = 0
            self.tokens = min(self._most, self.tokens + max(1, self.tokens // 4))


class StepTallies:
    """Counts steps by size, and encoded images by the time that they took."""

    def __init__(self) -> None:
        self._tallies = {name: Tally(name, row.buckets) for name, row in DISTRIBUTIONS.items()}

    def add(self, tokens: int, sequences: int, result: StepResult) -> None:
        """Count one step.

        tokens: computed tokens. A step that only encoded has none, and is not counted as a step of tokens.
        sequences: sequences for which they were computed.
        """
        if tokens:
            self._tallies["step_tokens"].add(tokens)
            self._tallies["step_sequences"].add(sequences)
        for seconds in result.encoded.values():
            self._tallies["image_encode_seconds"].add(seconds)
        for seconds in result.projected.values():
            self._tallies["image_project_seconds"].add(seconds)

    def stats(self) -> dict[str, float]:
        """Return the figures of all histograms by the names of `core.tally`."""
        return {key: value for tally in self._tallies.values() for key, value in tally.stats().items()}
