"""The check says the same as loading, but names all faults, and reads no weight."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fovea.cli.models import check_table
from fovea.core.errors import CheckpointError, ConfigError
from fovea.engine import check as prompt_check
from fovea.engine.check import MOST_GROUPS, check_checkpoint, group_problems, run_within
from fovea.engine.config import EngineConfig
from fovea.engine.load import build_model, count_parameters, load_model, read_config
from fovea.engine.models.targets import Problem
from tests.engine.models.test_checkpoints import DAMAGES as FAULTS
from tests.engine.models.test_checkpoints import WEIGHTS, Damage, edit_json, edit_weights, shards
from tests.engine.models.test_hostile_checkpoints import DAMAGES as ATTACKS
from tests.fuzz.targets.checkpoint import FILES, seeds
from tests.support.checkpoints import ARCHITECTURES, write
from tests.support.hub import hub_cache
from tests.support.thorough import is_thorough, others_slow

CONFIG = EngineConfig.of(dtype="float32", device="cpu", kv_blocks=16)
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(qwen: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint, for the test to damage."""
    return Path(shutil.copytree(qwen, tmp_path / "checkpoint"))


def messages(folder: Path) -> list[str]:
    return [finding.message for finding in check_checkpoint(str(folder)).errors]


USUAL = ("qwen3_vl", "qwen3_5_moe", "gemma4", "mllama", "idefics3", "internvl_chat", "pixtral")
"""Architectures of the default run.

They have videos, experts and states, kinds of layers, states of images, text between tiles, names of
their own, and a tower that is named beside the model.
"""


@pytest.mark.parametrize("architecture", others_slow(ARCHITECTURES, USUAL))
def test_a_checkpoint_that_loads_has_no_findings(architecture: str, tmp_path: Path) -> None:
    folder = write(architecture, tmp_path, dtype=torch.bfloat16)
    report = check_checkpoint(str(folder))
    assert (report.errors, report.warnings, report.unchecked) == ([], [], [])
    loaded = load_model(str(folder), CONFIG)
    decoder, item = loaded.model.decoder.config, torch.bfloat16.itemsize
    expected = {
        "architecture": loaded.info.architecture,
        "parameters": loaded.info.parameters,
        "dtype": "bfloat16",
        "context": loaded.info.max_context,
        "kv_bytes_per_token": decoder.kv_bytes_per_token(item),
        "state_bytes_per_sequence": decoder.state_bytes(item),
        "videos": loaded.videos is not None,
    }
    assert {name: report.facts[name] for name in expected} == expected


FOUND = {"missing tensor": "decoder.embed_tokens.weight is missing"}
"""Messages that differ from those of loading."""
DAMAGES = {
    **{name: (damage, FOUND.get(name, message)) for name, (damage, _, message) in FAULTS.items()},
    **ATTACKS,
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES.keys())
def test_every_fault_that_loading_refuses_is_a_finding(folder: Path, damage: Damage, message: str) -> None:
    damage(folder)
    report = check_checkpoint(str(folder))
    found = [finding.message for finding in report.errors]
    assert any(re.search(message, text) for text in found), found
    assert sum(map(len, found)) < 20_000
    json.dumps(report.as_json())


def test_all_faults_are_found_at_once(folder: Path) -> None:
    """Loading stops at the first; a user would repair a folder one start at a time."""

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(3):
            del tensors[f"model.language_model.layers.{layer}.mlp.up_proj.weight"]
            tensors[f"adapter.{layer}.lora"] = torch.zeros(2)
        tensors["model.language_model.norm.weight"] = torch.zeros(5)

    edit_weights(spoil)(folder)
    (folder / "preprocessor_config.json").unlink()
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 9}')
    (folder / "tokenizer.json").unlink()
    report = check_checkpoint(str(folder))
    assert [finding.part for finding in report.errors] == [
        *("weights",) * 3,
        "generation",
        "images",
        "prompt",
    ]
    texts = [finding.message for finding in report.errors]
    assert "3 tensors 'adapter.N.lora', N from 0 to 2 are not part of this architecture" in texts
    assert "3 tensors 'decoder.layers.N.mlp.up_proj.weight', N from 0 to 2 are missing" in texts
    assert any("has shape [5], the configuration says [64]" in text for text in texts)


def test_without_shards_the_names_of_the_index_are_checked(folder: Path) -> None:
    names = shards(folder)
    for name in names:
        (folder / name).unlink()
    report = check_checkpoint(str(folder))
    assert [finding.message.split(": ")[1] for finding in report.errors] == ["3 of 3 shards are missing"]
    assert "shapes and types of" in report.unchecked[0].message
    edit_json(INDEX, lambda c: c["weight_map"].pop("model.visual.merger.norm.weight") and None)(folder)
    edit_json(INDEX, lambda c: c["weight_map"].update(other=names[0]))(folder)
    assert messages(folder)[1:] == [
        f"{names[0]}: tensor 'other' is not part of this architecture",
        "vision.merger.norm.weight is missing",
    ]


def test_a_broken_shard_does_not_make_its_tensors_missing(folder: Path) -> None:
    names = shards(folder)
    (folder / names[1]).write_bytes(b"<html>")
    (text,) = messages(folder)
    assert "is not a safetensors file" in text
    (folder / INDEX).unlink()
    report = check_checkpoint(str(folder))
    assert len(report.errors) == 1
    assert any("which tensors are missing" in finding.message for finding in report.unchecked)


def test_no_weight_is_read(folder: Path) -> None:
    """The values are cut off, and then replaced by a hole in the file."""
    path = folder / WEIGHTS
    size, data = path.stat().st_size, path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(data[:header])
    assert "is truncated" in messages(folder)[0]
    os.truncate(path, size)
    assert messages(folder) == []


def test_unknown_ways_to_quantize_are_refused_by_name(folder: Path) -> None:
    """Their tensors have other names; a list of these would hide the reason."""
    edit_json("config.json", lambda c: c.update(quantization_config={"quant_method": "hqq"}))(folder)
    report = check_checkpoint(str(folder))
    (error,) = report.errors
    assert "is quantized by 'hqq'; accepted: awq, bitsandbytes, compressed-tensors" in error.message
    assert [finding.part for finding in report.unchecked] == ["weights"]


def text_only(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['role'] }}{% endfor %}")


def twice(folder: Path) -> None:
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("<|image_pad|>", "<|image_pad|><|image_pad|>"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (text_only, "the prompt holds 0 image markers '<|image_pad|>' for 1 images"),
        (twice, "the prompt holds 2 image markers '<|image_pad|>' for 1 images"),
    ],
)
def test_a_template_must_write_one_marker_for_each_image(folder: Path, damage: Damage, message: str) -> None:
    """Such a folder loads, and then every question about an image fails."""
    damage(folder)
    assert message in messages(folder)[0]


def test_a_folder_without_a_template_loads(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    report = check_checkpoint(str(folder))
    assert report.loads
    assert [finding.message.split(":")[0] for finding in report.warnings] == ["there is no chat template"]


def test_tokens_outside_the_vocabulary(folder: Path) -> None:
    def shrink(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("lm_head.weight", "model.language_model.embed_tokens.weight"):
            tensors[name] = tensors[name][:5].clone()

    edit_weights(shrink)(folder)
    edit_json("config.json", lambda c: c["text_config"].update(vocab_size=5))(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [300]}')
    edit_json("tokenizer_config.json", lambda c: c.pop("eos_token") and None)(folder)
    report = check_checkpoint(str(folder))
    assert "config.json: image_token_id is 5; accepted: 0 to 4 (vocab_size)" in report.errors[0].message
    told = [finding.message for finding in report.warnings]
    assert told[0].startswith("the tokenizer has 358 tokens and the model 5")
    assert told[1].startswith("no token ends an answer: eos_token_id is [300]")


def test_a_template_that_does_not_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_check, "SECONDS", 0.2)
    loops = "{% for a in range(6000) %}{% for b in range(6000) %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(loops)
    assert "the tokenizer or the chat template did not end within 0.2 seconds" in messages(folder)[0]


def test_the_error_of_a_bounded_step_is_raised() -> None:
    def fail() -> None:
        raise ConfigError("no")

    assert run_within(5, lambda: 3) == 3
    with pytest.raises(ConfigError, match="no"):
        run_within(5, fail)


def test_a_hub_id_is_checked_in_the_local_cache(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is downloaded, so the check can run before a download of many gigabytes."""
    snapshot, _ = hub_cache(qwen, tmp_path)
    (snapshot.parent.parent / "refs" / "main").write_text(snapshot.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert check_checkpoint("org/name").loads
    (snapshot / WEIGHTS).unlink()
    assert "holds no *.safetensors file" in check_checkpoint("org/name").errors[0].message
    with pytest.raises(CheckpointError, match=r"'org/other' is not on this machine"):
        check_checkpoint("org/other")


def test_many_faulty_tensors_stay_readable() -> None:
    problems = [Problem("unknown", f"x.{n}.y", "is not part", "a") for n in (3, 40, 7)]
    problems += [Problem("shape", f"h.{n}.w", "has shape [1], the", "a") for n in (1, 2)]
    assert group_problems([*problems, Problem("missing", "x.3.y", "is missing")]) == [
        "3 tensors 'x.N.y', N from 3 to 40 are not part of this architecture",
        "2 tensors 'h.N.w', N from 1 to 2 have shape [1], the",
        "x.3.y is missing",
    ]


def test_thousands_of_faults_are_counted(folder: Path) -> None:
    edit_weights(lambda t: t.update({"x" * n: torch.zeros(1) for n in range(1, 100)}))(folder)
    found = messages(folder)
    assert len(found) == MOST_GROUPS + 1
    assert found[-1] == f"{99 - MOST_GROUPS} more kinds of tensors do not fit"


LARGEST: dict[str, Any] = {
    "model_type": "qwen3_vl_moe",
    "image_token_id": 151655,
    "video_token_id": 151656,
    "text_config": {
        "model_type": "qwen3_vl_moe_text", "hidden_size": 4096, "num_hidden_layers": 94, "head_dim": 128,
        "num_attention_heads": 64, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536, "intermediate_size": 12288, "vocab_size": 151936,
        "rope_theta": 5000000, "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20]},
        "max_position_embeddings": 262144,
    },
    "vision_config": {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
        "out_hidden_size": 4096, "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24],
    },
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(("layers", "billions"), [pytest.param(94, 236, marks=pytest.mark.slow), (16, 42)])
def test_the_largest_model_needs_no_memory_and_few_modules(
    tmp_path: Path, layers: int, billions: int
) -> None:
    """The sizes are those of Qwen3-VL-235B-A22B. The experts of a layer are two tensors, not 384 modules."""
    text = {**LARGEST["text_config"], "num_hidden_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps({**LARGEST, "text_config": text}))
    model = build_model(tmp_path, read_config(tmp_path), torch.device("meta"), torch.bfloat16)
    tensors = [*model.parameters(), *model.buffers()]
    assert all(tensor.is_meta for tensor in tensors)
    assert round(count_parameters(model) / 1e9) == billions
    assert sum(1 for _ in model.modules()) < 300 + 29 * layers
    names = {f"shard-{layer:05}.safetensors" for layer in range(layers)}
    expert = "model.language_model.layers.{}.mlp.experts.{}.{}_proj.weight"
    places = {
        expert.format(layer, number, part): f"shard-{layer:05}.safetensors"
        for layer in range(layers)
        for number in range(128)
        for part in ("gate", "up", "down")
    }
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    report = check_checkpoint(str(tmp_path))
    assert f"{len(names)} of {len(names)} shards are missing" in report.errors[0].message
    missing = [f.message for f in report.errors if f.message.endswith("missing")]
    gates = f"{layers} tensors 'decoder.layers.N.mlp.gate.weight', N from 0 to {layers - 1} are missing"
    assert gates in missing
    assert not any("experts" in text for text in missing)


def test_broken_files_of_every_kind_end_in_findings(folder: Path) -> None:
    """The inputs are those with which fuzzing begins: one damaged file each."""
    for seed in seeds() if is_thorough() else seeds()[::8]:
        name, content = FILES[seed[0]], seed[1:]
        path = folder / name
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(content)
        report = check_checkpoint(str(folder))
        assert max(map(len, check_table(report).splitlines())) <= 80
        if before is None:
            path.unlink()
        else:
            path.write_bytes(before)
    assert check_checkpoint(str(folder)).loads
