"""Keys and values in the types of pages, for tests of kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from fovea.kernels.pages import FORMATS, KV, KVPool, gather, store

KINDS = ("auto", "int8")
"""The types that all kernels have, by the names of the setting `kv_dtype`."""


def stored(kv: Tensor, kind: str) -> KV:
    """Return keys and values (blocks, block_size, 2, Hkv, D) as pages of a kind. "auto": as they are."""
    if kind == "auto":
        return kv
    blocks, size, _, kv_heads, dim = kv.shape
    pool = KVPool((1, blocks, size), kv_heads, dim, kv.dtype, FORMATS[kind])
    pages = pool.kv[0]
    store(pages, kv.flatten(0, 1), torch.arange(blocks * size))
    return pages


def numbers(kv: KV) -> Tensor:
    """Return the numbers that pages stand for, in float32."""
    return gather(
        kv, torch.arange(len(kv) if isinstance(kv, Tensor) else len(kv.levels)), torch.float32
    ).float()
