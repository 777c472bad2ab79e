"""Shapes of published models: they come from tests/published alone, and agree with published figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tools import known_shapes as tool

from fovea.core.names import spellings
from fovea.planner.shape import ModelShape, find, from_json, known_models, to_json
from tests.support.thorough import is_thorough

COUNTS: dict[str, dict[str, object]] = json.loads((tool.PUBLISHED / "parameters.json").read_text())
NEWEST = ("Qwen/Qwen3-VL-2B-Instruct", "google/gemma-4-E2B-it", "LiquidAI/LFM2-VL-450M")
"""Models that the default tests build again; the thorough run builds all."""


def shape(name: str) -> ModelShape:
    found = find(name)
    assert found is not None
    return found


@pytest.mark.parametrize("model", sorted(COUNTS))
def test_published_numbers_of_parameters(model: str) -> None:
    assert shape(model).parameters == COUNTS[model]["parameters"]


def test_llava_counts_without_the_last_layer_of_its_tower() -> None:
    """LLaVA-1.5 7B has 7063427072 parameters (a public program asserts it).

    Its last CLIP layer, and the norm after it, are not computed: two norms, four maps of attention and two of
    the feed-forward block.
    """
    norm, attention, block = 2 * 1024, 4 * (1024 * 1024 + 1024), 2 * 1024 * 4096 + 4096 + 1024
    left_out = 3 * norm + attention + block
    assert shape("llava-hf/llava-1.5-7b-hf").parameters == 7063427072 - left_out


def test_names_agree_with_sizes() -> None:
    """A name such as 32B is the number of parameters, rounded.

    Names of Gemma's E2B leave tables out, and those of LLaVA-OneVision the vision tower.
    """
    for model in known_models():
        size = [part for part in model.replace("_", "-").split("-") if part[:-1].replace(".", "").isdigit()]
        sizes = [float(part[:-1]) * (1e9 if part[-1] in "bB" else 1e6) for part in size if part[-1] in "bBM"]
        known = shape(model)
        total = known.parameters - ("onevision" in model) * known.weights("encoder")
        for named in sizes[:1]:
            assert 0.7 * named < total < 1.4 * named, model


def test_the_file_in_the_package_is_what_the_tool_writes() -> None:
    lines = tool.ASSET.read_text().splitlines()[1:-1]
    names = [json.loads(line.rstrip(","))["name"] for line in lines]
    assert names == list(tool.every_model())
    for model in tool.every_model() if is_thorough() else NEWEST:
        assert to_json(tool.shape(model)) == json.loads(lines[names.index(model)].rstrip(","))


def test_every_entry_has_a_source() -> None:
    for model, entry in tool.sized().items():
        assert len(entry["source"]) > 40, model
        assert ("config" in entry) != ("like" in entry), model
    for model, count in COUNTS.items():
        assert len(str(count["source"])) > 30, model


def test_no_two_known_models_share_a_name() -> None:
    names = [spelling for model in known_models() for spelling in spellings(model)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("qwen/qwen2.5-vl-72b-instruct:free", "Qwen/Qwen2.5-VL-72B-Instruct"),
        ("unsloth/Qwen3-VL-235B-A22B-Instruct-GGUF:Q4_K_M", "Qwen/Qwen3-VL-235B-A22B-Instruct"),
        ("RedHatAI/Llama-3.2-90B-Vision-Instruct-FP8-dynamic", "meta-llama/Llama-3.2-90B-Vision-Instruct"),
        ("fovea-tiny", "fovea-tiny"),
        ("Qwen/Qwen2.5-VL", None),
        ("", None),
    ],
)
def test_a_name_leads_to_its_model(name: str, model: str | None) -> None:
    found = find(name)
    assert (found and found.name) == model


def test_a_shape_survives_json() -> None:
    for model in known_models():
        assert from_json(json.loads(json.dumps(to_json(shape(model))))) == shape(model)


def test_caches_by_hand() -> None:
    """Qwen2.5-VL-7B: 28 layers, 4 KV heads of 128. Qwen3.5-9B: 8 of 32 layers have keys and values.

    Llama 3.2 11B: 32 layers with 8 KV heads of 128, and 8 layers that read 1601 states of a tile.
    """
    assert shape("Qwen/Qwen2.5-VL-7B-Instruct").kv_bytes_per_token(2) == 2 * 28 * 4 * 128 * 2
    hybrid = shape("Qwen/Qwen3.5-9B")
    assert hybrid.kv_bytes_per_token(2) == 2 * 8 * 4 * 256 * 2
    assert hybrid.state == (24 * 3 * 8192, 24 * 32 * 128 * 128)
    llama = shape("meta-llama/Llama-3.2-11B-Vision-Instruct")
    assert llama.cross is not None
    assert (llama.cross.count, llama.cross.rows_per_tile) == (8, 1601)
    assert llama.visual_token_numbers == 8 * 2 * 8 * 128
    assert llama.kv_bytes_per_token(2) == 2 * 32 * 8 * 128 * 2


def test_active_weights_of_experts() -> None:
    """30B-A3B: about 3e9 weights compute a token, the head of 0.3e9 included."""
    model = shape("Qwen/Qwen3-VL-30B-A3B-Instruct")
    assert (model.experts, model.active_experts) == (128, 8)
    assert 2.9e9 < model.active_weights + model.weights("head") < 3.2e9


def test_the_planner_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from fovea.planner import memory, recommend, shape; shape.find('fovea-tiny'); "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(tool.ROOT))
    assert done.returncode == 0
