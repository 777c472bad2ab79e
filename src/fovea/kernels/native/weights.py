"""Weights in the layouts that the C++ products read."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from fovea.kernels.native.border import I64, address, check_numbers
from fovea.kernels.quantize import Format

PANEL, LANES, CODES = 64, 16, 15
"""Outputs of a panel, outputs of a tile, exponents that have a code."""
PACKED_TILE, PLAIN_TILE = 48, 64  # bytes
MAX_EXCEPTIONS = 0.002
"""Largest share of values without a code in a packed weight. A weight with more is stored in plain tiles."""
BF16, SCALE_BYTES = 0, 2
"""Number of the format of `PackedWeight`; bytes of a group's scale."""


class WeightStruct(ctypes.Structure):
    """A weight as C++ reads it. The fields have the order of `Weight` in cpu/kernels.h."""

    _fields_ = [
        ("data", c_void_p), ("table", c_void_p), ("starts", c_void_p), ("exceptions", c_void_p),
        ("bias", c_void_p), ("n", c_int64), ("k", c_int64), ("format", c_int64),
    ]  # fmt: skip


class PackedWeight:
    """A bf16 weight (n, k) in the layout of `cpu/bf16.cpp`: three quarters of its bytes, without loss.

    Raises ValueError if the weight is not bf16, or k is odd.

    bias: (n,), or None.
    gated: the first half of the outputs are gates, the second half the values that they scale. A panel holds
        both.
    table: exponents of the 16 codes; None: too many values have no code, so the tiles are plain.
    address: of the structure that C++ reads. It is valid as long as this object lives.
    """

    def __init__(self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None, *, gated: bool) -> None:
        if weight.dtype is not torch.bfloat16 or weight.shape[1] % 2:
            raise ValueError(
                f"a packed weight is bf16 with an even width, got {weight.dtype} {list(weight.shape)}"
            )
        self.library = library
        self.n, self.k = weight.shape
        weight = weight.contiguous()
        order = panel_order(self.n, gated=gated)
        self.panels = len(order) // PANEL
        codes, self.table = self._codes(weight)
        self.data, self.starts, self.exceptions = self._tiles(weight, order, codes)
        if len(self.exceptions) > MAX_EXCEPTIONS * weight.numel():
            self.table = None
            self.data, self.starts, self.exceptions = self._tiles(weight, order, None)
        self.bias = _panel_bias(bias, order)
        self.struct = WeightStruct(
            self.data.data_ptr(),
            None if self.table is None else self.table.data_ptr(),
            self.starts.data_ptr(),
            self.exceptions.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            self.n,
            self.k,
            BF16,
        )
        self.address = ctypes.addressof(self.struct)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.exceptions.nbytes

    def _codes(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the code of each exponent, (256,), and the table of exponents by code, (16,).

        The most frequent exponents have codes 1..15. Code 0 stands for zero and for exceptions.
        """
        counts = torch.zeros(256, dtype=torch.int64)
        self.library.fovea_exponents(weight.data_ptr(), weight.numel(), counts.data_ptr())
        counts[0] = -1
        frequent = counts.argsort(descending=True)[:CODES]
        codes = torch.zeros(256, dtype=torch.uint8)
        codes[frequent] = torch.arange(1, CODES + 1, dtype=torch.uint8)
        table = torch.zeros(CODES + 1, dtype=torch.uint8)
        table[1:] = frequent.to(torch.uint8)
        return codes, table

    def _tiles(self, weight: Tensor, order: Tensor, codes: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        tile = PLAIN_TILE if codes is None else PACKED_TILE
        data = torch.empty(self.panels * self.k // 2 * PANEL // LANES * tile, dtype=torch.uint8)
        counts = torch.zeros(self.panels, dtype=torch.int64)
        starts = torch.zeros(self.panels + 1, dtype=torch.int64)
        exceptions = torch.zeros(0, dtype=torch.int64)
        for again in (False, True):
            self.library.fovea_pack(
                weight.data_ptr(), self.k, order.data_ptr(), self.panels,
                None if codes is None else codes.data_ptr(), data.data_ptr(), counts.data_ptr(),
                starts.data_ptr(), exceptions.data_ptr() if again else None, torch.get_num_threads(),
            )  # fmt: skip
            if again or not int(counts.sum()):
                break
            torch.cumsum(counts, 0, out=starts[1:])
            exceptions = torch.zeros(int(starts[-1]), dtype=torch.int64)
        return data, starts, exceptions


class QuantizedWeight:
    """A bf16 weight (n, k) in 8 or 4 bits, in the layout of `cpu/levels.h`.

    Raises ValueError if the weight is not bf16.

    bias, gated, address: as in `PackedWeight`.
    format: INT8 or INT4.
    """

    def __init__(
        self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None, format: Format, *, gated: bool
    ) -> None:
        if weight.dtype is not torch.bfloat16:
            raise ValueError(f"a weight is quantized from bf16, got {weight.dtype}")
        self.n, self.k = weight.shape
        weight = weight.contiguous()
        order = panel_order(self.n, gated=gated)
        panels, groups = len(order) // PANEL, -(-self.k // format.group)
        size = panels * groups * PANEL * (format.group * format.bits // 8 + SCALE_BYTES)
        self.data = torch.empty(size, dtype=torch.uint8)
        library.fovea_quantize(
            weight.data_ptr(), self.k, order.data_ptr(), panels, format.number, self.data.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        self.bias = _panel_bias(bias, order)
        self.struct = WeightStruct(
            self.data.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            n=self.n,
            k=self.k,
            format=format.number,
        )
        self.address = ctypes.addressof(self.struct)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


NativeWeight = PackedWeight | QuantizedWeight


def weight_rows(library: ctypes.CDLL, weight: NativeWeight, ids: Tensor) -> Tensor:
    """Return rows of a weight that is not gated, bf16 (*ids, k). Quantized rows are dequantized."""
    ids = ids.contiguous()
    check_numbers("rows of a weight", ids, 0, weight.n - 1)
    out = torch.empty((*ids.shape, weight.k), dtype=torch.bfloat16)
    library.fovea_rows(weight.address, address(ids, I64, *ids.shape), ids.numel(), out.data_ptr())
    return out


def _panel_bias(bias: Tensor | None, order: Tensor) -> Tensor | None:
    return (
        None if bias is None else torch.where(order >= 0, bias.float()[order.clamp(min=0)], 0.0).contiguous()
    )


def panel_order(n: int, *, gated: bool) -> Tensor:
    """Return the row of the weight that each output of the panels has, (panels * 64,); -1 for padding.

    gated: a panel has 32 gates, then the 32 values that they scale.
    """
    if not gated:
        panels = -(-n // PANEL)
        order = torch.full((panels * PANEL,), -1, dtype=torch.int64)
        order[:n] = torch.arange(n)
        return order
    half, width = n // 2, PANEL // 2
    panels = -(-half // width)
    gates = torch.full((panels * width,), -1, dtype=torch.int64)
    gates[:half] = torch.arange(half)
    gates = gates.view(panels, 1, width)
    ups = torch.where(gates >= 0, gates + half, -1)
    return torch.cat((gates, ups), dim=1).reshape(-1)
