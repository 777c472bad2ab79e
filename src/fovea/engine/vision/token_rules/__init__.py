"""Counts of visual tokens by the rules of known models, without a checkpoint. It must not import torch.

A rule counts with the image processor of a model. known.json has the settings of published models that decide
the number of tokens; `tools/known_models.py` writes it from the facts of `tests/published`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from fovea.core.errors import CheckpointError, FoveaError
from fovea.core.media import Detail, PixelBudget
from fovea.core.names import BUNDLED, bundled_model, canonical, spellings
from fovea.core.protocols import VisualTokenRule
from fovea.engine.files import read_json
from fovea.engine.vision.processor import build
from fovea.engine.vision.processor.base import ImageProcessor, VisualPlan
from fovea.engine.vision.processor.settings import section, stated_type
from fovea.media.token_rules import RULES

FILE = Path(__file__).with_name("known.json")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of published models that decide the number of visual tokens.

    models: hub ids of all models that have these settings.
    config, preprocessor, processor: parts of config.json, preprocessor_config.json, processor_config.json.
    """

    models: tuple[str, ...]
    config: Mapping[str, Any] = field(repr=False)
    preprocessor: Mapping[str, Any] = field(repr=False)
    processor: Mapping[str, Any] = field(repr=False)


@cache
def all_settings() -> tuple[Settings, ...]:
    """Return the settings of all known models, in the order of the file."""
    return tuple(
        Settings(tuple(entry["models"]), entry["config"], entry["preprocessor"], entry["processor"])
        for entry in json.loads(FILE.read_text(encoding="utf-8"))
    )


def known_models() -> tuple[str, ...]:
    """Return the hub ids of all known models, sorted without regard to case."""
    return tuple(sorted((model for entry in all_settings() for model in entry.models), key=str.lower))


def find(name: str) -> tuple[str, int] | None:
    """Return the hub id of the known model that a name means, and its place in `all_settings`.

    None: no known model has this name.
    """
    return _index().get(canonical(name))


@cache
def _index() -> Mapping[str, tuple[str, int]]:
    """Known models by canonical name. A test checks that no two models share one."""
    return {
        spelling: (model, place)
        for place, entry in enumerate(all_settings())
        for model in entry.models
        for spelling in spellings(model)
    }


SIZES = 4096
"""Different sizes that a rule remembers by default; about 1 MB."""


class ProcessorRule:
    """Counts visual tokens as a model's own image processor plans them. Thread-safe.

    The count is that of `VisualPlan.tokens`: positions of the prompt that are the model's image token. Text
    between them (row breaks of Pixtral, marks of tiles) is not counted. For Llama 3.2 Vision it is 1, because
    its image states lie outside of the prompt.

    Clients repeat sizes, so the counts of the last `sizes` different calls are kept.
    """

    __slots__ = ("_count", "_processor", "honours_detail", "name")

    def __init__(
        self, name: str, processor: ImageProcessor, *, honours_detail: bool = True, sizes: int = SIZES
    ) -> None:
        """Wrap a processor.

        name: name of the model, for logs.
        honours_detail: whether the backend reads `detail`, as Fovea does. vLLM and SGLang ignore it: all
            their images have as many tokens as the model's own limit allows.
        sizes: how many counts are kept.
        """
        self.name = name
        self.honours_detail = honours_detail
        self._processor = processor
        # With types, so that true is not found as 1: the processor refuses it as a number of pixels.
        self._count = lru_cache(sizes, typed=True)(self._plan)

    def tokens(
        self,
        width: int,
        height: int,
        *,
        detail: Detail = "auto",
        images: int = 1,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> int:
        """Count the tokens of an image, see `VisualTokenRule.tokens`."""
        if not self.honours_detail:
            detail = "auto"
        try:
            return self._count(width, height, detail, images, min_pixels, max_pixels)
        except TypeError:  # a list, for example: it has no hash, and the processor refuses it by name
            return self._plan(width, height, detail, images, min_pixels, max_pixels)

    def plan(self, width: int, height: int) -> VisualPlan:
        """Return the visual plan of a single image without a budget of its own."""
        return self._processor.plan(width, height, PixelBudget())

    def cache_info(self) -> Any:
        """Hits, misses and size of the cache, see `functools.lru_cache`."""
        return self._count.cache_info()

    def _plan(
        self,
        width: int,
        height: int,
        detail: Detail,
        images: int,
        min_pixels: int | None,
        max_pixels: int | None,
    ) -> int:
        budget = PixelBudget(detail, min_pixels, max_pixels)
        return self._processor.plan(width, height, budget, images=images).tokens


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
