"""Converts requests of a trace into sequences for the scheduler."""

from __future__ import annotations

from fovea.core.sampling import SamplingParams
from fovea.core.trace import TEXT_BITS, TraceRequest
from fovea.engine.sequence import ImageSpan, Sequence
from fovea.engine.visual_budget.detail import SHARES_UNDER_LOAD

IMAGE_ID = -1
"""The token that stands for an image; text has other ids."""
SAMPLING = SamplingParams(temperature=0.0)


def to_sequence(
    request: TraceRequest,
    number: int,
    before: Sequence | None = None,
    arrival: float | None = None,
    steps_down: int = 0,
) -> Sequence:
    """Return a sequence with the request's system prompt, images and text, in this order.

    number: number of the request in its trace. It is the sequence's id, and makes its text unique.
    before: an ended sequence whose prompt and answer come first; None: nothing does.
    arrival: when the client sent it; None: at `request.at`.
    steps_down: 1 or 2: images keep a part of their visual tokens, as images do under load.
    """
    arrival = request.at if arrival is None else arrival
    ids, spans = list(range(request.system)), list[ImageSpan]()
    if before is not None:
        ids, spans = [*before.prompt_ids, *before.output_ids], list(before.spans)
    share = (1.0, *SHARES_UNDER_LOAD)[steps_down]
    for whole, all_tokens in request.images:
        tokens = max(1, int(share * all_tokens))
        key = whole if tokens == all_tokens else f"{whole}, {tokens} tokens"
        spans.append(ImageSpan(len(spans), len(ids), tokens, tokens, key, (1, 2, 2 * tokens)))
        ids += [IMAGE_ID] * tokens
    first = (number + 1) << TEXT_BITS
    ids += range(first, first + request.text)
    return Sequence(
        id=str(number),
        prompt_ids=ids,
        sampling=SAMPLING,
        max_tokens=request.output,
        spans=tuple(spans),
        arrival=arrival,
        deadline=None if request.timeout is None else arrival + request.timeout,
        priority=request.priority,
    )
