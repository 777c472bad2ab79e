"""Chunks of prompts on a GPU by FlashInfer, where it is installed: all of a step at once, over the KV where it lies.

Its pages of layout NHD are (blocks, block_size, Hkv, D), keys and values each with strides of their own, so the pool as it
is serves as both. Who computes what is planned on the host, once a step for all layers. (FlashAttention 2 wants pages of 256
tokens, and what came after it is for a few cards only.)
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

HEAD_DIMS = (64, 128, 256)
"""What its kernels for Hopper have, and its own tests run."""
DTYPES = (torch.bfloat16, torch.float16)
WORKSPACE_BYTES = 128 << 20
"""What its makers recommend for the parts of contexts that are split."""
TRIAL_ERROR = 0.1
"""Two right answers to the trial differ by hundredths, the rounding of bfloat16; a wrong one is off by more than 1."""


class FlashInfer:
    """A `ChunkAttention`, for one model on one thread. Holds WORKSPACE_BYTES on the device."""

    def __init__(self, device: torch.device) -> None:
        import flashinfer

        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self._planned: tuple[Chunk, ...] | None = None
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(
        self, query: Tensor, kv: Tensor, chunks: tuple[Chunk, ...], scale: float, out: Tensor
    ) -> None:
        if chunks is not self._planned:
            self._plan(query, kv, chunks, scale)
        first = chunks[0].row
        self._wrapper.run(query[first:], (kv[:, :, 0], kv[:, :, 1]), out=out[first:])

    def _plan(self, query: Tensor, kv: Tensor, chunks: tuple[Chunk, ...], scale: float) -> None:
        """The same for every layer, since all of a step's are given the same chunks, shapes and scale."""
        heads, dim, size = query.shape[1], query.shape[2], kv.shape[1]
        stops = [chunk.first + chunk.count for chunk in chunks]
        pages = [-(-stop // size) for stop in stops]
        tables = torch.cat([chunk.table[:used] for chunk, used in zip(chunks, pages, strict=True)])
        if self._copied is not None:
            # A plan is written to one pinned buffer and copied from there whenever the device comes to it. A step that
            # samples nothing waits for nobody, so the copy before may still be to come.
            self._copied.synchronize()
        self._wrapper.plan(
            _bounds([chunk.count for chunk in chunks]),
            _bounds(pages),
            tables.to(torch.int32),
            torch.tensor([(stop - 1) % size + 1 for stop in stops], dtype=torch.int32),
            heads, kv.shape[3], dim, size, causal=True, sm_scale=scale, q_data_type=query.dtype,
        )  # fmt: skip
        if self._copied is not None:
            self._copied.record()
        self._planned = chunks


def load(heads: Heads, device: torch.device, dtype: torch.dtype) -> FlashInfer:
    """FlashInfer for a model's heads, tried once: it compiles on first use, for minutes where nothing is kept from before.

    Raises ConfigError, saying what is missing, or what the library said.
    """
    if find_spec("flashinfer") is None:
        raise ConfigError(
            "flashinfer kernels need the package flashinfer-python, which is not installed", param="kernels"
        )
    if dtype not in DTYPES:
        raise ConfigError(
            f"flashinfer kernels need bfloat16 or float16, the model runs in {str(dtype).removeprefix('torch.')}",
            param="kernels",
        )
    if heads.dim not in HEAD_DIMS:
        raise ConfigError(
            f"flashinfer kernels are for heads of {', '.join(map(str, HEAD_DIMS))} numbers, the model's have {heads.dim}",
            param="kernels",
        )
    try:
        found = FlashInfer(device)
        error = trial(found, heads, device, dtype)
    except Exception as problem:  # a foreign library, its compiler and its driver raise what they like
        said = (str(problem).splitlines() or [""])[0]
        raise ConfigError(
            f"flashinfer cannot be used: {type(problem).__name__}: {said}", param="kernels"
        ) from problem
    if not error < TRIAL_ERROR:
        raise ConfigError(
            f"flashinfer cannot be used: its attention differs from torch's by {error:.2g}", param="kernels"
        )
    return found


@torch.inference_mode()
def trial(found: FlashInfer, heads: Heads, device: torch.device, dtype: torch.dtype) -> float:
    """The largest difference to torch's over random chunks, one of them at the end of a longer context; maybe NaN."""
    draw = torch.Generator().manual_seed(0)
    kv, query = (
        torch.randn(*shape, generator=draw).to(device, dtype)
        for shape in ((8, 16, 2, heads.kv, heads.dim), (45, heads.query, heads.dim))
    )
    tables = torch.tensor([[5, 0, 7], [2, 6, 1]], device=device)
    chunks = (Chunk(0, 15, 22, tables[0]), Chunk(15, 30, 0, tables[1]))
    ours, theirs = torch.zeros_like(query), torch.zeros_like(query)
    found(query, kv, chunks, heads.dim**-0.5, ours)
    prefill_each(query, kv, chunks, heads.dim**-0.5, theirs)
    return float((ours.float() - theirs.float()).abs().max())


def _bounds(counts: Sequence[int]) -> Tensor:
    """Where runs of so many begin and end, one after the other, on the host."""
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
