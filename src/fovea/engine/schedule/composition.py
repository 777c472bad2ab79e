"""The composition of step plans, from which durations are predicted."""

from __future__ import annotations

from collections.abc import Iterable

from fovea.engine.schedule.plan import StepPlan
from fovea.engine.sequence import Sequence
from fovea.planner.composition import Composition, pairs_of


def composition_of(plan: StepPlan) -> Composition:
    """Return the composition of a plan. Call it before `Stepper.apply`, which changes the sequences."""
    decodes = context = tokens = chunks = pairs = 0
    for item in plan.work:
        if item.seq.decoding:
            decodes += item.count
            context += item.count * item.stop
        else:
            tokens += item.count
            chunks += 1
            pairs += pairs_of(item.start, item.count)
    return Composition(decodes, context, tokens, chunks, pairs)


def composition_of_decodes(sequences: Iterable[Sequence]) -> Composition:
    """Return the composition of a step that only decodes, drafts included. Other sequences do not count."""
    rows = context = 0
    for seq in sequences:
        if seq.decoding:
            count = 1 + len(seq.drafts)
            rows += count
            context += count * (seq.computed_tokens + count)
    return Composition(rows, context)
