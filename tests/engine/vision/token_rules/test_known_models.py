"""The rules of known models count as the engine does, and come from tests/published alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tools import known_models as tool

from fovea.core.errors import InvalidRequest
from fovea.core.media import DETAILS, PixelBudget
from fovea.engine.load import read_config
from fovea.engine.models.side_files import build_processors
from fovea.engine.vision.processor.base import ImageProcessor
from fovea.engine.vision.token_rules import all_settings, known_models, known_rule
from tests.support import published

SIBLINGS: dict[str, dict[str, Any]] = json.loads(tool.SIBLINGS.read_text())
FROM_FACTS = sorted(tool.published())
OWN_SETTINGS = sorted(model for model in SIBLINGS if "like" not in SIBLINGS[model])
WITHOUT_SETTINGS = {"LiquidAI/LFM2.5-VL-1.6B", "allenai/Molmo2-8B", "deepseek-ai/DeepSeek-OCR"}
"""Published repositories that have no rule: no known processor settings, or no processor in Fovea."""


def sizes(seed: str, count: int) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    most = [64, 700, 2000, 6000]
    return [(draw.randint(1, draw.choice(most)), draw.randint(1, draw.choice(most))) for _ in range(count)]


def outcome(count: Callable[..., int], *args: Any, **options: Any) -> int | str:
    """The number that a function returns, or the message with which it refuses."""
    try:
        return count(*args, **options)
    except InvalidRequest as error:
        return error.message


def compare(model: str, processor: ImageProcessor) -> None:
    """200 sizes with different levels, bounds and numbers of images must have equal outcomes."""
    rule = known_rule(model)
    assert rule is not None
    assert rule.name == model

    def planned(width: int, height: int, budget: PixelBudget, images: int) -> int:
        return processor.plan(width, height, budget, images=images).tokens

    draw = random.Random(model)
    counted = 0
    for width, height in sizes(model, 200):
        detail, images = draw.choice(DETAILS), draw.randint(1, 3)
        most = draw.choice([None, None, 10**6, 200_000])
        ours = outcome(rule.tokens, width, height, detail=detail, max_pixels=most, images=images)
        theirs = outcome(planned, width, height, PixelBudget(detail, None, most), images)
        assert ours == theirs, (width, height, detail, most, images)
        counted += isinstance(ours, int)
    assert counted > 60, "most sizes must be accepted"


@pytest.mark.parametrize("model", FROM_FACTS)
def test_a_rule_counts_as_the_engine_with_all_published_files(model: str, tmp_path: Path) -> None:
    folder = published.write(model.replace("/", "__"), tmp_path)
    config = read_config(folder)
    if config.model_type in tool.CONFIG_ALONE:
        # A loaded checkpoint needs the file. It cannot change the count: its edge must be the tower's.
        settings = {"size": 448, "crop_size": 448, "feature_extractor_type": "CLIPFeatureExtractor"}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    processor, _ = build_processors(folder, config)
    compare(model, processor)


@pytest.mark.parametrize("model", OWN_SETTINGS)
def test_a_rule_of_further_settings_counts_as_the_engine(model: str, tmp_path: Path) -> None:
    """transformers reads the configuration, and adds the defaults of its classes."""
    for part, name in published.FILES.items():
        if part in SIBLINGS[model]:
            (tmp_path / name).write_text(json.dumps(SIBLINGS[model][part]))
    processor, _ = build_processors(tmp_path, read_config(tmp_path))
    compare(model, processor)


@pytest.mark.parametrize("model", sorted(set(SIBLINGS) - set(OWN_SETTINGS)))
def test_a_model_with_the_settings_of_another_counts_as_that_one(model: str) -> None:
    ours, theirs = known_rule(model), known_rule(SIBLINGS[model]["like"])
    assert ours is not None
    assert theirs is not None
    assert ours.name == model
    for width, height in sizes(model, 20):
        assert outcome(ours.tokens, width, height) == outcome(theirs.tokens, width, height)


def test_every_sibling_has_a_source_and_a_known_relative() -> None:
    known = set(FROM_FACTS) | set(OWN_SETTINGS)
    for model, entry in SIBLINGS.items():
        assert len(entry["source"]) > 40, model
        assert ("config" in entry) != ("like" in entry), model
        assert entry.get("like", model) in known, model
    assert not set(FROM_FACTS) & set(SIBLINGS), "facts.json has the settings of these"


def test_the_file_in_the_package_is_what_the_tool_writes() -> None:
    assert tool.ASSET.read_text() == tool.text()


def test_known_models_are_all_that_have_settings() -> None:
    repositories = {published.facts(name)["repository"] for name in published.repositories()}
    assert repositories - set(known_models()) == WITHOUT_SETTINGS
    assert set(known_models()) == set(FROM_FACTS) | set(SIBLINGS)
    assert sum(len(entry.models) for entry in all_settings()) == len(known_models())


@pytest.mark.parametrize(
    ("model", "width", "height", "tokens"),
    [
        # Qwen2-VL, section 2.1: sides rounded to 28 pixels; 3136 to 12845056 pixels.
        ("Qwen/Qwen2.5-VL-7B-Instruct", 1024, 768, 37 * 27),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 28, 28, 4),
        ("Qwen/Qwen2-VL-2B-Instruct", 224, 224, 64),
        # Sides rounded to 32 pixels; 65536 to 16777216 pixels.
        ("Qwen/Qwen3-VL-8B-Instruct", 1024, 768, 32 * 24),
        ("Qwen/Qwen3.5-9B", 64, 64, 64),
        ("Qwen/Qwen3.8-27B", 8192, 8192, 128 * 128),
        ("google/gemma-3-27b-it", 1024, 768, 256),
        ("google/gemma-3-27b-it", 1, 1, 256),
        # One tile; two tiles and the view of the whole image.
        ("OpenGVLab/InternVL3-8B-hf", 448, 448, 256),
        ("OpenGVLab/InternVL3_5-8B", 896, 448, 3 * 256),
        # Patches of 16 pixels, and of 28.
        ("mistralai/Pixtral-12B-2409", 1024, 768, 64 * 48),
        ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", 1540, 1540, 55 * 55),
        # Its image states lie outside of the prompt.
        ("meta-llama/Llama-3.2-11B-Vision-Instruct", 1120, 1120, 1),
        # The limits count each pixel twice.
        ("zai-org/GLM-4.1V-9B-Thinking", 1024, 768, 37 * 27),
    ],
)
def test_counts_by_hand(model: str, width: int, height: int, tokens: int) -> None:
    rule = known_rule(model)
    assert rule is not None
    assert rule.tokens(width, height) == tokens
