"""The composition that is expected of a step is that of the plan that follows."""

from __future__ import annotations

from fovea.engine.schedule.plan import StepPlan, Work, composition_of, composition_of_decodes
from fovea.engine.sequence import Drafts
from fovea.planner.cost import Composition
from tests.support.brains import sequence


def test_drafts_count_before_a_step_as_they_do_in_it() -> None:
    """Without them, steps that verify drafts took longer than a target for gaps had planned."""
    plain, drafting, prompt = sequence("a", 10), sequence("b", 20), sequence("c", 30)
    for seq in (plain, drafting):
        seq.append([1, 2])
        seq.computed_tokens = seq.length - 1
        seq.max_tokens = 50
    drafting.expect(Drafts.certain([3, 4, 5]))
    plan = StepPlan((Work(plain, 11, 1), Work(drafting, 21, 4)))
    expected = composition_of_decodes((plain, drafting, prompt))
    assert expected == composition_of(plan) == Composition(5, 12 + 4 * 25)


def test_without_decodes_there_is_nothing() -> None:
    assert not composition_of_decodes((sequence("a", 10),))
