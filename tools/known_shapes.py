"""Writes the shapes of known models that come with the package, from the facts of tests/published.

    python -m tools.known_shapes            # writes src/fovea/planner/known.json
    python -m tools.known_shapes --check    # exit code 1 if the file is not what would be written

Every model is built without weights from its published configuration. Sizes that facts.json does not have
are in shapes.json: `config` holds the fields that decide a shape, or `like` names another model and
`changes` what differs, by its path in the configuration. Each entry has its `source`.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from fovea.core.errors import UnsupportedModel
from fovea.core.names import BUNDLED, bundled_model
from fovea.engine.check import shape_of_config, shape_of_folder
from fovea.engine.load import read_config
from fovea.engine.models.registry import architecture
from fovea.engine.vision.processor.settings import stated_type
from fovea.planner.shape import ModelShape, to_json
from tools.asset import write_or_check

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "tests" / "published"
SHAPES = PUBLISHED / "shapes.json"
ASSET = ROOT / "src" / "fovea" / "planner" / "known.json"
STAND_INS = {"<IMG_CONTEXT>": 151667}
"""Ids of tokens for repositories whose sources show none. They do not change a shape."""


@cache
def published() -> dict[str, dict[str, Any]]:
    """Return what facts.json says of every published repository whose model Fovea supports, by hub id."""
    found = {}
    for path in sorted(PUBLISHED.glob("*/facts.json")):
        facts = json.loads(path.read_text(encoding="utf-8"))
        config = facts["config"]
        try:
            architecture(stated_type(config), config.get("vision_config", {}).get("model_type", ""))
        except UnsupportedModel:
            continue
        found[facts["repository"]] = facts
    return found


@cache
def sized() -> dict[str, dict[str, Any]]:
    """Return the entries of shapes.json, by hub id."""
    entries: dict[str, dict[str, Any]] = json.loads(SHAPES.read_text(encoding="utf-8"))
    return entries


def configuration(model: str) -> dict[str, Any]:
    """Return the published configuration of a model, a copy. Fields that decide no shape may lack."""
    entry = sized().get(model)
    if entry is None:
        return copy.deepcopy(published()[model]["config"])  # type: ignore[no-any-return]
    if "config" in entry:
        return copy.deepcopy(entry["config"])  # type: ignore[no-any-return]
    like = entry["like"]
    config = copy.deepcopy(published()[like]["config"]) if like == model else configuration(like)
    for path, value in entry.get("changes", {}).items():
        *sections, name = path.split(".")
        part = config
        for section in sections:
            part = part[section]
        part[name] = value
    return config


def shape(model: str) -> ModelShape:
    """Return the shape of a model of `every_model`."""
    if model == BUNDLED:
        return shape_of_folder(bundled_model(), BUNDLED)
    content = configuration(model)
    ids = {**STAND_INS, **published().get(model, {}).get("token_ids", {})}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.json").write_text(json.dumps(content))
        tokens = {str(number): {"content": token, "special": True} for token, number in ids.items()}
        (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": tokens}))
        config = read_config(folder)
        if _unties(content):
            config.tie_word_embeddings = False
        return shape_of_config(folder, config, model)


def every_model() -> tuple[str, ...]:
    """Return the names of all models that known.json has, sorted without regard to case."""
    return tuple(sorted({BUNDLED, *published(), *sized()}, key=str.lower))


def text() -> str:
    """Return the content of known.json, one model per line."""
    lines = [json.dumps(to_json(shape(model)), separators=(",", ":")) for model in every_model()]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def _unties(content: dict[str, Any]) -> bool:
    """Whether a configuration says that the head is not tied. transformers goes by the tensors instead."""
    parts = (content, content.get("text_config") or {}, content.get("llm_config") or {})
    stated = [part["tie_word_embeddings"] for part in parts if "tie_word_embeddings" in part]
    return bool(stated) and not stated[0]


def main() -> int:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    about = __doc__.splitlines()[0] if __doc__ else ""
    return write_or_check(ASSET, text, "tools/known_shapes.py", about)


if __name__ == "__main__":
    sys.exit(main())
