"""Plans recommend and emit what the engine accepts, and predict with the times of the engine's table."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from fovea.cli.plan.make import read_back
from fovea.core.errors import ConfigError
from fovea.core.precision import INSTRUCTION_SETS, KV_COMPUTE, TABLE, Device, kv_obstacle, speed_of
from fovea.engine.config import EngineConfig
from fovea.engine.config.memory import KV_DTYPES
from fovea.engine.config.model import QUANTIZATIONS
from fovea.kernels.native.instruction_sets import instruction_sets
from fovea.kernels.native.kernels import NativeKernels
from fovea.kernels.torch_kernels import TorchKernels
from fovea.planner import emit
from fovea.planner.hardware import Hardware, find, known_hardware
from fovea.planner.precision import RECIPES, recipe
from fovea.planner.recommend import PRECISIONS, recommend, speed_source
from fovea.planner.roofline import cost_model, image_seconds
from fovea.planner.shape import find as find_model
from fovea.planner.workload import Kind, Workload
from tests.planner.small import CPU, GPU, SHAPE, pixels_by_64, setup_of

WORKLOAD = Workload((Kind("image", images=((640, 640),)),))
LARGE = find_model("Qwen/Qwen3-VL-8B-Instruct")
assert LARGE is not None
MODEL = LARGE


def accepted(hardware: Hardware, quantization: str, kv: str) -> bool:
    """Whether the engine's check passes on a stand-in for a device, in the type that plans use there."""
    gpu = "bfloat16" if "bf16" in hardware.peaks else "float16"
    dtype = "bfloat16" if hardware.kind == "cpu" else gpu
    try:
        EngineConfig.of(quantization=quantization, kv_dtype=kv).check_on(hardware.device, dtype)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("hardware", known_hardware(), ids=lambda one: one.name)
def test_what_is_recommended_is_what_the_engine_accepts(hardware: Hardware) -> None:
    """Every device with every type: the engine accepts what is emitted, and plans name no other."""
    for scheme, kv in product(PRECISIONS, ("auto", *KV_COMPUTE)):
        parts = {"decoder": RECIPES[scheme].decoder, "encoder": RECIPES[scheme].encoder,
                 "head": RECIPES[scheme].head, "kv": kv.replace("auto", "")}  # fmt: skip
        text = ",".join(f"{part}={format}" for part, format in parts.items() if format) or "none"
        found = recommend(SHAPE, [hardware], WORKLOAD, pixels_by_64, precisions=(text,), devices=(1,))
        if not accepted(hardware, scheme, kv):
            assert found.best is None
            assert found.impossible[0][1] == found.refused[0]
            assert hardware.name in found.refused[0] or hardware.peaks.get("bf16") is None
            continue
        assert found.best is not None, (text, found.impossible)
        assert found.refused == ()
        config = read_back("engine.toml", emit.engine_toml(found.best, WORKLOAD), hardware)
        assert (config.model.quantization, config.kv.kv_dtype) == (scheme, kv)


def test_the_reason_of_a_refusal_is_said() -> None:
    device = find("RTX-4090", known_hardware())
    alone = recommend(SHAPE, [device], WORKLOAD, pixels_by_64, precisions=("fp8",))
    sentence = "fp8 needs compute capability 9.0; RTX-4090 has 8.9"
    assert alone.impossible == (("1 x RTX-4090, fp8", sentence),)
    both = [device, find("A100-80GB", known_hardware()), find("H100-SXM", known_hardware())]
    found = recommend(SHAPE, both, WORKLOAD, pixels_by_64)
    assert found.refused == (f"{sentence}, A100-80GB has 8.0",)
    assert found.impossible == ()
    unknown = recommend(SHAPE, [replace(device, capability="")], WORKLOAD, pixels_by_64, precisions=("fp8",))
    assert unknown.refused == ("fp8 needs compute capability 9.0; that of RTX-4090 is not known",)


def test_an_emitted_file_that_the_engine_would_refuse_is_an_error() -> None:
    text = 'model = "small"\ndtype = "bfloat16"\nquantization = "fp8"\n'
    with pytest.raises(ConfigError, match="L4 has 8.9; accepted here: none, int8, int4"):
        read_back("engine.toml", text, find("L4", known_hardware()))
    with pytest.raises(ConfigError, match="keys and values in fp8 need compute capability 8.9; .* has 8.0"):
        read_back("engine.toml", text.replace('quantization = "fp8"', 'kv_dtype = "fp8"'),
                  find("A100-80GB", known_hardware()))  # fmt: skip


def test_quantized_weights_are_predicted_as_they_were_measured_on_cuda() -> None:
    """int8 is slower for prompts and images and faster for decodes, int4 slower for both."""
    device = find("H100-SXM", known_hardware())
    cost = {name: cost_model(setup_of(MODEL, device, recipe(name))) for name in PRECISIONS}
    image = {name: image_seconds(setup_of(MODEL, device, recipe(name)), 1024) for name in PRECISIONS}
    plain = cost["none"]
    assert cost["int8"].read_s == pytest.approx(0.72 * plain.read_s, rel=0.01)
    assert cost["int4"].read_s > 1.5 * plain.read_s
    assert cost["fp8"].read_s < plain.read_s
    for name in ("int8", "int4"):
        assert cost[name].token_s > 1.6 * plain.token_s
        assert image[name] > image["none"]
    assert cost["fp8"].token_s == pytest.approx(0.62 * plain.token_s)


def test_measured_rates_of_a_device_win_over_the_table() -> None:
    own = replace(CPU, measured=True)
    table, measured = setup_of(device=CPU), setup_of(device=own)
    assert measured.rate("int8", "prefill") == 2e12
    assert table.rate("int8", "prefill") == pytest.approx(1e12 / 0.59)
    assert "measured on small-cpu" in speed_source(measured)
    assert "assumed" in speed_source(table)
    assert "measured on this device" in speed_source(setup_of(device=find("H100-SXM", known_hardware())))
    assert "format before the present one" in speed_source(setup_of(device=GPU, precision=recipe("int4")))


def test_the_table_has_what_the_engine_has() -> None:
    weights = {row.weights for row in TABLE}
    assert weights == set(QUANTIZATIONS) - {"dequantize"} == set(RECIPES)
    assert set(KV_COMPUTE) == set(KV_DTYPES) - {"auto"}
    assert tuple(one.name for one in instruction_sets()) == INSTRUCTION_SETS
    for capability, kernels in (("avx2", NativeKernels), ("", TorchKernels)):
        cpu = Device("box", "cpu", capability)
        read = {format.name for format in kernels.kv_formats}  # type: ignore[attr-defined]
        assert read == {name for name in KV_COMPUTE if kv_obstacle(name, cpu) is None}
    for capability in INSTRUCTION_SETS:
        row = speed_of("int8", Device("box", "cpu", capability))
        assert row is not None
        assert row.many < 1
