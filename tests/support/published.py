"""The facts of tests/published: settings and tensors of published checkpoints, as folders without weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from fovea.core.errors import UnsupportedModel
from fovea.engine.models.registry import architecture
from fovea.engine.models.targets import TensorEntry
from fovea.engine.vision.processor.settings import stated_type

FOLDER = Path(__file__).parents[1] / "published"
FILES = {
    "config": "config.json",
    "preprocessor": "preprocessor_config.json",
    "video_preprocessor": "video_preprocessor_config.json",
    "processor": "processor_config.json",
    "generation": "generation_config.json",
}
"""The file that holds the settings of each part of facts.json."""


STAND_INS = {"<IMG_CONTEXT>": 151671}
"""Ids of tokens for repositories of which no source showed any."""


def repositories() -> list[str]:
    """Names of the folders of all repositories."""
    return sorted(path.name for path in FOLDER.iterdir() if path.is_dir())


@cache
def facts(repository: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / repository / "facts.json").read_text())
    return content


@cache
def tensors(repository: str) -> dict[str, Any]:
    """tensors.json; empty if no source listed the tensors."""
    path = FOLDER / repository / "tensors.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def is_supported(repository: str) -> bool:
    """Whether Fovea knows the model_type."""
    config = facts(repository)["config"]
    tower = config.get("vision_config", {}).get("model_type", "")
    try:
        architecture(stated_type(config), tower)
    except UnsupportedModel:
        return False
    return True


def write(repository: str, folder: Path) -> Path:
    """Write the published settings, and the ids of special tokens, with which some of them are read."""
    known = facts(repository)
    for part, name in FILES.items():
        if part in known:
            (folder / name).write_text(json.dumps(known[part]))
    ids = known.get("token_ids", STAND_INS)
    decoder = {str(number): {"content": token, "special": True} for token, number in ids.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    return folder


def is_whole(repository: str) -> bool:
    """Whether the list of tensors has them all."""
    return "count" in tensors(repository)


def entries(repository: str) -> list[TensorEntry]:
    """The published tensors. Where no source showed a shape, only the name is known."""
    listed = tensors(repository)
    types = {"bfloat16": "BF16", "float32": "F32", "float16": "F16"}
    found = []
    for pattern, shape in listed.get("tensors", {}).items():
        kind = types[listed.get("dtypes", {}).get(pattern, "bfloat16")]
        for name in _expand(pattern, listed):
            found.append(TensorEntry(name) if shape is None else TensorEntry(name, kind, tuple(shape)))
    return found


def _expand(pattern: str, listed: dict[str, Any]) -> Iterator[str]:
    name = pattern.split(" @ ")[0]
    layers = _numbers(listed["layers"][pattern]) if "{layer}" in name else [0]
    experts = range(listed["experts"]) if "{expert}" in name else [0]
    for layer in layers:
        for expert in experts:
            yield name.replace("{layer}", str(layer)).replace("{expert}", str(expert))


def _numbers(text: str) -> list[int]:
    """Numbers of a list such as "0-2,5"."""
    ranges = [re.fullmatch(r"(\d+)(?:-(\d+))?", part) for part in text.split(",")]
    return [n for match in ranges if match for n in range(int(match[1]), int(match[2] or match[1]) + 1)]
