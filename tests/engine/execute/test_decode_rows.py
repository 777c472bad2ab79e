"""The arrays of decode steps are those that the sequences give, whichever of them join and leave."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fovea.core.sampling import SamplingParams
from fovea.engine.execute import decode_rows
from fovea.engine.execute.attention_plan import slots
from fovea.engine.execute.decode_rows import DecodeRows, only_decodes
from fovea.engine.kv.blocks import GONE
from fovea.engine.schedule.decode_batches import DecodeInputs, first_block
from fovea.engine.schedule.plan import Work
from fovea.engine.sequence import Sequence

SIZE, WINDOW = 4, 70
"""Block size, and a window that is longer than the 64 tokens to whose multiples tables are aligned."""


def delta(name: str) -> int:
    return 10 * int(name)


def sequence(name: str, length: int, blocks: list[int]) -> Sequence:
    """A sequence that decodes: all of its tokens but the newest are computed."""
    seq = Sequence(name, [1] * (length - 1), SamplingParams(), 999, computed_tokens=length - 1, blocks=blocks)
    seq.append([length])
    seq.window_blocks = [block + 10_000 for block in blocks]
    return seq


def forget(seq: Sequence) -> None:
    """Blocks behind the window of the next token are gone, as after each step."""
    for index in range(max(0, seq.computed_tokens - WINDOW + 1) // SIZE):
        seq.window_blocks[index] = GONE


def work_of(seqs: list[Sequence]) -> list[Work]:
    """One row for the newest token of each sequence, and one for each of its drafts."""
    return [piece for seq in seqs for piece in Work(seq, seq.computed_tokens, 1 + len(seq.drafts)).split()]


def check(inputs: DecodeInputs, work: list[Work], axes: int) -> None:
    places = [item.start for item in work]
    assert inputs.ids.tolist() == [item.seq.tokens(item.start, item.stop)[0] for item in work]
    positions = [place + delta(item.seq.id) for place, item in zip(places, work, strict=True)]
    assert inputs.positions.tolist() == ([positions] * axes if axes else positions)
    whole, windowed = inputs.groups
    assert whole.slots.tolist() == slots(work, SIZE).tolist()
    assert whole.lengths.tolist() == [place + 1 for place in places]
    assert whole.tables.shape == (len(work), -(-max(whole.lengths) // SIZE))
    assert windowed.slots.tolist() == slots(work, SIZE, windowed=True).tolist()
    assert windowed.firsts is not None
    for number, item in enumerate(work):
        count = -(-item.stop // SIZE)
        assert whole.tables[number, :count].tolist() == item.seq.blocks[:count]
        begin = int(first_block(item.start, WINDOW, SIZE))
        visible = max(0, item.stop - WINDOW)
        assert windowed.lengths[number] == item.stop - begin * SIZE
        assert windowed.firsts[number] == visible - begin * SIZE
        seen = slice(visible // SIZE, count)
        assert GONE not in item.seq.window_blocks[seen]
        row = windowed.tables[number, visible // SIZE - begin : count - begin]
        assert row.tolist() == item.seq.window_blocks[seen]
    assert windowed.tables.min() >= 0


@pytest.mark.parametrize("axes", [0, 3])
@pytest.mark.parametrize("seed", range(8))
def test_arrays_are_those_of_the_sequences(seed: int, axes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences get tokens, blocks and drafts, change their order, leave, join, and come back preempted."""
    monkeypatch.setattr(decode_rows, "ROOM", 1)
    dice = random.Random(seed)
    rows = DecodeRows(SIZE, axes, delta, (None, WINDOW))
    names, blocks = iter(range(10_000)), iter(range(10_000))
    seqs: list[Sequence] = []

    def join() -> None:
        length = dice.choice((dice.randint(2, 30), dice.randint(60, 150)))
        seqs.append(sequence(str(next(names)), length, [next(blocks) for _ in range(-(-length // SIZE))]))

    for _ in range(60):
        if not seqs or dice.random() < 0.2:
            join()
        if len(seqs) > 1 and dice.random() < 0.15:
            seqs.pop(dice.randrange(len(seqs)))
        if dice.random() < 0.1:
            dice.shuffle(seqs)
        if dice.random() < 0.1:  # it was preempted, and its prefix was found again in other blocks
            seq = dice.choice(seqs)
            seq.blocks = [next(blocks) for _ in seq.blocks]
            seq.window_blocks = [block + 10_000 for block in seq.blocks]
        for seq in seqs:
            forget(seq)
            seq.drafts = [dice.randint(5, 9) for _ in range(dice.choice((0, 0, 0, 2)))]
            while len(seq.blocks) * SIZE < seq.length + len(seq.drafts):
                seq.blocks.append(next(blocks))
                seq.window_blocks.append(seq.blocks[-1] + 10_000)
        work = work_of(seqs)
        assert only_decodes(work)
        check(rows.update(work), work, axes)
        for seq in seqs:
            accepted = dice.randint(0, len(seq.drafts))
            seq.append(seq.drafts[:accepted] + [dice.randint(0, 99)])
            seq.computed_tokens, seq.drafts = seq.length - 1, []


def test_tables_stay_while_nothing_changes() -> None:
    rows = DecodeRows(SIZE, 0, delta)
    seqs = [sequence(name, 5, [7, int(name)]) for name in ("3", "4")]
    tables = rows.update(work_of(seqs)).groups[0].tables
    for seq in seqs:
        seq.append([0])
        seq.computed_tokens += 1
    assert np.shares_memory(rows.update(work_of(seqs)).groups[0].tables, tables)


def test_a_step_that_does_more_than_decode_has_no_such_arrays() -> None:
    decode = work_of([sequence("1", 5, [])])
    prompt = Work(Sequence("2", [1, 2, 3], SamplingParams(), 9), 0, 3)
    last = Work(Sequence("3", [1, 2, 3], SamplingParams(), 9, computed_tokens=2), 2, 1)
    assert only_decodes(decode)
    assert not only_decodes([*decode, prompt])
    assert not only_decodes([*decode, last]), "the last token of a prompt may belong to an image"
