"""Requests of a trace as sequences: which tokens they share and which not."""

from __future__ import annotations

from fovea.core.trace import TraceRequest
from fovea.engine.simulate.run import to_sequence


def test_a_sequence_has_system_prompt_images_and_text_in_order() -> None:
    seq = to_sequence(TraceRequest(1.0, 3, 4, (("cat", 2), ("dog", 1)), system=2, timeout=5.0), 7)
    assert len(seq.prompt_ids) == 2 + 3 + 3
    assert [(span.key, span.start, span.end) for span in seq.spans] == [("cat", 2, 4), ("dog", 4, 5)]
    assert (seq.arrival, seq.deadline, seq.max_tokens) == (1.0, 6.0, 4)


def test_only_system_prompts_and_images_are_shared() -> None:
    request = TraceRequest(0.0, 3, 4, (("cat", 2),), system=2)
    one, other = to_sequence(request, 0), to_sequence(request, 1)
    assert one.prompt_ids[:4] == other.prompt_ids[:4]
    assert not set(one.prompt_ids[4:]) & set(other.prompt_ids[4:])
