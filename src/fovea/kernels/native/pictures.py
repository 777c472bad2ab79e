"""Resizing and cutting of pictures by the C++ kernels, on numpy arrays: image processors do not import torch.

Where the kernels cannot run, callers compute the same values with Pillow and numpy. ctypes releases the GIL,
so pictures are prepared on as many cores as there are threads.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL.Image import Resampling

from fovea.kernels.native.build import library

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]
_P, _L = c_void_p, c_int64
_AXIS = [_L, _L, _P, _P, _P]
SIGNATURES = {
    "fovea_resize": [_P, _L, _L, *_AXIS, *_AXIS, _P],
    "fovea_patches": [_P, _L, _P, _L, _L, _L, _P, _L, _L, _L, _L, _P],
}
POINT = 22
"""Bits after the point of a weight. 22 bits + 8 bits of a byte + 2 spare bits = 32, the size of a sum."""
COLUMNS_MAY_COME_FIRST = int(PIL.__version__.partition(".")[0]) >= 13
"""Whether the installed Pillow resizes columns before rows where that is less work. 13.0 does, 12.3 does not.
The order changes the last bits."""
MOST_SHRUNK = 1000
"""Largest factor by which the kernels can shrink a side. No model needs more for a usual picture."""


@functools.cache
def kernels() -> ctypes.CDLL | None:
    """Load the kernels; None: they cannot run here. The first call may compile them: 10 to 30 seconds."""
    loaded = library()
    if loaded is not None:
        for name, signature in SIGNATURES.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = signature, None
    return loaded


def resize(pixels: Bytes, height: int, width: int, resample: Resampling) -> Bytes | None:
    """Resize a picture (h, w, 3) to (height, width, 3), with the bytes that Pillow returns.

    None: the kernels cannot do it. They have no nearest neighbour.
    """
    native, (old_height, old_width) = kernels(), pixels.shape[:2]
    if native is None or resample not in _FILTERS or min(height, width) < 1:
        return None
    if old_height > height * MOST_SHRUNK or old_width > width * MOST_SHRUNK:
        return None
    columns_first = old_height - height > max(0, 2 * (old_width - width)) and old_width != width
    if columns_first and COLUMNS_MAY_COME_FIRST:
        pixels = _resize(native, pixels, height, old_width, resample)
    return _resize(native, pixels, height, width, resample)


def _resize(native: ctypes.CDLL, pixels: Bytes, height: int, width: int, resample: Resampling) -> Bytes:
    """Resize along rows, then along columns. A picture that already has this size is returned unchanged."""
    old_height, old_width = pixels.shape[:2]
    if pixels.dtype != np.uint8 or pixels.shape[2:] != (3,) or not pixels.size:
        raise ValueError(f"a picture must be bytes (height, width, 3), got {_describe(pixels)}")
    if (old_height, old_width) == (height, width):
        return pixels  # C++ expects that an axis changes
    source, out = np.ascontiguousarray(pixels), np.empty((height, width, 3), np.uint8)
    rows, columns = (
        None if old == new else axis_weights(old, new, resample)
        for old, new in ((old_height, height), (old_width, width))
    )
    native.fovea_resize(
        source.ctypes.data, old_height, old_width, *_of_axis(rows, height), *_of_axis(columns, width),
        out.ctypes.data,
    )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class Order:
    """The order of patches, and of the values of a patch, in an encoder's input.

    places: int64 (patches, 2), the row and column of the first pixel of each patch.
    height, width: sides of a patch, in pixels.
    channels_last: the three values of a pixel are neighbours. Otherwise the values of a channel are.
    """

    places: NDArray[np.int64]
    height: int
    width: int
    channels_last: bool = False


def cut(pixels: Bytes, order: Order, table: NDArray[Any], out: NDArray[Any]) -> bool:
    """Cut patches out of a picture and translate their bytes. Return False where the kernels cannot run.

    pixels: (height, width, 3); rows may be apart, the pixels of a row may not.
    table: (3, 256), the value of each byte of each channel, of 2 or 4 bytes.
    out: (patches, 3, values), or (patches, values, 3) for channels at the end, of the type of the table.
        Patches and channels may be apart.
    """
    native = kernels()
    if native is None:
        return False
    places, rest = order.places, (order.height * order.width,)
    shape = (len(places), *rest, 3) if order.channels_last else (len(places), 3, *rest)
    row, pixel, byte = pixels.strides
    size = out.itemsize
    steps = [step // size for step in out.strides]
    by_value, by_channel = (steps[1], steps[2]) if order.channels_last else (steps[2], steps[1])
    if pixels.dtype != np.uint8 or pixels.shape[2:] != (3,) or (pixel, byte) != (3, 1) or row < 0:
        raise ValueError(f"a picture must be rows of pixels of 3 bytes, got {_describe(pixels)}")
    if table.shape != (3, 256) or not table.flags.c_contiguous or size not in (2, 4):
        raise ValueError(f"a table must have 3 rows of 256 values of 2 or 4 bytes, got {_describe(table)}")
    if out.shape != shape or out.dtype != table.dtype or min(steps) < 0 or any(s % size for s in out.strides):
        raise ValueError(f"patches must be {list(shape)} of {table.dtype}, got {_describe(out)}")
    if not out.flags.writeable:
        raise ValueError("patches must be writable")
    room = np.array(pixels.shape[:2]) - (order.height, order.width)
    if places.dtype != np.int64 or places.shape[1:] != (2,):
        raise ValueError(f"places of patches must be pairs of int64, got {_describe(places)}")
    if len(places) and ((places < 0).any() or (places > room).any()):
        raise ValueError(
            f"a patch of {order.height} rows and {order.width} columns is outside of its picture"
        )
    starts = np.ascontiguousarray(places[:, 0] * row + places[:, 1] * 3)
    native.fovea_patches(
        pixels.ctypes.data, row, starts.ctypes.data, len(starts), order.height, order.width,
        table.ctypes.data, size, steps[0], by_channel, by_value, out.ctypes.data,
    )  # fmt: skip
    return True


@dataclass(frozen=True, slots=True)
class AxisWeights:
    """The old pixels of each new one along one axis.

    firsts, counts: int64 (new,), the first old pixel and how many there are.
    weights: int32 (new, taps), in units of 2**-POINT; 0 beyond `counts`.
    """

    firsts: NDArray[np.int64]
    counts: NDArray[np.int64]
    weights: NDArray[np.int32]


@functools.lru_cache(maxsize=64)
def axis_weights(old: int, new: int, resample: Resampling) -> AxisWeights:
    """Compute the weights of an axis in Pillow's way: in double precision, rounded at the end."""
    reach, filter_of = _FILTERS[resample]
    scale = old / new
    stretch = max(scale, 1.0)
    support = reach * stretch
    centers = (np.arange(new, dtype=np.float64) + 0.5) * scale
    firsts = np.maximum((centers - support + 0.5).astype(np.int64), 0)
    counts = np.minimum((centers + support + 0.5).astype(np.int64), old) - firsts
    taps = np.arange(math.ceil(support) * 2 + 1)
    weights = filter_of((taps + firsts[:, None] - centers[:, None] + 0.5) * (1.0 / stretch))
    weights[taps >= counts[:, None]] = 0.0
    total = np.zeros(new)
    for tap in range(len(taps)):  # in this order, as the sum is rounded
        total += weights[:, tap]
    weights /= np.where(total == 0.0, 1.0, total)[:, None]
    rounded = np.trunc(weights * (1 << POINT) + np.where(weights < 0, -0.5, 0.5))
    return AxisWeights(firsts, counts, rounded.astype(np.int32))


def _of_axis(axis: AxisWeights | None, size: int) -> tuple[int, int, int | None, int | None, int | None]:
    """The arguments of an axis for C++. None: its size does not change."""
    if axis is None:
        return size, 0, None, None, None
    taps = axis.weights.shape[1]
    return size, taps, axis.firsts.ctypes.data, axis.counts.ctypes.data, axis.weights.ctypes.data


def _describe(array: NDArray[Any]) -> str:
    return f"{array.dtype} {list(array.shape)} with strides {list(array.strides)}"


def _box(x: Floats) -> Floats:
    return np.where((x > -0.5) & (x <= 0.5), 1.0, 0.0)


def _bilinear(x: Floats) -> Floats:
    x = np.abs(x)
    return np.where(x < 1.0, 1.0 - x, 0.0)


def _bicubic(x: Floats) -> Floats:
    x, a = np.abs(x), -0.5
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _lanczos(x: Floats) -> Floats:
    return np.where((x >= -3.0) & (x < 3.0), _sinc(x) * _sinc(x / 3), 0.0)


def _sinc(x: Floats) -> Floats:
    angle = x * math.pi
    return np.where(x == 0.0, 1.0, np.sin(angle) / np.where(x == 0.0, 1.0, angle))


_FILTERS: dict[Resampling, tuple[float, Callable[[Floats], Floats]]] = {
    Resampling.BOX: (0.5, _box),
    Resampling.BILINEAR: (1.0, _bilinear),
    Resampling.BICUBIC: (2.0, _bicubic),
    Resampling.LANCZOS: (3.0, _lanczos),
}
"""Filters of the kernels: how far they reach, in pixels, and their weight at a distance from the center."""
