"""Reads a preprocessor_config.json.

Values are typed, and an absent or null key has the default of the processor class.

A key that would change the pixels and is not supported is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fovea.core.errors import CheckpointError, UnsupportedModel
from fovea.engine.vision.processor.size import Size

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


class Settings:
    """The settings of one file.

    Each getter marks its key as read; `close` refuses unread keys that change pixels.

    A getter returns its default for an absent or null key, and raises CheckpointError for a value of another
    type.
    """

    def __init__(self, source: Mapping[str, Any], where: str = FILE) -> None:
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


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A nested part of a config; empty if it is absent or null. Raises CheckpointError for another type."""
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{name} is {value!r}; accepted: a mapping", param=name)
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
