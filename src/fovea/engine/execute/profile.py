"""Marks the stage of a step's tokens for profiles, with its amount of work."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from fovea.core.measure import NO_SPAN, active_recorder, stage
from fovea.engine.schedule.plan import Work


def forward_stage(work: Sequence[Work]) -> AbstractContextManager[None]:
    """Return the stage of a step: "decode step", "prefill", or "mixed step" if it has both.

    Its notes are: rows, the tokens computed; keys, the positions whose KV is read, counted once per sequence;
    pairs, the pairs of a query and a key that it attends to.
    """
    if active_recorder() is None:
        return NO_SPAN
    decodes = sum(item.seq.decoding for item in work)
    name = "decode step" if decodes == len(work) else "mixed step" if decodes else "prefill"
    return stage(
        name,
        rows=sum(item.count for item in work),
        keys=sum(item.stop for item in work),
        pairs=sum(item.count * (item.start + 1 + item.stop) // 2 for item in work),
    )
