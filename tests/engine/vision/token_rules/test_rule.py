"""Rules from folders, their caches, and what importing them costs."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from fovea.core.errors import CheckpointError, InvalidImage, InvalidRequest, UnsupportedModel
from fovea.core.media import PixelBudget
from fovea.core.names import bundled_model
from fovea.engine.load import read_config
from fovea.engine.models.side_files import build_processors
from fovea.engine.vision.processor import build
from fovea.engine.vision.token_rules import ProcessorRule, folder_rule, known_rule, rule_for
from tests.support import published
from tests.support.checkpoints import ARCHITECTURES, write
from tests.support.thorough import examples

QWEN = "Qwen/Qwen2.5-VL-7B-Instruct"


def rule(honours_detail: bool = True) -> ProcessorRule:
    found = known_rule(QWEN, honours_detail=honours_detail)
    assert found is not None
    return found


def test_detail_and_bounds() -> None:
    ours = rule()
    assert ours.tokens(1024, 768) == ours.tokens(1024, 768, detail="high") == 999
    assert ours.tokens(1024, 768, detail="low") <= 64
    assert ours.tokens(1024, 768, max_pixels=28 * 28 * 100) <= 100
    assert ours.tokens(100, 100, min_pixels=28 * 28 * 100) >= 100


def test_backends_that_ignore_detail_count_all_tokens() -> None:
    ours = rule(honours_detail=False)
    assert ours.tokens(1024, 768, detail="low") == 999
    assert ours.tokens(1024, 768, max_pixels=28 * 28 * 100) <= 100


def test_refusals_are_those_of_the_processor() -> None:
    ours = rule()
    with pytest.raises(InvalidImage, match="200 times"):
        ours.tokens(1000, 1)
    with pytest.raises(InvalidImage, match="at least 1"):
        ours.tokens(0, 10)
    with pytest.raises(InvalidRequest, match="max_pixels is 1"):
        ours.tokens(10, 10, max_pixels=1)
    with pytest.raises(InvalidRequest, match="max_pixels is True"):
        ours.tokens(10, 10, max_pixels=True)
    with pytest.raises(InvalidRequest, match=r"max_pixels is \[1\]"):
        ours.tokens(10, 10, max_pixels=[1])  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="detail is 'huge'"):
        ours.tokens(10, 10, detail="huge")  # type: ignore[arg-type]


def test_repeated_sizes_are_planned_once_and_the_cache_is_bounded() -> None:
    config = published.facts("Qwen__Qwen2.5-VL-7B-Instruct")
    processor = build("qwen2_5_vl", config["preprocessor"], config["config"])
    ours = ProcessorRule("name", processor, sizes=8)
    for _ in range(5):
        assert ours.tokens(300, 200) == ours.tokens(300, 200, detail="auto")
    assert ours.cache_info()[:2] == (9, 1)
    for side in range(100, 200):
        ours.tokens(side, side)
    assert ours.cache_info().currsize == 8


def test_rules_of_one_model_share_nothing_but_settings() -> None:
    first, second = rule(), rule()
    first.tokens(300, 200)
    assert second.cache_info().currsize == 0


def test_the_bundled_model() -> None:
    ours = rule_for("fovea-tiny")
    assert ours is not None
    assert ours.name == "fovea-tiny"
    assert ours.tokens(1024, 768) == 32 * 24
    assert folder_rule(bundled_model()).tokens(1024, 768) == 32 * 24


def test_a_folder_needs_settings_and_no_weights(tmp_path: Path) -> None:
    folder = published.write("google__gemma-4-E2B-it", tmp_path)
    ours = rule_for(str(folder))
    theirs = known_rule("google/gemma-4-E2B-it")
    assert ours is not None
    assert theirs is not None
    assert ours.name == str(folder)
    assert [ours.tokens(side, 700) for side in range(1, 2000, 97)] == [
        theirs.tokens(side, 700) for side in range(1, 2000, 97)
    ]


def test_a_folder_of_internvl_needs_config_json_alone(tmp_path: Path) -> None:
    folder = published.write("OpenGVLab__InternVL3_5-8B", tmp_path)
    assert folder_rule(folder).tokens(448, 448) == 256


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "qwen2_vl"}))
    with pytest.raises(CheckpointError, match=r"has no preprocessor_config\.json"):
        rule_for(str(tmp_path))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"patch_size": "big"}))
    with pytest.raises(CheckpointError, match="patch_size is 'big'"):
        rule_for(str(tmp_path))
    config.write_text(json.dumps({"model_type": "unheard_of"}))
    with pytest.raises(UnsupportedModel, match="unheard_of"):
        rule_for(str(tmp_path))
    config.write_text("[1")
    with pytest.raises(CheckpointError, match="is not JSON"):
        rule_for(str(tmp_path))
    config.write_text(json.dumps({"model_type": "idefics3", "scale_factor": [2], "vision_config": {}}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"resample": 3}))
    with pytest.raises(CheckpointError, match="no image processor can be built of its settings"):
        rule_for(str(tmp_path))


def test_an_empty_name_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published.write("google__gemma-4-E2B-it", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert rule_for("") is None


def test_counting_imports_neither_torch_nor_transformers() -> None:
    script = (
        "import sys\n"
        "from fovea.engine.vision.token_rules import known_models, rule_for\n"
        "assert all(rule_for(name).tokens(640, 480) for name in (*known_models(), 'fovea-tiny'))\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'safetensors', 'pydantic', 'httpx'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_the_rule_of_a_folder_counts_as_the_engine(architecture: str, tmp_path: Path) -> None:
    """Every family, 500 random sizes."""
    folder = write(architecture, tmp_path)
    config = read_config(folder)
    processor, _ = build_processors(folder, config)
    ours, draw = folder_rule(folder), random.Random(architecture)
    for _ in range(examples(500)):
        width, height = (draw.randint(1, draw.choice((64, 700, 2000))) for _ in range(2))
        try:
            tokens = ours.tokens(width, height)
        except InvalidImage:
            with pytest.raises(InvalidImage):
                processor.plan(width, height, PixelBudget())
            continue
        assert tokens == processor.plan(width, height, PixelBudget()).tokens, (width, height)
