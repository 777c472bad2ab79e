"""Pages of keys and values: their types, their layout in memory, and rounding in plain torch.

The pool of a KV group is bytes, (layers, blocks, bytes of a page). A page holds `block_size` tokens of one
layer: (block_size, 2, Hkv, D) numbers, keys before values, in the order of the tokens. In the model's type
that is all. In 8 bits their scales follow in the same page, (block_size, 2, Hkv) bfloat16: a number is a
level times the scale of its token, head and side. A scale depends on these D numbers alone. So a token has
the same bits whoever computes it, in whatever company, and pages can be shared, copied and moved as they are.

Levels are whole numbers up to 127 or 8-bit floats, and both are exact in bfloat16. So kernels multiply
queries with levels, and multiply scores by the scales of keys, and weights by those of values.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from fovea.core.errors import ConfigError

SCALE = torch.bfloat16
"""Type of scales."""
TINY = 1e-30
"""Scales up to this make levels of zero."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """A format of keys and values in 8 bits.

    name: its name in the configuration.
    dtype: type of a level.
    most: largest level. The largest magnitude of a head's numbers becomes it.
    """

    name: str
    dtype: torch.dtype
    most: float


INT8 = KVFormat("int8", torch.int8, 127.0)
FP8 = KVFormat("fp8", torch.float8_e4m3fn, 448.0)
FORMATS = {format.name: format for format in (INT8, FP8)}


def kv_format(name: str, kernels: str, supported: tuple[KVFormat, ...]) -> KVFormat:
    """Return the format that the setting `kv_dtype` names.

    kernels: name of the kernels in use. supported: the formats that they have.
    Raises ConfigError if they do not have it.
    """
    if FORMATS[name] not in supported:
        raise ConfigError(
            f"kv_dtype is {name!r}, which the kernels in use ({kernels}) do not read; accepted here: "
            f"{', '.join(['auto', *(format.name for format in supported)])}",
            param="kv_dtype",
        )
    return FORMATS[name]


def token_bytes(kv_heads: int, dim: int, itemsize: int, format: KVFormat | None) -> int:
    """Return the bytes of the keys and values of one token in one layer.

    itemsize: bytes of a number in the model's type. format: None: they have that type.
    """
    return 2 * kv_heads * (itemsize * dim if format is None else dim + SCALE.itemsize)


@dataclass(frozen=True, slots=True)
class QuantizedKV:
    """Keys and values of one layer, or of several, in 8 bits: two views of the same pages.

    levels: (..., blocks, block_size, 2, Hkv, D), the numbers of a page contiguous.
    scales: (..., blocks, block_size, 2, Hkv), bfloat16, right behind the levels of each page.
    """

    levels: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """That of the levels, which a tensor of keys and values in the model's type has, too."""
        return self.levels.shape

    @property
    def format(self) -> KVFormat:
        return INT8 if self.levels.dtype is torch.int8 else FP8

    def __getitem__(self, layer: int) -> QuantizedKV:
        return QuantizedKV(self.levels[layer], self.scales[layer])


KV = Tensor | QuantizedKV
"""Keys and values as kernels read them, (blocks, block_size, 2, Hkv, D), in the model's type or in 8 bits."""


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return zeros. On a CPU their memory is taken from the system when they are first written.

    So a server's pools grow as they are used, and a program that asks one question takes a few MiB of them.
    (torch.zeros writes all of its zeros at once.)

    Raises MemoryError if the system grants no room of this size.
    """
    count = math.prod(shape)
    if count == 0 or (device is not None and device.type != "cpu"):
        return torch.zeros(shape, dtype=dtype, device=device)
    size = count * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{size} bytes could not be allocated: {error}") from error
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class KVPool:
    """The pages of one KV group.

    pages: (layers, blocks, bytes of a page) uint8.
    kv: the same memory as keys and values, (layers, blocks, block_size, 2, Hkv, D).
    """

    def __init__(
        self,
        size: tuple[int, int, int],
        kv_heads: int,
        dim: int,
        dtype: torch.dtype,
        format: KVFormat | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Allocate pages that are zero.

        size: layers, blocks, and tokens of a block.
        dtype: the model's type. format: None: keys and values have that type.

        Zeroed, not empty: rows past a sequence's end are masked, but 0 * NaN would still be NaN.
        """
        layers, blocks, block_size = size
        self.dtype, self.format = dtype, format
        self._sides = block_size, 2, kv_heads, dim
        page = block_size * token_bytes(kv_heads, dim, dtype.itemsize, format)
        self.pages = zeros((layers, blocks, page), torch.uint8, device)
        parts = self.parts(self.pages)
        self.kv: KV = parts[0] if format is None else QuantizedKV(*parts)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers together."""
        return len(self.pages) * self.pages.shape[2]

    @property
    def block_size(self) -> int:
        return self._sides[0]

    @property
    def heads(self) -> int:
        """KV heads."""
        return self._sides[2]

    def parts(self, pages: Tensor) -> tuple[Tensor, ...]:
        """Return views of pages (..., bytes of a page) in which a dimension counts the tokens of a page.

        They are the numbers, (..., block_size, 2, Hkv, D), and, in 8 bits, their scales,
        (..., block_size, 2, Hkv).
        """
        outer, (block_size, sides, kv_heads, dim) = pages.shape[:-1], self._sides
        if self.format is None:
            return (pages.view(self.dtype).view(*outer, *self._sides),)
        count = block_size * sides * kv_heads * dim
        levels = pages[..., :count].view(self.format.dtype).view(*outer, *self._sides)
        return levels, pages[..., count:].view(SCALE).view(*outer, *self._sides[:3])


def round_heads(numbers: Tensor, format: KVFormat) -> tuple[Tensor, Tensor]:
    """Round numbers (..., D) to a format. Returns their levels, and the scale of each D numbers, (...).

    Levels are chosen for the rounded scale. A number that is not finite makes the scale so, and thereby the
    result of every row that reads it, as in the model's type.
    """
    wide = numbers.float()
    scales = (wide.abs().amax(-1) / format.most).to(SCALE)
    # Smaller numbers are zero: the reciprocal of a subnormal scale could be infinite.
    inverse = torch.where(scales.float() > TINY, 1 / scales.float(), 0.0)
    levels = (wide * inverse[..., None]).nan_to_num(0.0)
    if format is INT8:
        levels = levels.round()
    return levels.clamp(-format.most, format.most).to(format.dtype), scales


def store(kv: KV, keys_values: Tensor, slots: Tensor) -> None:
    """Write rows (T, 2, Hkv, D) into pages. slots: (T,), block * block_size + offset of each row."""
    if isinstance(kv, Tensor):
        kv.flatten(0, 1).index_copy_(0, slots, keys_values)
        return
    block, offset = slots // kv.shape[1], slots % kv.shape[1]
    levels, kv.scales[block, offset] = round_heads(keys_values, kv.format)
    # torch cannot write 8-bit floats by index, so bytes are written.
    kv.levels.view(torch.uint8)[block, offset] = levels.view(torch.uint8)


def gather(kv: KV, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys and values of blocks (n,) in a type, (n, block_size, 2, Hkv, D)."""
    if isinstance(kv, Tensor):
        return kv.index_select(0, blocks)
    levels = kv.levels.view(torch.uint8)[blocks].view(kv.levels.dtype)
    return (levels.float() * kv.scales[blocks].float()[..., None]).to(dtype)
