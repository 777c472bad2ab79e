"""Products in C++: weights in the layouts that they read, single products, and mixtures of experts.

A product includes the activation, gate and residual that follow. A mixture of experts is one call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from itertools import groupby, pairwise

import torch
from torch import Tensor

from fovea.kernels.activation import finish
from fovea.kernels.codes import Format
from fovea.kernels.native.border import ANY, BF16, I64, address, check_numbers
from fovea.kernels.native.layouts import BLOCK_BYTES, Packable, join_packable
from fovea.kernels.shared import keep

PANEL, LANES, CODES = 64, 16, 15
"""Outputs of a panel, outputs of a tile, exponents that have a code."""
PACKED_TILE, PLAIN_TILE = 48, 64  # bytes
MAX_EXCEPTIONS = 0.002
"""Largest share of values without a code in a packed weight. A weight with more is stored in plain tiles."""
PACKED_FORMAT = 0
"""Number of the format of `PackedWeight`."""


class WeightStruct(ctypes.Structure):
    """A weight as C++ reads it. The fields have the order of `Weight` in cpu/kernels.h."""

    _fields_ = [
        ("data", c_void_p), ("table", c_void_p), ("starts", c_void_p), ("exceptions", c_void_p),
        ("bias", c_void_p), ("n", c_int64), ("k", c_int64), ("format", c_int64), ("next", c_void_p),
    ]  # fmt: skip


class ScalesStruct(ctypes.Structure):
    """The scales of codes as C++ reads them. The fields have the order of `Scales` in cpu/quantize.cpp."""

    _fields_ = [
        ("scale", c_void_p), ("offset", c_void_p), ("outer", c_void_p), ("outer_offset", c_void_p),
        ("groups", c_int64),
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
        self.data, self.exceptions = keep(self.data), keep(self.exceptions)
        self.bias = _panel_bias(bias, order)
        table, biases = (None if part is None else part.data_ptr() for part in (self.table, self.bias))
        self.struct = WeightStruct(
            self.data.data_ptr(), table, self.starts.data_ptr(), self.exceptions.data_ptr(), biases,
            self.n, self.k, PACKED_FORMAT,
        )  # fmt: skip
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
    """A bf16 weight (n, k) that is rounded to 8 or 4 bits, in a layout of `cpu/levels.h`.

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
        panels = len(order) // PANEL
        self.data = _room(panels, self.k, format.number)
        library.fovea_quantize(
            weight.data_ptr(), self.k, order.data_ptr(), panels, format.number, self.data.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        self.data = keep(self.data)
        self.bias = _panel_bias(bias, order)
        self.struct = _struct(self.data, self.bias, self.n, self.k, format.number)
        self.address = ctypes.addressof(self.struct)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


class CodedWeight:
    """A weight whose codes are kept as they are, in layouts of `cpu/levels.h`.

    parts: weights whose rows follow each other. Each run of equal layouts is a structure of its own in C++;
        the structures are linked.
    gated: as in `PackedWeight`. Then all parts have one layout.
    bias, address: as in `PackedWeight`.
    """

    def __init__(
        self, library: ctypes.CDLL, parts: Sequence[Packable], bias: Tensor | None, *, gated: bool
    ) -> None:
        self.n, self.k = sum(len(part.codes) for part in parts), parts[0].codes.shape[1]
        self._kept: list[tuple[WeightStruct, Tensor, Tensor | None]] = []
        first = 0
        for layout, run in groupby(parts, lambda part: part.layout):
            whole = join_packable(list(run))
            count = len(whole.codes)
            order = panel_order(count, gated=gated)
            panels = len(order) // PANEL
            data = _room(panels, self.k, layout)
            tensors = whole.scale, whole.offset, whole.outer, whole.outer_offset
            scales = ScalesStruct(*map(_address, tensors), whole.scale.shape[1])
            library.fovea_pack_codes(
                whole.codes.data_ptr(), self.k, order.data_ptr(), panels, layout, ctypes.addressof(scales),
                data.data_ptr(), torch.get_num_threads(),
            )  # fmt: skip
            data = keep(data)
            padded = None if bias is None else _panel_bias(bias[first : first + count], order)
            self._kept.append((_struct(data, padded, count, self.k, layout), data, padded))
            first += count
        for (struct, *_), (following, *_) in pairwise(self._kept):
            struct.next = ctypes.addressof(following)
        self.address = ctypes.addressof(self._kept[0][0])

    @property
    def nbytes(self) -> int:
        return sum(data.nbytes for _, data, _ in self._kept)


NativeWeight = PackedWeight | QuantizedWeight | CodedWeight


def _room(panels: int, k: int, layout: int) -> Tensor:
    """Return memory for the panels of a quantized weight."""
    values, size = BLOCK_BYTES[layout]
    return torch.empty(panels * -(-k // values) * size, dtype=torch.uint8)


def _struct(data: Tensor, bias: Tensor | None, n: int, k: int, layout: int) -> WeightStruct:
    return WeightStruct(data.data_ptr(), bias=_address(bias), n=n, k=k, format=layout)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


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


ACTIVATIONS = {
    (None, False): 0, ("silu", True): 1, ("gelu_pytorch_tanh", True): 2, ("gelu_new", True): 2,
    ("gelu", True): 3, ("gelu_pytorch_tanh", False): 4, ("gelu_new", False): 4, ("gelu", False): 5,
    ("quick_gelu", False): 6, ("silu", False): 7,
}  # fmt: skip
"""Number of each (activation, gated) that C++ fuses into a product: `Activation` in cpu/kernels.h."""


def fuses(activation: str | None, gated: bool) -> bool:
    """Whether C++ applies the activation. If so, a gated weight has to be packed as a gated one."""
    return (activation, gated) in ACTIVATIONS


class NativeProduct:
    """A product with a packed weight, in C++. Bias, activation, gate and residual are part of it if possible.

    kind: number of the activation that is fused into the product; None: torch applies the activation.
    width: width of the rows that C++ writes.
    """

    def __init__(
        self, library: ctypes.CDLL, weight: NativeWeight, activation: str | None, gated: bool
    ) -> None:
        self.kind = ACTIVATIONS.get((activation, gated))
        self.activation, self.gated = activation, gated
        self.weight = weight
        self.width = weight.n // 2 if gated and self.kind is not None else weight.n
        self._library = library

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        x = x.contiguous()
        rows = x.numel() // self.weight.k
        y = x.new_empty((*x.shape[:-1], self.width))
        fused = None if residual is None or self.kind is None else residual.contiguous()
        self._library.fovea_product(
            self.weight.address, address(x, BF16, *x.shape[:-1], self.weight.k), self.weight.k, rows,
            self.kind or 0, address(fused, BF16, *y.shape), y.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return y if self.kind is not None else finish(y, self.activation, self.gated, residual)

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows of the weight, (*ids, k) bfloat16. The weight must not be gated."""
        return weight_rows(self._library, self.weight, ids)


class MixtureStruct(ctypes.Structure):
    """The experts as C++ reads them. The fields have the order of `Mixture` in cpu/kernels.h."""

    _fields_ = [
        ("gate_up", c_void_p), ("down", c_void_p), ("experts", c_int64), ("active", c_int64),
        ("activation", c_int64),
    ]  # fmt: skip


class NativeExperts:
    """The experts of a layer as one call. This is a `kernels.base.Mixture`.

    library: the compiled kernels.
    gate_up, down: both products of each expert. All gate_up have one shape and one format, and so have all
        down.
    active: experts per row.
    address: address of the structure that C++ reads. It is valid as long as this object lives.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        gate_up: Sequence[NativeProduct],
        down: Sequence[NativeProduct],
        active: int,
    ) -> None:
        self._library = library
        self._products = gate_up, down  # their addresses are valid as long as they live
        self._hidden = gate_up[0].weight.k
        if len(gate_up) != len(down):
            raise ValueError(
                f"each expert needs both products, got {len(gate_up)} gate_up and {len(down)} down"
            )
        if not 0 < active <= len(gate_up):
            raise ValueError(
                f"the active experts of a row must be from 1 to all {len(gate_up)} experts, got {active}"
            )
        self._tables = _addresses(gate_up), _addresses(down)
        first, second = map(ctypes.addressof, self._tables)
        self._struct = MixtureStruct(first, second, len(gate_up), active, gate_up[0].kind)
        self.address = ctypes.addressof(self._struct)

    def __call__(self, x: Tensor, logits: Tensor, residual: Tensor | None) -> Tensor:
        x, logits = x.contiguous(), logits.contiguous()
        residual = None if residual is None else residual.contiguous()
        out, experts = torch.empty_like(x), len(self._products[0])
        self._library.fovea_experts(
            self.address, address(x, BF16, ANY, self._hidden), len(x), address(logits, BF16, len(x), experts),
            address(residual, BF16, *x.shape), out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out


def _addresses(products: Sequence[NativeProduct]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(products))(*(product.weight.address for product in products))
