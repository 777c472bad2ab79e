"""Visual plans that one engine sends to another: nothing is lost, and no lie is accepted."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fovea.core.errors import InvalidRequest
from fovea.core.media import Image, PixelBudget
from fovea.engine.request.plans import plan_fields, read_plan, whole_plan
from fovea.engine.request.prompt_plan import PlannedImage
from fovea.engine.vision.processor import build, model_types
from fovea.engine.vision.processor.base import LookPrompt, Reduction, VisualPlan
from fovea.engine.visual_budget.methods import METHODS

CLIP = {"vision_config": {"image_size": 224, "patch_size": 14}}
IDEFICS = {"vision_config": {"image_size": 364, "patch_size": 14}}
MODELS: dict[str, dict[str, Any]] = {"idefics3": IDEFICS, "smolvlm": IDEFICS, "llava": CLIP}
PREPROCESSORS: dict[str, dict[str, Any]] = {
    "llava_next": {"crop_size": 336, "size": {"shortest_edge": 336}}, "internvl": {"size": 448},
}  # fmt: skip
SIZES = ((100, 50), (28, 1000), (640, 480), (2000, 3000))
IDENTITY = "ab" * 32
SALT = "salt"


def picture(width: int, height: int, identity: str = IDENTITY) -> Image:
    return Image(identity, width, height, bytes(width * height * 3))


def sent(plan: VisualPlan) -> dict[str, Any]:
    """The plan as it arrives."""
    fields: dict[str, Any] = json.loads(json.dumps(plan_fields(plan)))
    return fields


def reduction(method: str, key: str, tokens: int) -> Reduction:
    prefix = f"{SALT}\x00{IDENTITY}\x00"
    look = LookPrompt((1, 2), (3,), (4, 5))
    return Reduction(
        method, tokens, prefix + key, f"{prefix}{key};{method}", SALT, "what?", (7, 8), 0.25, look
    )


@pytest.mark.parametrize("model_type", model_types())
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_plan_arrives_as_it_was(model_type: str, size: tuple[int, int]) -> None:
    processor = build(model_type, PREPROCESSORS.get(model_type, {}), MODELS.get(model_type, {}))
    try:
        plan = processor.plan(*size, PixelBudget())
    except InvalidRequest:
        pytest.skip("the model takes no picture of this size")
    found = read_plan(sent(plan), picture(*size), SALT)
    assert found.plan == plan
    assert found.key == f"{SALT}\x00{IDENTITY}\x00{plan.key}"
    assert whole_plan(found) == found


@pytest.fixture
def plan() -> VisualPlan:
    return build("qwen2_vl", {}, {}).plan(640, 480, PixelBudget())


@pytest.mark.parametrize("method", METHODS)
def test_a_reduced_plan_arrives_as_it_was(method: str, plan: VisualPlan) -> None:
    fewer = replace(plan, tokens=plan.tokens // 2, reduction=reduction(method, plan.key, plan.tokens))
    found = read_plan(sent(fewer), picture(640, 480), SALT)
    assert found.plan == fewer
    assert found.reduction == (method, plan.tokens)
    whole = whole_plan(found)
    if METHODS[method].by_region:
        assert whole is None
    else:
        assert isinstance(whole, PlannedImage)
        assert whole.key == f"{SALT}\x00{IDENTITY}\x00{plan.key}"
        assert (whole.plan.tokens, whole.plan.key, whole.plan.reduction) == (plan.tokens, plan.key, None)


LIES: dict[str, dict[str, Any]] = {
    "another width": {"width": 641},
    "another height": {"height": 1},
    "no tokens": {"tokens": 0},
    "fewer than no tokens": {"tokens": -5},
    "many tokens": {"tokens": (1 << 20) + 1},
    "tokens in words": {"tokens": "many"},
    "half a token": {"tokens": 1.5},
    "endless tokens": {"tokens": 1 << 80},
    "many states": {"states": (1 << 20) + 1},
    "fewer than no states": {"states": -1},
    "a grid below zero": {"grid": [1, -2, 3]},
    "a short grid": {"grid": [1, 2]},
    "no grid": {"grid": None},
    "huge sizes": {"sizes": [[1 << 20, 1 << 20]]},
    "a size of nothing": {"sizes": [[0, 10]]},
    "a size below zero": {"sizes": [[-10, -10]]},
    "many sizes": {"sizes": [[28, 28]] * 65},
    "kept cells": {"kept_cells": [0, 1]},
    "no key": {"key": None},
    "a list for a key": {"key": ["a"]},
    "a text for a reduction": {"reduction": "uniform"},
}


@pytest.mark.parametrize("lie", LIES)
def test_no_lie_about_a_plan_is_accepted(lie: str, plan: VisualPlan) -> None:
    with pytest.raises(InvalidRequest, match="the plan of an image") as refused:
        read_plan(sent(plan) | LIES[lie], picture(640, 480), SALT)
    assert refused.value.param == "images"
    assert len(refused.value.message) < 500


REDUCTIONS: dict[str, dict[str, Any]] = {
    "an unknown method": {"method": "magic"},
    "another salt": {"salt": "other"},
    "more tokens than all": {"full_tokens": 1},
    "many tokens": {"full_tokens": (1 << 20) + 1},
    "the output of another picture": {"whole_key": f"{SALT}\x00{'cd' * 32}\x00k"},
    "the reduced output of another picture": {"key": f"{SALT}\x00{'cd' * 32}\x00k"},
    "the output of another client": {"whole_key": f"other\x00{IDENTITY}\x00k"},
    "the output of a client without a salt": {"key": f"\x00{IDENTITY}\x00k"},
    "no output": {"key": ""},
    "words for ids": {"word_ids": "abc"},
    "a load in words": {"load": "high"},
    "a wrong look": {"look": {"before": [1]}},
}


@pytest.mark.parametrize("lie", REDUCTIONS)
def test_no_lie_about_fewer_tokens_is_accepted(lie: str, plan: VisualPlan) -> None:
    fewer = replace(plan, tokens=plan.tokens // 2, reduction=reduction("dart", plan.key, plan.tokens))
    fields = sent(fewer)
    with pytest.raises(InvalidRequest, match="the plan of an image"):
        read_plan(fields | {"reduction": fields["reduction"] | REDUCTIONS[lie]}, picture(640, 480), SALT)


@pytest.mark.parametrize("fields", [{}, [], None, "plan", 5, {"width": 640}], ids=str)
def test_what_is_no_plan_is_refused(fields: Any) -> None:
    with pytest.raises(InvalidRequest, match="the plan of an image"):
        read_plan(fields, picture(640, 480), SALT)


def test_small_pictures_may_be_enlarged_to_the_least_size_of_a_model(plan: VisualPlan) -> None:
    small = replace(plan, width=10, height=10, sizes=((2048, 2048),))
    assert read_plan(sent(small), picture(10, 10), SALT).plan == small
    larger = replace(small, sizes=((2048, 2049),))
    with pytest.raises(InvalidRequest, match="accepted: up to 4194304 pixels"):
        read_plan(sent(larger), picture(10, 10), SALT)


def test_a_plan_cannot_name_the_output_of_another_client(plan: VisualPlan) -> None:
    """Whatever its key says, the output is stored behind the salt and the picture's own identity."""
    liar = replace(plan, key=f"other\x00{'cd' * 32}\x00{plan.key}")
    found = read_plan(sent(liar), picture(640, 480), SALT)
    assert found.key.startswith(f"{SALT}\x00{IDENTITY}\x00")
