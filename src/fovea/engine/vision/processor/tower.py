"""The facts about a vision tower that a processor needs to count the rows that the tower returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fovea.core.errors import CheckpointError
from fovea.engine.vision.processor.settings import expect_equal, section

# (image_size, patch_size) of towers whose config omits them. Configs store only differences from these
# defaults.
_DEFAULTS: Mapping[str, tuple[int, int]] = {
    "clip_vision_model": (224, 32),
    "siglip_vision_model": (224, 16),
    "idefics3_vision": (224, 32),
    "smolvlm_vision": (224, 32),
}
_WITHOUT_CLASS_TOKEN = ("siglip_vision_model", "idefics3_vision", "smolvlm_vision")


@dataclass(frozen=True, slots=True)
class Tower:
    """The input size of a vision tower, and the rows that the model takes from its output.

    image_size: side of the input, in pixels.
    patch_size: side of a patch, in pixels.
    extra_rows: rows in addition to those of the patches: CLIP's class token.
    drops_first: whether the model leaves out the first row (feature selection "default"). Otherwise it keeps
        all rows ("full").
    """

    image_size: int
    patch_size: int
    extra_rows: int
    drops_first: bool

    @classmethod
    def read(
        cls,
        model: Mapping[str, Any],
        processor: Mapping[str, Any],
        image_size: int,
        patch_size: int,
        strategy: str,
    ) -> Tower:
        """Read the tower from config.json (model) and processor_config.json (processor).

        image_size, patch_size, strategy: defaults for a model config that omits them.

        `num_additional_image_tokens` is used only if the processor's file has it. Old checkpoints lack it,
        and to assume 0 for a tower with a class token would count one token too few.

        Raises CheckpointError if a value is missing or the files contradict each other.
        """
        vision = section(model, "vision_config")
        kind = str(vision.get("model_type") or "")
        if kind in _DEFAULTS:
            image_size, patch_size = _DEFAULTS[kind]
        image_size, patch_size = vision.get("image_size", image_size), vision.get("patch_size", patch_size)
        for name, value in (("image_size", image_size), ("patch_size", patch_size)):
            if not isinstance(value, int) or value < 1:
                raise CheckpointError(
                    f"vision_config.{name} is {value!r}; accepted: a positive integer", param=name
                )
        if processor.get("patch_size") is not None:
            expect_equal("patch_size", processor["patch_size"], patch_size)
        return cls(image_size, patch_size, _extra(kind, processor), _drops_first(model, processor, strategy))

    @property
    def side(self) -> int:
        """Patches along an edge of the tower's input."""
        return self.image_size // self.patch_size

    def rows(self, patches: int) -> int:
        """Number of rows that the model receives for this number of patches."""
        return patches + self.extra_rows - self.drops_first


def _extra(kind: str, processor: Mapping[str, Any]) -> int:
    name = "num_additional_image_tokens"
    extra = processor.get(name)
    if extra is None:
        extra = {"": 1, "clip_vision_model": 1, **dict.fromkeys(_WITHOUT_CLASS_TOKEN, 0)}.get(kind)
    if not isinstance(extra, int) or extra < 0:
        raise CheckpointError(
            f"{name} is {extra!r} for a vision tower of type {kind!r}; "
            "accepted: 0 or more, in the processor's files",
            param=name,
        )
    return extra


def _drops_first(model: Mapping[str, Any], processor: Mapping[str, Any], strategy: str) -> bool:
    name = "vision_feature_select_strategy"
    theirs = model.get(name) or strategy
    ours = processor.get(name) or theirs
    if ours != theirs or ours not in ("default", "full"):
        raise CheckpointError(
            f"{name}: the processor's files say {ours!r}, the model's config says {theirs!r}; accepted: "
            "equal values, 'default' or 'full'",
            param=name,
        )
    return bool(ours == "default")
