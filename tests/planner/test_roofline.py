"""Times and work from a shape and a device: exact on small numbers, and monotone."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.planner.capacity import capacity, sequence_bytes
from fovea.planner.cost import Composition
from fovea.planner.precision import RECIPES, Precision
from fovea.planner.roofline import (
    LATENCY_S,
    OVERHEADS,
    arithmetic_of,
    cost_model,
    cross_state_bytes,
    image_seconds,
    image_work,
    read_bytes,
    reductions,
    together,
)
from fovea.planner.shape import AttentionLayers, Maps, find
from fovea.planner.workload import Tokens
from tests.planner.small import CPU, GPU, SHAPE, setup_of
from tests.support.thorough import examples

DECODER = 8 * 64 * 64 + 4 * 64 * 256


def tokens(longest: float, images: tuple[int, ...] = ()) -> Tokens:
    return Tokens(images, images, sum(images), 1.0, longest - 1, longest - 1, 1, 1, longest)


def test_parameters_of_a_step_are_work_over_rates() -> None:
    cost = cost_model(setup_of())
    assert cost.read_s == pytest.approx(2 * (DECODER + 64_000) / 1e11)
    assert cost.token_s == pytest.approx(2 * DECODER / 1e13)
    assert cost.row_s == pytest.approx(2 * (DECODER + 64_000) / 1e13)
    assert cost.context_s == pytest.approx(
        2 * 2 * 2 * 16 * 2 / 1e11
    )  # K and V, layers, heads, numbers, bytes
    assert cost.pair_s == pytest.approx(4 * 2 * 4 * 16 / 1e13)
    assert cost.kv_token_bytes == 2 * 2 * 2 * 16 * 2
    assert cost.visual_token_bytes == 128
    assert cost.step_s == OVERHEADS["gpu"].step_s
    assert cost.max_context == 4096


def test_an_image_is_its_rows_times_weights_and_its_pairs() -> None:
    work = image_work(setup_of(), 100)
    assert work.pair_operations == 4 * 32 * 100**2
    assert work.operations == 2 * 100 * (4 * 32 * 32 + 64 * 32) + work.pair_operations
    assert work.bytes == 2 * (4 * 32 * 32 + 64 * 32)
    expected = together(work.bytes / 1e11, work.operations / 1e13, 4.0)
    assert image_seconds(setup_of(), 100) == pytest.approx(OVERHEADS["gpu"].image_s + expected)


@pytest.mark.parametrize("tokens", [50, 100, 200])
def test_the_cost_of_an_image_is_exact_around_the_typical_one(tokens: int) -> None:
    setup = setup_of(device=CPU)  # nothing hides there, so that the curve is a parabola
    assert cost_model(setup, 100).image(tokens) == pytest.approx(image_seconds(setup, tokens), rel=1e-6)


def test_a_tower_is_not_divided_among_devices() -> None:
    assert image_seconds(setup_of(devices=4), 400) == pytest.approx(image_seconds(setup_of(), 400))
    one, four = capacity(setup_of(), [(1, tokens(10))]), capacity(setup_of(devices=4), [(1, tokens(10))])
    tower = 2 * (4 * 32 * 32 + 64 * 32)
    assert four.weight_bytes == one.weight_bytes + 3 * tower


def test_kv_heads_are_copied_to_further_devices() -> None:
    assert [setup_of(devices=count).kv_devices for count in (1, 2, 4)] == [1, 2, 2]
    assert sequence_bytes(setup_of(devices=4), 10) == 2 * sequence_bytes(setup_of(devices=2), 10)
    cost = [cost_model(setup_of(devices=count)).context_s for count in (1, 2, 4)]
    assert cost[1] == pytest.approx(cost[0] / 2)
    assert cost[2] == pytest.approx(cost[1])


def test_tensor_parallel_adds_sums_over_the_devices() -> None:
    assert reductions(SHAPE) == 10  # maps that end in the width of the decoder
    one, two = cost_model(setup_of()), cost_model(setup_of(devices=2))
    assert two.step_s - one.step_s == pytest.approx(10 * LATENCY_S["nvlink"])
    assert two.read_s == pytest.approx(one.read_s / 2)
    row = 10 * (2 * 1 / 2) * 64 * 2 / 1e10
    assert two.decode_s - one.decode_s == pytest.approx(row)
    assert two.token_s == pytest.approx(one.token_s / 2 + row)


def test_a_window_bounds_what_a_decode_reads() -> None:
    windowed = replace(SHAPE, attention=(AttentionLayers(2, 2, 4, 2, 16, window=100),))
    cost = cost_model(setup_of(windowed), context=1000)
    assert cost.context_s == 0
    assert cost.pair_s == 0
    own = 2 * 2 * 2 * 16 * 2 * 100 / 1e11
    assert cost.decode_s == pytest.approx(OVERHEADS["gpu"].sequence_s + own)
    short = cost_model(setup_of(windowed), context=50)
    assert short.decode_s == pytest.approx(OVERHEADS["gpu"].sequence_s + own / 2)
    assert sequence_bytes(setup_of(windowed), 1000) == sequence_bytes(setup_of(windowed), 100)


def test_states_are_read_and_written_by_each_decode() -> None:
    hybrid = replace(SHAPE, state=(1000, 500))
    one, other = cost_model(setup_of()), cost_model(setup_of(hybrid))
    assert other.decode_s - one.decode_s == pytest.approx(2 * (1000 * 2 + 500 * 4) / 1e11)
    memory = capacity(setup_of(hybrid), [(1, tokens(100))])
    assert memory.request_bytes == 256 * 100 + 4000
    assert memory.states == memory.requests * 4000


def test_of_experts_only_those_that_are_used_are_read() -> None:
    maps = {**SHAPE.maps, "experts": (Maps(64, 64, count=80),)}
    sparse = replace(SHAPE, maps=maps, experts=8, active_experts=2)
    cost = cost_model(setup_of(sparse))
    all_bytes = 2 * 80 * 64 * 64
    assert cost.expert_share == 0.25
    assert cost.expert_s == pytest.approx(all_bytes / 1e11)
    assert cost.token_s == pytest.approx(2 * (DECODER + 20 * 64 * 64) / 1e13)
    memory = [replace(cost, row_s=0, decode_s=0).step(Composition(decodes=count)) for count in (1, 2, 50)]
    assert memory[1] - memory[0] == pytest.approx(all_bytes / 1e11 * 0.75 * 0.25, rel=0.01)
    assert memory[2] - cost.step_s == pytest.approx(cost.read_s + cost.expert_s, rel=0.01)


def test_image_states_outside_of_the_prompt_are_kept_and_read() -> None:
    shape = find("meta-llama/Llama-3.2-11B-Vision-Instruct")
    assert shape is not None
    assert shape.cross is not None
    setup = setup_of(shape)
    row = cross_state_bytes(setup)
    assert row == 2 * shape.cross.count * shape.cross.kv_heads * shape.cross.head_dim * 2
    none, some = (capacity(setup, [(1, tokens(100, images))]) for images in ((), (6404,)))
    assert some.request_bytes - none.request_bytes == 6404 * row
    without, with_images = cost_model(setup), cost_model(setup, image_rows=6404)
    assert with_images.decode_s - without.decode_s == pytest.approx(6404 * row / 1e11)
    assert with_images.token_s > without.token_s


@pytest.mark.parametrize(
    ("format", "kind", "dtype", "arithmetic"),
    [
        ("int4", "cpu", "bfloat16", "int8"),
        ("int4", "gpu", "float16", "fp16"),  # a T4 has no bf16
        ("awq", "gpu", "bfloat16", "bf16"),
        ("int8", "gpu", "bfloat16", "int8"),
        ("fp8", "gpu", "bfloat16", "fp8"),
        ("float32", "cpu", "float32", "fp32"),
    ],
)
def test_the_arithmetic_of_a_format(format: str, kind: str, dtype: str, arithmetic: str) -> None:
    assert arithmetic_of(format, kind, dtype) == arithmetic


def test_a_tied_table_with_a_packed_copy_is_read_once() -> None:
    tied = replace(SHAPE, tied=True, maps={**SHAPE.maps, "decoder": (Maps(640, 640, count=8),)})
    setup = setup_of(tied, CPU, replace(Precision(), storage="panels"))
    decoder = 8 * 10 * (640 // 2) * 192
    assert read_bytes(setup) == decoder + 16 * (64 // 2) * 192  # 1000 rows in 16 panels of 64


@settings(max_examples=examples(60))
@given(st.floats(1, 8), st.integers(1, 64), st.integers(1, 4000), st.integers(0, 1000))
def test_more_bandwidth_and_more_arithmetic_are_never_slower(
    factor: float, decodes: int, context: int, prompt: int
) -> None:
    made_of = Composition(decodes, decodes * context, prompt, 1 if prompt else 0, prompt * context)
    peaks = MappingProxyType({name: rate * factor for name, rate in GPU.peaks.items()})
    base = setup_of()
    for device in (replace(GPU, bandwidth=GPU.bandwidth * factor), replace(GPU, peaks=peaks)):
        faster = setup_of(device=device)
        assert cost_model(faster).step(made_of) <= cost_model(base).step(made_of) * (1 + 1e-9)
        assert image_seconds(faster, context) <= image_seconds(base, context) * (1 + 1e-9)


@settings(max_examples=examples(30))
@given(st.integers(10**8, 10**10), st.floats(1, 4), st.integers(2, 4000))
def test_more_memory_never_holds_fewer_requests(size: int, factor: float, longest: int) -> None:
    mix = [(1.0, tokens(longest, (100,)))]
    small = capacity(setup_of(device=replace(GPU, memory_bytes=size)), mix)
    large = capacity(setup_of(device=replace(GPU, memory_bytes=round(size * factor))), mix)
    assert large.requests >= small.requests
    assert small.total >= small.work + small.encoder_cache + small.requests * small.request_bytes


@pytest.mark.parametrize(
    "model", ["Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3.5-35B-A3B", "google/gemma-3-12b-it"]
)
def test_coarser_precision_is_never_larger_and_never_reads_more(model: str) -> None:
    shape = find(model)
    assert shape is not None
    memory = {
        name: capacity(setup_of(shape, precision=one), [(1, tokens(9))]) for name, one in RECIPES.items()
    }
    read = {name: read_bytes(setup_of(shape, precision=one)) for name, one in RECIPES.items()}
    for sizes in ({name: one.weight_bytes for name, one in memory.items()}, read):
        assert sizes["none"] > sizes["fp8"]
        assert sizes["none"] > sizes["int8"] > sizes["int4"]


def test_without_images_nothing_is_kept_for_encoder_outputs() -> None:
    assert capacity(setup_of(), [(1, tokens(9))], 0).encoder_cache == 0
    assert capacity(setup_of(), [(1, tokens(9))], 1000).encoder_cache == 1000
    assert capacity(setup_of(), [(1, tokens(9))]).encoder_cache == round(0.02 * 10**9)
