"""Iteration-level scheduling: in each step, every running sequence computes some of its missing tokens.

A step has three budgets: a number of tokens, a number of sequences, and the time that the ITL limit leaves
beside the decodes. Each running sequence computes as many of its missing tokens as the budgets allow. A
decode needs one token, or several if it has drafts, and decodes come first. So a long prompt uses only what
the decodes leave and never stalls them. A prompt that does not fit continues in the next step.

Images are encoded in the same steps, not before them. A sequence computes its tokens up to the first image
that is not encoded yet, and requests that image. The encoder works on the requested images one slice at a
time. Waiting sequences request their images, too, so these are encoded ahead, and a sequence joins when the
first image that it needs is encoded. While its image is encoded, a waiting sequence holds no blocks and does
not delay the others. A prefix hit that covers an image needs no encoder at all.

A long prompt does not hold up short ones. Half of a step's budget for prompts is for the prompt that waits
longest. The other half is first offered to prompts of at most a quarter of the longest one's length: the
shortest first, and clients take turns. A step in which one of these gets its first token ends early. So a
short prompt beside long ones waits for the step that runs, and then about twice as long as alone.

Then waiting sequences join in the order of a policy, as long as there are free blocks for their whole prompt
in addition to those that running sequences still need. If a running sequence is computing the next block of a
waiting one, the waiting sequence lets others pass and joins when that block is computed: ten questions about
one new image prefill it once. Clients take turns. No sequence is passed more than `max_passes` times, except
by short prompts in their half of a step.

When the pool is empty, the sequence that arrived last is preempted: it releases its blocks and returns to the
queue, at the place that its arrival time gives it. It loses time, but no text: its tokens are recomputed,
except those whose blocks are still cached.

A sequence that keeps only a part of its tokens (`engine.keep`) computes the tokens that decide about the part
in one step. The next step begins with the copy of what is kept.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from operator import attrgetter
from typing import Any

from fovea.core.types import FinishReason
from fovea.engine.cache.embeddings import EmbeddingCache
from fovea.engine.config.schedule import ScheduleSettings
from fovea.engine.keep import NEVER
from fovea.engine.kv.manager import KVManager, PrefixMatch
from fovea.engine.schedule.images import ImageRequests
from fovea.engine.schedule.itl_limit import FEWEST_TOKENS, PromptBudget
from fovea.engine.schedule.plan import Budget, StepPlan, Work
from fovea.engine.schedule.policy import POLICIES, SHORT, FairOrder, Policy, count_passes, may_pass
from fovea.engine.sequence import NO_DRAFTS, Drafts, Sequence, Status

LOOKAHEAD = 32
"""How many waiting sequences are searched for images to encode ahead when no sequence can join."""
RUNNING = Status.RUNNING
"""A module constant, because each lookup of an enumeration's member takes time, for every row of a step."""
BY_ARRIVAL = attrgetter("arrival", "id")
"""The order in which sequences arrived."""


class Scheduler:
    """Decide what each step computes and encodes, and update the sequences after it.

    Only the engine thread uses it.
    """

    def __init__(
        self,
        config: ScheduleSettings,
        kv: KVManager,
        embeddings: EmbeddingCache[Any],
        *,
        visual_token_bytes: int = 1,
        policy: Policy | None = None,
        whole_images: bool = False,
        lasting_images: bool = False,
    ) -> None:
        """Create a scheduler without sequences.

        config: budgets and bounds.
        kv: block tables and the prefix cache.
        embeddings: cache of encoder outputs.
        visual_token_bytes: memory of the encoder's output per visual token.
        policy: order of waiting sequences; None for the policy that `config` names.
        whole_images: all tokens of an image are computed in one step, because they see each other.
        lasting_images: every later token reads the encoder outputs of a sequence's images.
        """
        self.config = config
        self.policy = policy or POLICIES[config.policy]()
        self.kv = kv
        self.embeddings = embeddings
        self.images = ImageRequests(embeddings, visual_token_bytes, lasting=lasting_images)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.fair_order = FairOrder()
        self.preemptions = 0
        self.steps = 0
        self._most = config.max_running
        self._whole_images = whole_images

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, seq: Sequence, drafts: Drafts = NO_DRAFTS) -> None:
        """Add a sequence. drafts: tokens with which its answer is expected to begin."""
        seq.arrival_step = self.steps
        seq.reusable_tokens = self.kv.cached_prefix(seq)
        seq.expect(drafts)
        self.fair_order.enter(seq.client)
        self._wait(seq)

    @property
    def decodes(self) -> int:
        return sum(seq.decoding for seq in self.running)

    @property
    def streams_to_protect(self) -> int:
        """Number of decoding sequences that the ITL limit protects while others wait for their first token.

        Not counted are sequences with images whose first token came after every still waiting sequence had
        arrived: when several images are asked about at once, the first answer does not delay the others. With
        a target in milliseconds, all decoding sequences count.
        """
        if self.config.target_itl_ms:
            return self.decodes
        decoding = [seq for seq in self.running if seq.decoding]
        with_images = [seq for seq in decoding if seq.spans]
        if not with_images:
            return len(decoding)
        pending = (seq for seq in (*self.waiting, *self.running) if not seq.decoding)
        newest = max((seq.arrival_step for seq in pending), default=self.steps)
        return len(decoding) - sum(seq.first_token_step > newest for seq in with_images)

    def schedule(
        self,
        prompts: PromptBudget | None = None,
        running: int | None = None,
        only: Collection[str] | None = None,
        tokens: int | None = None,
    ) -> StepPlan:
        """Plan the next step.

        prompts: budget for prompts beside the decodes; None for no bound except the configured one.
        running: no sequence joins while this many run; None for the configured maximum.
        only: ids of the sequences that the step may take; None for all.
        tokens: most tokens of the step; None for the configured maximum.
        """
        self._most = min(self.config.max_running, running or self.config.max_running)
        self.steps += 1
        most = min(self.config.max_step_tokens, tokens or self.config.max_step_tokens)
        budget = Budget(most, self.config.max_step_visual_tokens, prompts)
        for seq in _among(self.running, only):
            if seq.keep is not None:
                self._leave_out(seq, budget)
        current, waiting = _among(self.running, only), _among(self.waiting, only)
        self.images.begin(current, waiting)
        current.sort(key=BY_ARRIVAL)
        decodes = [seq for seq in current if seq.decoding]
        others = [seq for seq in current if not seq.decoding]
        for later, seq in enumerate(decodes, 1 - len(decodes)):
            self._continue(seq, budget, max(1, budget.tokens + later))
        self._serve_short(others, waiting, budget)
        for seq in others:
            if seq.id not in budget.work:
                self._continue(seq, budget, budget.most(seq))
        self._admit_waiting(_among(self.waiting, only), budget)
        work = sorted(budget.work.values(), key=lambda w: not w.seq.decoding)
        return StepPlan(
            tuple(work),
            tuple(budget.jobs.values()),
            tuple(budget.preempted),
            tuple(budget.encoded_ids),
            self.kv.take_moves(),
        )

    def follow(self, plan: StepPlan) -> StepPlan | None:
        """Plan the step after one that runs, before its tokens are known: each sequence decodes once more.

        So the device need not wait for the host. An answer that ends with its unknown token computes one row
        in vain, which no other sequence reads. The sequences get blocks for it.

        Returns None unless the step only decodes, without drafts and states, no other request could join, no
        sequence reaches its point, and blocks are free without a move.
        """
        settled = not (plan.encode or plan.encoded_ids or plan.moves or plan.preempted)
        full = len(self.running) >= self._most
        if not settled or self.kv.keeps_states or len(plan.work) != len(self.running):
            return None
        if self.waiting and not full:
            return None
        for item in plan.work:
            seq = item.seq
            if seq.status is not RUNNING or item.count != 1 or seq.drafts or item.stop != seq.length:
                return None
            if not seq.decoding:
                return None
            if seq.keep is not None and self.kv.point(seq) <= seq.length + 1:
                return None
        going_on = [item.seq for item in plan.work if len(item.seq.output_ids) + 1 < item.seq.max_tokens]
        for seq in going_on:
            if not self.kv.can_extend_quietly(seq, seq.length + 1):
                return None
            self.kv.extend(seq, seq.length + 1)
        if not going_on:
            return None
        return StepPlan(tuple(Work(seq, seq.length, 1) for seq in going_on))

    def update(
        self, plan: StepPlan, sampled: Mapping[str, Seq[int]], drafts: Mapping[str, Drafts] | None = None
    ) -> None:
        """Update the sequences after a plan was executed: count computed tokens and add the chosen ones.

        Of a sequence with drafts, the tokens count as computed up to the last accepted draft.

        sampled: the new tokens of each sequence, by sequence id: the accepted drafts and one more.
        drafts: tokens that are expected next, by sequence id.
        """
        self.kv.finish_moves()
        for item in plan.work:
            seq = item.seq
            if seq.status is not RUNNING:
                continue
            tokens = sampled.get(seq.id, ())
            computed = item.count - item.draft + max(0, len(tokens) - 1)
            known = seq.length
            seq.append(tokens)
            self.kv.commit(seq, computed, known)
            spans = seq.spans_between(item.start, item.stop) if seq.spans else ()
            if any(span.end <= seq.computed_tokens for span in spans):
                self.images.release_computed(seq)
            if tokens:
                seq.first_token_step = seq.first_token_step or self.steps
                seq.expect((drafts or {}).get(seq.id, NO_DRAFTS))

    def settle(self, seq: Sequence, tokens: Seq[int], drafts: Drafts) -> None:
        """Add tokens to a sequence that were not ready when their step ended.

        Since then no token of the sequence was missing, so it was in no step, unless it was preempted.
        """
        seq.append(tokens)
        seq.first_token_step = seq.first_token_step or self.steps
        seq.expect(drafts)

    def abandon(self, plan: StepPlan) -> None:
        """The step failed: forget its moves.

        Sequences whose blocks should have been filled by these moves start again from the queue, and so do
        sequences whose state the step may have changed. All others keep their computed tokens, and can be in
        the next step as if this one had not been.
        """
        self.kv.abandon_moves()
        owners = {move.owner for move in plan.moves}
        changed = {item.seq.id for item in plan.work if item.state is not None}
        for seq in [seq for seq in self.running if seq.id in owners | changed]:
            self._send_back(seq, intact=seq.id not in changed)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence in any state and release everything that it holds. A second call does nothing."""
        if seq.status is Status.FINISHED:
            return
        self.fair_order.leave(seq.client)
        if seq.status is Status.WAITING:
            self.waiting.remove(seq)
            self.images.release(seq)
        else:
            self._free(seq, intact=reason != "error")
        seq.status = Status.FINISHED
        seq.finish_reason = reason

    def expired(self, now: float) -> list[Sequence]:
        """Sequences whose deadline has passed."""
        return [s for s in (*self.waiting, *self.running) if s.deadline is not None and now >= s.deadline]

    def check_integrity(self) -> None:
        self.kv.check_integrity()
        self.embeddings.check_integrity({seq.id for seq in (*self.running, *self.waiting)})

    def _next_tokens(self, seq: Sequence, most: int, budget: Budget) -> int:
        """How many of its next `most` tokens a sequence should compute; no drafts if no block is free."""
        begin, point = self._deciding(seq) if seq.keep is not None else (0, NEVER)
        if point <= seq.length and seq.computed_tokens == begin:
            most = max(most, point - begin)
        count = self.images.tokens_before_unencoded_image(seq, min(seq.missing_tokens, most), budget)
        if self._whole_images:
            count = _to_image_border(seq, count)
        if point <= seq.length:
            count = _to_point(seq.computed_tokens, count, begin, point)
        else:  # the newest token of the answer is the last one before the point, never a draft
            count = min(count, point - 1 - seq.computed_tokens)
        if not seq.drafts:
            return count
        known, drafts = seq.length - seq.computed_tokens, self.kv.most_drafts()
        if not self.kv.can_extend(seq, seq.computed_tokens + count):
            count = min(count, known)  # nobody is preempted for drafts
        return count if drafts is None else min(count, known + drafts)

    def _deciding(self, seq: Sequence) -> tuple[int, int]:
        """The tokens [begin, point) that decide what a sequence keeps, and must be computed in one step."""
        point = self.kv.point(seq)
        if point > seq.length:
            return 0, point
        begin = seq.decides_from(point)
        inside = seq.spans_between(begin, begin + 1) if self._whole_images else ()
        return min([begin, *(span.start for span in inside)]), point

    def _leave_out(self, seq: Sequence, budget: Budget) -> None:
        """If a sequence has reached its point, plan the copy of what it keeps.

        If the point is in its answer, the tokens that decide were computed one by one. So they first count as
        missing: the next step computes them again, together with the newest token.
        """
        point = self.kv.point(seq)
        if seq.status is not RUNNING:
            return
        if seq.decoding and seq.length == point and self._make_room(seq, self.kv.can_rewind, budget):
            self.kv.rewind(seq)
        if seq.computed_tokens == point and self._make_room(seq, self.kv.can_compact, budget):
            self.kv.compact(seq)

    def _make_room(self, seq: Sequence, fits: Callable[[Sequence], bool], budget: Budget) -> bool:
        """Preempt sequences until something fits. Returns False if the last one was `seq` itself."""
        while not fits(seq):
            victim = max(self.running, key=BY_ARRIVAL)
            self._preempt(victim, budget)
            if victim is seq:
                return False
        return True

    def _continue(self, seq: Sequence, budget: Budget, most: int) -> None:
        """most: most tokens, so that one is left for each later decode: drafts do not delay these."""
        if seq.status is not RUNNING or budget.tokens <= 0:  # another one has taken its blocks
            return
        count = self._next_tokens(seq, most, budget)
        if count == 0:
            return
        while not self.kv.can_extend(seq, seq.computed_tokens + count):
            victim = max(self.running, key=BY_ARRIVAL)
            self._preempt(victim, budget)
            if victim is seq:
                return
        self._take(seq, count, budget)

    def _serve_short(self, prompts: list[Sequence], waiting: list[Sequence], budget: Budget) -> None:
        """Serve prompts that are short beside the longest one, in half of the step's budget.

        prompts: running sequences that do not decode, the oldest first. waiting: those that may join.
        """
        if not self.policy.fair:
            return
        joining = [seq for seq in waiting if not seq.encode_only and self.images.ready(seq)]
        all_prompts = [*prompts, *joining]
        most = max((_to_compute(seq) // SHORT for seq in all_prompts), default=0)
        short = sorted((seq for seq in all_prompts if _to_compute(seq) <= most), key=_to_compute)
        if not short:
            return
        halved = budget.prompts.reserve_half()
        if not halved and self.steps % 2:  # too small to be halved: they get all of it every second time
            return
        oldest, ends = all_prompts[0], 0
        for seq in self.fair_order.order(short):
            count = _to_compute(seq)
            if ends and count > 2 * ends or seq is oldest and count > budget.most(seq):
                continue  # too long to end in this step, or the oldest prompt, which has the other half
            if seq.status is Status.RUNNING:
                self._continue(seq, budget, budget.most(seq))
            elif not self._admit_short(seq, joining, budget):
                break
            if not ends and seq.id in budget.work and budget.work[seq.id].samples:
                ends = max(count, FEWEST_TOKENS)
        if halved:
            budget.prompts.return_half(short=ends > 0)

    def _admit_short(self, seq: Sequence, joining: list[Sequence], budget: Budget) -> bool:
        """Let a short prompt join, unless the oldest waiting sequence needs its blocks or its place.

        Returns False if no other prompt may join in this step either.
        """
        if budget.preempted or len(self.running) >= self._most - 1 or budget.most(seq) <= 0:
            return False
        oldest = next(other for other in joining if other.status is Status.WAITING)
        own = self.kv.blocks_for(self.kv.rows_of(seq))
        if oldest is not seq and not self.kv.can_admit(oldest, self.kv.match(oldest), own):
            return False
        match = self.kv.match(seq)
        if match.pending is None and not self.images.request_next(seq, self.kv.matched_tokens(match), budget):
            if not self.kv.can_admit(seq, match):
                return False
            self._admit(seq, match, budget)
        return True

    def _admit_waiting(self, waiting: list[Sequence], budget: Budget) -> None:
        """waiting: the sequences that may join, the oldest first."""
        room = not budget.preempted
        oldest = waiting[0] if waiting else None
        if oldest is not None:
            self._request_first_image(oldest, budget)
        order = self.policy.order(tuple(waiting), self.images.ready)
        for position, seq in enumerate(self.fair_order.order(order) if self.policy.fair else order, 1):
            room = room and len(self.running) < self._most and budget.most(seq) > 0
            if not room and position > LOOKAHEAD:
                return
            if seq.encode_only:
                if seq is not oldest:
                    self._encode_only(seq, budget)
                continue
            match = self.kv.match(seq)
            if match.pending is not None:
                continue
            if self.images.request_next(seq, self.kv.matched_tokens(match), budget):
                room = room and not self.policy.strict
                continue
            if room and may_pass(seq, self.waiting, self.config.max_passes):
                room = self.kv.can_admit(seq, match)
                if room:
                    count_passes(seq, self.waiting)
                    self._admit(seq, match, budget)

    def _request_first_image(self, seq: Sequence, budget: Budget) -> None:
        """Request the image of the longest waiting sequence, before the policy puts others in front."""
        if seq.encode_only:
            self._encode_only(seq, budget)
            return
        match = self.kv.match(seq)
        if match.pending is None:
            self.images.request_next(seq, self.kv.matched_tokens(match), budget)

    def _encode_only(self, seq: Sequence, budget: Budget) -> None:
        if not self.images.request_any(seq, budget):
            budget.encoded_ids.append(seq.id)

    def _admit(self, seq: Sequence, match: PrefixMatch, budget: Budget) -> None:
        self.waiting.remove(seq)
        self.kv.admit(seq, match)
        self.fair_order.charge(seq.client, seq.missing_tokens)
        self.images.release_computed(seq)
        seq.status = Status.RUNNING
        self.running.append(seq)
        count = self._next_tokens(seq, budget.most(seq), budget)
        if count and self.kv.can_extend(seq, seq.computed_tokens + count):
            self._take(seq, count, budget)

    def _take(self, seq: Sequence, count: int, budget: Budget) -> None:
        self.kv.extend(seq, seq.computed_tokens + count)
        kept, stop = None, seq.computed_tokens + count
        if seq.keep is not None and stop == self.kv.point(seq):
            kept = self.kv.kept_at(seq, seq.kept, stop)
        budget.take(Work(seq, seq.computed_tokens, count, self.kv.plan_state(seq, count), kept))

    def _preempt(self, seq: Sequence, budget: Budget) -> None:
        budget.refund(seq)
        budget.preempted.append(seq.id)
        self._send_back(seq)

    def _send_back(self, seq: Sequence, *, intact: bool = True) -> None:
        """Let a running sequence release its blocks and wait again. intact: see `KVManager.release`."""
        self._free(seq, intact=intact)
        seq.keep_drafts(0)
        seq.preemptions += 1
        self.preemptions += 1
        self._wait(seq)

    def _free(self, seq: Sequence, *, intact: bool) -> None:
        self.running.remove(seq)
        self.kv.release(seq, intact=intact)
        self.images.release(seq)

    def _wait(self, seq: Sequence) -> None:
        seq.status = Status.WAITING
        insort(self.waiting, seq, key=BY_ARRIVAL)


def _to_image_border(seq: Sequence, count: int) -> int:
    """Change the number of next tokens so that they do not end inside an image.

    They end before the image, or, if they begin with it, after the image. So a step can exceed its budget of
    tokens by a part of an image.
    """
    end = seq.computed_tokens + count
    for span in seq.spans_between(end - 1, end):
        if span.start < end < span.end:
            return (span.start if span.start > seq.computed_tokens else span.end) - seq.computed_tokens
    return count


def _to_point(start: int, count: int, begin: int, point: int) -> int:
    """Change the number of next tokens so that the tokens [begin, point) are computed in one step.

    start: the next token, at most `begin`.
    """
    end = start + count
    if end >= point:
        return point - start
    return max(0, min(end, begin) - start)


def _to_compute(seq: Sequence) -> int:
    """About how many tokens a sequence must compute before it can decode."""
    return seq.missing_tokens - (seq.reusable_tokens if seq.status is Status.WAITING else 0)


def _among(sequences: list[Sequence], only: Collection[str] | None) -> list[Sequence]:
    """The sequences that a step may take, in their order. only: their ids; None for all."""
    return [seq for seq in sequences if only is None or seq.id in only]
