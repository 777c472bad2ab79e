"""Attention of prompts on a GPU by FlashInfer: all chunks of a step at once, over the KV pool in place.

FlashInfer's pages of layout NHD are (blocks, block_size, Hkv, D). Keys and values have strides of their own,
so the pool serves as both without a copy. FlashInfer plans the work of a step on the host, once for all
layers. (FlashAttention 2 needs pages of a multiple of 256 tokens, and its later releases run on few GPUs.)
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fovea.core.errors import ConfigError
from fovea.kernels.attention import Chunk, Heads, prefill_each
from fovea.kernels.pages import KV

HEAD_DIMS = (64, 128, 256)
"""Sizes of heads that FlashInfer's kernels for Hopper have, and its own tests run."""
DTYPES = (torch.bfloat16, torch.float16)
WORKSPACE_BYTES = 128 << 20
"""Memory for the partial results of contexts that are split, as FlashInfer's documentation recommends."""
MAX_TRIAL_ERROR = 0.1
"""Largest accepted difference in the trial.

Correct results differ by hundredths, because bfloat16 is rounded. A wrong result differs by more than 1.
"""


class FlashInfer:
    """FlashInfer's attention of prompts, for one model and one thread. This is a `ChunkAttention`.

    It holds WORKSPACE_BYTES of memory on the device.
    """

    def __init__(self, device: torch.device) -> None:
        import flashinfer

        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self._planned_chunks: tuple[Chunk, ...] | None = None
        self._copy_event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, query: Tensor, kv: KV, chunks: tuple[Chunk, ...], scale: float, out: Tensor) -> None:
        assert isinstance(kv, Tensor), "Triton's kernel computes prompts over pages in 8 bits"
        if chunks is not self._planned_chunks:
            self._plan(query, kv, chunks, scale)
        first = chunks[0].row
        self._wrapper.run(query[first:], (kv[:, :, 0], kv[:, :, 1]), out=out[first:])

    def _plan(self, query: Tensor, kv: Tensor, chunks: tuple[Chunk, ...], scale: float) -> None:
        """Plan the chunks of a step. All layers of the step have the same chunks, shapes and scale."""
        heads, dim, size = query.shape[1], query.shape[2], kv.shape[1]
        stops = [chunk.first + chunk.count for chunk in chunks]
        pages = [-(-stop // size) for stop in stops]
        tables = torch.cat([chunk.table[:used] for chunk, used in zip(chunks, pages, strict=True)])
        if self._copy_event is not None:
            # FlashInfer writes every plan to the same pinned buffer, and the device copies it later. A step
            # that samples nothing does not wait for the device, so the previous copy may still be pending.
            self._copy_event.synchronize()
        self._wrapper.plan(
            _bounds([chunk.count for chunk in chunks]),
            _bounds(pages),
            tables.to(torch.int32),
            torch.tensor([(stop - 1) % size + 1 for stop in stops], dtype=torch.int32),
            heads, kv.shape[3], dim, size, causal=True, sm_scale=scale, q_data_type=query.dtype,
        )  # fmt: skip
        if self._copy_event is not None:
            self._copy_event.record()
        self._planned_chunks = chunks


def load(heads: Heads, device: torch.device, dtype: torch.dtype) -> FlashInfer:
    """Return FlashInfer for a model's heads, after a trial.

    The trial makes FlashInfer compile its kernels. This takes minutes if no compiled kernels are cached.

    Raises ConfigError that names what is missing or wrong, or quotes FlashInfer's error.
    """
    if find_spec("flashinfer") is None:
        raise ConfigError(
            "flashinfer kernels need the package flashinfer-python, which is not installed", param="kernels"
        )
    if dtype not in DTYPES:
        raise ConfigError(
            "flashinfer kernels need bfloat16 or float16, "
            f"the model runs in {str(dtype).removeprefix('torch.')}",
            param="kernels",
        )
    if heads.dim not in HEAD_DIMS:
        raise ConfigError(
            f"flashinfer kernels are for heads of {', '.join(map(str, HEAD_DIMS))} numbers, "
            f"the model's have {heads.dim}",
            param="kernels",
        )
    try:
        attention = FlashInfer(device)
        error = trial_error(attention, heads, device, dtype)
    except Exception as problem:  # the library, its compiler and its driver may raise any exception
        first_line = (str(problem).splitlines() or [""])[0]
        raise ConfigError(
            f"flashinfer cannot be used: {type(problem).__name__}: {first_line}", param="kernels"
        ) from problem
    if not error < MAX_TRIAL_ERROR:
        raise ConfigError(
            f"flashinfer cannot be used: its attention differs from torch's by {error:.2g}", param="kernels"
        )
    return attention


@torch.inference_mode()
def trial_error(attention: FlashInfer, heads: Heads, device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest difference between FlashInfer's and torch's attention in an example. It may be NaN.

    The example has two random chunks, one of them behind 22 earlier tokens of its sequence.
    """
    draw = torch.Generator().manual_seed(0)
    kv, query = (
        torch.randn(*shape, generator=draw).to(device, dtype)
        for shape in ((8, 16, 2, heads.kv, heads.dim), (45, heads.query, heads.dim))
    )
    tables = torch.tensor([[5, 0, 7], [2, 6, 1]], device=device)
    chunks = (Chunk(0, 15, 22, tables[0]), Chunk(15, 30, 0, tables[1]))
    ours, theirs = torch.zeros_like(query), torch.zeros_like(query)
    attention(query, kv, chunks, heads.dim**-0.5, ours)
    prefill_each(query, kv, chunks, heads.dim**-0.5, theirs)
    return float((ours.float() - theirs.float()).abs().max())


def _bounds(counts: Sequence[int]) -> Tensor:
    """Return where consecutive runs of the given lengths begin and end, (len(counts) + 1,), on the host."""
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
