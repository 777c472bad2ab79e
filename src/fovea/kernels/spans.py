"""Attention inside spans of rows of any lengths: for encoders on a GPU, all images of a step in one launch.

torch's own attention over sequences of different lengths (torch.nn.attention.varlen, FlashAttention) does it,
from compute capability 8.0 on, in bfloat16 and float16, for heads of a multiple of 8 numbers up to 256.
Elsewhere each run of spans of one length is one call of torch's scaled_dot_product_attention.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fovea.kernels.transfer import to_device

log = logging.getLogger("fovea.kernels")
Runs = Sequence[tuple[int, int]]
"""Numbers of groups, and of rows per group, one run after the other from the first row on."""
MAX_TRIAL_ERROR = 0.1
"""Largest accepted difference in the trial. A wrong result differs by more than 1."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans of rows that attend to each other; together they are all rows.

    runs: the spans by length.
    bounds: (spans + 1,) int32, where each span begins, and the end of the last one.
    longest: rows of the longest span.
    """

    runs: tuple[tuple[int, int], ...]
    bounds: Tensor
    longest: int

    @classmethod
    def of(cls, runs: Runs, device: torch.device) -> Spans:
        """Return the spans of runs. Neighbouring runs of one length become one."""
        joined: list[tuple[int, int]] = []
        for groups, count in runs:
            if joined and joined[-1][1] == count:
                groups += joined.pop()[0]
            joined.append((groups, count))
        lengths = np.repeat([count for _, count in joined], [groups for groups, _ in joined])
        bounds = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        return cls(tuple(joined), to_device(torch.from_numpy(bounds), device), int(lengths.max(initial=0)))


SpanAttention = Callable[[Tensor, Spans, int], Tensor]
"""Computes attention inside each span, (T, heads * D).

Arguments: qkv (T, 3 * heads, D), queries before keys before values; the spans; the number of heads.
Scores are scaled by D**-0.5.
"""


def attend_each(qkv: Tensor, spans: Spans, heads: int) -> Tensor:
    """Compute spans of one length together, one length after the other. This is a `SpanAttention`."""
    return attend_runs(qkv, spans.runs, heads)


def attend_runs(qkv: Tensor, runs: Runs, heads: int) -> Tensor:
    """Do the work of `attend_each` for runs. Their numbers are constants if torch exports it."""
    outputs, first = [], 0
    for groups, count in runs:
        rows = qkv[first : first + groups * count].view(groups, count, 3, heads, -1)
        output = functional.scaled_dot_product_attention(*rows.permute(2, 0, 3, 1, 4))
        outputs.append(output.transpose(1, 2).reshape(groups * count, -1))
        first += groups * count
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def fits_one_launch(dtype: torch.dtype, dim: int) -> bool:
    """Whether `attend_all` computes all spans in one launch. dim: numbers per head."""
    return dtype in (torch.bfloat16, torch.float16) and dim % 8 == 0 and dim <= 256


def attend_all(qkv: Tensor, spans: Spans, heads: int) -> Tensor:
    """Compute all spans in one launch, if it can be. This is a `SpanAttention` for a GPU."""
    if not fits_one_launch(qkv.dtype, qkv.shape[2]):
        return attend_each(qkv, spans, heads)
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = qkv[:, :heads], qkv[:, heads : 2 * heads], qkv[:, 2 * heads :]
    out = varlen_attn(query, key, value, spans.bounds, spans.bounds, spans.longest, spans.longest)
    assert isinstance(out, Tensor)
    return out.flatten(1)


@torch.inference_mode()
def load(device: torch.device) -> SpanAttention:
    """Return `attend_all` if it works on the device and agrees with `attend_each`, otherwise the latter."""
    if device.type != "cuda":
        return attend_each
    draw = torch.Generator().manual_seed(0)
    try:
        qkv = torch.randn(72, 6, 80, generator=draw).to(device, torch.bfloat16)
        spans = Spans.of(((2, 16), (1, 40)), device)
        error = float((attend_all(qkv, spans, 2) - attend_each(qkv, spans, 2)).float().abs().max())
    except Exception as problem:  # noqa: BLE001 - the library and its driver may raise any exception
        obstacle = f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"
    else:
        if error < MAX_TRIAL_ERROR:
            log.info("attention of encoders: FlashAttention over all images of a step at once")
            return attend_all
        obstacle = f"its result differs by {error:.2g}"
    log.warning(
        "attention of encoders: one length after the other; FlashAttention cannot be used: %s", obstacle
    )
    return attend_each
