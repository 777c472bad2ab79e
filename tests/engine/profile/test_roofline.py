"""The work of stages agrees with figures computed by hand, and with the rows that the layers really get."""

from __future__ import annotations

import pytest
import torch

from fovea.core.measure import Span
from fovea.core.media import PixelBudget
from fovea.engine.config import EngineConfig
from fovea.engine.load import load_model
from fovea.engine.profile import Demand, LowerBound, ModelRoofline, linears
from fovea.kernels.calibrate import PLAIN, Machine
from tests.support.checkpoints import ARCHITECTURES, VOCABULARY, write
from tests.support.engines import SETTINGS, picture, shared_model

MACHINE = Machine(bandwidth=1e9, peaks={PLAIN: 1e10, "int8": 4e10}, stream_bytes=1, threads=1, kernels="none")

LAYER = 64 * (64 + 32 + 32) + 64 * 64 + 64 * 2 * 112 + 112 * 64
"""Parameters of a decoder layer: queries, keys and values; output; gate and up; down."""
BLOCK = 32 * 96 + 32 * 32 + 32 * 2 * 48 + 48 * 32
PATCH = 3 * 2 * 14 * 14 * 32
MERGER = 128 * 128 + 128 * 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelRoofline:
    return ModelRoofline(shared_model(write("qwen2_5_vl", tmp_path_factory.mktemp("roofline"))).model)


def test_a_step_of_five_tokens(model: ModelRoofline) -> None:
    """Three float32 layers.

    KV has 2 * 3 layers * 2 heads * 16 * 4 bytes per token, written and read for five.
    """
    demand = model.step(rows=5, keys=5, pairs=15)
    assert demand.operations == {PLAIN: 2 * 5 * 3 * LAYER + 4 * 3 * 4 * 16 * 15}
    assert demand.bytes == 4 * 3 * LAYER + 10 * 768


def test_one_token_of_a_long_context_is_limited_by_memory(model: ModelRoofline) -> None:
    bound = model.step(rows=1, keys=1000, pairs=1000).lower_bound(MACHINE)
    assert bound.limit == "memory"
    assert bound.seconds == bound.memory_s == pytest.approx((4 * 3 * LAYER + 1001 * 768) / 1e9)


def test_head_and_sampling(model: ModelRoofline) -> None:
    assert model.logits(2).operations == {PLAIN: 2 * 2 * 64 * VOCABULARY}
    assert model.logits(2).bytes == 4 * 64 * VOCABULARY
    assert model.sampling(2) == Demand(2 * 4 * VOCABULARY)


def test_an_image(model: ModelRoofline, tmp_path_factory: pytest.TempPathFactory) -> None:
    """16 x 8 patches: two windows of 64 in two blocks, and all 128 in one block; 32 tokens."""
    processor = shared_model(write("qwen2_5_vl", tmp_path_factory.mktemp("image"))).processor
    plan = processor.plan(112, 224, PixelBudget())
    assert plan.grid == (1, 16, 8)
    demands = model.image(plan, encoded_bytes=300)
    pairs = 128 * 128 + 2 * 2 * 64 * 64
    assert demands["encoder"].operations == {PLAIN: 2 * 128 * (PATCH + 3 * BLOCK) + 4 * 32 * pairs}
    assert demands["encoder"].bytes == 4 * (PATCH + 3 * BLOCK)
    assert demands["projector"].operations == {PLAIN: 2 * 32 * MERGER}
    assert demands["fetch"].bytes == 700
    assert demands["image decode"].bytes == 300 + 3 * 112 * 224
    assert demands["patchify"].bytes == 3 * 112 * 224 + 4 * 128 * 588
    assert "resize" not in demands
    larger = model.image(processor.plan(120, 230, PixelBudget()), 300)
    assert larger["resize"].bytes == 3 * 120 * 230 + 3 * 112 * 224


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_operations_agree_with_the_layers(
    architecture: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every linear map of the encoder counts its rows while an image passes through."""
    loaded = shared_model(write(architecture, tmp_path_factory.mktemp(architecture)))
    image = picture(0, 150, 100)
    plan = loaded.processor.plan(image.width, image.height, PixelBudget())
    counted = dict.fromkeys(("encoder", "projector"), 0)
    projectors = {layer for part in loaded.model.projector_modules() for layer in linears(part)}

    def count(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        rows = inputs[0].numel() // inputs[0].shape[-1]
        counted["projector" if layer in projectors else "encoder"] += (
            2 * rows * layer.in_features * layer.out_features
        )  # type: ignore[operator]

    layers = [layer for part in loaded.model.encoder_modules() for layer in linears(part)]
    hooks = [layer.register_forward_pre_hook(count) for layer in layers]
    with torch.inference_mode():
        loaded.model.encode(loaded.processor.process(image, plan))
    for hook in hooks:
        hook.remove()
    demands = ModelRoofline(loaded.model).image(plan, 1)
    attention = 4 * loaded.model.visual_shape(plan).hidden * loaded.model.visual_shape(plan).pairs
    assert demands["projector"].operations[PLAIN] == counted["projector"] > 0
    assert demands["encoder"].operations[PLAIN] - attention == counted["encoder"] > 0


def test_quantized_weights_count_with_their_size_in_memory(tmp_path_factory: pytest.TempPathFactory) -> None:
    """8 bits per value, and a 2-byte scale per group of 128, here of a row; patches stay plain."""
    folder = write("qwen2_5_vl", tmp_path_factory.mktemp("int8"))
    quantized = load_model(str(folder), EngineConfig.of(**{**SETTINGS, "quantization": "int8"}))
    model = ModelRoofline(quantized.model)
    step = model.step(rows=1, keys=1, pairs=1)
    assert step.operations == {"int8": 2 * 3 * LAYER, PLAIN: 4 * 3 * 4 * 16}
    of_width_64, of_width_112 = 128 + 64 + 2 * 112, 64
    assert step.bytes == 3 * (of_width_64 * (64 + 2) + of_width_112 * (112 + 2)) + 2 * 768
    assert model.logits(1).operations == {"int8": 2 * 64 * VOCABULARY}
    assert {format.name if format else PLAIN for format in model.formats} == {PLAIN, "int8"}


def test_bounds_of_spans_add_up_step_by_step(model: ModelRoofline) -> None:
    notes = {"rows": 1.0, "keys": 9.0, "pairs": 9.0}
    spans = [
        Span("decode step", 0, 1, 1, notes), Span("decode step", 1, 2, 1, notes),
        Span("head", 2, 3, 1, {"rows": 1.0}), Span("sampling", 3, 4, 1, {"rows": 1.0}),
        Span("schedule", 0, 4, 1),
    ]  # fmt: skip
    bounds = model.lower_bounds(spans, MACHINE)
    assert list(bounds) == ["decode step", "head", "sampling"]
    assert bounds["decode step"].seconds == pytest.approx(
        2 * model.step(1, 9, 9).lower_bound(MACHINE).seconds
    )
    assert bounds["sampling"].seconds == pytest.approx(4 * VOCABULARY / 1e9)


def test_a_sum_of_steps_is_more_than_its_slower_side() -> None:
    """One step is limited by memory, the other by arithmetic, and they do not overlap."""
    both = LowerBound(memory_s=3, arithmetic_s=1) + LowerBound(memory_s=1, arithmetic_s=4)
    assert (both.seconds, both.memory_s, both.arithmetic_s, both.limit) == (7, 4, 5, "arithmetic")


def test_operations_of_two_formats_add_up() -> None:
    bound = Demand(0, {PLAIN: 1e10, "int8": 4e10}).lower_bound(MACHINE)
    assert bound.seconds == pytest.approx(2)
    assert (Demand(1, {PLAIN: 2}) + Demand(3, {"int8": 4})) == Demand(4, {PLAIN: 2, "int8": 4})
