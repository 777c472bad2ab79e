"""Experts on a GPU: the choice of experts in one launch, and the sum of their results in another.

Twins are `torch_kernels.choose_experts` and `sum_experts`. Numbers are rounded where those round them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fovea.kernels.triton.rows import next_power, sigmoid

SUM_TILE = 1024
"""Numbers of a row that one program adds over the experts."""
DOT_TILE = 1024
"""Numbers of a row that are multiplied at once by the weights of the gate of a shared expert."""


@triton.jit
def _choose(
    logits, factors, x, gate, weights, chosen, opened, experts, active, scaling, width,
    EXPERTS: tl.constexpr, PLACES: tl.constexpr, NORMALIZED: tl.constexpr, FACTORS: tl.constexpr,
    OPENS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Choose the experts of one row. Of equal probabilities the first is chosen."""
    row = tl.program_id(0).to(tl.int64)
    at, places = tl.arange(0, EXPERTS), tl.arange(0, PLACES)
    inside, used = at < experts, places < active
    scores = tl.load(logits + row * experts + at, mask=inside, other=float("-inf")).to(tl.float32)
    powers = tl.exp(scores - tl.max(scores, axis=0))
    left = tl.where(inside, powers / tl.sum(powers, axis=0), -1.0)
    best, numbers = tl.zeros((PLACES,), tl.float32), tl.zeros((PLACES,), tl.int32)
    for place in range(active):
        top = tl.max(left, axis=0)
        # A NaN is equal to nothing. Its row means nothing then, but no other memory may be read for it.
        number = tl.minimum(tl.min(tl.where(left == top, at, EXPERTS), axis=0), experts - 1)
        best = tl.where(places == place, top, best)
        numbers = tl.where(places == place, number, numbers)
        left = tl.where(at == number, -1.0, left)
    if NORMALIZED:
        best /= tl.sum(best, axis=0)
    else:
        best *= scaling
    if FACTORS:
        best *= tl.load(factors + numbers, mask=used, other=0.0).to(tl.float32)
    place = row * active + places
    tl.store(weights + place, best.to(weights.dtype.element_ty), mask=used)
    tl.store(chosen + place, numbers.to(tl.int64), mask=used)
    if OPENS:
        products = tl.zeros((SIZE,), tl.float32)
        for first in range(0, width, SIZE):
            number = first + tl.arange(0, SIZE)
            real = number < width
            products += tl.load(x + row * width + number, mask=real, other=0.0).to(tl.float32) * tl.load(
                gate + number, mask=real, other=0.0
            ).to(tl.float32)
        total = tl.sum(products, axis=0).to(opened.dtype.element_ty).to(tl.float32)
        tl.store(opened + row, sigmoid(total).to(opened.dtype.element_ty))


def choose_experts(
    logits: Tensor, active: int, *, normalized: bool, scaling: float = 1.0, factors: Tensor | None = None,
    opening: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Do the work of `kernels.base.Kernels.choose_experts`."""
    logits = logits.contiguous()
    rows, experts = logits.shape
    weights = logits.new_empty((rows, active))
    chosen = torch.empty((rows, active), dtype=torch.int64, device=logits.device)
    x, gate = (logits, logits) if opening is None else (opening[0].contiguous(), opening[1])
    opened = None if opening is None else x.new_empty((rows, 1))
    _choose[(rows,)](
        logits, logits if factors is None else factors, x, gate, weights, chosen,
        weights if opened is None else opened, experts, active, scaling, x.shape[1],
        EXPERTS=next_power(experts), PLACES=next_power(active), NORMALIZED=normalized,
        FACTORS=factors is not None, OPENS=opened is not None, SIZE=DOT_TILE,
    )  # fmt: skip
    return weights, chosen, opened


@triton.jit
def _sum(
    outputs, weights, shared, opened, residual, out, active, width,
    SHARED: tl.constexpr, OPENED: tl.constexpr, RESIDUAL: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = at < width
    total = tl.zeros((SIZE,), tl.float32)
    for place in range(active):
        pair = row * active + place
        part = tl.load(outputs + pair * width + at, mask=inside, other=0.0).to(tl.float32)
        part *= tl.load(weights + pair).to(tl.float32)
        total += part.to(out.dtype.element_ty).to(tl.float32)
    total = total.to(out.dtype.element_ty).to(tl.float32)
    if SHARED:
        part = tl.load(shared + row * width + at, mask=inside, other=0.0).to(tl.float32)
        if OPENED:
            part = (part * tl.load(opened + row).to(tl.float32)).to(out.dtype.element_ty).to(tl.float32)
        total = (total + part).to(out.dtype.element_ty).to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual + row * width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, total.to(out.dtype.element_ty), mask=inside)


def sum_experts(
    outputs: Tensor, weights: Tensor, shared: Tensor | None = None, opened: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Do the work of `kernels.base.Kernels.sum_experts`."""
    rows, active, width = outputs.shape
    outputs, weights = outputs.contiguous(), weights.contiguous()
    given = [outputs if part is None else part.contiguous() for part in (shared, opened, residual)]
    out = outputs.new_empty((rows, width))
    _sum[(rows, triton.cdiv(width, SUM_TILE))](
        outputs, weights, *given, out, active, width,
        SHARED=shared is not None, OPENED=opened is not None, RESIDUAL=residual is not None, SIZE=SUM_TILE,
    )  # fmt: skip
    return out
