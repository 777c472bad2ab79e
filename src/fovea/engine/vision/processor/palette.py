"""Normalisation: turns bytes into the numbers that an encoder was trained on, in the encoder's own type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fovea.core.errors import EngineError
from fovea.engine.vision.processor.pixels import Bytes
from fovea.engine.vision.processor.settings import Settings
from fovea.kernels.native import pictures
from fovea.kernels.native.pictures import Order

Values = NDArray[Any]
"""Normalised pixels: float32, float16, or uint16, which are the bits of bfloat16 (numpy has no such type)."""
Holder = TypeVar("Holder")
_PATCHES = 256
"""Patches that `cut_slowly` cuts at once."""

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True)
class Palette:
    """Rescaling and normalisation of pixels, as a table per channel.

    A byte has 256 values, so a table is exact, and takes one pass over the pixels instead of five. The table
    is computed with the arithmetic of Hugging Face's processors: multiply in float64, round to float32, then
    subtract and divide in float32.

    key: names the arithmetic, for cache keys.
    average: `image_mean` as a color in bytes, fractions cut off. LLaVA's borders have this color.
    table: (3, 256), maps (channel, byte) to a value. float32 at first, see `in_type`.
    stays_exact: values stay float32 in every encoder, because it calculates with them before it rounds.
    """

    key: str
    average: tuple[int, int, int]
    table: Values
    stays_exact: bool = False

    @classmethod
    def read(
        cls,
        settings: Settings,
        mean: tuple[float, float, float] = CLIP_MEAN,
        std: tuple[float, float, float] = CLIP_STD,
        *,
        normalizes: bool = True,
    ) -> Palette:
        """Read the normalisation from a checkpoint's settings. Raises CheckpointError.

        `do_convert_rgb` has no effect, because images are RGB already.

        mean, std, normalizes: defaults of the processor class; the last is that of `do_normalize`.
        """
        settings.flag("do_convert_rgb", True)
        factor = settings.number("rescale_factor", 1 / 255)
        mean, std = settings.channels("image_mean", mean), settings.channels("image_std", std)
        if 0.0 in std:
            raise settings.error("image_std", std, "numbers other than 0")
        rescale, normalize = settings.flag("do_rescale", True), settings.flag("do_normalize", normalizes)
        levels = np.arange(256, dtype=np.float64)
        table = np.tile((levels * factor if rescale else levels).astype(np.float32), (3, 1))
        if normalize:
            table = (table - np.array(mean, np.float32)[:, None]) / np.array(std, np.float32)[:, None]
        key = f"rescale={factor if rescale else None};norm={(mean, std) if normalize else None}"
        return cls(key, (int(mean[0] * 255), int(mean[1] * 255), int(mean[2] * 255)), table)

    def in_type(self, name: str) -> Palette:
        """Return the palette with its values rounded to a type, as torch rounds them.

        name: "float32", "float16" or "bfloat16".
        """
        if self.table.dtype != np.float32:
            raise EngineError(f"the values of a palette are {self.table.dtype} already, not float32")
        if self.stays_exact or name == "float32":
            return self
        if name == "float16":
            return replace(self, table=self.table.astype(np.float16))
        if name != "bfloat16":
            raise EngineError(f"no encoder reads {name}; accepted: float32, float16, bfloat16")
        bits = self.table.view(np.uint32)
        return replace(self, table=((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16))

    def patches(self, pictures: Sequence[Bytes], order: Order) -> Values:
        """Cut equal pictures (height, width, 3) into patches of normalised pixels.

        Returns (pictures * patches, 3 * height * width), with the sides of a patch.
        """
        count, area = len(order.places), order.height * order.width
        shape = (area, 3) if order.channels_last else (3, area)
        out = np.empty((len(pictures), count, *shape), self.table.dtype)
        for pixels, place in zip(pictures, out, strict=True):
            self.cut(pixels, order, place)
        return out.reshape(-1, 3 * area)

    def cut(self, pixels: Bytes, order: Order, out: Values) -> None:
        """Cut a picture into patches of normalised pixels, see `native.pictures.cut` for the arguments."""
        if not pictures.cut(pixels, order, self.table, out):
            self.cut_slowly(pixels, order, out)

    def cut_slowly(self, pixels: Bytes, order: Order, out: Values) -> None:
        """Cut a picture as `cut` does. Works on every machine, but is several times slower."""
        windows = np.lib.stride_tricks.sliding_window_view(pixels, (order.height, order.width), (0, 1))
        for first in range(0, len(order.places), _PATCHES):
            some = slice(first, first + _PATCHES)
            planes = windows[order.places[some, 0], order.places[some, 1]].reshape(
                -1, 3, order.height * order.width
            )
            for channel in range(3):
                part = out[some, :, channel] if order.channels_last else out[some, channel]
                # "clip" avoids numpy's check of the indices, which needs a buffer.
                part[:] = np.take(self.table[channel], planes[:, channel], mode="clip")

    def tiles(self, tiles: Sequence[Bytes]) -> Values:
        """Normalise equal tiles: bytes (height, width, 3) each to (tiles, 3, height, width)."""
        height, width = tiles[0].shape[:2]
        order = Order(np.zeros((1, 2), np.int64), height, width)
        return self.patches(tiles, order).reshape(len(tiles), 3, height, width)


def in_type(holder: Holder, name: str) -> Holder:
    """Return a processor that gives values of a type.

    holder: a dataclass; palettes in it and in its parts are converted.
    name: see `Palette.in_type`.
    """
    changes: dict[str, Any] = {}
    for field in fields(holder):  # type: ignore[arg-type]
        part = getattr(holder, field.name)
        if isinstance(part, Palette):
            changes[field.name] = part.in_type(name)
        elif is_dataclass(part):
            changes[field.name] = in_type(part, name)
    return replace(holder, **changes)  # type: ignore[type-var]
