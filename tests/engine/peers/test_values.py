"""Names and order of the values that engines hand over, and how they are taken in. No tensors."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.engine.kv.blocks import BlockPool, WindowBlocks
from fovea.engine.kv.manager import KVManager
from fovea.engine.kv.states import StateSlots
from fovea.engine.peers.values import Value, needed_outputs, output_value, prefix_values
from fovea.engine.sequence import Sequence
from tests.support.brains import sequence

KINDS = ("plain", "windows", "states", "whole images")
PIECES = st.lists(
    st.one_of(
        st.integers(1, 9),
        st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(1, 9)),
    ),
    min_size=1,
    max_size=12,
)
SIZES = st.sampled_from([1, 2, 4, 5])


def manager(kind: str, size: int, blocks: int = 200) -> KVManager:
    more: dict[str, Any] = {}
    if kind == "windows":
        more["window"] = WindowBlocks(BlockPool(blocks), size, 6, 8)
    if kind == "states":
        more["states"] = StateSlots(20, 0)
    if kind == "whole images":
        more["whole_images"] = True
    return KVManager(BlockPool(blocks), size, **more)


def values_of(kind: str, size: int, seq: Sequence, first: int = 0, layout: str = "one") -> list[Value]:
    return list(prefix_values(layout, manager(kind, size), seq, first))


def adopt(kv: KVManager, seq: Sequence, values: list[Value]) -> int:
    """Take values in as `execute.handover` does, without their bytes."""
    found = 0
    for value in values:
        if value.kind == "state":
            found += kv.adopt_state(seq, value.position) is not None
        else:
            found += kv.adopt(seq, value.position, windowed=value.kind == "window") is not None
    return found


@given(PIECES, SIZES, st.sampled_from(KINDS), st.integers(0, 30))
def test_both_engines_know_the_same_names(pieces: list[Any], size: int, kind: str, first: int) -> None:
    one, other = (sequence(name, pieces, salt="s", arrival=5.0 * len(name)) for name in ("1", "22"))
    last = len(one.prompt_ids) - 1
    first = min(first, max(0, last))
    values = values_of(kind, size, one, first)
    assert values == values_of(kind, size, other, first)
    assert all(value.position > first // size * size for value in values if value.kind != "state")
    assert all(0 < value.position <= max(last, 0) for value in values)
    assert [value.position for value in values] == sorted(value.position for value in values)
    whole = values_of(kind, size, one)
    assert {value for value in values if value.kind != "state"} <= set(whole)
    assert len({value.name for value in whole}) == len(whole), "a name stands for two values"
    assert len({value.kind for value in whole}) <= 2 or kind == "windows"


@given(PIECES, SIZES, st.sampled_from(KINDS), st.randoms())
def test_names_differ_with_everything_that_decides_the_bits(
    pieces: list[Any], size: int, kind: str, random: Random
) -> None:
    seq = sequence("1", pieces, salt="s")
    names = {value.name for value in values_of(kind, size, seq)}
    assert not names & {value.name for value in values_of(kind, size, seq, layout="other")}
    assert not names & {value.name for value in values_of(kind, size, sequence("1", pieces, salt="t"))}
    at = random.randrange(len(pieces))
    changed = list(pieces)
    changed[at] = ("d", pieces[at][1]) if isinstance(pieces[at], tuple) else 77
    start = sum(piece[1] if isinstance(piece, tuple) else 1 for piece in pieces[:at])
    before = {value.name for value in values_of(kind, size, seq) if value.position <= start}
    other = {value.name for value in values_of(kind, size, sequence("1", changed, salt="s"))}
    assert names & other == before


@given(PIECES, SIZES, st.sampled_from(KINDS), st.integers(1, 40))
def test_after_all_values_only_what_must_be_computed_is_left(
    pieces: list[Any], size: int, kind: str, blocks: int
) -> None:
    """And in a pool with too few blocks, the pool is still consistent."""
    seq = sequence("1", pieces, salt="s")
    last = len(seq.prompt_ids) - 1
    kv = manager(kind, size)
    values = list(prefix_values("one", kv, seq, 0))
    assert adopt(kv, seq, values) == len(values)
    assert adopt(kv, seq, values) == 0, "they are known now"
    kv.check_integrity()
    matched = kv.matched_tokens(kv.match(sequence("2", pieces, salt="s")))
    if kind == "states":
        assert matched == last
    elif kind == "plain":
        inside = [span.end for span in seq.spans if last // size * size < span.end <= last]
        assert matched == max([last // size * size, *inside])
    small = manager(kind, size, blocks)
    adopt(small, seq, values)
    small.check_integrity()


@given(PIECES, PIECES, SIZES, st.sampled_from(KINDS), st.integers(2, 40))
def test_values_of_others_take_no_block_that_is_in_use(
    pieces: list[Any], others: list[Any], size: int, kind: str, blocks: int
) -> None:
    kv = manager(kind, size, blocks)
    running = sequence("1", others, salt="s")
    match = kv.match(running)
    if not kv.can_admit(running, match):
        return
    kv.admit(running, match)
    if not kv.can_extend(running, running.length):
        return
    kv.extend(running, running.length)
    table, windows = list(running.blocks), list(running.window_blocks)
    seq = sequence("2", pieces, salt="s")
    adopted = set()
    for value in prefix_values("one", kv, seq, 0):
        if value.kind == "state":
            slot = kv.adopt_state(seq, value.position)
            assert running.state is None or slot != running.state.slot
            continue
        block = kv.adopt(seq, value.position, windowed=value.kind == "window")
        if block is not None:
            adopted.add((value.kind == "window", block))
    kv.check_integrity()
    assert not adopted & {(False, block) for block in table}
    assert not adopted & {(True, block) for block in windows}
    assert (running.blocks, running.window_blocks) == (table, windows)


def test_without_shared_prefixes_nothing_is_taken_in() -> None:
    kv, seq = KVManager(BlockPool(8), 2, share_prefixes=False), sequence("1", 9)
    assert adopt(kv, seq, list(prefix_values("one", kv, seq, 0))) == 0


@pytest.mark.parametrize(("kind", "lasting", "needed"), [
    ("plain", False, "c"), ("plain", True, "abc"), ("windows", False, "bc"), ("whole images", False, "bc"),
    ("states", False, "c"),
])  # fmt: skip
def test_outputs_are_needed_of_images_that_are_not_before_the_last_token(
    kind: str, lasting: bool, needed: str
) -> None:
    """The last block begins with token 12: image a ends before it, b inside it, c with the last token."""
    seq = sequence("1", [1, ("a", 6), ("b", 6), ("c", 2)])
    found = needed_outputs(manager(kind, 4), seq, seq.spans, lasting=lasting)
    assert "".join(span.key for span in found) == needed


def test_outputs_have_names_of_their_own() -> None:
    one = output_value("one", "a", 4)
    assert one == output_value("one", "a", 4)
    assert len({one.name, output_value("one", "b", 4).name, output_value("two", "a", 4).name}) == 3
    assert (one.kind, one.key, one.rows) == ("output", "a", 4)


def test_a_prompt_of_one_token_has_nothing_to_hand_over() -> None:
    for kind in KINDS:
        assert values_of(kind, 4, sequence("1", 1)) == []
