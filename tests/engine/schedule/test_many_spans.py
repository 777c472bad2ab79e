"""A video is thousands of spans in one prompt; planning it may not stop the engine's thread for seconds."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fovea.engine import sequence as module
from fovea.engine.sequence import ImageSpan
from tests.support.brains import scheduler, sequence

PIECES = st.one_of(st.integers(0, 3), st.tuples(st.just("cat"), st.integers(1, 5)))


@given(st.lists(PIECES, min_size=1, max_size=12), st.integers(0, 40), st.integers(1, 40))
def test_the_spans_between_two_positions_are_those_that_overlap(prompt: Any, start: int, count: int) -> None:
    seq, stop = sequence("s", prompt), start + count
    expected = [span for span in seq.spans if span.start < stop and span.end > start]
    assert list(seq.spans_between(start, stop)) == expected


def test_the_work_per_block_does_not_grow_with_the_number_of_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of a prompt read all of its spans.

    A video of 1,500 frame groups stopped the engine's thread for two seconds, and with it all other clients.
    """
    reads = 0

    def counting_end(span: ImageSpan) -> int:
        nonlocal reads
        reads += 1
        return span.end

    monkeypatch.setattr(module, "_end", counting_end)
    per_block = {}
    for groups in (50, 800):
        brain = scheduler(blocks=2048, block_size=8, max_step_visual_tokens=1 << 20)
        prompt: list[Any] = [piece for number in range(groups) for piece in (1, (f"group {number}", 9), 2)]
        for number in range(groups):
            brain.embeddings.put(f"group {number}", "", 1, set())
        seq = sequence("video", prompt, max_tokens=2)
        brain.add(seq)
        reads = 0
        while not seq.output_ids:
            plan = brain.schedule()
            brain.update(plan, {item.seq.id: [5] for item in plan.work if item.samples})
        per_block[groups] = reads / len(seq.blocks)
    assert per_block[800] < 3 * per_block[50], "twice as many spans are one more read"
