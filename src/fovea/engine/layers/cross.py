"""Layers in which text attends to the states of images (Llama 3.2 Vision, arXiv 2407.21783, section 7).

The states lie outside of the prompt. Their keys and values do not depend on the text, so they are computed
once, with the image. Rows that see no image pass such a layer unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fovea.engine.layers.config import CrossAttention, Dense
from fovea.engine.layers.linear import Linear
from fovea.engine.layers.mlp import GatedMLP
from fovea.engine.layers.norm import RMSNorm
from fovea.engine.layers.shape import DecoderConfig
from fovea.engine.layers.step import ImageRows, Step
from fovea.kernels.base import Kernels
from fovea.kernels.torch_kernels import PLAIN


class CrossAttentionMixer(nn.Module):
    """The attention of a cross layer. Attribute names are those of checkpoints."""

    kernels: Kernels = PLAIN

    def __init__(self, config: DecoderConfig, shape: CrossAttention) -> None:
        super().__init__()
        self.shape = shape
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = Linear(config.hidden, query, bias=False)
        self.k_proj = Linear(config.hidden, key, bias=False)
        self.v_proj = Linear(config.hidden, key, bias=False)
        self.o_proj = Linear(query, config.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, config.eps)
        self.k_norm = RMSNorm(shape.head_dim, config.eps)

    def keys_values(self, states: Tensor) -> Tensor:
        """Return keys and values (R, 2 * kv_heads * head_dim) of image states (R, hidden)."""
        heads = len(states), self.shape.kv_heads, self.shape.head_dim
        keys = self.k_norm(self.k_proj(states).view(heads))
        return torch.stack((keys, self.v_proj(states).view(heads)), dim=1).flatten(1)

    def forward(self, x: Tensor, runs: tuple[ImageRows, ...], place: int) -> Tensor:
        """Attend from rows x (n, hidden), those of all runs one after the other. Returns (n, hidden).

        place: number of the layer among those with cross-attention.
        """
        query = self.q_norm(self.q_proj(x).view(len(x), self.shape.heads, self.shape.head_dim))
        parts, first = [], 0
        for run in runs:
            part, kv = query[first : first + len(run.rows)], run.keys_values[place][None]
            parts.append(self.kernels.attend(part, kv, run.plan, self.shape.scale))
            first += len(run.rows)
        return self.o_proj(torch.cat(parts).flatten(1))  # type: ignore[no-any-return]


class CrossLayer(nn.Module):
    """A layer with cross-attention. Learned gates scale the outputs of attention and MLP by their tanh.

    place: number of the layer among those with cross-attention.
    """

    def __init__(self, config: DecoderConfig, mixer: CrossAttention, block: Dense, place: int) -> None:
        super().__init__()
        self.place = place
        self.input_layernorm = RMSNorm(config.hidden, config.eps)
        self.cross_attn = CrossAttentionMixer(config, mixer)
        self.cross_attn_attn_gate = nn.Parameter(torch.empty(1), requires_grad=False)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps)
        self.mlp = GatedMLP(config.hidden, block.intermediate, block.activation, bias=block.bias)
        self.cross_attn_mlp_gate = nn.Parameter(torch.empty(1), requires_grad=False)

    def forward(self, x: Tensor, step: Step, read: Tensor | None = None) -> Tensor:
        """Compute the layer on rows x (T, hidden). read: as in `Layer.forward`."""
        if step.images:
            rows = torch.cat([run.rows for run in step.images])
            seeing = x[rows]
            mixed = self.cross_attn(self.input_layernorm(seeing), step.images, self.place)
            seeing = seeing + self.cross_attn_attn_gate.tanh() * mixed
            inner = self.mlp(self.post_attention_layernorm(seeing), None)
            x = x.index_copy(0, rows, seeing + self.cross_attn_mlp_gate.tanh() * inner)
        return x if read is None else x[read]
