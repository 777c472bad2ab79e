"""Operations on pictures of bytes, (height, width, 3): resize, crop, pad, cut into tiles, normalise.

Resizing is done by the C++ kernels, or by Pillow where they cannot run. Both return the same bytes. A palette
turns bytes into the numbers that an encoder was trained on, in the encoder's own type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import PIL.Image
from numpy.typing import NDArray
from PIL.Image import Resampling

from fovea.core.errors import EngineError
from fovea.core.measure import stage
from fovea.core.media import Image
from fovea.engine.vision.processor.settings import Settings, Size, with_shortest_edge
from fovea.kernels.native import pictures
from fovea.kernels.native.pictures import Order

Bytes = NDArray[np.uint8]
Color = tuple[int, int, int]
_BAND = 256
"""Rows of a picture that `resize_squared` resizes at once."""


def read_filter(settings: Settings, default: Resampling) -> Resampling:
    """The setting `resample`: the number of a PIL filter.

    All filters are supported. Raises CheckpointError.
    """
    value = settings.raw("resample")
    if value is None:
        return default
    numbers = [int(f) for f in Resampling]
    if isinstance(value, bool) or not isinstance(value, int) or value not in numbers:
        accepted = ", ".join(f"{int(f)} ({f.name.lower()})" for f in sorted(Resampling))
        raise settings.error("resample", value, accepted)
    return Resampling(value)


def picture(image: Image) -> Bytes:
    """The pixels of an image, (height, width, 3), without a copy."""
    return np.frombuffer(image.rgb, np.uint8).reshape(image.height, image.width, 3)


def resize(source: Bytes, height: int, width: int, resample: Resampling) -> Bytes:
    """Resize a picture. A picture that already has this size is returned unchanged."""
    if source.shape[:2] == (height, width):
        return source
    with stage("resize"):
        resized = pictures.resize(source, height, width, resample)
        return resize_with_pillow(source, height, width, resample) if resized is None else resized


def resize_with_pillow(source: Bytes, height: int, width: int, resample: Resampling) -> Bytes:
    """Resize a picture as `resize` does. Works on every machine, but is several times slower."""
    return np.asarray(PIL.Image.fromarray(source).resize((width, height), resample))


def center_crop(pixels: Bytes, height: int, width: int) -> Bytes:
    """Crop (h, w, 3) to (height, width, 3) around its center. A side that is too short gets a black border.

    If the difference is odd, one line more is cut below and at the right; a border is one line wider above
    and at the left.
    """
    old_height, old_width = pixels.shape[:2]
    top, left = max(0, old_height - height) // 2, max(0, old_width - width) // 2
    cut = pixels[top : top + height, left : left + width]
    if cut.shape[:2] == (height, width):
        return cut
    out = np.zeros((height, width, 3), np.uint8)
    top, left = -(-(height - cut.shape[0]) // 2), -(-(width - cut.shape[1]) // 2)
    out[top : top + cut.shape[0], left : left + cut.shape[1]] = cut
    return out


def center_on_canvas(pixels: Bytes, height: int, width: int, color: Color = (0, 0, 0)) -> Bytes:
    """Put (h, w, 3) into the middle of a larger canvas (height, width, 3) of one color.

    If the difference is odd, the border is one line wider below and at the right.
    """
    old_height, old_width = pixels.shape[:2]
    if (old_height, old_width) == (height, width):
        return pixels
    out = np.empty((height, width, 3), np.uint8)
    out[:] = color
    top, left = (height - old_height) // 2, (width - old_width) // 2
    out[top : top + old_height, left : left + old_width] = pixels
    return out


def make_square(source: Bytes, color: Color) -> Bytes:
    """Make a picture square with a border of `color` along the two longer edges.

    A square is returned itself.
    """
    side = max(source.shape[:2])
    return center_on_canvas(source, side, side, color)


def resize_squared(source: Bytes, color: Color, height: int, width: int, resample: Resampling) -> Bytes:
    """Resize a picture with a border that makes it square, without the square in memory.

    The result is that of `resize(make_square(source, color), height, width, resample)`. The square of a long
    picture may not fit into memory. From a square to a square, PIL resizes along rows first, each row
    independently, and then along columns. So rows are padded and resized in bands, and all rows of the border
    are equal. Only pictures of the result's width ever have the full height. To another shape, PIL may resize
    along columns first; then the square is made.
    """
    side, own = max(source.shape[:2]), source.shape[:2]
    if own[0] == own[1] or side <= _BAND or height != width:
        return resize(make_square(source, color), height, width, resample)
    top = (side - own[0]) // 2
    narrow = np.empty((side, width, 3), np.uint8)
    narrow[:] = resize(np.full((1, side, 3), color, np.uint8), 1, width, resample)
    for y in range(0, own[0], _BAND):
        rows = source[y : y + _BAND]
        band = center_on_canvas(rows, len(rows), side, color)
        narrow[top + y : top + y + len(rows)] = resize(band, len(rows), width, resample)
    return resize(narrow, height, width, resample)


def cut_tiles(pixels: Bytes, tile: int) -> list[Bytes]:
    """Cut into square tiles, row by row. Both edges of `pixels` must be multiples of `tile`."""
    height, width = pixels.shape[:2]
    return [pixels[y : y + tile, x : x + tile] for y in range(0, height, tile) for x in range(0, width, tile)]


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


@dataclass(frozen=True, slots=True)
class Fit:
    """The resize and the center crop of a checkpoint.

    resample: the filter of the resize.
    size: target of the resize; None: pictures are not resized.
    crop: (height, width) after the crop, in pixels; None: pictures are not cropped.
    """

    resample: Resampling
    size: Size | None
    crop: tuple[int, int] | None

    @classmethod
    def read(
        cls, settings: Settings, size: Size, crop: Size | None, resample: Resampling = Resampling.BICUBIC
    ) -> Fit:
        """Read both steps from a checkpoint's settings. Raises CheckpointError.

        size: default of the processor class.
        crop: default of the processor class; None: it crops only if the settings say so.
        resample: default of the processor class.
        """
        square = settings.flag("default_to_square", False)
        wanted = settings.size("size", size, square=square)
        if wanted is not None and not (wanted.fixed_size or wanted.shortest_edge):
            raise settings.error("size", wanted, "height and width, or shortest_edge")
        cut = settings.size("crop_size", crop)
        crops = settings.flag("do_center_crop", crop is not None)
        if crops and (cut is None or cut.fixed_size is None):
            raise settings.error("crop_size", cut, "height and width")
        return cls(
            read_filter(settings, resample),
            wanted if settings.flag("do_resize", True) else None,
            cut.fixed_size if cut and crops else None,
        )

    def resized_size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) after the resize."""
        if self.size is None:
            return height, width
        if self.size.shortest_edge:
            return with_shortest_edge(height, width, self.size.shortest_edge, self.size.longest_edge)
        return self.size.fixed_size or (height, width)

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) after both steps."""
        return self.crop or self.resized_size(height, width)

    @property
    def fixed_size(self) -> tuple[int, int] | None:
        """(height, width) of every output, if it does not depend on the picture; else None."""
        return self.crop or (self.size.fixed_size if self.size and not self.size.shortest_edge else None)

    def apply(self, source: Bytes, border: Color | None = None) -> Bytes:
        """Apply both steps to bytes (h, w, 3). Returns bytes (height, width, 3).

        border: color of a border that first makes the picture square; None: no border.
        """
        if border is None:
            target = self.resized_size(*source.shape[:2])
            pixels = resize(source, *target, self.resample)
        else:
            side = max(source.shape[:2])
            pixels = resize_squared(source, border, *self.resized_size(side, side), self.resample)
        return center_crop(pixels, *self.crop) if self.crop else pixels

    @property
    def key(self) -> str:
        return f"{self.resample.name};fit={self.size and self.size.key};crop={self.crop}"
