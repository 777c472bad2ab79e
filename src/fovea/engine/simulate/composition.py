"""The amounts of work in a step plan, from which a cost model tells the duration of the step."""

from __future__ import annotations

from fovea.engine.schedule.plan import StepPlan
from fovea.planner.cost import Composition


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
            pairs += item.count * item.start + item.count * (item.count + 1) // 2
    return Composition(decodes, context, tokens, chunks, pairs)
