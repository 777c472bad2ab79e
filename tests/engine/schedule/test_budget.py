"""The remaining budget of a step."""

from __future__ import annotations

from fovea.engine.cache.embeddings import EmbeddingCache
from fovea.engine.schedule.images import ImageRequests
from fovea.engine.schedule.plan import Budget
from tests.support.brains import sequence


def test_a_refunded_image_leaves_its_room_to_other_images() -> None:
    """The room for encoder outputs was not given back, so a later image of the same step was refused."""
    images = ImageRequests(EmbeddingCache(10), token_bytes=1)
    budget = Budget(tokens=100, visual=100)
    first, second = sequence("a", [("cat", 6), 1]), sequence("b", [("dog", 6), 1])
    images.request(first.spans[0], first, budget)
    images.request(second.spans[0], second, budget)
    assert list(budget.jobs) == ["cat"], "both outputs together exceed the ceiling"
    budget.refund(first)
    assert (budget.visual, budget.requested_visual) == (100, 0)
    images.request(second.spans[0], second, budget)
    assert list(budget.jobs) == ["dog"]
