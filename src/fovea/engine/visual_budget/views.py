"""Divides one budget of visual tokens between several images of a request, before the prompt is laid out.

Some images are encoded closely, the others as glances. Each image keeps its own plan, or gets a smaller plan
of the same processor with the key of that plan. So an image that keeps its plan has the same cache entries as
in any other request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fovea.core.media import Image, PixelBudget
from fovea.engine.vision.processor.any_size_regions import survey_coarsely
from fovea.engine.vision.processor.base import ResizingProcessor, VisualPlan
from fovea.relevance.images import GLANCES, Sizes, allot, rank, score_view


@dataclass(frozen=True, slots=True)
class SharingImage:
    """One of the images that share a budget.

    plan: the plan with all tokens.
    budget: the pixel budget that the plan was made with.
    mention: number of the last turn that names the image; -1: no turn does.
    """

    image: Image
    plan: VisualPlan
    budget: PixelBudget
    mention: int


def share_budget(
    processor: ResizingProcessor, images: Sequence[SharingImage], question: str, total: int
) -> list[VisualPlan]:
    """Return a plan for each image: at most `total` tokens together, and at least one token each.

    Images that the user named last are encoded closely first, then those whose content fits the question
    best. CPU-bound, some milliseconds per image.
    """
    scores = [score_view(survey_coarsely(processor, entry.image, entry.plan), question) for entry in images]
    mentions = [entry.mention for entry in images]
    order = rank(mentions, scores, [entry.image.identity for entry in images])
    glances = [
        tuple(processor.shrink(entry.plan, entry.budget, most) for most in GLANCES) for entry in images
    ]
    sizes = [
        Sizes(entry.plan.tokens, tuple(plan.tokens for plan in plans))
        for entry, plans in zip(images, glances, strict=True)
    ]
    close_count = mentions.count(max(mentions)) if max(mentions) >= 0 else 1
    allotment = allot(sizes, order, close_count, total)
    plans = [plans[allotment.glance] for plans in glances]
    for number, most in allotment.close.items():
        closer = processor.shrink(images[number].plan, images[number].budget, most)
        plans[number] = max(plans[number], closer, key=lambda plan: plan.tokens)
    return plans
