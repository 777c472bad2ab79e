"""Tests of the capabilities of processors, and of the methods of reduction that follow from them.

A new model only declares its capabilities. So the table here is all that differs between the architectures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from fovea.core.errors import ConfigError, InvalidRequest
from fovea.core.media import Image, PixelBudget, VisualTokens
from fovea.engine.vision.processor import ImageProcessor, ProcessedImage, VisualPlan, build, model_types
from fovea.engine.vision.processor.base import Capabilities
from fovea.engine.visual_budget.choose import RequestContext, VisualBudget, possible_methods
from fovea.engine.visual_budget.detail import DetailRule, FullDetail
from fovea.engine.visual_budget.methods import METHODS

ANY_SIZE = {"encoder_taps", "any_size", "resize", "regions"}
TABLE: Mapping[str, set[str]] = {
    "qwen2_vl": {"droppable", *ANY_SIZE},
    "qwen2_5_vl": {"droppable", *ANY_SIZE},
    "qwen3_vl": {"droppable", *ANY_SIZE},
    "llava": {"droppable"},
    "llava_next": {"droppable", "regions"},
    "llava_onevision": {"droppable"},
    "idefics3": set(),
    "smolvlm": set(),
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), {"droppable", *ANY_SIZE}),
    "lfm2_vl": set(),
    "gemma3": {"droppable"},
    "mistral3": {"any_size", "resize"},
    "lighton_ocr": {"droppable", "any_size", "resize"},
    **dict.fromkeys(("paddleocr_vl", "glm4v", "glm46v"), {"droppable", *ANY_SIZE}),
    "internvl": {"droppable"},
    "internvl_chat": {"droppable"},
    "minicpmv4_6": set(),
    "deepseek_ocr2": {"droppable"},
    "gemma4": {"droppable", "any_size", "resize"},
    "mllama": set(),
}
"""The capabilities that each architecture's processor declares, by field name."""
NEEDS_NOTHING = ("uniform", "random", "dart", "dart_query", "dart_k", "dpp", "dpp_query", "tome", "fastv")
"""Methods that only read the encoder's output, the question, or a decoder that begins with attention."""
PROBING = ("dart_k", "fastv")
"""Methods that read the attention of the decoder's first layers."""
METHODS_BY_TYPE: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "paddleocr_vl", "glm4v", "glm46v"), tuple(METHODS)
    ),
    "llava": NEEDS_NOTHING,
    "llava_next": (*NEEDS_NOTHING, "relevance"),
    "llava_onevision": NEEDS_NOTHING,
    "idefics3": (),
    "smolvlm": (),
    "qwen3_vl_moe": tuple(METHODS),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), tuple(name for name in METHODS if name not in PROBING)),
    "lfm2_vl": (),
    "gemma3": tuple(name for name in NEEDS_NOTHING if name not in PROBING),
    "mistral3": (),
    "lighton_ocr": (*NEEDS_NOTHING, "resize", "views"),
    "internvl": NEEDS_NOTHING,
    "internvl_chat": NEEDS_NOTHING,
    "minicpmv4_6": (),
    "deepseek_ocr2": NEEDS_NOTHING,
    "mllama": (),
    "gemma4": (*(name for name in NEEDS_NOTHING if name not in PROBING), "resize", "views"),
}


def processor_of(model_type: str) -> ImageProcessor:
    tower = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
    sizes = {"crop_size": 336, "size": {"shortest_edge": 336}}
    small = {"image_size": 364, "patch_size": 14}
    windows = {"layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
    settings: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "llava": (sizes, {"vision_config": tower}),
        "llava_next": (sizes, {"vision_config": tower}),
        "idefics3": ({}, {"vision_config": small}),
        "smolvlm": ({}, {"vision_config": small}),
        "lighton_ocr": ({"patch_size": 28}, {"vision_config": {"patch_size": 14}, "spatial_merge_size": 2}),
        "internvl": ({"size": 448}, {}),
        "gemma3": ({}, {"vision_config": {"image_size": 224}, "text_config": windows}),
    }
    hybrid = {"text_config": {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}}
    settings = {**settings, **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), ({}, hybrid))}
    preprocessor, model = settings.get(model_type, ({}, {}))
    return build(model_type, preprocessor, model)


def field_names(capabilities: Capabilities) -> set[str]:
    """Names of the capabilities that a processor has."""
    names = ("droppable", "encoder_taps", "any_size", "resize", "regions")
    return {name for name in names if getattr(capabilities, name)}


def test_every_architecture_is_in_the_table() -> None:
    assert set(TABLE) == set(model_types())


@pytest.mark.parametrize("model_type", TABLE)
def test_a_processor_declares_its_capabilities(model_type: str) -> None:
    assert field_names(processor_of(model_type).capabilities) == TABLE[model_type]


@pytest.mark.parametrize("model_type", TABLE)
def test_the_possible_methods_follow_from_the_capabilities(model_type: str) -> None:
    methods = possible_methods(processor_of(model_type).capabilities)
    assert set(methods) == set(METHODS_BY_TYPE[model_type])
    assert list(methods) == [name for name in METHODS if name in methods], "in the order of METHODS"


def test_a_processor_that_does_not_resize_loses_only_the_methods_that_make_pictures_smaller() -> None:
    capabilities = build("qwen2_vl", {"do_resize": False}, {}).capabilities
    assert field_names(capabilities) == {"droppable", *ANY_SIZE} - {"resize"}
    assert set(METHODS) - set(possible_methods(capabilities)) == {"resize", "views"}


@pytest.mark.parametrize(
    ("field", "methods"),
    [("encoder_taps", {"visionzip"}), ("resize", {"resize", "views"}), ("regions", {"relevance"})],
)
def test_each_capability_allows_its_own_methods(field: str, methods: set[str]) -> None:
    full = processor_of("qwen2_vl").capabilities
    change: dict[str, Any] = {field: False if field == "encoder_taps" else None}
    less = replace(full, **change)
    assert set(possible_methods(full)) - set(possible_methods(less)) == methods


@dataclass(frozen=True)
class MadeUpProcessor:
    """A processor of a new model, which declares no capability of its own."""

    capabilities: Capabilities = Capabilities()

    def plan(self, width: int, height: int, budget: PixelBudget, *, images: int = 1) -> VisualPlan:
        return VisualPlan(width, height, 16, (1, 4, 4), "<image>" * 16, "made up")

    def process(self, image: Image, plan: VisualPlan) -> ProcessedImage:
        raise NotImplementedError


def made_up_budget(visual: VisualTokens | None = None) -> VisualBudget:
    return VisualBudget(MadeUpProcessor(), lambda text: list(text.encode()), visual)


def test_a_made_up_processor_has_exactly_the_methods_that_need_nothing() -> None:
    assert set(possible_methods(MadeUpProcessor().capabilities)) == set(NEEDS_NOTHING)
    assert possible_methods(Capabilities(droppable=False)) == ()


@pytest.mark.parametrize("method", METHODS)
def test_a_made_up_processor_reduces_by_these_methods_and_refuses_the_others(method: str) -> None:
    image, wish = Image("an image", 4, 4, bytes(48)), VisualTokens(method, 0.5)
    budget = PixelBudget("high", visual=wish)
    plan = MadeUpProcessor().plan(4, 4, budget)
    context = RequestContext("what is it?", "salt", 0.0, (("what is it?", 1),))
    if method in NEEDS_NOTHING:
        reduced = made_up_budget(wish).reduce(image, plan, budget, context)
        assert reduced is not None
        assert (reduced.plan.tokens, reduced.plan.text, reduced.method) == (8, "<image>" * 8, method)
        return
    with pytest.raises(ConfigError, match=f"visual_tokens: .*; accepted: {', '.join(NEEDS_NOTHING)}"):
        made_up_budget(wish)
    if method != "views":  # `views` leaves a single image as it is
        with pytest.raises(InvalidRequest, match=f"accepted: {', '.join(NEEDS_NOTHING)}"):
            made_up_budget().reduce(image, plan, budget, context)


def test_a_request_that_names_nothing_is_not_refused_under_load() -> None:
    """A quarter of LLaVA-NeXT's tokens is fewer than the view of the whole image has."""
    under_load, _ = DetailRule(FullDetail(), 0.5, "relevance").settle(PixelBudget(), "what is it?", 2.0)
    named = replace(under_load, visual=VisualTokens("relevance", keep=0.25))
    processor, image = processor_of("llava_next"), Image("an image", 400, 300, bytes(3 * 400 * 300))
    planner = VisualBudget(processor, lambda text: list(text.encode()), None)
    plan, context = processor.plan(400, 300, PixelBudget()), RequestContext("what is it?", "salt", 0.0)
    reduced = planner.reduce(image, plan, under_load, context)
    assert reduced is not None
    assert reduced.plan.tokens == 577
    with pytest.raises(InvalidRequest, match="accepted: 577 or more"):
        planner.reduce(image, plan, named, context)
