"""A mixture of experts: a router chooses for each row which feed-forward blocks compute it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from fovea.engine.layers.config import Experts
from fovea.engine.layers.linear import GatedMLP, Linear, RMSNorm, UnitNorm, parameter
from fovea.engine.layers.ranks import ALONE, Ranks
from fovea.kernels.activation import finish
from fovea.kernels.base import GroupedProduct, Kernels, Mixture, Product
from fovea.kernels.codes import Format
from fovea.kernels.torch_kernels import PLAIN

GROUPED_GPUS = (9, 10)
"""Major compute capabilities on which torch's grouped_mm of bfloat16 is one launch: Hopper and Blackwell."""
GROUPED_BYTES = 16
"""grouped_mm takes rows whose size is a multiple of this many bytes."""


def grouped_mm_waits(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's grouped_mm reads the numbers of rows on the host, so that it waits for the device.

    torch 2.11 and newer then multiply one expert after the other.
    """
    if device.type != "cuda":
        return False
    return dtype is not torch.bfloat16 or torch.cuda.get_device_capability(device)[0] not in GROUPED_GPUS


class ExpertLinear(Linear):
    """One linear map per expert, without bias: weight (experts, out, in).

    name: the tensor's name in checkpoints.
    grouped: the kernels' product of all experts; None: there is none.
    by_torch: torch's grouped_mm multiplies rows that are sorted, because it is better.
    products: the product of each expert; empty: the weights of all experts are multiplied in one call.
    """

    def __init__(
        self,
        name: str,
        count: int,
        in_features: int,
        out_features: int,
        *,
        activation: str | None = None,
        gated: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias=False, activation=activation, gated=gated)
        self.weight = parameter(count, out_features, in_features)
        self.name, self.count = name, count
        self.grouped: GroupedProduct | None = None
        self.by_torch = True
        self.products: list[Product] = []

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:  # type: ignore[override]
        """Map rows x (T, in), sorted by expert. counts: (experts,) int32, rows of each expert."""
        if self.grouped is not None and not self.by_torch:
            return self.grouped(x, counts)
        if not self.products:
            # All experts in one call, which needs no copy of the counts on the host.
            ends = counts.cumsum(0, dtype=torch.int32)
            y = functional.grouped_mm(x, self.weight.transpose(1, 2), offs=ends)
            return finish(y, self.activation, self.gated, None)
        parts, first = [], 0
        for expert, count in enumerate(counts.tolist()):
            if count:
                parts.append(self.products[expert](x[first : first + count], None))
                first += count
        return torch.cat(parts) if parts else x.new_empty((0, self.width))

    def of_rows(self, x: Tensor, chosen: Tensor) -> Tensor | None:
        """Map each row x (T, in) with its experts (T, places), see `GroupedProduct.of_rows`."""
        return None if self.grouped is None else self.grouped.of_rows(x, chosen)

    @property
    def width(self) -> int:
        """Width of an output row."""
        return self.out_features // 2 if self.gated else self.out_features

    def pack(self, kernels: Kernels, format: Format | None = None, *, keep: bool = False) -> None:
        if self.products or self.grouped is not None:
            return
        row_bytes = self.in_features * self.weight.dtype.itemsize
        by_torch = format is None and kernels.groups_experts and row_bytes % GROUPED_BYTES == 0
        self.grouped = kernels.grouped_product(self.weight.data, self.activation, self.gated, format)
        waits = grouped_mm_waits(self.weight.dtype, self.weight.device)
        self.by_torch = by_torch and (self.grouped is None or not waits)
        if self.grouped is not None:
            self.format = format
            if not keep and not self.by_torch:
                self.weight.data = self.weight.data.new_empty(0)
            return
        if by_torch:
            return
        self.format = format
        details = None, self.activation, self.gated
        for weight in self.weight.data:
            product: Product | None
            if format is None:
                product = kernels.product(weight, *details)
            else:
                product = kernels.quantized_product(weight, *details, format)
            if product is None:
                return
            self.products.append(product)
        if not keep:
            self.weight.data = self.weight.data.new_empty(0)

    @property
    def wait(self) -> str | None:
        """Why a call waits for the device; None: it does not."""
        if self.grouped is not None and not self.by_torch:
            return None
        if self.products:
            return "experts are multiplied one by one, which reads their numbers of rows on the host"
        if grouped_mm_waits(self.weight.dtype, self.weight.device):
            name = str(self.weight.dtype).removeprefix("torch.")
            return (
                f"torch multiplies experts in {name} one by one on this GPU, which reads their numbers of "
                "rows on the host; in bfloat16 on compute capability 9 or 10 it does not"
            )
        return None

    @property
    def weight_bytes(self) -> int:
        plain = self.count * self.in_features * self.out_features * self.weight.dtype.itemsize
        products = self.products if self.grouped is None else [self.grouped]
        packed = [getattr(product, "nbytes", None) for product in products]
        return sum(size for size in packed if size) if packed and None not in packed else plain

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        yield f"../{self.name}", self.weight.data


class ExpertBank(nn.Module):
    """The experts of a layer; attribute names as in checkpoints."""

    kernels: Kernels = PLAIN

    def __init__(self, hidden: int, config: Experts) -> None:
        super().__init__()
        self.gate_up = ExpertLinear(
            "gate_up_proj",
            config.count,
            hidden,
            2 * config.intermediate,
            activation=config.activation,
            gated=True,
        )
        self.down = ExpertLinear("down_proj", config.count, config.intermediate, hidden)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Compute each row of x (T, hidden) with its expert.

        The rows are sorted by expert. counts: rows of each expert.
        """
        return self.down(self.gate_up(x, counts), counts)  # type: ignore[no-any-return]

    def mix(
        self,
        x: Tensor,
        weights: Tensor,
        chosen: Tensor,
        shared: Tensor | None = None,
        opened: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Sum the results of each row's experts.

        x: (T, hidden). weights, chosen: (T, active), weights and numbers of experts. The others are those of
            `Kernels.sum_experts`.
        """
        outputs = self._outputs(x, chosen)
        return self.kernels.sum_experts(outputs, weights, shared, opened, residual)

    def _outputs(self, x: Tensor, chosen: Tensor) -> Tensor:
        """The results of each row's experts, (T, active, hidden)."""
        (rows, width), active = x.shape, chosen.shape[1]
        inner = self.gate_up.of_rows(x, chosen)
        results = None if inner is None else self.down.of_rows(inner, chosen.view(-1, 1))
        if results is not None:
            return results.view(rows, active, width)
        # Rows with the same expert are computed together.
        order = chosen.flatten().argsort(stable=True)
        counts = torch.zeros(self.gate_up.count, dtype=torch.int32, device=x.device)
        counts.scatter_add_(0, chosen.flatten(), torch.ones_like(order, dtype=torch.int32))
        outputs = x.new_empty((rows * active, width))
        outputs[order] = self(x[order // active], counts)
        return outputs.view(rows, active, width)


class RowGate(Linear):
    """A gate with one number per row. Its weight stays plain beside a packed one if kernels read it."""

    def pack(self, kernels: Kernels, format: Format | None = None, *, keep: bool = False) -> None:
        super().pack(kernels, format, keep=keep or kernels.joins_rows)


class ExpertsBlock(nn.Module):
    """A feed-forward block of experts: residual + sum of weight * expert(x) over the chosen experts.

    mixture: the experts as one call of the kernels; None: `ExpertBank.mix` computes them.
    ranks: the processes of which each has a part of every expert's width, see `Linear`.
    """

    kernels: Kernels = PLAIN
    ranks: Ranks = ALONE

    def __init__(self, hidden: int, config: Experts) -> None:
        super().__init__()
        self.active, self.normalized, self.scaling = config.active, config.normalized, config.scaling
        self.gate = Linear(hidden, config.count, bias=False)
        self.experts = ExpertBank(hidden, config)
        self.shared_expert: GatedMLP | None = None
        self.shared_expert_gate: Linear | None = None
        self.mixture: Mixture | None = None
        if config.shared:
            self.shared_expert = GatedMLP(hidden, config.shared, config.activation, bias=False)
            self.shared_expert_gate = RowGate(hidden, 1, bias=False) if config.shared_gate else None

    def use_mixture(self, kernels: Kernels) -> None:
        """Compute the experts as one call from now on, if the kernels have such a call.

        The experts must be packed.
        """
        if not self.normalized:
            return
        first, second = self.experts.gate_up.products, self.experts.down.products
        self.mixture = kernels.mixture(first, second, self.active)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if self.ranks is not ALONE:
            return self.ranks.add(self._sum(x, self.ranks.own(residual)))
        return self._sum(x, residual)

    def _sum(self, x: Tensor, residual: Tensor | None) -> Tensor:
        shared = None if self.shared_expert is None else self.shared_expert(x, None)
        gate, logits, opening, opened = self.shared_expert_gate, self.gate(x), None, None
        if gate is not None:
            opening = (x, gate.weight) if self.kernels.joins_rows else None
            opened = None if self.kernels.joins_rows else gate(x).sigmoid()
        if self.mixture is None:
            weights, chosen, found = self.kernels.choose_experts(
                logits, self.active, normalized=self.normalized, scaling=self.scaling, opening=opening
            )
            opened = opened if found is None else found
            return self.experts.mix(x, weights, chosen, shared, opened, residual)
        if shared is None:
            return self.mixture(x, logits, residual)
        out: Tensor = self.mixture(x, logits, None) + (shared if opened is None else opened * shared)
        return out if residual is None else residual + out


class ScaledRouter(nn.Module):
    """The router of Gemma 4: it normalises its rows itself, and each expert has a factor of its own."""

    kernels: Kernels = PLAIN

    def __init__(self, hidden: int, config: Experts, eps: float) -> None:
        super().__init__()
        self.active = config.active
        self.norm = UnitNorm(hidden, eps)
        self.scale = parameter(hidden)
        self.proj = Linear(hidden, config.count, bias=False)
        self.per_expert_scale = parameter(config.count)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts for rows x (T, hidden). Returns weights and numbers of experts, (T, active)."""
        logits = self.proj(self.norm(x) * self.scale * x.shape[1] ** -0.5)
        weights, chosen, _ = self.kernels.choose_experts(
            logits, self.active, normalized=True, factors=self.per_expert_scale
        )
        return weights, chosen


class DenseBesideExperts(nn.Module):
    """A dense block and experts that compute the same rows, each between norms of its own (Gemma 4).

    ranks: the processes of which each has a part of every expert's width, see `Linear`.
    """

    ranks: Ranks = ALONE

    def __init__(self, hidden: int, config: Experts, eps: float) -> None:
        super().__init__()
        self.dense_norm, self.dense_output_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.dense = GatedMLP(hidden, config.dense, config.activation, bias=False)
        self.experts_norm, self.experts_output_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.router = ScaledRouter(hidden, config, eps)
        self.experts = ExpertBank(hidden, config)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """x: (T, hidden), rows before all norms."""
        out: Tensor = self.dense_output_norm(self.dense(self.dense_norm(x), None))
        mixed = self.ranks.add(self.experts.mix(self.experts_norm(x), *self.router(x)))
        out += self.experts_output_norm(mixed)
        return out if residual is None else residual + out
