"""Names of backends lead to known models, or to none."""

from __future__ import annotations

import pytest

from fovea.core.names import canonical, spellings
from fovea.engine.vision.token_rules import known_models, known_rule, rule_for

QWEN = "Qwen/Qwen2.5-VL-7B-Instruct"


@pytest.mark.parametrize(
    ("name", "model"),
    [
        (QWEN, QWEN),
        ("qwen/qwen2.5-vl-7b-instruct", QWEN),
        ("qwen/qwen2.5-vl-7b-instruct:free", QWEN),
        ("Qwen2.5-VL-7B-Instruct", QWEN),
        ("qwen2_5-vl-7b-instruct", QWEN),
        ("Qwen/Qwen2.5-VL-7B-Instruct-AWQ", QWEN),
        ("unsloth/Qwen2.5-VL-7B-Instruct-unsloth-bnb-4bit", QWEN),
        ("unsloth/Qwen2.5-VL-7B-Instruct-GGUF:Q4_K_M", QWEN),
        ("RedHatAI/Qwen2.5-VL-7B-Instruct-FP8-dynamic", QWEN),
        ("RedHatAI/Qwen2.5-VL-7B-Instruct-quantized.w4a16", QWEN),
        ("mlx-community/Qwen2.5-VL-7B-Instruct-4bit", QWEN),
        ("/models/Qwen2.5-VL-7B-Instruct/", QWEN),
        (
            "/hub/models--Qwen--Qwen2.5-VL-7B-Instruct/snapshots/cc594898137f460bfe9f0759e9844b3ce807cfb5",
            QWEN,
        ),
        ("cpatonn/Qwen3-VL-30B-A3B-Instruct-AWQ-4bit", "Qwen/Qwen3-VL-30B-A3B-Instruct"),
        ("Qwen/Qwen3-VL-235B-A22B-Thinking-FP8", "Qwen/Qwen3-VL-235B-A22B-Thinking"),
        ("nvidia/Qwen3.6-35B-A3B-NVFP4", "Qwen/Qwen3.6-35B-A3B"),
        ("bartowski/Qwen_Qwen3-VL-4B-Instruct-GGUF", "Qwen/Qwen3-VL-4B-Instruct"),
        ("google_gemma-3-27b-it-Q4_K_M.gguf", "google/gemma-3-27b-it"),
        ("google/gemma-3-4b-it-qat-q4_0-gguf", "google/gemma-3-4b-it"),
        ("ISTA-DASLab/gemma-3-27b-it-GPTQ-4b-128g", None),
        ("gaunernst/gemma-3-12b-it-int4-awq", "google/gemma-3-12b-it"),
        ("openbmb/MiniCPM-V-4.6", "openbmb/MiniCPM-V-4_6"),
        ("unsloth/Pixtral-12B-2409", "mistralai/Pixtral-12B-2409"),
        ("OpenGVLab/InternVL3-8B-hf-GPTQ-Int4", "OpenGVLab/InternVL3-8B-hf"),
    ],
)
def test_a_name_leads_to_its_model(name: str, model: str | None) -> None:
    rule = rule_for(name)
    assert (rule and rule.name) == model


@pytest.mark.parametrize(
    "name",
    [
        "",
        ":",
        "/",
        "-",
        ".",
        "awq",
        "gpt-4o",
        "Qwen/Qwen2.5-VL",
        "Qwen/Qwen2.5-VL-7B",
        "Qwen/Qwen2.5-7B-Instruct",
        "Qwen/Qwen2.5-VL-7B-Instruct-abliterated",
        "Qwen/Qwen3-VL-8B",
        "Qwen/Qwen3.5",
        "google/gemma-3-1b-it",
        "gemma3:4b",
        "OpenGVLab/InternVL3-8B",
        "my-Qwen2.5-VL-7B-Instruct",
        "llava",
        "~nobody/model",
        "a\0b",
        "x" * 10_000,
        "Qwen/Qwen2.5-VL-7B-Instruct" + "-awq" * 100_000,
    ],
)
def test_other_names_lead_to_none(name: str) -> None:
    assert rule_for(name) is None
    assert known_rule(name) is None


def test_no_two_known_models_share_a_name() -> None:
    names = [spelling for model in known_models() for spelling in spellings(model)]
    assert len(names) == len(set(names)) == 2 * len(known_models())


def test_no_ending_is_cut_off_a_known_model() -> None:
    """Otherwise the name of another model could become that of a known one."""
    for model in known_models():
        plain = model.partition("/")[2].lower().replace(".", "-").replace("_", "-")
        assert canonical(model) == plain
