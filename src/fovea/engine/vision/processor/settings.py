"""Reads preprocessor_config.json, and the parts of config.json that a processor needs: model type and tower.

Values are typed, and an absent or null key has the default of the processor class.

A key that would change the pixels and is not supported is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from fovea.core.errors import CheckpointError, UnsupportedModel

Config = Mapping[str, Any]
"""The content of a JSON file."""
FILE = "preprocessor_config.json"
LARGEST = 1 << 40
"""Largest number of pixels that a setting may ask for."""
# Keys that concern how Hugging Face's processor runs. They do not change the pixels.
_METADATA = frozenset(
    {
        "_valid_processor_keys",
        "aspect_ratio_setting",
        "auto_map",
        "data_format",
        "device",
        "disable_grouping",
        "feature_extractor_type",
        "image_processor_type",
        "image_seq_length",
        "input_data_format",
        "processor_class",
        "return_row_col_info",
        "return_tensors",
        "transformers_version",
        "video_sampling",
    }
)
# Names of keys that probably change the pixels.
_SHAPES_PIXELS = re.compile(
    r"^(?!video)(do_.*|.*(size|crop|pad(?!ding_side)|resiz|resample|interpol|pixel|mean|std|scale|patch|tile|split|"
    r"pinpoint|convert|edge|thumbnail).*)"
)
TYPES_BY_CLASS: Mapping[str, str] = MappingProxyType({"LightOnOCRForConditionalGeneration": "lighton_ocr"})
"""The model_type of checkpoints whose config.json has another one, by the name of their class.

LightOnOCR was published with the model_type of Mistral 3, before transformers had a class for it. It has the
same tower, but no text between the rows of visual tokens.
"""
# (image_size, patch_size) of towers whose config omits them. Configs store only differences from these
# defaults.
_DEFAULTS: Mapping[str, tuple[int, int]] = {
    "clip_vision_model": (224, 32),
    "siglip_vision_model": (224, 16),
    "idefics3_vision": (224, 32),
    "smolvlm_vision": (224, 32),
}
_WITHOUT_CLASS_TOKEN = ("siglip_vision_model", "idefics3_vision", "smolvlm_vision")


class Settings:
    """The settings of one file.

    Each getter marks its key as read; `close` refuses unread keys that change pixels.

    A getter returns its default for an absent or null key, and raises CheckpointError for a value of another
    type.
    """

    def __init__(self, source: Config, where: str = FILE) -> None:
        self._source = source
        self._where = where
        self._read: set[str] = set()

    def raw(self, name: str) -> Any:
        self._read.add(name)
        return self._source.get(name)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, value, "a number")
        return float(value)

    def count(self, name: str, default: int) -> int:
        value = self.raw(name)
        return default if value is None else self.positive(name, value)

    def positive(self, name: str, value: Any) -> int:
        """Check a positive integer.

        Floats without a fraction pass: some checkpoints store pixel counts as `1.0e6`.
        """
        whole = value.is_integer() if isinstance(value, float) else isinstance(value, int)
        if not whole or isinstance(value, bool) or not 1 <= value <= LARGEST:
            raise self.error(name, value, f"a positive integer up to {LARGEST}")
        return int(value)

    def channels(self, name: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
        """Read one number per RGB channel, or one number for all channels."""
        value = self.raw(name)
        if value is None:
            return default
        values = list(value) if isinstance(value, list | tuple) else [value] * 3
        if len(values) != 3 or not all(
            isinstance(v, int | float) and not isinstance(v, bool) for v in values
        ):
            raise self.error(name, value, "three numbers, one per RGB channel")
        return (float(values[0]), float(values[1]), float(values[2]))

    def size(self, name: str, default: Size | None, *, square: bool = True) -> Size | None:
        """Read a size: a mapping of edges, a pair (height, width), or one integer.

        square: whether one integer means both edges; otherwise it is the shortest edge.
        """
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, Mapping):
            edges = {
                key: self.positive(f"{name}.{key}", edge) for key, edge in value.items() if edge is not None
            }
        elif isinstance(value, list | tuple) and len(value) == 2:
            edges = dict(zip(("height", "width"), (self.positive(name, edge) for edge in value), strict=True))
        elif square:
            edges = dict.fromkeys(("height", "width"), self.positive(name, value))
        else:
            edges = {"shortest_edge": self.positive(name, value)}
        unknown = sorted(set(edges) - set(Size.NAMES))
        if unknown or not edges:
            raise self.error(name, value, f"a mapping with some of {', '.join(Size.NAMES)}")
        return Size(**edges)

    def processor_type(self, accepted: Mapping[str, str] | tuple[str, ...], default: str) -> str:
        """The processor class without its backend suffix ("Fast" or "Pil").

        Raises UnsupportedModel for a class that is not accepted: other classes compute other pixels.
        """
        name = self.raw("image_processor_type") or str(self.raw("feature_extractor_type") or default)
        kind = re.sub(r"(Fast|Pil)$", "", str(name)).replace("FeatureExtractor", "ImageProcessor")
        if kind not in accepted:
            raise UnsupportedModel(
                f"{self._where}: image_processor_type {name!r} is not supported here; "
                f"accepted: {', '.join(accepted)}"
            )
        return kind

    def close(self) -> None:
        """Raise CheckpointError for an unread key that would change the pixels.

        Null values, and `do_...: false` and `use_...: false`, change nothing.
        """
        for name, value in self._source.items():
            if name in self._read or name in _METADATA or value is None:
                continue
            declined = value is False and name.startswith(("do_", "use_"))
            if _SHAPES_PIXELS.match(name) and not declined:
                raise CheckpointError(
                    f"{self._where}: {name} = {value!r} would change the pixels, and this kind of model "
                    f"does not support it; accepted keys: {', '.join(sorted(self._read))}",
                    param=name,
                )

    def error(self, name: str, value: Any, accepted: str) -> CheckpointError:
        """The error for a value that is not accepted."""
        return CheckpointError(f"{self._where}: {name} is {value!r}; accepted: {accepted}", param=name)


@dataclass(frozen=True, slots=True)
class Size:
    """A target size. A checkpoint names some of its fields.

    All fields are edges in pixels, except for Qwen: there `shortest_edge` and `longest_edge`, or `min_pixels`
    and `max_pixels`, are areas in pixels.
    """

    NAMES: ClassVar[tuple[str, ...]] = (
        "height",
        "width",
        "shortest_edge",
        "longest_edge",
        "min_pixels",
        "max_pixels",
    )

    height: int | None = None
    width: int | None = None
    shortest_edge: int | None = None
    longest_edge: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None

    @property
    def fixed_size(self) -> tuple[int, int] | None:
        """(height, width) if both are named, else None."""
        return (self.height, self.width) if self.height and self.width else None

    @property
    def key(self) -> str:
        """The named fields, as part of a cache key."""
        return ",".join(f"{name}:{getattr(self, name)}" for name in self.NAMES if getattr(self, name))


def with_shortest_edge(height: int, width: int, edge: int, longest: int | None = None) -> tuple[int, int]:
    """(height, width) of equal aspect; the shorter edge is `edge`, the longer edge at most `longest`.

    Fractions are cut off, not rounded. With a limit, the longer edge is computed from the unrounded shorter
    one, so that it equals the limit. This is the rule of torchvision's and Hugging Face's resize.
    """
    short, long = min(height, width), max(height, width)
    exact: float = edge
    if longest is not None and long / short * edge > longest:
        exact = longest * float(short) / long
        edge = round(exact)
    if longest is not None and short == edge:
        return height, width
    far = int(exact * long / short)
    return (edge, far) if height <= width else (far, edge)


def section(config: Config, name: str) -> Config:
    """A nested part of a config; empty if it is absent or null. Raises CheckpointError for another type."""
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{name} is {value!r}; accepted: an object such as {{}}, or null", param=name)
    return value


def expect_equal(what: str, ours: int, theirs: object) -> None:
    """Raise CheckpointError if the processor's value differs from the model's.

    The pixels must fit the model's shapes.

    what: name of the setting.
    ours: the processor's value.
    theirs: the model's value; None: its config has none.
    """
    if theirs is not None and theirs != ours:
        raise CheckpointError(
            f"{what}: the processor's files say {ours}, the model's config says {theirs}", param=what
        )


def stated_type(content: Config) -> str:
    """Return the model_type of a config.json; "" if it has none. `architectures` overrides `model_type`."""
    names = content.get("architectures")
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and name in TYPES_BY_CLASS:
            return TYPES_BY_CLASS[name]
    return str(content.get("model_type", ""))[:100]


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
    def read(cls, model: Config, processor: Config, image_size: int, patch_size: int, strategy: str) -> Tower:
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
                    f"vision_config.{name} is {value!r}; accepted: a positive integer, such as 14",
                    param=name,
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


def _extra(kind: str, processor: Config) -> int:
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


def _drops_first(model: Config, processor: Config, strategy: str) -> bool:
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
