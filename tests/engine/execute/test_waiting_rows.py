"""Rows of a draft layer that wait: in the order of places, without a gap, whatever steps computed them."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from fovea.core.sampling import SamplingParams
from fovea.engine.execute import layer_drafter
from fovea.engine.execute.layer_drafter import _Waiting
from fovea.engine.sequence import Sequence


def rows(start: int, stop: int) -> Tensor:
    """States that are the places of their rows."""
    return torch.arange(start, stop)[:, None].float()


def waiting() -> _Waiting:
    return _Waiting(Sequence("a", [1] * 200, SamplingParams(), 8))


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 20), st.sampled_from(["", "take", "preempt"])),
        max_size=12,
    )
)
def test_rows_have_their_places_under_any_steps(steps: list[tuple[int, int, str]]) -> None:
    """A step goes on after the rows before it. After a preemption it begins anywhere before."""
    found, begin, at = waiting(), 0, 0
    for back, count, event in steps:
        if event == "preempt":
            at = back
            begin = at if at <= begin or at > found.start + found.count else begin
        found.add(at, rows(at, at + count))
        at += count
        begin = begin if found.start == begin else found.start
        assert found.start + found.count == at
        if event == "take":
            stop = at - count // 2
            work, taken = found.take(stop)
            assert (work.start, work.stop) == (begin, stop)
            assert torch.equal(taken, rows(begin, stop))
            begin = stop
        if found.parts:
            assert torch.equal(torch.cat(found.parts), rows(found.start, at))


def test_rows_that_overlap_are_there_once() -> None:
    found = waiting()
    found.add(0, rows(0, 30))
    found.add(16, rows(16, 20))  # a preempted sequence goes on after a cached prefix
    work, taken = found.take(20)
    assert (work.start, work.stop) == (0, 20)
    assert torch.equal(taken, rows(0, 20))


@pytest.mark.parametrize("start", [0, 31, 50])
def test_rows_begin_anew_at_the_beginning_or_after_a_gap(start: int) -> None:
    found = waiting()
    found.add(0, rows(0, 30))
    found.add(start, rows(start, start + 5))
    assert (found.start, found.count) == (start, 5)


def test_a_sequence_with_too_many_rows_gets_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_drafter, "MOST_WAITING", 40)
    found = waiting()
    found.add(0, rows(0, 30))
    states = [found.lost]
    found.add(30, rows(30, 50))
    assert [*states, found.lost] == [False, True]
    assert not found.parts
