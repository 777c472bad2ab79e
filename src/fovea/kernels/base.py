"""The interface between layers and kernels: the functions of a set of kernels, and their tensors' shapes.

A layer holds the set that `choose` picked for the model and does not depend on which one it is.
`torch_kernels.TorchKernels` implements everything on every device. A faster set implements what it does
better and delegates the rest to a TorchKernels that it holds.

Letters in shapes: T rows (tokens) of a step, H query heads, Hkv KV heads, D numbers per head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fovea.kernels.attention import AttentionPlan, Heads
from fovea.kernels.codes import Codes, Format
from fovea.kernels.pages import KV, KVFormat
from fovea.kernels.pieces import Cutting
from fovea.kernels.spans import Spans
from fovea.kernels.states import StatePlan

Product = Callable[[Tensor, Tensor | None], Tensor]
"""Computes y (..., out) = activation(x (..., in) W^T + bias) + residual.

Arguments: x, and the residual (..., out) or None.

A gated activation is applied to the first half of the outputs, which then scales the second half; so `out` is
half the rows of W.
"""
Stack = Callable[[Tensor, int, int, Tensor, Tensor, KV, AttentionPlan, Tensor | None], Tensor]
"""Computes layers first..last-1 on x (T, hidden) and returns the result, (T, hidden), or
(rows, hidden) for chosen rows. x is not changed.

Arguments: x, first, last, cos and sin (T, 1, D) float32, kv (layers, blocks, block_size, 2, Hkv, D), plan,
and the numbers of the rows whose results are returned, (rows,) int64, in any order; None: all T.
"""

Mixture = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Computes a mixture of experts: y (T, hidden) = residual + sum of scale * expert(x) over the chosen experts.

The experts with the highest logits are chosen. Scales are probabilities over all experts, divided by the sum
of the chosen ones.

Arguments: x (T, hidden), the router's logits (T, experts), and the residual (T, hidden) or None.
"""


class GroupedProduct(Protocol):
    """Computes y (T, out) = activation(x W^T), each row with the weight W of its expert."""

    def __call__(self, x: Tensor, counts: Tensor) -> Tensor:
        """Multiply rows x (T, in) that are sorted by expert.

        counts: (experts,) int32, the number of rows of each expert. The host does not read these numbers.
        """
        ...

    def of_rows(self, x: Tensor, chosen: Tensor) -> Tensor | None:
        """Multiply each row x (T, in) with the weights of its experts. Returns (T * places, out).

        None: with so many rows it is better to sort them.

        chosen: (T, places) int64, the numbers of each row's experts.
        """
        ...


class TableProduct(Protocol):
    """A product whose weight can also be read by row."""

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor: ...

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows of the weight, (*ids, in), in float32 or bfloat16. Not defined for a gated product."""


@dataclass(frozen=True, slots=True)
class StackShape:
    """Sizes that all layers of a decoder share.

    hidden: width of a row between layers.
    heads, kv_heads: query heads, and KV heads, which divide them.
    head_dim: numbers per head.
    intermediate: width of the MLP after the gate; 0: the layers have experts.
    eps: constant of the norms.
    scale: factor of the attention scores.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    scale: float


@dataclass(frozen=True, slots=True)
class StackLayer:
    """Norm weights and products of one decoder layer.

    input_norm, post_norm: norms before attention and before the MLP, (hidden,).
    q_norm, k_norm: norms of queries and keys, (D,); None: the layer has none.
    qkv, out, gate_up, down: the products; gate and up are one, with a gated activation. None: the layer
        uses its plain weight, or it has experts instead of gate_up and down.
    router, mixture: the router's product and the experts; None: the layer has none.
    """

    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: Product | None
    out: Product | None
    gate_up: Product | None = None
    down: Product | None = None
    router: Product | None = None
    mixture: Mixture | None = None


class Kernels(Protocol):
    """One set of kernels.

    least_shared_rows: the least number of rows that read common first blocks together. Fewer rows read them
        separately.
    sharing_rounds: whether a row gets other bits when it reads its first blocks together with others.
    """

    @property
    def least_shared_rows(self) -> int: ...

    @property
    def sharing_rounds(self) -> bool: ...

    @property
    def kv_formats(self) -> tuple[KVFormat, ...]:
        """The formats of keys and values in 8 bits that `rotate_store` writes and `attend` reads."""
        ...

    @property
    def plain(self) -> bool:
        """Whether everything is torch with plain weights, so that torch can compile the layers."""
        ...

    @property
    def joins_rows(self) -> bool:
        """Whether operations on rows that follow each other are better joined in one launch.

        Then `add_norm` adds a residual, not the product before it, and `choose_experts` multiplies rows by
        the gate of a shared expert.
        """
        ...

    @property
    def groups_experts(self) -> bool:
        """Whether torch's grouped_mm multiplies the plain weights of all experts of a layer in one call.

        Otherwise each expert gets its own `product`, if the kernels have one.
        """
        ...

    @property
    def spans_in_one_launch(self) -> bool:
        """Whether `attend_spans` is one launch whose shape depends on the number of bounds alone.

        So a CUDA graph can record it, for the types and heads that `spans.fits_one_launch` names.
        """
        ...

    def product(
        self, weight: Tensor, bias: Tensor | None, activation: str | None, gated: bool
    ) -> Product | None:
        """Return a product with `weight` (n, in), or with a copy of it in the kernels' own layout.

        None: the kernels have no product of their own, so the caller uses the weight as it is.

        bias: (n,), or None.
        activation: a name in `kernels.activation`, or None.
        gated: whether the activation is gated, see `Product`.
        """
        ...

    def quantized_product(
        self, weight: Tensor, bias: Tensor | None, activation: str | None, gated: bool, format: Format
    ) -> TableProduct:
        """Return a product with a copy of `weight` (n, in) rounded to the format.

        The other arguments are those of `product`.
        """
        ...

    def coded_product(
        self,
        parts: Sequence[Codes],
        bias: Tensor | None,
        activation: str | None,
        gated: bool,
        dtype: torch.dtype,
    ) -> TableProduct | None:
        """Return a product with a weight that is quantized already, without rounding it again.

        None: the kernels have none, so the caller uses the weight's values.

        parts: weights whose rows follow each other; their schemes may differ.
        dtype: type of the rows that will be multiplied.
        The other arguments are those of `product`.
        """
        ...

    def grouped_product(
        self, weights: Tensor, activation: str | None, gated: bool, format: Format | None
    ) -> GroupedProduct | None:
        """Return a product with the weights of all experts of a layer, (experts, n, in).

        None: the kernels have none. The other arguments are those of `product`.

        format: the weights are rounded to it, into a copy; None: they are used as they are.
        """
        ...

    def stack(self, shape: StackShape, layers: Sequence[StackLayer]) -> Stack | None:
        """Return a function that computes a run of decoder layers; None: the layers are called one by one."""
        ...

    def mixture(self, gate_up: Sequence[Product], down: Sequence[Product], active: int) -> Mixture | None:
        """Return a function that computes a mixture of experts; None: the layer computes it itself.

        gate_up: the product of each expert's gate and up, with a gated activation. down: its second product.
        active: number of experts per row.
        """
        ...

    def attends_in_place(self, head_dim: int, *, window: bool = False) -> bool:
        """Whether decodes read keys and values directly in the pool, without a gathered copy.

        Otherwise they are grouped by length and masked.

        window: whether the layers have a sliding window.
        """
        ...

    def cutting(self, heads: Heads) -> Cutting | None:
        """Return how the contexts of decodes are cut into pieces; None: the kernels divide the work alone.

        Called only if decodes read keys and values in place.
        """
        ...

    def shared_rows(self, group: int) -> int:
        """Return how many rows at most read their common first blocks together; 0: every row reads its own.

        Each of these rows has `group` queries per KV head, and a kernel has room for so many queries at once.

        group: query heads per KV head.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, centered: bool = False) -> Tensor:
        """Return x (..., width) divided by its root mean square per row, times weight (width,).

        centered: times 1 + weight instead, and the result is rounded once, not also before that factor.
        """
        ...

    def add_norm(
        self,
        x: Tensor,
        y: Tensor,
        inner: Tensor | None,
        outer: Tensor | None,
        eps: float,
        *,
        centered: bool = False,
        factor: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (x + norm(y)) * factor, and the norm of that; x and y are (rows, width).

        inner: weight of the norm of y (width,); None: y is added as it is.
        outer: weight of the norm of the result; None: the result is returned twice.
        eps, centered: see `rms_norm`, of both norms.
        factor: one number (1,); None: 1.
        gate: one number (1,), by whose tanh what is added to x is multiplied; None: it is not.
        """
        ...

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the norm of x (T, heads, width), times weight (width,), times silu of gate.

        gate: shaped like x. Its heads are contiguous, its rows may be parts of longer ones.
        """
        ...

    def open(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return x (rows, width) times the sigmoid of gate (rows, width), which is rounded before."""
        ...

    def choose_experts(
        self,
        logits: Tensor,
        active: int,
        *,
        normalized: bool,
        scaling: float = 1.0,
        factors: Tensor | None = None,
        opening: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Choose the most probable experts of each row.

        logits: (T, experts), before the softmax, which is computed in float32.
        active: number of experts of a row.
        normalized: the probabilities are divided by the sum of the chosen ones; otherwise times `scaling`.
        factors: (experts,), one more factor of each expert; None: there are none.
        opening: rows x (T, hidden) and the weight of a gate (1, hidden); None: there is no gate.

        Returns weights in the type of the logits, and numbers of experts, (T, active) each, and the sigmoid
        of the gate's product, (T, 1), or None.
        """
        ...

    def sum_experts(
        self,
        outputs: Tensor,
        weights: Tensor,
        shared: Tensor | None = None,
        opened: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return residual + sum of weight * output over the experts of each row + opened * shared.

        The experts are added in their order, so that a row's result depends on that row alone.

        outputs: (T, active, width). weights: (T, active).
        shared: (T, width), the result of an expert that all rows use; None: there is none.
        opened: (T, 1), its factor; None: 1.
        residual: (T, width), or None.
        """
        ...

    def rotate(self, x: Tensor, count: int, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply rotary embedding to the first `count` heads of x (T, H, D), in place, and return x.

        cos, sin: (T, 1, D) float32, contiguous.
        """
        ...

    def rotate_store(
        self,
        qkv: Tensor,
        heads: int,
        cos: Tensor,
        sin: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        kv: KV | None,
        slots: Tensor | None,
        *,
        centered: bool = False,
        value_norm: Tensor | None = None,
    ) -> Tensor:
        """Normalise and rotate queries and keys, store keys and values, return the queries (T, heads, D).

        qkv: (T, heads + 2 * Hkv, D), queries before keys before values. It may be overwritten, and the result
            may be a part of it. With heads + Hkv, values are the keys before their norm and rotation.
        heads: number of query heads.
        cos, sin: (T, 1, R) float32, contiguous. The first R numbers of each head are rotated; R is at most D.
        norms: weights (D,) of the norms of queries and keys; None: no norms.
        eps: constant of the norms.
        centered: the kind of these norms, see `rms_norm`.
        kv: (blocks, block_size, 2, Hkv, D), in the type of qkv and contiguous, or in 8 bits; None: there are
            only queries, and nothing is stored.
        slots: (T,) int64, slot of each token's keys and values: block * block_size + offset. None without kv.
        value_norm: weight (D,) of the norm of values, which is not centered; None: they have none.
        """
        ...

    def attend(self, query: Tensor, kv: KV, plan: AttentionPlan, scale: float) -> Tensor:
        """Return the attention (T, H, D) of query (T, H, D) over kv, as planned.

        kv: (blocks, block_size, 2, Hkv, D), see `pages.KV`.
        """
        ...

    def attend_groups(self, qkv: Tensor, groups: int, heads: int, part: slice, out: Tensor) -> None:
        """Compute attention within `groups` groups of equally many rows. A row attends to its whole group.

        qkv: (T, 3 * heads, D), queries before keys before values. Scores are scaled by D**-0.5.
        heads: number of heads.
        part: the heads to compute; start and stop are numbers.
        out: (T, heads * D); only the heads in `part` are written.
        """
        ...

    def attend_spans(self, qkv: Tensor, spans: Spans, heads: int) -> Tensor:
        """Compute attention inside spans of rows, in as few launches as possible. Returns (T, heads * D).

        qkv: (T, 3 * heads, D), queries before keys before values. Scores are scaled by D**-0.5.
        heads: number of heads.
        """
        ...

    def short_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        state: Tensor,
        plan: StatePlan,
    ) -> Tensor:
        """Convolve each channel over the newest `width` tokens of its sequence. Returns (T, channels).

        x: (T, channels).
        weight: (width, channels); the last row is multiplied with the token itself.
        bias: (channels,), or None.
        activation: a name in `kernels.activation`, or None.
        state: (slots, width - 1, channels), the tokens before. Written as planned.
        """
        ...

    def gated_delta(
        self,
        qkv: Tensor,
        beta: Tensor,
        step: Tensor,
        rates: tuple[Tensor, Tensor],
        key_heads: int,
        state: Tensor,
        plan: StatePlan,
    ) -> Tensor:
        """Compute the gated delta rule (arXiv 2412.06464). Returns (T, value_heads * value_dim).

        A head's state is a matrix S. A token multiplies S by exp(-e^a * softplus(step + bias)), then adds the
        outer product of its key k and beta * (v - S^T k), and reads S^T q. Queries and keys are first scaled
        to length 1, and queries then by key_dim**-0.5. A head of queries and keys serves
        value_heads / key_heads heads of values.

        qkv: (T, 2 * key_heads * key_dim + value_heads * value_dim), queries before keys before values.
        beta, step: (T, value_heads), beta before its sigmoid. The sigmoid is rounded to their type.
        rates: a and bias, (value_heads,) float32 each.
        state: (slots, value_heads, key_dim, value_dim) float32. Written as planned.
        """
        ...
