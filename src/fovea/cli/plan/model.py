"""Finds the model of a plan: its shape, and how many tokens an image is in it."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fovea.core.errors import CheckpointError, ConfigError
from fovea.core.names import BUNDLED, bundled_model
from fovea.engine.vision.token_rules import ProcessorRule, folder_rule, known_rule
from fovea.planner.known import find, known_models
from fovea.planner.shape import ModelShape
from fovea.planner.workload import ImageTokens, TokenCount

FIXED = {"llava": 576, "gemma3": 256}
"""Visual tokens of an image of any size, in families whose images have one size.

llava: LLaVA-1.5, a picture of 336 by 336 pixels in patches of 14. gemma3: as its processor says.
"""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """The model of a plan. name: as given. shape: its shape. count: tokens of an image."""

    name: str
    shape: ModelShape
    count: TokenCount


def find_model(name: str, visual_tokens: int = 0) -> PlannedModel:
    """Return the model that a name or a folder means.

    name: a folder with config.json and the settings of the image processor; a hub id of a known model, or of
        one in the local cache of the hub; "fovea-tiny".
    visual_tokens: tokens of every image, for models whose processor is not known; 0: by the model's rule.
    Raises ConfigError for an unknown name, CheckpointError or UnsupportedModel for a folder.
    """
    folder = Path(name).expanduser()
    if name != BUNDLED and (folder / "config.json").is_file():
        return _from_folder(name, folder, visual_tokens)
    shape_or_none = find(name)
    if shape_or_none is None and (cached := _downloaded(name)) is not None:
        return _from_folder(name, cached, visual_tokens)
    if shape_or_none is None:
        known = known_models()
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}? " if near else ""
        raise ConfigError(
            f"model {name!r} is neither a folder with config.json, nor a known model, nor in the local cache "
            f"of the hub; {hint}"
            f"`fovea plan --models` lists the {len(known)} that are known",
            param="model",
        )
    rule = None if visual_tokens else _known(name)
    return PlannedModel(name, shape_or_none, _count(shape_or_none, rule, visual_tokens))


def _from_folder(name: str, folder: Path, visual_tokens: int) -> PlannedModel:
    # torch builds the model without weights, so a folder takes seconds and a known name does not.
    from fovea.engine.check import shape_of_folder

    shape = shape_of_folder(folder, name)
    rule = None if visual_tokens else folder_rule(folder)
    return PlannedModel(name, shape, _count(shape, rule, visual_tokens))


def _downloaded(name: str) -> Path | None:
    """The folder of a hub id whose files are in the local cache; None: they are not."""
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        return None
    from fovea.engine.load import resolve

    try:
        folder = resolve(name, download=False)
    except CheckpointError:
        return None
    return folder if (folder / "config.json").is_file() else None


def _known(name: str) -> ProcessorRule | None:
    return folder_rule(bundled_model()) if name == BUNDLED else known_rule(name)


def _count(shape: ModelShape, rule: ProcessorRule | None, visual_tokens: int) -> TokenCount:
    fixed = visual_tokens or (FIXED.get(shape.family, 0) if rule is None else 0)
    if fixed:
        return lambda width, height: ImageTokens(fixed, fixed)
    if rule is None:
        raise ConfigError(
            f"the image processor of {shape.name} is not known; accepted: --visual-tokens N, the tokens of "
            "an image",
            param="visual_tokens",
        )
    if shape.cross is not None:
        return _states(rule, shape.cross.rows_per_tile)
    return lambda width, height: _both(rule.tokens(width, height))


def _both(tokens: int) -> ImageTokens:
    return ImageTokens(tokens, tokens)


def _states(rule: ProcessorRule, rows_per_tile: int) -> Callable[[int, int], ImageTokens]:
    """Image states lie outside of the prompt, a fixed number of them for each tile."""

    def count(width: int, height: int) -> ImageTokens:
        plan = rule.plan(width, height)
        return ImageTokens(plan.tokens, plan.grid[1] * plan.grid[2] * rows_per_tile)

    return count
