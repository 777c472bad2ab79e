"""Shapes of published models, which come with the package. `tools/known_shapes.py` writes known.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fovea.core.names import canonical, spellings
from fovea.planner.shape import AttentionLayers, CrossLayers, Maps, ModelShape, Tower

FILE = Path(__file__).with_name("known.json")


def known_models() -> tuple[str, ...]:
    """Return the hub ids of all models whose shapes are known, sorted without regard to case."""
    return tuple(sorted(_entries(), key=str.lower))


def find(name: str) -> ModelShape | None:
    """Return the shape of the known model that a name means; None: no known model has this name.

    name: hub id, also under another owner and with endings such as "-AWQ", "-FP8", "-GGUF" or ":free" (see
        `core.model_names.canonical`). It is compared as a whole: no shape is guessed from a part of it.
    """
    model = _index().get(canonical(name))
    return None if model is None else _shape(model)


def to_json(shape: ModelShape) -> dict[str, Any]:
    """Return a shape as values of JSON. Fields with their default are left out."""
    return _without_defaults(
        shape,
        maps={part: [_positional(item) for item in items] for part, items in shape.maps.items()},
        rest=dict(shape.rest),
        exact=dict(shape.exact),
        attention=[_positional(item) for item in shape.attention],
        state=list(shape.state),
        cross=None if shape.cross is None else _positional(shape.cross),
        tower=_without_defaults(shape.tower),
    )


def from_json(values: Mapping[str, Any]) -> ModelShape:
    """Return the shape of which `to_json` made these values."""
    shape = ModelShape(
        **{
            **values,
            "maps": MappingProxyType(
                {part: tuple(Maps(*item) for item in items) for part, items in values["maps"].items()}
            ),
            "rest": MappingProxyType(values.get("rest", {})),
            "exact": MappingProxyType(values.get("exact", {})),
            "attention": tuple(AttentionLayers(*item) for item in values.get("attention", ())),
            "tower": Tower(**values["tower"]),
        }
    )
    state = values.get("state", (0, 0))
    cross = values.get("cross")
    return replace(shape, state=(state[0], state[1]), cross=None if cross is None else CrossLayers(*cross))


def _without_defaults(value: Any, **written: Any) -> dict[str, Any]:
    """Fields of a value by name, those with their default left out. written: other forms of some fields."""
    found: dict[str, Any] = {}
    for field in fields(value):
        content = getattr(value, field.name)
        if content not in (field.default, {}, ()):
            found[field.name] = written.get(field.name, content)
    return found


def _positional(value: Any) -> list[Any]:
    """Fields of a value in their order, without the last ones that have their default."""
    content = [getattr(value, field.name) for field in fields(value)]
    defaults = [field.default for field in fields(value)]
    while content and content[-1] == defaults[-1]:
        content.pop()
        defaults.pop()
    return content


@cache
def _entries() -> Mapping[str, Mapping[str, Any]]:
    """Values of known.json by hub id."""
    return {entry["name"]: entry for entry in json.loads(FILE.read_text(encoding="utf-8"))}


@cache
def _shape(model: str) -> ModelShape:
    return from_json(_entries()[model])


@cache
def _index() -> Mapping[str, str]:
    """Known models by canonical name. A test checks that no two models share one."""
    return {spelling: model for model in _entries() for spelling in spellings(model)}
