"""Sequences and a runner for the scheduler's tests: no tensors, yet wrong bookkeeping gives wrong answers.

`SlotRunner` executes plans on numbered slots. A slot holds the hash of everything that a KV row depends on:
all tokens and images up to its position. So a block that is shared, reused or named wrongly is detected when
it is read. The next token is a function of the prefix alone, so every schedule must give the same answer.
States are slots, too: each holds the hash of the prefix that it is the state of. Sequences that keep a part
of their tokens keep a part that follows from the tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from random import Random
from typing import Any

from fovea.core.sampling import SamplingParams
from fovea.engine import keep as keeping
from fovea.engine.cache.embeddings import EmbeddingCache
from fovea.engine.changes import DEVICE, HOST, BlockChanges
from fovea.engine.config import EngineConfig
from fovea.engine.keep import NOTHING_DROPPED, KeepRule, Kept, kept_at, next_point
from fovea.engine.kv.blocks import BlockPool, HostBlocks, WindowBlocks
from fovea.engine.kv.manager import Compaction, KVManager, Move, PrefixMatch
from fovea.engine.kv.states import StateSlots
from fovea.engine.schedule.plan import StepPlan, Work
from fovea.engine.schedule.scheduler import Scheduler
from fovea.engine.sequence import Drafts, ImageSpan, Sequence, Status
from fovea.kernels import NO_SLOT

IMAGE_TOKEN = 999
MOST_IMAGE = 5
"""Tokens of the largest image, where images are computed in one piece."""
GREEDY = SamplingParams(temperature=0.0)


def image(start: int, tokens: int, key: str, index: int = 0) -> ImageSpan:
    return ImageSpan(index, start, tokens, tokens, key, (1, 2, 2 * tokens))


def sequence(
    name: str,
    prompt: int | Seq[int | tuple[str, int]],
    *,
    arrival: float = 0.0,
    max_tokens: int = 4,
    salt: str = "",
    client: str = "",
    deadline: float | None = None,
    keep: KeepRule | None = None,
) -> Sequence:
    """Create a sequence.

    prompt: a number n for the token ids 0 to n - 1, or a list of ids in which (key, tokens) stands for an
        image.
    """
    ids: list[int] = []
    spans: list[ImageSpan] = []
    for piece in range(prompt) if isinstance(prompt, int) else prompt:
        if isinstance(piece, tuple):
            spans.append(image(len(ids), piece[1], piece[0], len(spans)))
            ids += [IMAGE_TOKEN] * piece[1]
        else:
            ids.append(piece)
    return Sequence(
        name,
        ids,
        GREEDY,
        max_tokens,
        tuple(spans),
        salt=salt,
        client=(client, ""),
        arrival=arrival,
        deadline=deadline,
        keep=keep,
    )


BLOCK_SIZE = 2
"""Tokens per block where sequences keep a part of their tokens."""


def rows(seq: Sequence) -> list[int]:
    """A hash for each position of what its KV row depends on: tokens and images up to it, and the salt.

    What was left out before changes later rows.
    """
    keys = {place: span.key for span in seq.spans for place in range(span.start, span.end)}
    hashes, state = [], hash(seq.salt)
    points = {kept.until for kept in points_of(seq)}
    for place, token in enumerate([*seq.prompt_ids, *seq.output_ids, *seq.drafts]):
        if place in points:
            state = hash((state, str(seq.keep)))
        state = hash((state, token, keys.get(place)))
        hashes.append(state)
    return hashes


def points_of(seq: Sequence) -> Iterator[Kept]:
    """Yield what a sequence keeps at each point before its last token."""
    kept = NOTHING_DROPPED
    while seq.keep is not None:
        point = next_point(seq.keep, len(seq.prompt_ids), kept, BLOCK_SIZE)
        if point >= seq.length + len(seq.drafts):
            return
        kept = kept_at(seq.keep, point, kept, seq.visual_between(kept.until, point), BLOCK_SIZE)
        yield kept


def kept_rows(seq: Sequence, until: int) -> list[tuple[int, bool]]:
    """Return a hash for each row that a sequence has kept at point `until`, and whether it is an image's."""
    truth, found, before = rows(seq), list[tuple[int, bool]](), 0
    for kept in points_of(seq):
        if kept.until > until:
            break
        found += [(truth[at], bool(seq.visual_between(at, at + 1))) for at in range(before, kept.until)]
        found, before = [found[row] for row in choice(seq, found, kept)], kept.until
    return found


def choice(seq: Sequence, found: list[tuple[int, bool]], kept: Kept) -> list[int]:
    """Numbers of the rows that a sequence keeps, by chance, which follows from its tokens."""
    dice = Random(found[-1][0])
    assert seq.keep is not None
    if seq.keep.method in ("snap", "window"):
        return sorted(dice.sample(range(len(found)), kept.rows))
    visual = [row for row, (_, is_visual) in enumerate(found) if is_visual]
    text = [row for row, (_, is_visual) in enumerate(found) if not is_visual]
    return sorted(dice.sample(visual, kept.visual)) + sorted(dice.sample(text, kept.text))


def answer(seq: Sequence) -> list[int]:
    """The output tokens that `seq` must have at its end: generated alone, without any cache."""
    alone = Sequence(seq.id, list(seq.prompt_ids), seq.sampling, seq.max_tokens, seq.spans, salt=seq.salt)
    alone.keep = seq.keep
    while len(alone.output_ids) < alone.max_tokens:
        alone.append([rows(alone)[-1] % 97])
    return alone.output_ids


def chosen_tokens(work: Work) -> list[int]:
    """The tokens that a step chooses for a sequence: its drafts as long as they are right, and one more."""
    seq, chosen = work.seq, list[int]()
    for place in range(seq.length - 1, work.stop):
        chosen.append(rows(seq)[place] % 97)
        if chosen[-1:] != seq.drafts[len(chosen) - 1 : len(chosen)]:
            break
    return chosen


class SlotRunner:
    """Execute the plans of a scheduler on slots; check budgets, blocks and encoder outputs in every step."""

    def __init__(
        self,
        scheduler: Scheduler,
        image_bytes: int = 10,
        slices: Callable[[], int] = lambda: 1,
        drafts: Callable[[Sequence, list[int]], list[int]] = lambda seq, new: [],
        late: Callable[[], int] = lambda: 0,
    ) -> None:
        """Create a runner for a scheduler.

        image_bytes: size of every encoder output.
        slices: returns the number of steps that the next image takes; images are encoded one after the other.
        drafts: returns the drafts that follow a sequence's new tokens.
        late: returns the number of steps by which the next token of a sequence is late.
        """
        self.scheduler = scheduler
        self.slices = slices
        self.drafts = drafts
        self.late = late
        self.held: dict[str, tuple[Sequence, int, int]] = {}
        self.left: dict[str, int] = {}
        self.image_bytes = image_bytes
        self.slots: dict[int, int] = {}
        self.saved: dict[int, int] = {}
        self.states: dict[int, int] = {}
        self.windowed: dict[int, int] = {}
        self.encoded: list[str] = []
        self.computed_tokens = 0
        self.choices: dict[str, list[int]] = {}

    def step(self) -> StepPlan:
        """Schedule and execute a step, update the scheduler, end finished sequences; check everything."""
        scheduler = self.scheduler
        self._settle()
        plan = scheduler.schedule()
        self._check_budgets(plan)
        sampled: dict[str, list[int]] = {}
        finished_jobs = []
        self._copy(plan)
        for work in plan.work:
            for piece in work.split():
                self._compute_state(piece)
            self._compute(work.seq, work.start, work.stop)
            self._choose(work)
            if work.samples:
                sampled[work.seq.id] = chosen_tokens(work)
                self._hold(work.seq, sampled)
        for job in sorted(plan.encode, key=lambda job: job.span.key not in self.left):
            assert job.holders, "an image is encoded, but no sequence waits for it"
            assert len(set(job.holders)) == len(job.holders)
            left = self.left.setdefault(job.span.key, self.slices()) - 1
            self.left[job.span.key] = left
            if left > 0:
                break
            del self.left[job.span.key]
            finished_jobs.append(job)
        for job in finished_jobs:
            scheduler.embeddings.put(job.span.key, job.span.key, self.image_bytes, set(job.holders))
            self.encoded.append(job.span.key)
        self.computed_tokens += plan.tokens
        drafts = {
            work.seq.id: Drafts.certain(self.drafts(work.seq, sampled[work.seq.id]))
            for work in plan.work
            if work.seq.id in sampled
        }
        scheduler.update(plan, sampled, drafts)
        for seq in [s for s in scheduler.waiting if s.id in plan.encoded_ids]:
            scheduler.finish(seq, "length")
        for work in plan.work:
            if len(work.seq.output_ids) >= work.seq.max_tokens:
                scheduler.finish(work.seq, "length")
        scheduler.check_integrity()
        return plan

    def _hold(self, seq: Sequence, sampled: dict[str, list[int]]) -> None:
        """Hold the token of a sequence back, if it is late or was late before a preemption."""
        if seq.id not in self.held and (steps := self.late()):
            self.held[seq.id] = seq, steps, sampled[seq.id][0]
        if seq.id in self.held:
            del sampled[seq.id]

    def _settle(self) -> None:
        """Give sequences their late tokens."""
        for name, (seq, steps, token) in list(self.held.items()):
            if steps and seq.status is not Status.FINISHED:
                self.held[name] = seq, steps - 1, token
                continue
            del self.held[name]
            if seq.status is not Status.FINISHED:
                self.scheduler.settle(seq, [token], Drafts.certain(self.drafts(seq, [token])))
                if len(seq.output_ids) >= seq.max_tokens:
                    self.scheduler.finish(seq, "length")

    def spoil(self, plan: StepPlan) -> None:
        """Overwrite everything that a step would have written, and execute nothing."""
        size = self.scheduler.kv.block_size
        for move in plan.moves:
            if isinstance(move, Compaction):
                self.slots.update({block * size + at: -1 for block in move.target for at in range(size)})
                continue
            target = self._target(move)
            target.update(dict.fromkeys(range(move.target * size, move.target * size + move.rows), -1))
        for work in plan.work:
            for place in range(work.start, work.stop):
                self.slots[self._slot(work.seq, place - work.seq.dropped)] = -1
                if self.scheduler.kv.window is not None:
                    self.windowed[work.seq.window_blocks[place // size] * size + place % size] = -1
            for _, slot in work.state.saves if work.state is not None else ():
                self.states[slot] = -1

    def _copy(self, plan: StepPlan) -> None:
        size = self.scheduler.kv.block_size
        for move in plan.moves:
            if isinstance(move, Compaction):
                old = [self.slots.get(b * size + at, 0) for b in move.source for at in range(size)]
                for row, chosen in enumerate(self.choices.pop(move.owner)):
                    self.slots[move.target[row // size] * size + row % size] = old[chosen]
                continue
            source = self.saved if move.kind == "load" else self.windowed if move.windowed else self.slots
            target = self._target(move)
            for row in range(move.rows):
                # A block with names for its first rows only is saved whole; the other rows are not used.
                target[move.target * size + row] = source.get(move.source * size + row, 0)

    def _target(self, move: Move) -> dict[int, int]:
        return self.saved if move.kind == "save" else self.windowed if move.windowed else self.slots

    def run(self, limit: int = 10_000) -> list[StepPlan]:
        """Run steps until the scheduler is idle; every step must do something."""
        plans = []
        while not self.scheduler.idle:
            plans.append(self.step())
            empty = not plans[-1] and not self.held and not self.scheduler.idle
            assert not empty, "sequences wait, yet the step is empty: a deadlock"
            assert len(plans) <= limit, f"{limit} steps were not enough"
        return plans

    def _slot(self, seq: Sequence, row: int) -> int:
        size = self.scheduler.kv.block_size
        return seq.blocks[row // size] * size + row % size

    def _choose(self, work: Work) -> None:
        """Note what a sequence keeps, if the step decides about it."""
        seq, kept = work.seq, work.kept
        if kept is None:
            return
        assert kept.until == work.stop <= seq.length
        assert work.start <= seq.decides_from(work.stop), "the tokens that decide are not in one step"
        found = kept_rows(seq, seq.kept.until)
        truth = rows(seq)
        found += [
            (truth[at], bool(seq.visual_between(at, at + 1))) for at in range(seq.kept.until, work.stop)
        ]
        self.choices[seq.id] = choice(seq, found, kept)

    def _compute(self, seq: Sequence, start: int, stop: int) -> None:
        truth = rows(seq)
        assert start == seq.computed_tokens
        assert 0 < stop <= seq.length + len(seq.drafts)
        places = [self._slot(seq, row) for row in range(stop - seq.dropped)]
        for place in range(start, stop):
            self.slots[places[place - seq.dropped]] = truth[place]
        self._compute_window(seq, truth, start, stop)
        lasting = self.scheduler.images.lasting
        for span in seq.spans_between(0 if lasting else start, stop):
            assert self.scheduler.embeddings.get(span.key) == span.key
        seen = [row for row, _ in kept_rows(seq, seq.kept.until)] + truth[seq.kept.until : stop]
        assert [self.slots.get(p) for p in places] == seen, f"{seq.id} reads KV that is not its own"

    def _compute_window(self, seq: Sequence, truth: list[int], start: int, stop: int) -> None:
        """Write the rows of layers with a window, and check all rows that the first of these tokens sees."""
        window, size = self.scheduler.kv.window, self.scheduler.kv.block_size
        if window is None:
            return
        first = window.first_visible(start) * size
        places = [seq.window_blocks[p // size] * size + p % size for p in range(first, stop)]
        for place in range(start, stop):
            self.windowed[places[place - first]] = truth[place]
        seen = max(0, start - window.window + 1) - first
        assert [self.windowed.get(p) for p in places[seen:]] == truth[first + seen : stop], (
            f"{seq.id} reads rows of a window that are not its own"
        )
        assert min(places) >= 0, "a block that is seen was released"

    def _compute_state(self, work: Work) -> None:
        if work.state is None:
            return
        truth, state = [0, *rows(work.seq)], work.state
        before = 0 if state.source == NO_SLOT else self.states.get(state.source)
        assert before == truth[work.start], f"{work.seq.id} reads a state that is not its own"
        assert state.saves[-1][0] == work.stop
        for position, slot in state.saves:
            self.states[slot] = truth[position]

    def _check_budgets(self, plan: StepPlan) -> None:
        config = self.scheduler.config
        beyond = MOST_IMAGE if self.scheduler.kv.whole_images else 0
        decides = any(work.seq.keep is not None for work in plan.work)
        more = keeping.WINDOW - 1 + beyond if decides else 0
        assert plan.tokens <= config.max_step_tokens + beyond + more
        assert not beyond or not any(
            span.start < work.stop < span.end for work in plan.work for span in work.seq.spans
        ), "a step ends inside an image"
        visual = [job.span.tokens for job in plan.encode]
        assert len(visual) <= 1 or sum(visual) <= config.max_step_visual_tokens
        assert len({job.span.key for job in plan.encode}) == len(visual), (
            "one image is encoded twice in a step"
        )
        assert len(self.scheduler.running) <= config.max_running
        kinds = [work.seq.decoding for work in plan.work]
        assert kinds == sorted(kinds, reverse=True), "a prompt stands before a decode"
        assert all(work.seq.status is Status.RUNNING for work in plan.work)
        computing = {work.seq.id for work in plan.work}
        assert not computing & set(plan.preempted), (
            "a sequence gives its blocks back and computes in one step"
        )


class FollowedKV(KVManager):
    """A KV manager whose announcements a router follows. Integrity checks compare both."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.changes = BlockChanges()
        self.announced: set[tuple[str, bytes]] = set()
        self._keeps = False
        super().__init__(*args, changes=self.changes, **options)

    def admit(self, seq: Sequence, match: PrefixMatch) -> None:
        self._keeps |= seq.keep is not None  # blocks of kept rows have names, and are not announced
        super().admit(seq, match)

    def check_integrity(self) -> None:
        super().check_integrity()
        net = self.changes.take()
        self.announced = set() if net.cleared else self.announced
        self.announced |= net.stored.keys()
        self.announced -= set(net.removed)
        names = (self.pool.names(block)[0] for block in range(self.pool.size))
        held = {(DEVICE, name) for name in names if name is not None}
        held |= {(HOST, name) for name in self.host._by_name}
        if not self.announced <= held or (self.announced != held and not self._keeps):
            raise RuntimeError("a router that follows the announcements does not know the cached blocks")


def scheduler(
    *,
    blocks: int = 64,
    block_size: int = 4,
    embed_bytes: int = 1000,
    prefix_cache: bool = True,
    host_slots: int = 0,
    state_slots: int = 0,
    state_spacing: int = 0,
    window: int = 0,
    window_blocks: int = 0,
    whole_images: bool = False,
    lasting_images: bool = False,
    **settings: Any,
) -> Scheduler:
    config = EngineConfig.of(block_size=block_size, **settings)
    host = HostBlocks(host_slots)
    states = StateSlots(state_slots, state_spacing) if state_slots else None
    most = config.schedule.max_step_tokens + (MOST_IMAGE if whole_images else 0)
    kv = FollowedKV(
        BlockPool(blocks),
        block_size,
        share_prefixes=prefix_cache,
        host=host,
        states=states,
        window=WindowBlocks(BlockPool(window_blocks), block_size, window, most) if window else None,
        whole_images=whole_images,
    )
    return Scheduler(
        config.schedule,
        kv,
        EmbeddingCache(embed_bytes),
        whole_images=whole_images,
        lasting_images=lasting_images,
    )
