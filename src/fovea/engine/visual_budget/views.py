"""Several images of a request share one budget: which are looked at closely, decided before the prompt is laid out.

Each image keeps its own plan or gets a smaller one of the same processor, and its key with it. So an image that is looked
at closely shares the caches of one that nothing was left out of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fovea.core.image import Image, PixelBudget
from fovea.engine.vision.processor.any_size_regions import glimpse
from fovea.engine.vision.processor.base import ResizingProcessor, VisualPlan
from fovea.relevance.views import GLANCES, Sizes, allot, rank, score_view


@dataclass(frozen=True, slots=True)
class SharingImage:
    """One of the images that share a budget.

    plan: the plan with all of its tokens.
    mention: the last turn that names the image; -1: no turn does.
    """

    image: Image
    plan: VisualPlan
    budget: PixelBudget
    mention: int


def share_budget(
    processor: ResizingProcessor, images: Sequence[SharingImage], question: str, total: int
) -> list[VisualPlan]:
    """A plan for each image, with `total` tokens at most together and one for each at least.

    CPU-bound, some milliseconds per image.
    """
    scores = [score_view(glimpse(processor, entry.image, entry.plan), question) for entry in images]
    mentions = [entry.mention for entry in images]
    order = rank(mentions, scores, [entry.image.identity for entry in images])
    glances = [
        tuple(processor.shrink(entry.plan, entry.budget, most) for most in GLANCES) for entry in images
    ]
    sizes = [
        Sizes(entry.plan.tokens, tuple(plan.tokens for plan in plans))
        for entry, plans in zip(images, glances, strict=True)
    ]
    wanted = mentions.count(max(mentions)) if max(mentions) >= 0 else 1
    allotment = allot(sizes, order, wanted, total)
    plans = [plans[allotment.glance] for plans in glances]
    for number, most in allotment.close.items():
        closer = processor.shrink(images[number].plan, images[number].budget, most)
        plans[number] = max(plans[number], closer, key=lambda plan: plan.tokens)
    return plans
