"""Published checkpoints would load: their settings, names and shapes are those that Fovea expects.

Nothing is downloaded. tests/published holds the facts, and says where they come from. The models are built
without storage. A repository whose model_type becomes supported is tested from then on without a change here,
except to UNSUPPORTED.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fovea.core.media import PixelBudget
from fovea.engine.layers.config import Attention
from fovea.engine.load import build_model, read_config, untie_own_head
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.side_files import build_processors, default_sampling
from fovea.engine.models.targets import Assignment, assign
from tests.support import published

Build = Callable[[str], VisionLanguageModel]
UNSUPPORTED = {
    "allenai__Molmo2-8B",
    "deepseek-ai__DeepSeek-OCR",
}
REPOSITORIES = [
    pytest.param(name, marks=() if published.is_supported(name) else pytest.mark.skip("not supported yet"))
    for name in published.repositories()
]
every_repository = pytest.mark.parametrize("repository", REPOSITORIES)
TOKEN = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")


def test_the_list_of_unsupported_repositories_is_exact() -> None:
    assert {name for name in published.repositories() if not published.is_supported(name)} == UNSUPPORTED


def config_of(repository: str, folder: Path) -> Any:
    return read_config(published.write(repository, folder))


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """A function from a repository to its model, which is built once."""

    @cache
    def build_once(repository: str) -> VisionLanguageModel:
        folder = tmp_path_factory.mktemp(repository)
        config = config_of(repository, folder)
        untie_own_head(config, (entry.name for entry in published.entries(repository)))
        return build_model(folder, config, torch.device("meta"), torch.bfloat16)

    return build_once


def assignment(repository: str, model: VisionLanguageModel) -> Assignment:
    targets = {name: tuple(tensor.shape) for name, tensor in model.checkpoint_targets()}
    files = [("model.safetensors", published.entries(repository))]
    return assign(files, targets, model.ignored, model.renames, model.fused_tensors())


@every_repository
def test_every_published_tensor_has_its_place(repository: str, build: Build) -> None:
    entries = published.entries(repository)
    found = assignment(repository, build(repository))
    assert [str(problem) for problem in found.problems if problem.kind != "missing"] == []
    assert len(found.fills) + len(found.ignored) == len(entries)
    if published.is_whole(repository):
        assert len(entries) == published.tensors(repository)["count"]
        assert found.missing == []


@every_repository
def test_the_decoder_has_the_published_sizes(repository: str, build: Build) -> None:
    """Settings have moved between versions of transformers. One that is lost is replaced by a default."""
    config = published.facts(repository)["config"]
    text = config.get("text_config") or config.get("llm_config") or config
    decoder = build(repository).decoder.config
    attention = next(layer.mixer for layer in decoder.layers if isinstance(layer.mixer, Attention))
    actual = {
        "hidden_size": decoder.hidden,
        "num_hidden_layers": len(decoder.layers),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "rms_norm_eps": decoder.eps,
        "norm_eps": decoder.eps,
        "vocab_size": decoder.vocab_size,
        "max_position_embeddings": decoder.max_positions,
    }
    assert {name: value for name, value in actual.items() if name in text} == {
        name: text[name] for name in actual if name in text
    }
    inverse = decoder.rotaries[0].inverse
    parameters = text.get("rope_parameters", {})
    # With parameters for each kind of layer, the first are those of layers without a window.
    theta = text.get("rope_theta") or parameters.get("full_attention", parameters).get("rope_theta")
    if theta is not None:
        assert inverse[1] ** -len(inverse) == pytest.approx(theta, rel=1e-4)


@every_repository
def test_an_image_is_planned_with_the_published_marker(repository: str, tmp_path: Path) -> None:
    known = published.facts(repository)
    config = config_of(repository, tmp_path)
    if "preprocessor" not in known and "image_processor" not in known.get("processor", {}):
        pytest.skip("no source showed the settings of the image processor")
    processor, _ = build_processors(tmp_path, config)
    plan = processor.plan(1000, 700, PixelBudget())
    counts = Counter(TOKEN.findall(plan.text))
    marker = counts.most_common(1)[0][0]
    assert plan.tokens == counts[marker]
    assert plan.rows > 100
    if "token_ids" in known:
        assert known["token_ids"][marker] == config.image_token_id
    if "prompt" in known:
        # The template writes the token that is repeated, or one that stands before all of them (Gemma 3).
        written = known["prompt"]["image"]
        assert written.count(marker) == 1 or plan.text.count(written) == 1


@every_repository
def test_the_defaults_of_sampling_are_accepted(repository: str, tmp_path: Path) -> None:
    defaults = default_sampling(published.write(repository, tmp_path))
    generation = published.facts(repository).get("generation", {})
    assert bool(defaults) == ("do_sample" in generation)


def test_lighton_ocr_has_no_text_between_the_rows_of_an_image(tmp_path: Path) -> None:
    """Its config.json says model_type mistral3, so its images got the line breaks of Mistral 3.

    The model was not trained with them. The class in `architectures` tells it from Mistral 3.
    """
    config = config_of("lightonai__LightOnOCR-1B-1025", tmp_path)
    assert config.model_type == "lighton_ocr"
    plan = build_processors(tmp_path, config)[0].plan(1000, 700, PixelBudget())
    assert plan.text == "<|image_pad|>" * plan.tokens
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**content, "architectures": ["Mistral3ForConditionalGeneration"]})
    )
    config = read_config(tmp_path)
    assert config.model_type == "mistral3"
    plan = build_processors(tmp_path, config)[0].plan(1000, 700, PixelBudget())
    assert plan.text.endswith("<|vision_end|>")
