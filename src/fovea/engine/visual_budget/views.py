"""Several images on one budget: which are looked at closely, settled before the prompt is laid out.

What is shown of an image is a plan of the model's own processor, all of it or a smaller one, and so is its
key: an image that is looked at closely has the caches of one that nobody left anything out of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fovea.core.image import Image, PixelBudget
from fovea.engine.vision.processor.base import VisualPlan
from fovea.engine.vision.processor.qwen import QwenProcessor
from fovea.engine.vision.processor.regions import glimpse
from fovea.relevance.views import GLANCES, Sizes, allot, rank, score_view


@dataclass(frozen=True, slots=True)
class View:
    """An image, the plan with all of its tokens, and the last turn that names it; -1: none does."""

    image: Image
    plan: VisualPlan
    budget: PixelBudget
    named: int


def shown(processor: QwenProcessor, views: Sequence[View], question: str, total: int) -> list[VisualPlan]:
    """A plan for each, of `total` tokens at most together; that is one for each at least.

    CPU-bound, some milliseconds per image.
    """
    scores = [score_view(glimpse(processor, view.image, view.plan), question) for view in views]
    named = [view.named for view in views]
    order = rank(named, scores, [view.image.identity for view in views])
    glances = [tuple(shrunk(processor, view.plan, view.budget, most) for most in GLANCES) for view in views]
    sizes = [
        Sizes(view.plan.tokens, tuple(plan.tokens for plan in plans))
        for view, plans in zip(views, glances, strict=True)
    ]
    wanted = named.count(max(named)) if max(named) >= 0 else 1
    found = allot(sizes, order, wanted, total)
    plans = [plans[found.glance] for plans in glances]
    for number, most in found.close.items():
        closer = shrunk(processor, views[number].plan, views[number].budget, most)
        plans[number] = max(plans[number], closer, key=lambda plan: plan.tokens)
    return plans


def shrunk(processor: QwenProcessor, plan: VisualPlan, budget: PixelBudget, most: int) -> VisualPlan:
    """The largest plan of at most `most` tokens; the plan itself where it has no more."""
    if plan.tokens <= most:
        return plan
    pixels = min(most * processor.factor**2, processor.max_pixels)
    return processor.plan(plan.width, plan.height, PixelBudget(budget.detail, max_pixels=pixels))
