"""Quantization at load: answers of every architecture, layers that stay plain, and errors."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fovea import Engine
from fovea.core.errors import CheckpointError, ConfigError
from fovea.core.names import bundled_model
from fovea.core.types import ChatPrompt, Completion
from fovea.engine.config import EngineConfig
from fovea.engine.layers.experts import ExpertLinear
from fovea.engine.layers.linear import Linear, PatchLinear
from fovea.engine.load import load_model
from fovea.engine.models.stored import SafetensorsWeights
from fovea.engine.models.weights import RECIPES, load_weights
from fovea.evaluation.datasets import scene_cases
from fovea.evaluation.scenes import HELD_OUT_SEED
from fovea.evaluation.score import Result, report
from fovea.kernels.codes import CodedProduct
from fovea.kernels.native.products import NativeProduct
from fovea.kernels.quantize import quantize
from tests.support.checkpoints import ARCHITECTURES, write
from tests.support.engines import ask, picture
from tests.support.programs import need_kernels
from tests.support.thorough import is_thorough, others_slow

pytestmark = pytest.mark.kernels

QUANTIZATIONS = ("int8", "int4")
INT4 = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "lfm2_vl", "gemma4", "deepseek_ocr2", "mllama")
"""Architectures that the default tests quantize to int4: one for each kind of layer.

The first gets int8, too.
"""
PLAIN: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "kernels": "torch",
    "threads": 1,
    "kv_blocks": 256,
}


def linears(model: torch.nn.Module) -> Iterator[tuple[str, Linear]]:
    for path, layer in model.named_modules():
        if isinstance(layer, Linear):
            yield path, layer


def round_weights(model: torch.nn.Module, quantization: str) -> None:
    """Replace the model's plain weights by their rounded values."""
    for path, layer in linears(model):
        format = RECIPES[quantization].format_of(path, layer)
        if format is not None and layer.weight.numel():
            maps = layer.weight.data if isinstance(layer, ExpertLinear) else [layer.weight.data]
            rounded = [quantize(weight, format).values(weight.dtype) for weight in maps]
            layer.weight.data = torch.stack(rounded).view(layer.weight.shape)


def answer(engine: Engine, prompt: ChatPrompt) -> Completion:
    return engine.generate(prompt, temperature=0, max_tokens=6, ignore_eos=True, logprobs=True)


@pytest.mark.parametrize(
    ("architecture", "quantization"),
    [
        pytest.param(
            name,
            kind,
            marks=[] if name == INT4[0] or (kind == "int4" and name in INT4) else pytest.mark.slow,
        )
        for name in sorted(ARCHITECTURES)
        for kind in QUANTIZATIONS
    ],
)
def test_answers_are_those_of_the_rounded_weights(
    architecture: str, quantization: str, tmp_path: Path
) -> None:
    """In float32, so that only the weights are rounded."""
    folder = str(write(architecture, tmp_path / architecture))
    prompt = ask("what is it?", picture(1, 64, 72))
    with Engine.from_pretrained(folder, **PLAIN) as engine:
        before = answer(engine, prompt)
        engine.clear_caches()
        round_weights(engine.runner.model, quantization)
        theirs = answer(engine, prompt)
    with Engine.from_pretrained(folder, **PLAIN, quantization=quantization) as engine:
        assert engine.info.quantization == quantization
        ours = answer(engine, prompt)
    assert ours.token_ids == theirs.token_ids
    first, second = ([entry.logprob for entry in done.logprobs[0]] for done in (ours, theirs))
    assert first == pytest.approx(second, abs=1e-4)
    unrounded = [entry.logprob for entry in before.logprobs[0]]
    assert first != pytest.approx(unrounded, abs=1e-4), "the weights were not rounded"


@pytest.mark.parametrize("architecture", ["qwen2_5_vl", "llava_next"])
def test_which_layers_are_quantized(architecture: str, tmp_path: Path) -> None:
    folder = str(write(architecture, tmp_path / architecture))
    model = load_model(folder, EngineConfig.of(**PLAIN, quantization="int4")).model
    kinds: dict[str, set[int | None]] = {"decoder": set(), "head": set(), "patches": set(), "encoder": set()}
    for path, layer in linears(model):
        product = layer.product
        bits = None
        if isinstance(product, CodedProduct):
            assert layer.format is not None
            bits = layer.format.bits
            assert layer.weight.numel() == 0, f"{path}: the plain weight is still held"
        part = path.split(".")[0]
        part = "patches" if isinstance(layer, PatchLinear) else part if part in kinds else "encoder"
        kinds[part].add(bits)
    assert kinds == {"decoder": {4}, "head": {8}, "patches": {None}, "encoder": {8}}


def test_a_tied_table_is_in_memory_once() -> None:
    plain = load_model("fovea-tiny", EngineConfig.of(**PLAIN)).model
    assert plain.head.tied
    ids = torch.tensor([5, 0, 7])
    rows = plain.decoder.embed_tokens(ids)
    model = load_model("fovea-tiny", EngineConfig.of(**PLAIN, quantization="int8")).model
    assert model.decoder.embed_tokens.weight.numel() == model.head.lm_head.weight.numel() == 0
    assert model.decoder.embed_tokens.quantized is model.head.lm_head.product
    close = model.decoder.embed_tokens(ids)
    assert close.dtype is rows.dtype
    torch.testing.assert_close(close, rows, atol=0.01 * float(rows.abs().max()), rtol=0)
    assert (model.dtype, model.device.type) == (torch.float32, "cpu")


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_the_cpu_kernels_run_quantized_weights_in_bf16(quantization: str) -> None:
    need_kernels()
    settings = EngineConfig.of(dtype="bfloat16", device="cpu", threads=1, quantization=quantization)
    model = load_model("fovea-tiny", settings).model
    assert model.decoder._stack is not None
    for path, layer in linears(model):
        assert isinstance(layer.product, NativeProduct), path
        number = layer.product.weight.struct.format
        format = RECIPES[quantization].format_of(path, layer)
        assert number == (0 if format is None else format.number), path


def accuracy(**settings: Any) -> float:
    """Return the score of the bundled model on scenes that a quantized model could get wrong."""
    cases = list(
        scene_cases(
            4 if is_thorough() else 2, ("colour", "counting", "reading", "position", "json"), HELD_OUT_SEED
        )
    )
    results = []
    with Engine.from_pretrained("fovea-tiny", device="cpu", kv_cache_mib=16, threads=1, **settings) as engine:
        for case in cases:
            done = engine.generate(case.exchanges[0].question, case.images, temperature=0, max_tokens=48)
            results.append(Result(case, (done.text,), 0, 0, 0))
    return next(row for row in report(results) if row.kind == "all").accuracy


@pytest.mark.parametrize("quantization", others_slow(QUANTIZATIONS, ["int4"]))
def test_the_bundled_model_answers_nearly_as_well(quantization: str) -> None:
    """10 questions here, and 20 in the thorough tests.

    `fovea eval --count 200` asks 2,800, and docs/quantization.md has the table.
    """
    exact = accuracy(dtype="float32")
    assert accuracy(quantization=quantization) >= exact - 0.1


def test_stored_outputs_of_different_encoders_are_separate(tmp_path: Path) -> None:
    marks = {
        load_model(
            "fovea-tiny",
            EngineConfig.of(device="cpu", threads=1, embed_disk_dir=str(tmp_path), quantization=quantization),
        ).fingerprint
        for quantization in ("none", "int8", "int4")
    }
    assert len(marks) == 3


def test_stored_outputs_of_models_that_choose_other_tokens_are_separate(tmp_path: Path) -> None:
    """Once, fine-tunes with the same encoder and folder shared the tokens that one of them had chosen."""
    from safetensors.torch import load_file, save_file

    marks = set()
    for changed in ("", "embed_tokens.weight", "layers.1.mlp.up_proj.weight", "layers.4.mlp.up_proj.weight"):
        folder = Path(shutil.copytree(bundled_model(), tmp_path / (changed or "as it is")))
        weights = load_file(folder / "model.safetensors")
        for name in weights:
            if changed and name.endswith(f"language_model.{changed}"):
                weights[name] = weights[name] + 1
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        settings = EngineConfig.of(device="cpu", threads=1, embed_disk_dir=str(tmp_path / "disk"))
        marks.add(load_model(str(folder), settings).fingerprint)
    assert len(marks) == 3, "the last layer does not affect the choice"


def test_an_unknown_quantization_is_refused() -> None:
    with pytest.raises(ConfigError, match="quantization is 'int3'; accepted: none, int8, int4, fp8"):
        EngineConfig.of(quantization="int3")


def test_a_tensor_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    """A layer is packed as soon as it is complete. A second value would be lost silently."""
    from safetensors.torch import save_file

    files = [tmp_path / name for name in ("a.safetensors", "b.safetensors")]
    for file in files:
        save_file({"model.norm.weight": torch.ones(4)}, file)
    targets: list[tuple[str, Tensor]] = [("decoder.norm.weight", torch.empty(4))]
    with pytest.raises(
        CheckpointError, match="b.safetensors: tensor 'model.norm.weight' is there a second time"
    ):
        load_weights(SafetensorsWeights(files), iter(targets))
