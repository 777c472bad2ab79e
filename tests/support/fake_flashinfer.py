"""A fake of the part of FlashInfer that Fovea calls, for machines without a GPU.

It has the signatures and checks the arguments as FlashInfer does, and computes with
`fovea.kernels.reference`. Use it by `monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)`. It
follows the documentation of FlashInfer 0.6: `BatchPrefillWithPagedKVCacheWrapper` of layout NHD, planned once
and run for every layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fovea.kernels import reference

DTYPES = (torch.float16, torch.bfloat16)


class BatchPrefillWithPagedKVCacheWrapper:
    """A fake of FlashInfer's wrapper for the attention of prompts over paged KV.

    plans: number of calls of `plan`.
    """

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype is torch.uint8
        assert kv_layout == "NHD"
        self.plans = 0

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        for tensor in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert tensor.dtype is torch.int32
            assert tensor.ndim == 1
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        assert num_qo_heads % num_kv_heads == 0
        assert q_data_type in DTYPES
        self.plans += 1
        self._causal = causal
        self._scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale
        self._dtype, self._kv_dtype = q_data_type, kv_data_type or q_data_type
        self._query_shape, self._page_shape = (
            (num_qo_heads, head_dim_qk),
            (page_size, num_kv_heads, head_dim_qk),
        )
        self._bounds, self._pages = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self._indices, self._last = paged_kv_indices.clone(), paged_kv_last_page_len.tolist()

    def run(self, q: Tensor, paged_kv_cache: Any, *, out: Tensor | None = None) -> Tensor:
        keys, values = paged_kv_cache if isinstance(paged_kv_cache, tuple) else paged_kv_cache.unbind(1)
        assert (q.dtype, keys.dtype, values.dtype) == (self._dtype, self._kv_dtype, self._kv_dtype)
        assert q.shape == (self._bounds[-1], *self._query_shape)
        assert keys.shape[1:] == values.shape[1:] == self._page_shape
        assert keys.stride() == values.stride(), "FlashInfer's kernels for Hopper take one stride for both"
        assert keys.stride(3) == q.stride(2) == 1
        out = torch.zeros_like(q) if out is None else out
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
        assert out.is_contiguous()
        for number, last in enumerate(self._last):
            rows = slice(self._bounds[number], self._bounds[number + 1])
            pages = self._indices[self._pages[number] : self._pages[number + 1]]
            length = (len(pages) - 1) * self._page_shape[0] + last
            key, value = (cache[pages].flatten(0, 1)[:length] for cache in (keys, values))
            # Causal attention counts from the end: the last query sees every key. Without `causal`, all
            # queries do.
            first = length - (rows.stop - rows.start) if self._causal else length
            out[rows] = reference.attention(q[rows], key, value, self._scale, first)
        return out
