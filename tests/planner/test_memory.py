"""The planner's bytes are those that the engine allocates, for every architecture, recipe and layout.

The engine is asked for the sizes of its tensors, and the planner computes from a shape that was read from
config.json alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from fovea.core.media import PixelBudget
from fovea.engine.config import EngineConfig
from fovea.engine.layers.experts import ExpertLinear
from fovea.engine.layers.linear import Embedding, Linear
from fovea.engine.layers.step import DecoderMemory
from fovea.engine.load import LoadedModel, load_model
from fovea.engine.models import base
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.weights import RECIPES as ENGINE_RECIPES
from fovea.engine.vision.token_rules import folder_rule
from fovea.kernels.float8 import Fp8Product
from fovea.kernels.native.products import PACKED_TILE, PLAIN_TILE, NativeProduct, PackedWeight
from fovea.planner import memory
from fovea.planner.memory import kv_bytes_per_token, map_bytes, output_bytes, state_bytes, weight_bytes
from fovea.planner.precision import RECIPES, Precision, recipe
from fovea.planner.shape import Maps, ModelShape
from tests.support.checkpoints import ARCHITECTURES
from tests.support.engines import picture, shared_model
from tests.support.programs import need_kernels
from tests.support.thorough import is_thorough, others_slow

STORAGE = {"torch": "plain", "onednn": "onednn", "native": "panels"}
"""Layout of each set of kernels."""
CASES = [
    ("native", "bfloat16", "none"),
    ("native", "bfloat16", "int4"),
    ("torch", "bfloat16", "fp8"),
    ("torch", "bfloat16", "int8"),
    ("onednn", "float32", "none"),
    ("torch", "float32", "int4"),
    ("native", "bfloat16", "int8"),
    ("torch", "bfloat16", "none"),
    ("onednn", "float32", "int8"),
    ("torch", "float32", "fp8"),
]
DEFAULT = 1
"""Cases of each architecture in the default run. Together the architectures try all cases."""
SIDES = {
    "decoder": ("decoder", "experts", "embedding", "cross", "head"),
    "encoder": ("patches", "encoder", "merged", "projector"),
}
"""The planner's parts on each side of the engine's model. A tied table is the head's and the decoder's."""


USUAL = ("qwen3_vl", "qwen3_5_moe", "gemma4", "mllama", "idefics3", "deepseek_ocr2", "minicpmv4_6")
"""Architectures whose caches the default run measures.

They have levels of DeepStack, states, two kinds of blocks, states of images, and images with text in them.
"""


def chosen() -> Iterator[Any]:
    for place, architecture in enumerate(sorted(ARCHITECTURES)):
        for number in range(len(CASES) if is_thorough() else DEFAULT):
            yield architecture, *CASES[(place * DEFAULT + number) % len(CASES)]


@pytest.mark.kernels
@pytest.mark.parametrize(("architecture", "kernels", "dtype", "quantization"), list(chosen()))
def test_weights_take_the_bytes_that_were_planned(
    architecture: str,
    kernels: str,
    dtype: str,
    quantization: str,
    checkpoint: Callable[[str], Path],
    planned: Callable[[str], ModelShape],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kernels == "native":
        need_kernels()
    monkeypatch.setattr("fovea.engine.config.check_precision", lambda *_: None)
    folder, shape = checkpoint(architecture), planned(architecture)
    loaded = load(folder, kernels, dtype, quantization)
    assert shape.parameters == loaded.info.parameters
    precision = recipe(quantization, dtype, STORAGE[kernels])
    parts = weight_bytes(shape, precision)
    sides = {side: sum(parts.get(part, 0) for part in names) for side, names in SIDES.items()}
    assert sum(sides.values()) == sum(parts.values())
    assert sides == allocated(loaded.model)


@pytest.mark.parametrize("architecture", others_slow(sorted(ARCHITECTURES), USUAL))
def test_caches_take_the_bytes_that_were_planned(
    architecture: str, checkpoint: Callable[[str], Path], planned: Callable[[str], ModelShape]
) -> None:
    """Blocks of 16 tokens, slots of states, and the output of one image."""
    folder, shape = checkpoint(architecture), planned(architecture)
    loaded = shared_model(folder)
    model, precision = loaded.model, Precision("float32")
    groups = model.decoder.config.kv_groups
    blocks = (3, 5)[: len(groups)]
    pools = DecoderMemory.allocate(model.decoder.config, blocks, 16, 2, torch.float32, torch.device("cpu"))
    sizes = [kv.pages.nbytes // count for kv, count in zip(pools.kv, blocks, strict=True)]
    assert 16 * kv_bytes_per_token(shape, precision) == sum(sizes)
    assert state_bytes(shape, precision) == pools.state_nbytes
    image = picture(0, 150, 100)
    plan = loaded.processor.plan(image.width, image.height, PixelBudget())
    with torch.inference_mode():
        features = model.encode(loaded.processor.process(image, plan))
    assert len(features.embeds) == plan.rows
    assert output_bytes(shape, precision, plan.rows) == features.nbytes
    assert plan.states or folder_rule(folder).tokens(image.width, image.height) == plan.rows


def load(folder: Path, kernels: str, dtype: str, quantization: str) -> LoadedModel:
    settings = {"device": "cpu", "threads": 1, "kv_blocks": 64}
    return load_model(
        str(folder),
        EngineConfig.of(**settings, kernels=kernels, dtype=dtype, quantization=quantization),
    )


def allocated(model: VisionLanguageModel) -> dict[str, int]:
    """Bytes of all parameters and packed weights, by side. Every tensor counts once."""
    found: Counter[str] = Counter(dict.fromkeys(SIDES, 0))
    counted: set[int] = set()
    for path, module in model.named_modules():
        side = "decoder" if path.startswith(("decoder", "head")) else "encoder"
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in counted:
                counted.add(id(parameter))
                found[side] += parameter.nbytes
        if isinstance(module, ExpertLinear):
            found[side] += sum(product_bytes(item) for item in module.products)
        elif isinstance(module, Linear):
            found[side] += product_bytes(module.product)
        elif isinstance(module, Embedding):
            assert module.quantized is None or module.quantized is model.head.lm_head.product
    return dict(found)


def product_bytes(packed: Any) -> int:
    """Bytes of a packed weight, without exceptions, and with the copy of the bias that C++ reads."""
    if packed is None:
        return 0
    if isinstance(packed, NativeProduct):
        weight = packed.weight
        size = weight.data.nbytes
        if isinstance(weight, PackedWeight) and weight.table is None:
            # Random weights can have too many exceptions. Those of real models have not.
            size = size * PACKED_TILE // PLAIN_TILE
        return size + (0 if weight.bias is None else weight.bias.nbytes)
    nbytes = getattr(packed, "nbytes", None)
    if nbytes is not None:
        return int(nbytes)
    cells = [cell.cell_contents for cell in packed.__closure__]
    (weight,) = (cell for cell in cells if isinstance(cell, torch.Tensor) and cell.is_mkldnn)
    return int(weight.numel() * weight.element_size())


def test_recipes_are_those_of_the_engine() -> None:
    assert list(RECIPES) == list(ENGINE_RECIPES)
    for name, theirs in ENGINE_RECIPES.items():
        ours = RECIPES[name]
        formats = [theirs.decoder, theirs.encoder, theirs.head]
        assert [ours.decoder, ours.encoder, ours.head] == [f.name if f else "" for f in formats]
    assert memory.TIED_HEAD_PACK_SHARE == base.TIED_HEAD_PACK_SHARE


@pytest.mark.parametrize(("n", "k"), list(product((1, 16, 63, 64, 130), (2, 15, 16, 100, 256))))
def test_odd_sides_are_padded_as_in_the_engine(n: int, k: int) -> None:
    weight = torch.zeros(n, k, dtype=torch.bfloat16)
    assert map_bytes(Maps(n, k), "fp8", Precision()) == Fp8Product(weight, None, None, False).nbytes
    from fovea.kernels.torch_kernels import TorchKernels

    for name, format in (("int8", ENGINE_RECIPES["int8"].decoder), ("int4", ENGINE_RECIPES["int4"].decoder)):
        assert format is not None
        theirs = TorchKernels().quantized_product(weight, None, None, False, format)
        assert map_bytes(Maps(n, k), name, Precision()) == theirs.nbytes


def test_a_small_tied_table_is_packed_once_more() -> None:
    """4096 parameters of which the table has 12.5%: panels of it are three quarters of its bytes."""
    shape = ModelShape(
        "tiny", "test", 16, 32, 64, 1,
        {"decoder": (Maps(16, 16, count=14),), "head": (Maps(32, 16),)}, tied=True,
    )  # fmt: skip
    assert shape.parameters == 4096
    assert weight_bytes(shape, Precision())["head"] == 1024
    assert weight_bytes(shape, Precision(storage="onednn"))["head"] == 2048
    assert weight_bytes(shape, Precision(storage="panels"))["head"] == 1024 + 64 * 16 * 3 // 2
    assert weight_bytes(shape, recipe("int8"))["head"] == 32 * 18
