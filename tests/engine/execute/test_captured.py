"""Decode steps read no tensor on the host, so that a CUDA graph can record them.

Triton's kernels are not computed here: only the code that launches them counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fovea import Engine
from fovea.core.errors import ConfigError
from fovea.engine.config import EngineConfig
from fovea.engine.execute.pool_sizes import decode_padding, graph_obstacle
from fovea.engine.layers import experts
from fovea.engine.layers.decoder import Decoder
from fovea.engine.layers.experts import ExpertLinear, grouped_mm_waits
from fovea.engine.layers.linear import Linear
from fovea.engine.models.base import VisionLanguageModel
from tests.support.checkpoints import ARCHITECTURES, write, write_gemma4
from tests.support.engines import ask
from tests.support.host_reads import HostRead, no_host_reads

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is a GPU: tests/gpu records these steps on it", allow_module_level=True)

from triton.runtime import interpreter

from fovea.kernels.triton import quantized
from fovea.kernels.triton.kernels import TritonKernels

pytestmark = pytest.mark.kernels

SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "threads": 1, "kv_blocks": 128, "block_size": 4, "max_running": 4,
    "max_step_tokens": 64, "kernels": "triton",
}  # fmt: skip
NOT_RECORDED = ("mllama",)
"""Models with cross-attention. Their steps should not wait either."""


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were launched."""
    names: list[str] = []
    choose = TritonKernels.choose_experts

    def choose_first(*args: Any, **options: Any) -> Any:
        """No numbers of experts are computed here, and any would be an error."""
        weights, chosen, opened = choose(*args, **options)
        return weights, chosen.zero_(), opened

    monkeypatch.setattr(TritonKernels, "choose_experts", staticmethod(choose_first))
    monkeypatch.setattr(
        interpreter.GridExecutor, "__call__", lambda self, *_args, **_kwargs: names.append(self.fn.__name__)
    )
    return names


GEMMA4_EXPERTS = "gemma4 with experts"


def folder_of(architecture: str, tmp_path: Path) -> str:
    if architecture != GEMMA4_EXPERTS:
        return str(write(architecture, tmp_path))
    return str(
        write_gemma4(
            tmp_path, enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=48
        )
    )


@pytest.mark.parametrize("architecture", [*sorted(set(ARCHITECTURES) - set(NOT_RECORDED)), GEMMA4_EXPERTS])
def test_the_recorded_part_of_a_step_reads_nothing(
    architecture: str, tmp_path: Path, launches: list[str]
) -> None:
    folder = folder_of(architecture, tmp_path)
    with Engine.from_pretrained(folder, **SETTINGS, decode_graphs="padded") as engine:
        assert graph_obstacle(engine.runner.model) is None
        padded = engine.runner._padded
        assert padded is not None
        launches.clear()
        for batch in padded._batches.values():
            with no_host_reads():
                batch._launch()
    assert launches


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to a device": lambda x: x.to("cpu"),
    "numpy": lambda x: x.numpy(),
    "bool": lambda x: bool(x.any()),
    "a loop over a range": lambda x: list(range(x[0])),
    "mask": lambda x: x[x > 1],
    "write by mask": lambda x: x.__setitem__(x > 1, 0),
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 1),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x),
    "equal": lambda x: torch.equal(x, x + 1),
    "a tensor from numbers": lambda x: torch.tensor([1, 2], device=x.device),
}


@pytest.mark.parametrize("read", READS)
def test_the_guard_sees_every_kind_of_read(read: str) -> None:
    with no_host_reads():
        numbers = torch.arange(3).view(3)
        assert numbers.to(torch.float32)[numbers].sum() is not None
        with pytest.raises(HostRead):
            READS[read](numbers)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("architecture", ["qwen3_vl", "qwen3_vl_moe", "deepseek_ocr2"])
def test_quantized_models_are_recorded(
    architecture: str, quantization: str, tmp_path: Path, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantized experts once read their numbers of rows on the host, twice per layer."""
    monkeypatch.setattr(quantized, "trial_error", lambda *_: 0.0)
    settings = SETTINGS | {"quantization": quantization, "decode_graphs": "padded"}
    with Engine.from_pretrained(str(write(architecture, tmp_path)), **settings) as engine:
        model, padded = engine.runner.model, engine.runner._padded
        assert graph_obstacle(model) is None
        assert padded is not None
        for layer in model.decoder.modules():
            if isinstance(layer, ExpertLinear):
                assert isinstance(layer.grouped, quantized.TritonGroupedProduct)
                assert layer.weight.numel() == 0, "the plain weight is still held"
                assert layer.weight_bytes == layer.grouped.nbytes
            elif isinstance(layer, Linear):
                assert layer.format is None or isinstance(layer.product, quantized.TritonQuantizedProduct)
        launches.clear()
        for batch in padded._batches.values():
            with no_host_reads():
                batch._launch()
    assert "_multiply" in launches


def test_quantized_experts_are_read_on_the_host_and_not_recorded_if_triton_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "trial_error", lambda *_: float("nan"))
    folder = str(write("qwen3_vl_moe", tmp_path))
    settings = SETTINGS | {"quantization": "int8", "decode_graphs": "padded"}
    with Engine.from_pretrained(folder, **settings) as engine:
        obstacle, padded = graph_obstacle(engine.runner.model), engine.runner._padded
        assert obstacle is not None
        assert "experts are multiplied one by one" in obstacle
        assert padded is not None
        with no_host_reads(), pytest.raises(HostRead):
            padded._batches[1, False]._launch()


@pytest.mark.parametrize("works", [True, False])
def test_rows_that_grouped_mm_does_not_take_are_multiplied_by_triton(
    works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """grouped_mm refuses rows whose size is no multiple of 16 bytes."""
    monkeypatch.setattr(quantized, "trial_error", lambda *_: 0.0 if works else float("nan"))
    kernels = TritonKernels(torch.device("cpu"))
    for width, by_torch in ((8, True), (6, False)):
        layer = ExpertLinear("up_proj", 3, width, 8)
        layer.weight.data.normal_()
        layer.pack(kernels)
        assert (layer.grouped is not None) == works
        assert layer.by_torch == by_torch
        assert len(layer.products) == (0 if works or by_torch else 3)
        assert layer(torch.ones(4, width), torch.tensor([1, 0, 3], dtype=torch.int32)).shape == (4, 8)


def test_types_whose_experts_torch_multiplies_one_by_one_are_multiplied_by_triton(
    tmp_path: Path, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The patch makes grouped_mm wait for the numbers of rows, as it does on a GPU in float16."""
    monkeypatch.setattr(quantized, "trial_error", lambda *_: 0.0)
    monkeypatch.setattr(experts, "grouped_mm_waits", lambda dtype, device: True)
    settings = SETTINGS | {"decode_graphs": "padded"}
    with Engine.from_pretrained(str(write("qwen3_vl_moe", tmp_path)), **settings) as engine:
        assert engine.runner.model.decoder.wait is None
        padded = engine.runner._padded
        assert padded is not None
        launches.clear()
        with no_host_reads():
            padded._batches[1, False]._launch()
    assert "_chosen" in launches


@pytest.mark.parametrize("waits", [False, True])
def test_the_log_says_why_steps_are_not_recorded(
    waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine.from_pretrained(str(write("deepseek_ocr2", tmp_path)), **SETTINGS) as engine:
        model = engine.runner.model
        monkeypatch.setattr(VisionLanguageModel, "device", property(lambda self: torch.device("cuda")))
        monkeypatch.setattr(experts, "grouped_mm_waits", lambda dtype, device: waits)
        with caplog.at_level("INFO"):
            padding = decode_padding(EngineConfig(), model, 64)
    assert (padding is None) == waits
    assert ("not recorded as CUDA graphs: torch multiplies experts in float32" in caplog.text) == waits
    padded = EngineConfig.of(decode_graphs="padded")
    if waits:
        with pytest.raises(ConfigError, match="'padded', but torch multiplies experts in float32 one by one"):
            decode_padding(padded, model, 64)
    else:
        assert decode_padding(padded, model, 64) is not None


@pytest.mark.parametrize(
    ("dtype", "capability", "waits"),
    [
        (torch.bfloat16, (9, 0), False),
        (torch.bfloat16, (10, 0), False),
        (torch.bfloat16, (8, 0), True),
        (torch.bfloat16, (12, 0), True),
        (torch.float16, (9, 0), True),
        (torch.float32, (9, 0), True),
    ],
)
def test_torch_groups_bfloat16_on_hopper_and_blackwell_only(
    dtype: torch.dtype, capability: tuple[int, int], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert grouped_mm_waits(dtype, torch.device("cuda")) == waits
    assert not grouped_mm_waits(dtype, torch.device("cpu"))


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of rows of the steps that only decode. None of them may read a tensor on the host."""
    steps: list[int] = []

    def guard(name: str) -> Callable[..., Any]:
        method = getattr(Decoder, name)

        def call(self: Decoder, x: torch.Tensor, *rest: Any, **options: Any) -> Any:
            if len(x) != 1:
                return method(self, x, *rest, **options)
            steps.append(len(x))
            with no_host_reads():
                return method(self, x, *rest, **options)

        return call

    for name in ("embed", "layer_embeddings", "forward"):
        monkeypatch.setattr(Decoder, name, guard(name))
    return steps


@pytest.mark.parametrize("architecture", [*NOT_RECORDED, "lfm2_vl", "qwen3_5"])
def test_a_step_that_is_not_recorded_reads_nothing_either(
    architecture: str, tmp_path: Path, guarded: list[int]
) -> None:
    with Engine.from_pretrained(folder_of(architecture, tmp_path), **SETTINGS) as engine:
        obstacle = "the model has cross-attention" if architecture in NOT_RECORDED else None
        assert graph_obstacle(engine.runner.model) == obstacle
        engine.generate(ask("what is it?"), temperature=0, max_tokens=3, ignore_eos=True)
    assert guarded
