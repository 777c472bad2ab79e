"""Models in GGUF files are those of the folders that they were written from: same weights, same answers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from fovea import Engine
from fovea.cli.main import main
from fovea.cli.plan.inputs import find_model
from fovea.core.errors import CheckpointError, ConfigError, InvalidRequest, UnsupportedModel
from fovea.core.media import PixelBudget
from fovea.engine.check import check_checkpoint
from fovea.engine.load import Checkpoint, build_model, open_checkpoint, untie_own_head
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.gguf.blocks import LAYOUTS
from fovea.engine.models.weights import load_weights
from tests.fuzz.targets.gguf import model as tiny_file
from tests.support.checkpoints import write
from tests.support.checkpoints.text import TEXT_MODELS, write_text
from tests.support.engines import ask, picture
from tests.support.gguf_files import PROJECTORS, quantized, write_model, write_tower
from tests.support.thorough import others_slow

CHANGES: dict[str, dict[str, Any]] = {
    "gemma3": {"projector.scale_factor": 2},
    "internvl": {"projector.scale_factor": 2},
    "idefics3": {"projector.scale_factor": 2, "preproc_image_size": 256},
    "smolvlm": {"projector.scale_factor": 2, "preproc_image_size": 256},
    "mistral3": {"spatial_merge_size": 2},
    "llava": {"block_count": 2},
}
"""Entries of towers' files that the checkpoints have elsewhere, or that differ from published models."""
SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_cache_mib": 16, "threads": 1, "kernels": "torch"}
QUESTION = "the blue square is left of the red circle, and what is right of it?"


def values(checkpoint: Checkpoint) -> VisionLanguageModel:
    """Load a checkpoint's values, unpacked."""
    config = checkpoint.config()
    stored = checkpoint.weights(config)
    untie_own_head(config, (entry.name for _, entries in stored.files for entry in entries))
    model = build_model(checkpoint.path, config, torch.device("cpu"), torch.float32).requires_grad_(False)
    load_weights(
        stored, model.checkpoint_targets(), model.ignored, None, model.renames, model.fused_tensors()
    )
    return model


def expect_equal(found: VisionLanguageModel, expected: VisionLanguageModel, tolerance: float = 0) -> None:
    ours, theirs = dict(found.checkpoint_targets()), dict(expected.checkpoint_targets())
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, rtol=0, atol=tolerance), name
    assert found.decoder.config == expected.decoder.config


def changed_config(folder: Path, **text: Any) -> Path:
    """Change fields of a text configuration that GGUF files cannot express."""
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content.get("text_config", content).update(text)
    path.write_text(json.dumps(content))
    return folder


def folder_of(kind: str, folder: Path) -> Path:
    """Write a checkpoint that a GGUF file can express."""
    written = write(kind, folder) if kind in PROJECTORS else write_text(kind, folder)
    if kind.startswith("gemma3"):
        return changed_config(written, query_pre_attn_scalar=32)  # the size of a head
    return changed_config(written, sliding_window=None) if kind == "mistral" else written


def answer(name: Path, prompt: Any = QUESTION, **settings: Any) -> tuple[int, ...]:
    with Engine.from_pretrained(str(name), **{**SETTINGS, **settings}) as engine:
        return engine.generate(prompt, temperature=0, max_tokens=10, ignore_eos=True).token_ids[0]


@pytest.mark.parametrize("kind", TEXT_MODELS)
def test_a_text_model_is_that_of_its_folder(kind: str, tmp_path: Path) -> None:
    """Gemma's norms lose a bit, because 1 is added to them in the file."""
    folder = folder_of(kind, tmp_path / "folder")
    path = write_model(folder, tmp_path / f"{kind}.gguf")
    found = values(open_checkpoint(path))
    expect_equal(found, values(open_checkpoint(folder)), 3e-7 if kind == "gemma3_text" else 0)
    report = check_checkpoint(str(path))
    assert report.loads, report.errors
    assert report.facts["images"] is False


@pytest.mark.parametrize("kind", others_slow(TEXT_MODELS, ["llama"]))
def test_a_text_model_answers_as_its_folder(kind: str, tmp_path: Path) -> None:
    folder = folder_of(kind, tmp_path / "folder")
    path = write_model(folder, tmp_path / f"{kind}.gguf")
    assert answer(path) == answer(folder)


@pytest.mark.parametrize("kind", others_slow(PROJECTORS, ["qwen2_5_vl", "gemma3", "internvl"]))
@torch.inference_mode()
def test_a_vision_model_is_that_of_its_folder(kind: str, tmp_path: Path) -> None:
    folder = folder_of(kind, tmp_path / "folder")
    write_model(folder, tmp_path / "files.gguf")
    write_tower(folder, tmp_path / "mmproj-files.gguf", kind, **CHANGES.get(kind, {}))
    theirs, ours = open_checkpoint(folder), open_checkpoint(tmp_path)
    found, expected = values(ours), values(theirs)
    expect_equal(found, expected, 3e-7 if kind == "gemma3" else 0)
    processor, videos = ours.processors(ours.config())
    original, original_videos = theirs.processors(theirs.config())
    assert (videos is None) == (original_videos is None)
    budget = PixelBudget(min_pixels=8000, max_pixels=30_000) if kind.startswith("qwen") else PixelBudget()
    image = picture(1, 150, 110)
    plan, expected_plan = (one.plan(150, 110, budget) for one in (processor, original))
    assert plan == expected_plan
    pixels = processor.process(image, plan)
    for name, array in original.process(image, plan).arrays.items():
        assert np.array_equal(pixels.arrays[name], array), name
    for model in (found, expected):
        model.finish_loading(model.kernels, None, 1)
    assert torch.equal(found.encode(pixels).embeds, expected.encode(pixels).embeds)
    report = check_checkpoint(str(tmp_path))
    assert report.loads, report.errors


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    write("qwen2_5_vl", folder / "folder")
    write_model(folder / "folder", folder / "model.gguf")
    write_tower(folder / "folder", folder / "mmproj.gguf", "qwen2_5_vl")
    return folder


def test_images_are_answered_as_by_the_folder(qwen: Path) -> None:
    prompt = ask("what is in the picture?", picture(2, 112, 84))
    with_tower = answer(qwen / "model.gguf", prompt, mmproj=str(qwen / "mmproj.gguf"))
    assert with_tower == answer(qwen / "folder", prompt)


def test_images_without_a_tower_are_refused_with_the_remedy(qwen: Path) -> None:
    with (
        Engine.from_pretrained(str(qwen / "model.gguf"), **SETTINGS) as engine,
        pytest.raises(InvalidRequest, match="takes text alone; accepted: .*, or start with --mmproj FILE"),
    ):
        engine.generate(ask("what is it?", picture(2, 56, 56)))


def test_a_name_is_that_of_the_file(qwen: Path) -> None:
    with Engine.from_pretrained(str(qwen / "model.gguf"), **SETTINGS) as engine:
        assert engine.info.name == "model"
        assert engine.info.quantization == "none"


def test_plans_read_shape_and_tokens_from_the_files(qwen: Path, tmp_path: Path) -> None:
    alone = find_model(str(qwen / "model.gguf"))
    assert not alone.shape.takes_images
    for name in ("model.gguf", "mmproj.gguf"):
        shutil.copy(qwen / name, tmp_path / name)
    planned, folder = find_model(str(tmp_path)), find_model(str(qwen / "folder"))
    assert planned.shape.takes_images
    assert replace(planned.shape, name="") == replace(folder.shape, name="")
    assert planned.count(200, 150) == folder.count(200, 150)


def test_encoders_are_not_built_from_a_file(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", str(qwen / "model.gguf")]) == 2
    assert "encoders are built from plain weights" in capsys.readouterr().err


def test_towers_of_other_models_are_refused(qwen: Path, tmp_path: Path) -> None:
    folder = write_text("llama", tmp_path / "folder")
    path = write_model(folder, tmp_path / "llama.gguf")
    with pytest.raises(CheckpointError, match=r"tower \(qwen2.5vl_merger\) of another model: .* is llama"):
        open_checkpoint(path, str(qwen / "mmproj.gguf")).config()
    with pytest.raises(CheckpointError, match="is no vision tower: general.architecture is 'llama'"):
        open_checkpoint(path, str(path)).config()
    with pytest.raises(CheckpointError, match="is a vision tower .* with --mmproj for this file"):
        open_checkpoint(qwen / "mmproj.gguf").config()
    with pytest.raises(ConfigError, match="accepted: an existing file"):
        open_checkpoint(path, str(tmp_path / "none.gguf"))
    with pytest.raises(ConfigError, match="is no GGUF file; accepted: a vision tower of a GGUF file"):
        open_checkpoint(folder, str(qwen / "mmproj.gguf"))


def test_several_models_in_a_folder_are_refused(qwen: Path, tmp_path: Path) -> None:
    shutil.copy(qwen / "model.gguf", tmp_path / "a.gguf")
    shutil.copy(qwen / "model.gguf", tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"holds 2 models in GGUF files \(a.gguf, b.gguf\); name the"):
        open_checkpoint(tmp_path)
    (tmp_path / "b.gguf").unlink()
    for name in ("mmproj-1.gguf", "mmproj-2.gguf"):
        shutil.copy(qwen / "mmproj.gguf", tmp_path / name)
    with pytest.raises(CheckpointError, match="holds 2 vision towers .*; name one with --mmproj"):
        open_checkpoint(tmp_path)


def test_links_out_of_the_folder_are_refused(qwen: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to(qwen / "model.gguf")
    with pytest.raises(CheckpointError, match="is a link to .*, outside of the checkpoint"):
        open_checkpoint(tmp_path)


def test_a_split_model_is_one(qwen: Path, tmp_path: Path) -> None:
    write_model(qwen / "folder", tmp_path / "m.gguf", split=9)
    parts = sorted(tmp_path.iterdir())
    assert len(parts) > 3
    expect_equal(values(open_checkpoint(parts[0])), values(open_checkpoint(qwen / "model.gguf")))
    assert open_checkpoint(tmp_path).config().to_dict() == open_checkpoint(parts[1]).config().to_dict()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": ("str", "rwkv7")}, "'rwkv7' is not supported; supported in GGUF files: "),
        ({"general.architecture": None}, "general.architecture is missing; accepted: a text"),
        ({"llama.block_count": None}, "llama.block_count is missing; accepted: an integer"),
        ({"llama.block_count": ("u32", 1 << 31)}, "num_hidden_layers is 2147483648; accepted: integers"),
        ({"llama.attention.head_count": ("[u32]", (2, 4))}, "accepted: an integer, the same for all layers"),
        ({"llama.attention.head_count": ("u32", 0)}, "num_attention_heads is 0"),
        ({"llama.embedding_length": ("u32", 48)}, "accepted: a multiple of the size of a head, 24"),
        ({"llama.feed_forward_length": ("u32", 48)}, r"the configuration says \[48, 32\]"),
        ({"llama.rope.scaling.type": ("str", "longrope")}, "is longrope; accepted: none, linear, yarn"),
        ({"llama.attention.layer_norm_rms_epsilon": ("f32", float("nan"))}, "is nan; accepted: a finite"),
        ({"llama.expert_count": ("u32", 8)}, "llama.expert_count is 8; accepted: 0"),
        ({"llama.attention.value_length": ("u32", 8)}, "accepted: the size of a head, 16"),
    ],
)  # fmt: skip
def test_wrong_metadata_is_refused(changes: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_file(changes))
    with pytest.raises((CheckpointError, UnsupportedModel), match=message):
        values(open_checkpoint(path))


def raw_blocks(kind: str, rows: int, width: int, seed: int) -> np.ndarray:
    """Random blocks with scales that make weights of about 0.1."""
    number = gguf.GGMLQuantizationType[kind]
    block, nbytes = gguf.GGML_QUANT_SIZES[number]
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (rows, width // block, nbytes), dtype=np.uint8)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(kind, (0, 2))
    halves = halves[:1] if kind in ("Q4_0", "Q5_0", "Q8_0") else halves
    scale = {"Q8_0": 1e-3, "Q6_K": 6e-5, "Q3_K": 2e-3, "Q2_K": 4e-3}.get(
        kind, 1e-2 if "K" not in kind else 4e-4
    )
    for place in halves:
        small = (random.uniform(0.5, 1, raw.shape[:2]) * scale).astype(np.float16)
        raw[..., place : place + 2] = small[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", others_slow(LAYOUTS, ["Q4_1", "Q6_K"]))
def test_quantized_models_answer_as_their_values(kind: str, tmp_path: Path) -> None:
    """The model with codes has the tokens of a folder with the values that the package gguf makes of them."""
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
    folder = _wide_llama(tmp_path / "folder", wide)
    number = gguf.GGMLQuantizationType[kind]
    stored: dict[str, np.ndarray] = {}

    def encode(name: str, array: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType | None]:
        if array.ndim != 2:
            return array, None
        stored[name] = raw_blocks(kind, *array.shape, seed=len(stored))
        return stored[name], number

    path = write_model(folder, tmp_path / "model.gguf", encode)
    _replace_values(folder, path, stored, number)
    with Engine.from_pretrained(str(path), **SETTINGS) as engine:
        assert engine.info.quantization == f"gguf {kind.lower()}"
        ids = engine.generate(QUESTION, temperature=0, max_tokens=10, ignore_eos=True).token_ids[0]
    assert ids == answer(folder)
    assert answer(path, quantization="dequantize") == ids


def _wide_llama(folder: Path, shape: dict[str, int]) -> Path:
    import transformers as hf

    from tests.support.checkpoints.folders import randomise
    from tests.support.checkpoints.parts import decoder

    write_text("llama", folder)
    torch.manual_seed(0)
    config = hf.LlamaConfig(**decoder(**shape, tie_word_embeddings=False))
    randomise(hf.LlamaForCausalLM(config)).save_pretrained(folder)
    return folder


def _replace_values(
    folder: Path, path: Path, stored: dict[str, np.ndarray], number: gguf.GGMLQuantizationType
) -> None:
    """Put the values of blocks into the folder, in the order of its own rows."""
    from fovea.engine.models.gguf.text import halves

    tensors = load_file(folder / "model.safetensors")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 8)
    for name, array in tensors.items():
        ours = names.get_name(name, try_suffixes=(".weight",))
        if ours in stored:
            with np.errstate(all="ignore"):
                plain = gguf.quants.dequantize(stored[ours], number)
            if ".attn_q." in ours or ".attn_k." in ours:
                plain = plain[halves(len(plain), 64).numpy()]
            assert plain.shape == array.shape
            tensors[name] = np.ascontiguousarray(plain)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_codes_keep_their_values_when_rows_are_reordered(tmp_path: Path) -> None:
    folder = write_text("llama", tmp_path / "folder")
    path = write_model(folder, tmp_path / "model.gguf", quantized("Q8_0"))
    checkpoint = open_checkpoint(path)
    weights = checkpoint.weights(checkpoint.config())
    entries = {entry.name: entry for _, found in weights.files for entry in found}
    for part in ("q_proj", "v_proj"):
        entry = entries[f"model.layers.0.self_attn.{part}.weight"]
        assert entry.coded == "8 bits"
        plain = torch.empty(entry.shape or ())
        weights.read(0, entry, plain)
        assert torch.equal(weights.codes(0, entry).values(), plain)
        original = load_file(folder / "model.safetensors")[entry.name]
        assert np.abs(plain.numpy() - original).max() < 0.01
    weights.close()
