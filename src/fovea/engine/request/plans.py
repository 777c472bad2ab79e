"""Images of a prompt and their visual plans, as JSON that one engine sends to another.

The receiver checks what it gets: an output is only ever stored under a key that begins with the salt of the
request and the identity of the picture, which it computes itself from the bytes that came with the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from fovea.core.errors import InvalidRequest
from fovea.core.media import Image
from fovea.engine.request.prompt_plan import PlannedImage
from fovea.engine.vision.processor.base import VisualPlan
from fovea.engine.visual_budget.methods import METHODS

if TYPE_CHECKING:  # imported where it is used: only engines with peers need it
    from pydantic import TypeAdapter

MOST_ENLARGED = 16
"""Most times that a plan may enlarge the area of a picture."""
SMALL_AREA = 4 << 20
"""Pixels to which any picture may be enlarged: models have least sizes."""
MOST_SIZES = 64
"""Most resizes of a plan."""


@cache
def _adapter() -> TypeAdapter[VisualPlan]:
    from pydantic import TypeAdapter

    return TypeAdapter(VisualPlan)


def plan_fields(plan: VisualPlan) -> dict[str, Any]:
    """Return a plan as JSON."""
    fields: dict[str, Any] = _adapter().dump_python(plan, mode="json")
    return fields


def read_plan(fields: Mapping[str, Any], image: Image, salt: str) -> PlannedImage:
    """Return the plan that another engine has made for an image.

    Raises InvalidRequest if it is no plan, or one for another image or another salt, or if its pixels would
    take much more memory than those of the image.
    """
    from pydantic import ValidationError

    try:
        plan = _adapter().validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidRequest(f"the plan of an image: {where}: {first['msg']}", param="images") from None
    prefix = f"{salt}\x00{image.identity}\x00"
    reduction = plan.reduction
    if (plan.width, plan.height) != (image.width, image.height):
        raise _wrong(f"is for {plan.width}x{plan.height} pixels, its image has {image.width}x{image.height}")
    if not 1 <= plan.tokens <= 1 << 20 or not 0 <= plan.states <= 1 << 20 or min(plan.grid) < 0:
        raise _wrong(f"has {plan.tokens} tokens, {plan.states} states and the grid {plan.grid}")
    area = max(image.width * image.height * MOST_ENLARGED, SMALL_AREA)
    if len(plan.sizes) > MOST_SIZES or any(min(size) < 1 or size[0] * size[1] > area for size in plan.sizes):
        raise _wrong(f"has the sizes {str(plan.sizes)[:100]}; accepted: up to {area} pixels each")
    if plan.kept_cells is not None:
        raise _wrong("keeps cells of a video")
    if reduction is not None:
        if reduction.method not in METHODS:
            raise _wrong(f"names the method {reduction.method!r:.40}")
        if not plan.tokens <= reduction.full_tokens <= 1 << 20:
            raise _wrong(f"keeps {plan.tokens} of {reduction.full_tokens} tokens")
        if reduction.salt != salt or not all(
            key.startswith(prefix) for key in (reduction.key, reduction.whole_key)
        ):
            raise _wrong("names the output of another image")
    return PlannedImage(image, plan, prefix + plan.key, reduction=_reduced(plan))


def whole_plan(planned: PlannedImage) -> PlannedImage | None:
    """Return the image with all of its tokens, from which others are left out afterwards.

    None: the method does not begin with these.
    """
    reduction = planned.plan.reduction
    if reduction is None:
        return planned
    if METHODS[reduction.method].by_region:
        return None
    key = reduction.whole_key.split("\x00", 2)[2]
    plan = replace(planned.plan, tokens=reduction.full_tokens, text="", key=key, reduction=None)
    return PlannedImage(planned.image, plan, reduction.whole_key)


def _reduced(plan: VisualPlan) -> tuple[str, int] | None:
    return None if plan.reduction is None else (plan.reduction.method, plan.reduction.full_tokens)


def _wrong(what: str) -> InvalidRequest:
    return InvalidRequest(f"the plan of an image {what}", param="images")
