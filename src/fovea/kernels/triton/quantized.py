"""Products on a GPU with quantized weights, and with the weights of all experts, as layers call them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional

from fovea.kernels.base import TableProduct
from fovea.kernels.codes import Codes, Format, join
from fovea.kernels.float8 import FP8, Fp8Product
from fovea.kernels.torch_kernels import PLAIN
from fovea.kernels.triton.products import (
    ROW_GROUP,
    Weight,
    multiply,
    multiply_chosen,
    of_float8,
    pack,
    pack_codes,
    packs,
    round_input,
    unpack,
)
from fovea.kernels.triton.rows import finish

FUSED_ROWS = 128
"""Up to so many rows are multiplied by packed weights. More rows would unpack the weights too often.

More rows are multiplied by torch, after one launch has turned the weight into plain numbers.
"""
FP8_FUSED_ROWS = 64
"""Up to so many rows are multiplied by 8-bit floats without being rounded."""
CHOSEN_PAIRS = 128
"""Up to so many pairs of a row and an expert are multiplied one by one, without being sorted: 16 rows of 8.

More rows would too often read the weight of the same expert.
"""
PLAIN_WEIGHTS = 1 << 27
"""Number of weights that are turned into plain numbers together, for many rows."""
TRIAL_ROWS = 1, 20, 64, FUSED_ROWS + 1
"""Numbers of rows in trials: every size of tiles, since each needs another amount of on-chip memory."""
TRIAL_OUTPUTS = 136


class TritonQuantizedProduct:
    """A product with weights of codes, one after the other. It is a `kernels.base.TableProduct`."""

    def __init__(
        self, weights: Sequence[Weight], bias: Tensor | None, activation: str | None, gated: bool,
        processors: int,
    ) -> None:  # fmt: skip
        sizes = [weight.n for weight in weights]
        self.weights = list(weights)
        self._biases = [None] * len(sizes) if bias is None else list(torch.split(bias, sizes))
        self._k = weights[0].k
        self._activation, self._gated, self._processors = activation, gated, processors

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        rows, details = x.reshape(-1, self._k), (self._activation, self._gated, residual)
        few = len(rows) <= FUSED_ROWS
        if few and len(self.weights) == 1:
            return _multiply_few(x, self.weights[0], self._biases[0], *details, self._processors)
        parts: list[Tensor] = []
        for weight, bias in zip(self.weights, self._biases, strict=True):
            if few:
                parts.append(multiply(rows, weight, bias, None, None, self._processors))
            else:
                parts += _multiply_plain(rows, weight, bias)
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return finish(y.view(*x.shape[:-1], y.shape[-1]), *details)

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows of the weight: (*ids, k) float32, exactly the values of the codes."""
        flat, first, out = ids.flatten(), 0, None
        for weight in self.weights:
            mine = (flat >= first) & (flat < first + weight.n)
            found = weight.rows((flat - first).clamp(0, weight.n - 1))
            out = found if out is None else torch.where(mine[:, None], found, out)
            first += weight.n
        assert out is not None
        return out.view(*ids.shape, self._k)


def _multiply_plain(x: Tensor, weight: Weight, bias: Tensor | None) -> list[Tensor]:
    """Multiply many rows by a weight, some outputs at a time. Returns the parts of the result."""
    n, parts = weight.n, []
    step = -(-n // -(-n * weight.k // PLAIN_WEIGHTS))
    for first in range(0, n, step):
        last = min(n, first + step)
        some = None if bias is None else bias[first:last]
        parts.append(functional.linear(x, unpack(weight, first, last, x.dtype), some))
    return parts


def _multiply_few(
    x: Tensor, weight: Weight, bias: Tensor | None, activation: str | None, gated: bool,
    residual: Tensor | None, processors: int,
) -> Tensor:  # fmt: skip
    """Compute a `kernels.base.Product` for few rows. Only after an activation the residual is a launch."""
    rows, added = x.reshape(-1, weight.k), None
    if activation is None and residual is not None:
        added, residual = residual.reshape(len(rows), weight.n).contiguous(), None
    y = multiply(rows, weight, bias, added, None, processors)
    return finish(y.view(*x.shape[:-1], weight.n), activation, gated, residual)


class TritonFp8Product:
    """A product with a weight in 8-bit floats. It is a `kernels.base.TableProduct`.

    torch's product has few tiles for few rows, and no splits of k. So few rows are multiplied by the weight
    as it is stored. They are not rounded.

    rounding: the product for more rows, which rounds them.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, activation: str | None, gated: bool, processors: int
    ) -> None:
        self.rounding = Fp8Product(weight, bias, activation, gated, round_input, finish)
        self._bias, self._activation, self._gated = bias, activation, gated
        self._processors = processors
        self._weight: Weight | None = None
        if self.rounding.values.shape[1] == self.rounding.k:  # else its rows are longer than those of x
            n = self.rounding.n
            self._weight = of_float8(self.rounding.values[None, :n], self.rounding.scale[None, :n, 0])

    @property
    def nbytes(self) -> int:
        return self.rounding.nbytes

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if self._weight is None or x.numel() > FP8_FUSED_ROWS * x.shape[-1]:
            return self.rounding(x, residual)
        return _multiply_few(
            x, self._weight, self._bias, self._activation, self._gated, residual, self._processors
        )

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows of the weight, dequantized: (*ids, k) float32."""
        return self.rounding.rows(ids)


class TritonGroupedProduct:
    """A product with the weights of all experts of a layer. It is a `kernels.base.GroupedProduct`."""

    def __init__(
        self, weights: Tensor, activation: str | None, gated: bool, format: Format | None, processors: int
    ) -> None:
        self.weight = pack(weights, format)
        self._activation, self._gated, self._processors = activation, gated, processors

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor, counts: Tensor) -> Tensor:
        y = multiply(x, self.weight, None, None, counts, self._processors)
        return finish(y, self._activation, self._gated, None)

    def of_rows(self, x: Tensor, chosen: Tensor) -> Tensor | None:
        if chosen.numel() > CHOSEN_PAIRS:
            return None
        gated = self._gated and self._activation is not None
        y = multiply_chosen(x, self.weight, chosen, self._activation if gated else None)
        return y if gated else finish(y, self._activation, self._gated, None)


def quantized_product(
    weight: Tensor, bias: Tensor | None, activation: str | None, gated: bool, format: Format, processors: int
) -> TableProduct:
    """Return the product of a format, see `kernels.base.Kernels.quantized_product`."""
    if format is FP8:
        return TritonFp8Product(weight, bias, activation, gated, processors)
    return TritonQuantizedProduct([pack(weight[None], format)], bias, activation, gated, processors)


def coded_product(
    parts: Sequence[Codes], bias: Tensor | None, activation: str | None, gated: bool, processors: int
) -> TritonQuantizedProduct | None:
    """Return a product with codes; None: some cannot be packed.

    Neighbours of one scheme are one weight, so that they take one launch.
    """
    if not all(map(packs, parts)):
        return None
    joined = [join(list(some)) for _, some in groupby(map(_complete, parts), _scheme)]
    weights = [pack_codes([each]) for each in joined]
    return TritonQuantizedProduct(weights, bias, activation, gated, processors)


def _complete(codes: Codes) -> Codes:
    """Return codes whose scales are complete. One scale per row has one number for its group."""
    scale, minimum = codes.full_scales()
    group = ROW_GROUP if scale.shape[1] == 1 else codes.group
    return replace(codes, group=group, scale=scale, minimum=minimum, outer=None, outer_minimum=None)


def _scheme(codes: Codes) -> tuple[object, ...]:
    zero = codes.zero if isinstance(codes.zero, int) else None
    return codes.bits, codes.group, zero, codes.minimum is None


@torch.inference_mode()
def coded_trial_error(weight: Weight, dtype: torch.dtype, processors: int) -> float:
    """Return the largest relative error of products with a weight against plain torch. It may be NaN.

    A part of the outputs is compared.
    """
    draw, device = torch.Generator().manual_seed(0), weight.values.device
    product = TritonQuantizedProduct([weight], None, None, False, processors)
    x = torch.randn(TRIAL_ROWS[-1], weight.k, generator=draw).to(device, dtype)
    ids = torch.arange(0, weight.n, -(-weight.n // TRIAL_OUTPUTS), device=device)
    plain = product.rows(ids)
    pairs = [(product(x[:rows], None)[:, ids], x[:rows].float() @ plain.T) for rows in TRIAL_ROWS]
    return _largest_error(pairs)


@torch.inference_mode()
def trial_error(
    format: Format | None, dtype: torch.dtype, device: torch.device, grouped: bool, processors: int
) -> float:
    """Return the largest relative error of products with random weights against plain torch. It may be NaN.

    format: None: plain weights. grouped: multiply the rows of three experts.
    """
    draw, (n, k) = torch.Generator().manual_seed(0), (TRIAL_OUTPUTS, 264)
    weights, x = (
        torch.randn(*shape, generator=draw).to(device, dtype) for shape in ((3, n, k), (TRIAL_ROWS[-1], k))
    )
    if format is None:
        plain = weights.float()
    else:
        makers = [PLAIN.quantized_product(weight, None, None, False, format) for weight in weights]
        plain = torch.stack([each.rows(torch.arange(n, device=device)) for each in makers])
    wide, pairs = x.float(), []
    if grouped:
        experts = TritonGroupedProduct(weights, None, False, format, processors)
        for counts in ([2, 0, 1], [5, 0, 60], [40, 1, 88]):
            parts = torch.split(wide[: sum(counts)], counts)
            theirs = torch.cat([part @ weight.T for part, weight in zip(parts, plain, strict=True)])
            numbers = torch.tensor(counts, dtype=torch.int32, device=device)
            pairs.append((experts(x[: sum(counts)], numbers), theirs))
        chosen = torch.tensor([[2, 0], [1, 1], [0, 2]], device=device)
        ours = experts.of_rows(x[:3], chosen)
        assert ours is not None
        pairs.append((ours, torch.einsum("tk,tpnk->tpn", wide[:3], plain[chosen]).flatten(0, 1)))
    elif format is not None:
        product = quantized_product(weights[0], None, None, False, format, processors)
        pairs = [(product(x[:rows], None), wide[:rows] @ plain[0].T) for rows in TRIAL_ROWS]
    return _largest_error(pairs)


def _largest_error(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    errors = [(ours.float() - theirs).norm() / theirs.norm() for ours, theirs in pairs]
    return float(torch.stack(errors).max())  # unlike Python's max, it does not pass over a NaN
