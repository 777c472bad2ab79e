"""The error for an unusable checkpoint names the file and the fault."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load_file, save_file
from torch import Tensor

from fovea.core.errors import CheckpointError, ConfigError, ModelError, UnsupportedModel
from fovea.engine.config import EngineConfig
from fovea.engine.load import load_model
from fovea.engine.models.internvl import InternVL
from fovea.engine.models.stored import SafetensorsWeights, read_header, shard_files
from fovea.engine.models.targets import canonical
from fovea.engine.models.weights import load_weights
from tests.support.checkpoints import ARCHITECTURES, write
from tests.support.thorough import examples, others_slow

CONFIG = EngineConfig.of(dtype="float32", device="cpu", kv_blocks=16)
WEIGHTS = "model.safetensors"
Damage = Callable[[Path], None]


def load(folder: Path) -> Any:
    return load_model(str(folder), CONFIG).model


@pytest.fixture
def folder(qwen: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint, for the test to damage."""
    return Path(shutil.copytree(qwen, tmp_path / "checkpoint"))


def edit_json(name: str, change: Callable[[dict[str, Any]], None]) -> Damage:
    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return damage


def edit_weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return damage


def overwrite(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content) and None


def remove(*names: str) -> Damage:
    def damage(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return damage


def truncate(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def pickle_only(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def shards(folder: Path, count: int = 3) -> list[str]:
    """Split the weight file into several files with an index, as in large checkpoints."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    files = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    where = {name: files[i % count] for i, name in enumerate(names)}
    for file in files:
        save_file({n: tensors[n] for n in names if where[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return files


def missing_shard(folder: Path) -> None:
    (folder / shards(folder)[1]).unlink()


def header(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content


def entry(**fields: Any) -> bytes:
    item = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **fields}
    return header(json.dumps({"x": item}).encode()) + bytes(4)


EMBED = "model.language_model.embed_tokens.weight"
QUANTIZED = {"quantization_config": {"quant_method": "hqq"}}

DAMAGES: dict[str, tuple[Damage, type[ModelError], str]] = {
    "missing shard": (missing_shard, CheckpointError, r"1 of 3 shards are missing: \['model-00002-of-00003"),
    "broken index": (overwrite("model.safetensors.index.json", b"{"), CheckpointError,
        "index.json is not JSON"),
    "index of another shape": (
        overwrite("model.safetensors.index.json", b'{"weight_map": {"a": 1}}'), CheckpointError,
        "index.json is not a weight index"),
    "index that is a list": (overwrite("model.safetensors.index.json", b"[]"), CheckpointError,
        "index.json must hold a JSON object"),
    "truncated file": (truncate, CheckpointError, r"model.safetensors is truncated: \d+ bytes, \d+ expected"),
    "empty file": (overwrite(WEIGHTS, b""), CheckpointError, "is not a safetensors file, or is truncated"),
    "a web page": (overwrite(WEIGHTS, b"<!doctype html><html>not found</html>"), CheckpointError,
        "is not a safetensors file"),
    "header that is no JSON": (overwrite(WEIGHTS, header(b"{nonsense}")), CheckpointError,
        "has a broken header"),
    "header that is a list": (overwrite(WEIGHTS, header(b"[1, 2]")), CheckpointError, "has a broken header"),
    "header that is no text": (overwrite(WEIGHTS, header(b"\xff\xfe\x00\x01")), CheckpointError,
        "has a broken header"),
    "offsets before the file": (overwrite(WEIGHTS, entry(data_offsets=[-4, 0])), CheckpointError,
        "has a broken header"),
    "offsets that are words": (overwrite(WEIGHTS, entry(data_offsets=["a", "b"])), CheckpointError,
        "has a broken header"),
    "a shape that is a number": (overwrite(WEIGHTS, entry(shape=4)), CheckpointError, "has a broken header"),
    "a type that is a list": (overwrite(WEIGHTS, entry(dtype=[])), CheckpointError, "has a broken header"),
    "foreign tensor": (edit_weights(lambda t: t.update({"adapter.lora_A": torch.zeros(2)})), CheckpointError,
        "model.safetensors: tensor 'adapter.lora_A' is not part of this architecture"),
    "missing tensor": (edit_weights(lambda t: t.__delitem__(EMBED)), CheckpointError,
        r"1 tensors are missing, among them \['decoder.embed_tokens.weight'\]"),
    "wrong shape": (edit_weights(lambda t: t.update({EMBED: torch.zeros(7, 64)})), CheckpointError,
        r"embed_tokens.weight has shape \[7, 64\], the configuration says \[384, 64\]"),
    "transposed": (edit_weights(lambda t: t.update({EMBED: torch.zeros(64, 384)})), CheckpointError,
        r"has shape \[64, 384\]"),
    "integers": (
        edit_weights(lambda t: t.update({EMBED: torch.zeros(384, 64, dtype=torch.int8)})), CheckpointError,
        "embed_tokens.weight has type I8; accepted: F64, F32, F16, BF16"),
    "quantized": (edit_json("config.json", lambda c: c.update(QUANTIZED)), UnsupportedModel,
        "is quantized by 'hqq'; accepted: awq, bitsandbytes, compressed-tensors"),
    "unknown model_type": (
        edit_json("config.json", lambda c: c.update(model_type="mystery_vl")), UnsupportedModel,
        "model_type 'mystery_vl' is not supported; supported: qwen3_5"),
    "no model_type": (edit_json("config.json", lambda c: c.pop("model_type") and None), UnsupportedModel,
        "model_type '' is not supported"),
    "unknown text model": (
        edit_json(
            "config.json",
            lambda c: c["text_config"]["rope_parameters"].update(
                rope_type="longrope", factor=2.0, short_factor=[1.0] * 8, long_factor=[1.0] * 8,
            ),
        ), UnsupportedModel,
        "RoPE of type 'longrope' is not supported"),
    "pickle only": (pickle_only, CheckpointError, r"\['pytorch_model.bin'\] are pickles, which are not read"),
    "no weights": (remove(WEIGHTS), CheckpointError, r"holds no \*.safetensors file"),
    "no config": (remove("config.json"), CheckpointError, "has no config.json"),
    "broken config": (overwrite("config.json", b"{"), CheckpointError, "config.json is not JSON"),
    "config that is a list": (overwrite("config.json", b"[]"), CheckpointError,
        "config.json must hold a JSON object"),
    "config of wrong values": (edit_json("config.json", lambda c: c.update(text_config=3)), CheckpointError,
        "config.json cannot be used"),
    "no tokenizer": (remove("tokenizer.json", "tokenizer_config.json"), CheckpointError,
        "has no usable tokenizer"),
    "broken tokenizer": (overwrite("tokenizer.json", b"{}"), CheckpointError, "has no usable tokenizer"),
    "tokenizer that is no JSON": (overwrite("tokenizer.json", b"{"), CheckpointError,
        "has no usable tokenizer"),
    "no processor": (remove("preprocessor_config.json"), CheckpointError, "has no preprocessor_config.json"),
    "broken processor": (overwrite("preprocessor_config.json", b"{"), CheckpointError,
        "preprocessor_config.json is not JSON"),
    "broken generation config": (overwrite("generation_config.json", b"{"), CheckpointError,
        "generation_config.json is not JSON"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "kind", "message"), DAMAGES.values(), ids=DAMAGES.keys())
def test_the_error_names_the_file_and_the_fault(
    folder: Path, damage: Damage, kind: type[ModelError], message: str
) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=message) as caught:
        load(folder)
    assert type(caught.value) is kind


def test_an_unknown_name() -> None:
    with pytest.raises(CheckpointError, match="neither a folder, a GGUF file"):
        load_model("/no/such/place", CONFIG)


def test_cuda_without_cuda(qwen: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(ConfigError, match="torch finds no CUDA device"):
        load_model(str(qwen), EngineConfig.of(device="cuda"))


PLAIN = EngineConfig.of(dtype="float32", device="cpu", kernels="torch")


def state(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(str(folder), PLAIN).model.checkpoint_targets())


def test_shards_are_one_checkpoint(folder: Path) -> None:
    whole = state(folder)
    assert len(shards(folder)) == 3
    split = state(folder)
    assert whole.keys() == split.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(split[name], tensor, rtol=0, atol=0)


# Names of their own, experts, states, and fused tensors. For the others, the parity of answers tells.
@pytest.mark.parametrize(
    "architecture",
    others_slow(ARCHITECTURES, ["deepseek_ocr2", "gemma4", "internvl_chat", "qwen3_5_moe", "qwen3_vl"]),
)
def test_every_tensor_is_loaded_to_its_place(architecture: str, tmp_path: Path) -> None:
    """The model's tensors equal those of the file bit for bit, fused and reshaped storage included."""
    folder = write(architecture, tmp_path)
    model = load_model(str(folder), PLAIN).model
    rules = [(re.compile(pattern), replacement) for pattern, replacement in model.renames]
    stored = {canonical(name, rules): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    for name, fused in model.fused_tensors().items():
        if name in stored:
            stored |= dict(fused.split(stored.pop(name)))
    for name, tensor in model.checkpoint_targets():
        if name not in stored:
            stored[name] = experts(name, len(tensor), stored)
        torch.testing.assert_close(tensor, stored[name].view(tensor.shape), rtol=0, atol=0)


def experts(name: str, count: int, stored: dict[str, Tensor]) -> Tensor:
    """Join the experts of a layer, which are one tensor of the model. The file stores them one by one."""
    path, kind = name.removesuffix("_proj").rsplit(".", 1)
    parts = ("down",) if kind == "down" else ("gate", "up")
    each = [
        torch.cat([stored[f"{path}.{number}.{part}_proj.weight"] for part in parts])
        for number in range(count)
    ]
    return torch.stack(each)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_float_types_are_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.randn(5, 3).to(dtype)
    save_file({"a": values}, tmp_path / WEIGHTS)
    target = torch.empty(5, 3)
    assert (
        load_weights(SafetensorsWeights([tmp_path / WEIGHTS]), iter([("a", target)]))
        == values.numel() * values.itemsize
    )
    torch.testing.assert_close(target, values.float(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", "decoder.layers.0.mlp.up_proj.weight"),
        ("language_model.model.layers.0.mlp.up_proj.weight", "decoder.layers.0.mlp.up_proj.weight"),
        ("model.text_model.norm.weight", "decoder.norm.weight"),
        ("model.layers.3.x", "decoder.layers.3.x"),
        ("model.embed_tokens.weight", "decoder.embed_tokens.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.visual.blocks.0.x", "vision.blocks.0.x"),
        ("visual.blocks.0.x", "vision.blocks.0.x"),
        ("model.vision_tower.vision_model.encoder.x", "vision.encoder.x"),
        ("vision_tower.vision_model.encoder.x", "vision.encoder.x"),
        ("model.multi_modal_projector.linear_1.bias", "projector.linear_1.bias"),
        ("vision_tower.transformer.layers.0.x", "vision.transformer.layers.0.x"),
        ("model.vision_encoder.patch_conv.weight", "vision.patch_conv.weight"),
        ("vision_encoder.patch_conv.weight", "vision.patch_conv.weight"),
        ("multi_modal_projector.patch_merger.x", "projector.patch_merger.x"),
        ("model.vision_projection.norm.weight", "projector.norm.weight"),
        ("model.connector.modality_projection.proj.weight", "projector.proj.weight"),
        ("model.image_newline", "newline"),
        ("visual.vision_model.encoder.layers.0.x", "vision.encoder.layers.0.x"),
        ("model.visual.vision_model.post_layernorm.x", "vision.post_layernorm.x"),
        ("mlp_AR.linear_1.weight", "projector.linear_1.weight"),
        ("model.projector.pre_norm.bias", "projector.pre_norm.bias"),
        ("something.else", "something.else"),
    ],
)
def test_names_of_all_generations_have_one_canonical_form(stored: str, name: str) -> None:
    assert canonical(stored) == name
    assert canonical(name) == name


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("model.vision_tower.embeddings.cls_token", "vision.embeddings.class_embedding"),
        ("vision_model.embeddings.position_embedding", "vision.embeddings.position_embedding.weight"),
        ("model.vision_tower.encoder.layer.1.lambda_2", "vision.encoder.layers.1.layer_scale2"),
        ("vision_model.encoder.layers.1.ls2", "vision.encoder.layers.1.layer_scale2"),
        ("vision_model.encoder.layers.1.attn.qkv.bias", "vision.encoder.layers.1.self_attn.qkv.bias"),
        ("mlp1.3.weight", "projector.linear_2.weight"),
        ("language_model.output.weight", "lm_head.weight"),
        ("language_model.model.tok_embeddings.weight", "decoder.embed_tokens.weight"),
        ("language_model.model.layers.0.attention.wqkv.weight", "decoder.layers.0.self_attn.wqkv.weight"),
        ("language_model.model.layers.0.feed_forward.w2.weight", "decoder.layers.0.mlp.down_proj.weight"),
    ],
)
def test_names_of_internvl_in_both_layouts(stored: str, name: str) -> None:
    rules = [(re.compile(pattern), replacement) for pattern, replacement in InternVL.renames]
    assert canonical(stored, rules) == name


@settings(
    max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_damage_to_a_header_is_a_checkpoint_error(tmp_path: Path, data: st.DataObject) -> None:
    """Bytes are changed, removed or added. Either the file is still read, or CheckpointError is raised."""
    good = tmp_path / "good.safetensors"
    if not good.exists():
        save_file({"a": torch.ones(4), "b": torch.zeros(2, 2)}, good)
    raw = bytearray(good.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    path = tmp_path / "bad.safetensors"
    path.write_bytes(raw)
    targets = {"a": torch.empty(4), "b": torch.empty(2, 2)}
    try:
        load_weights(SafetensorsWeights([path]), iter(targets.items()))
    except CheckpointError as error:
        message = str(error)
    else:
        with path.open("rb") as file:
            assert {e.name for e in read_header(file, path)[0]} >= targets.keys()
        message = "missing"
    assert "bad.safetensors" in message or "missing" in message


def test_files_are_found_without_an_index(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.safetensors"):
        (tmp_path / name).touch()
    assert [path.name for path in shard_files(tmp_path)] == ["a.safetensors", "b.safetensors"]


def test_mistrals_own_file_beside_that_of_transformers_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "consolidated.safetensors").touch()
    assert [path.name for path in shard_files(tmp_path)] == ["consolidated.safetensors"]
    (tmp_path / WEIGHTS).touch()
    assert [path.name for path in shard_files(tmp_path)] == [WEIGHTS]


def test_generation_defaults(tmp_path: Path) -> None:
    """Some checkpoints write top_k -1 for "off". It was not converted, so every request failed with 400."""
    from fovea.engine.models.side_files import default_sampling

    path = tmp_path / "generation_config.json"
    path.write_text('{"do_sample": true, "top_k": -1, "temperature": 0.7, "top_p": 0.8}')
    assert default_sampling(tmp_path) == {"temperature": 0.7, "top_p": 0.8, "top_k": 0}
    path.write_text('{"do_sample": true, "temperature": 7.5}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: temperature"):
        default_sampling(tmp_path)
