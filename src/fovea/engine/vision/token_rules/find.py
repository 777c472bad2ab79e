"""Builds the rule of a model from its name, or from a folder with its settings."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fovea.core.errors import CheckpointError, FoveaError
from fovea.core.names import BUNDLED, bundled_model
from fovea.core.protocols import VisualTokenRule
from fovea.engine.files import read_json
from fovea.engine.vision.processor.base import ImageProcessor
from fovea.engine.vision.processor.model_type import stated_type
from fovea.engine.vision.processor.registry import build
from fovea.engine.vision.processor.settings import section
from fovea.engine.vision.token_rules.known import all_settings, find
from fovea.engine.vision.token_rules.rule import ProcessorRule
from fovea.media.token_rules import RULES

_TOWERS = {"idefics3": "idefics3_vision", "smolvlm": "smolvlm_vision"}
"""model_type of vision_config in published files, and in transformers' classes for the same towers."""
_CONFIG_ALONE = "internvl_chat"
"""The model_type whose config.json has all settings that decide the number of tokens."""


def rule_for(name_or_folder: str, *, honours_detail: bool = True) -> VisualTokenRule | None:
    """Return the rule of a model, or None if the name is not known.

    name_or_folder: a folder with the settings files of a checkpoint; a known hub id, also under another
        owner and with endings such as "-AWQ", "-FP8", "-GGUF" or ":free" (see `core.model_names.canonical`);
        the bundled model's name; "openai-tiles" or "estimate" (see `media.token_rules`). The file system is
        read, so the text must come from the operator or from a backend, never from a client.
    honours_detail: see `ProcessorRule`.

    A name is compared as a whole: no rule is guessed from a part of it.
    Raises CheckpointError or UnsupportedModel for a folder from whose files no rule can be built.
    """
    if name_or_folder in RULES:
        return RULES[name_or_folder]()
    if (folder := _folder(name_or_folder)) is not None:
        return folder_rule(folder, name=name_or_folder, honours_detail=honours_detail)
    return known_rule(name_or_folder, honours_detail=honours_detail)


def known_rule(name: str, *, honours_detail: bool = True) -> ProcessorRule | None:
    """Return the rule of a known model without reading any folder; None: the name is not known."""
    found = find(name)
    if found is None:
        return None
    model, place = found
    return ProcessorRule(model, _known_processor(place), honours_detail=honours_detail)


def folder_rule(folder: Path, *, name: str = "", honours_detail: bool = True) -> ProcessorRule:
    """Return the rule of a checkpoint's folder. It needs config.json and the image processor's settings.

    name: name of the rule; "": the folder's own.
    Raises CheckpointError or UnsupportedModel.
    """
    config = read_json(folder / "config.json")
    preprocessor = read_json(folder / "preprocessor_config.json")
    processor = read_json(folder / "processor_config.json")
    has_settings = preprocessor or isinstance(processor.get("image_processor"), dict)
    if not has_settings and stated_type(config) != _CONFIG_ALONE:
        raise CheckpointError(f"{folder} has no preprocessor_config.json")
    return ProcessorRule(
        name or folder.name,
        _processor(config, preprocessor, processor, str(folder)),
        honours_detail=honours_detail,
    )


def _folder(name: str) -> Path | None:
    """Return the checkpoint's folder that a text names; None: it names none."""
    if name == BUNDLED:
        return bundled_model()
    try:
        folder = Path(name).expanduser()
        return folder if name and (folder / "config.json").is_file() else None
    except (OSError, RuntimeError, ValueError):  # no path of this system, such as a name that is too long
        return None


@cache
def _known_processor(place: int) -> ImageProcessor:
    """Build the processor of settings by their place. Models with equal settings share it."""
    entry = all_settings()[place]
    return _processor(entry.config, entry.preprocessor, entry.processor, ", ".join(entry.models))


def _processor(
    config: Mapping[str, Any], preprocessor: Mapping[str, Any], processor: Mapping[str, Any], where: str
) -> ImageProcessor:
    """Build the processor of settings files. where: their place, for errors."""
    tower = section(config, "vision_config")
    kind = str(tower.get("model_type"))
    if kind in _TOWERS:
        config = {**config, "vision_config": {**tower, "model_type": _TOWERS[kind]}}
    try:
        return build(stated_type(config), preprocessor, config, processor)
    except FoveaError:
        raise
    except Exception as error:
        raise CheckpointError(f"{where}: no image processor can be built of its settings: {error}") from error
