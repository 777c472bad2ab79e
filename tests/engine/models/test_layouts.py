"""Hybrids and mixtures of experts load from every layout in which such checkpoints are published."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fovea.core.errors import CheckpointError
from fovea.engine.config import EngineConfig
from fovea.engine.load import load_model
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.stored import SafetensorsWeights
from fovea.engine.models.targets import TensorEntry, assign
from fovea.engine.models.weights import load_weights
from tests.support.checkpoints import write

PLAIN = EngineConfig.of(dtype="float32", device="cpu", kernels="torch", kv_blocks=16)
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MIXTURES = ("qwen3_vl_moe", "qwen3_5_moe")
Tensors = dict[str, Tensor]


def load(folder: Path) -> VisionLanguageModel:
    return load_model(str(folder), PLAIN).model


def stored_name(name: str) -> str:
    """The name of one of the model's tensors in published files."""
    name = re.sub(r"^decoder\.", "model.language_model.", name)
    return re.sub(r"^vision\.", "model.visual.", name)


def stored_tensors(model: VisionLanguageModel) -> Tensors:
    """The model's tensors by the names of published files; the experts of a layer are one tensor."""
    targets = model.checkpoint_targets()
    return {
        stored_name(name): tensor.clone(memory_format=torch.contiguous_format) for name, tensor in targets
    }


def as_fused(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The layout of Qwen3.5-MoE: all experts of a layer are one tensor (experts, outputs, inputs)."""
    yield name, tensor


def as_transposed(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The layout of Qwen3-VL-MoE: (experts, inputs, outputs)."""
    yield name, tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor


def as_single(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The layout that transformers writes: each map of each expert is a tensor."""
    if ".experts." not in name:
        yield name, tensor
        return
    path, kind = name.rsplit(".", 1)
    for number, maps in enumerate(tensor):
        if kind == "down_proj":
            yield f"{path}.{number}.down_proj.weight", maps.clone()
        else:
            for part, rows in zip(("gate", "up"), maps.chunk(2), strict=True):
                yield f"{path}.{number}.{part}_proj.weight", rows.clone()


def save(folder: Path, tensors: Tensors, shards: int = 1) -> None:
    """Replace the weights. Neighbouring names, and so the maps of an expert, are in different shards."""
    (folder / WEIGHTS).unlink(missing_ok=True)
    if shards == 1:
        save_file(tensors, folder / WEIGHTS)
        return
    places = {name: f"model-{n % shards}.safetensors" for n, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in places if places[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize("layout", [as_fused, as_transposed, as_single], ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("architecture", MIXTURES)
def test_every_layout_of_experts_is_the_same_model(
    architecture: str, layout: Callable[[str, Tensor], Iterator[tuple[str, Tensor]]], tmp_path: Path
) -> None:
    folder = write(architecture, tmp_path)
    wanted = stored_tensors(load(folder))
    changed = dict(pair for name, tensor in wanted.items() for pair in layout(name, tensor))
    save(folder, changed, shards=4)
    assert len(list(folder.glob("model-*.safetensors"))) == 4
    actual = stored_tensors(load(folder))
    assert actual.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("architecture", ["qwen3_5", *MIXTURES])
def test_files_of_every_type_load(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Hybrids keep A_log in float32 beside 16-bit weights."""
    folder = write(architecture, tmp_path)
    tensors = {
        name: tensor.to(torch.float32 if name.endswith("A_log") else dtype)
        for name, tensor in load_file(folder / WEIGHTS).items()
    }
    save(folder, tensors, shards=3)
    model = load(folder)
    assert model.dtype is torch.float32
    values = stored_tensors(model)
    for name in tensors.keys() & values.keys():
        torch.testing.assert_close(
            values[name], tensors[name].float().view(values[name].shape), rtol=0, atol=0
        )


@pytest.mark.parametrize("architecture", ["qwen3_5", *MIXTURES])
def test_tied_and_own_heads(architecture: str, tmp_path: Path) -> None:
    """The files decide: a head of their own is used, whatever the configuration says of it."""
    folder = write(architecture, tmp_path)
    tensors = load_file(folder / WEIGHTS)
    assert not load(folder).head.tied
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    path.write_text(json.dumps(config))
    own = load(folder)
    assert not own.head.tied
    torch.testing.assert_close(own.head.lm_head.weight, tensors["lm_head.weight"], rtol=0, atol=0)
    save(folder, {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"})
    tied = load(folder)
    assert tied.head.tied
    rows = torch.randn(3, tied.decoder.config.hidden)
    expected = tied.decoder.norm(rows) @ tied.decoder.embed_tokens.weight.T
    torch.testing.assert_close(tied.logits(rows), expected, rtol=1e-4, atol=1e-4)
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"1 tensors are missing, among them \['lm_head.weight'\]"):
        load(folder)


LAYER = "model.language_model.layers.0."
EXPERT = LAYER + "mlp.experts.{}.gate_proj.weight"


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def add(name: str, *shape: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        ("qwen3_5", drop(LAYER + "linear_attn.A_log"), r"missing, .*'decoder.layers.0.linear_attn.A_log'"),
        ("qwen3_5", add(LAYER + "self_attn.q_proj.weight", 2, 2), r"0.self_attn.q_proj.weight' is not part"),
        ("qwen3_5_moe", drop(EXPERT.format(3)), r"missing, .*'decoder.layers.0.mlp.experts.gate_up_proj'\]"),
        ("qwen3_5_moe", add(EXPERT.format(6), 48, 64), r"experts.6.gate_proj.weight' is not part of this"),
        ("qwen3_5_moe", add(EXPERT.format(2), 48, 63), r"\[48, 63\], the configuration says \[48, 64\]"),
        ("qwen3_5_moe", add(LAYER + "mlp.experts.gate_up_proj", 6, 96, 64), "is there a second time"),
        ("qwen3_vl_moe", drop(EXPERT.format(0)), "1 tensors are missing"),
    ],
)  # fmt: skip
def test_missing_and_foreign_tensors_are_named(
    architecture: str, change: Callable[[Tensors], object], message: str, tmp_path: Path
) -> None:
    folder = write(architecture, tmp_path)
    model = load(folder)
    tensors = dict(pair for name, tensor in stored_tensors(model).items() for pair in as_single(name, tensor))
    change(tensors)
    save(folder, tensors, shards=2)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_square_experts_are_taken_as_they_are() -> None:
    """They were transposed, although transformers takes a tensor of the right shape as it is."""
    square, wide = TensorEntry("0.experts.a", "F32", (2, 4, 4)), TensorEntry("0.experts.b", "F32", (2, 3, 4))
    found = assign([("file", [square, wide])], {"0.experts.a": (2, 4, 4), "0.experts.b": (2, 4, 3)})
    assert [fill.transposed for fill in found.fills] == [False, True]


def test_nothing_is_read_of_a_checkpoint_that_does_not_fit(tmp_path: Path) -> None:
    """The last shard of a large checkpoint was refused after all others had been read."""
    for name in ("a", "b"):
        save_file({name: torch.ones(3)}, tmp_path / f"{name}.safetensors")
    targets = {"a": torch.zeros(3), "c": torch.zeros(3)}
    with pytest.raises(CheckpointError, match=r"b.safetensors: tensor 'b' is not part"):
        load_weights(SafetensorsWeights(sorted(tmp_path.glob("*.safetensors"))), iter(targets.items()))
    assert not targets["a"].any()
