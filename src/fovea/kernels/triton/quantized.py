"""Products on a GPU with quantized weights, and with the weights of all experts, as layers call them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fovea.kernels.quantize import Format
from fovea.kernels.torch_kernels import PLAIN
from fovea.kernels.triton.products import multiply, pack, unpack
from fovea.kernels.triton.rows import finish

FUSED_ROWS = 128
"""Up to so many rows are multiplied by packed weights. More rows would unpack the weights too often.

More rows are multiplied by torch, after one launch has turned the weight into plain numbers.
"""
PLAIN_WEIGHTS = 1 << 27
"""Number of weights that are turned into plain numbers together, for many rows."""


class TritonQuantizedProduct:
    """A product with a weight in int8 or int4. It is a `kernels.base.TableProduct`."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, activation: str | None, gated: bool, format: Format,
        processors: int,
    ) -> None:  # fmt: skip
        self.weight, self._bias = pack(weight[None], format), bias
        self._activation, self._gated, self._processors = activation, gated, processors

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        rows = x.reshape(-1, self.weight.k)
        shape = *x.shape[:-1], self.weight.n
        if self._activation is None and len(rows) <= FUSED_ROWS:
            added = None if residual is None else residual.reshape(len(rows), -1).contiguous()
            return multiply(rows, self.weight, self._bias, added, None, self._processors).view(shape)
        if len(rows) <= FUSED_ROWS:
            y = multiply(rows, self.weight, self._bias, None, None, self._processors)
        else:
            y = self._multiply_plain(rows)
        return finish(y.view(shape), self._activation, self._gated, residual)

    def _multiply_plain(self, x: Tensor) -> Tensor:
        n, k = self.weight.n, self.weight.k
        step = -(-n // -(-n * k // PLAIN_WEIGHTS))
        parts = []
        for first in range(0, n, step):
            last = min(n, first + step)
            bias = None if self._bias is None else self._bias[first:last]
            parts.append(functional.linear(x, unpack(self.weight, first, last, x.dtype), bias))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows of the weight, dequantized: (*ids, k) float32."""
        weight, places = self.weight, ids.flatten()
        assert weight.scale is not None
        values = weight.values[0][:, places]
        if weight.table is not None:
            values = weight.table[torch.cat((values & 15, values >> 4), dim=-1).int()]
        wide = values.float() * weight.scale[0][:, places].float()[..., None]
        return wide.transpose(0, 1).flatten(1)[:, : weight.k].view(*ids.shape, weight.k)


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


@torch.inference_mode()
def trial_error(
    format: Format | None, dtype: torch.dtype, device: torch.device, grouped: bool, processors: int
) -> float:
    """Return the largest relative error of products with random weights against plain torch. It may be NaN.

    Every size of tiles is tried, since each needs another amount of the GPU's memory on the chip.

    format: None: plain weights. grouped: multiply the rows of three experts.
    """
    draw, (n, k) = torch.Generator().manual_seed(0), (136, 264)
    weights, x = (
        torch.randn(*shape, generator=draw).to(device, dtype) for shape in ((3, n, k), (FUSED_ROWS + 1, k))
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
    elif format is not None:
        product = TritonQuantizedProduct(weights[0], None, None, False, format, processors)
        pairs = [(product(x[:rows], None), wide[:rows] @ plain[0].T) for rows in (1, 20, FUSED_ROWS, len(x))]
    errors = [(ours.float() - theirs).norm() / theirs.norm() for ours, theirs in pairs]
    return float(torch.stack(errors).max())  # unlike Python's max, it does not pass over a NaN
