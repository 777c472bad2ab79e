"""Reads the settings of known models, which come with the package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fovea.core.names import canonical, spellings

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
