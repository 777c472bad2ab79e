"""Linear maps whose storage may be shared by several checkpoint tensors, and may be repacked after loading."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from fovea.kernels import linear as kernel


class Linear(nn.Module):
    """y = x W^T + b, W (out, in). Storage is uninitialised until a checkpoint fills it."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self._packed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            return kernel.packed_linear(x, self._packed, self.bias)
        return functional.linear(x, self.weight, self.bias)

    def pack(self, *, keep: bool = False) -> None:
        """Repack for this machine and drop the plain weight; `keep` it where something else reads it."""
        if self._packed is not None or not kernel.can_pack(self.weight):
            return
        self._packed = kernel.pack(self.weight.data)
        if not keep:
            self.weight.data = self.weight.data.new_empty(0)

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", self.weight.data
        if self.bias is not None:
            yield "bias", self.bias.data


class FusedLinear(Linear):
    """Several linear maps of one input as one product. `parts` maps checkpoint names to output rows, in order."""

    def __init__(self, in_features: int, parts: dict[str, int], *, bias: bool) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self.parts = parts

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        row = 0
        for name, rows in self.parts.items():
            yield f"../{name}.weight", self.weight.data[row : row + rows]
            if self.bias is not None:
                yield f"../{name}.bias", self.bias.data[row : row + rows]
            row += rows


class PatchLinear(Linear):
    """A convolution whose stride is its kernel: one product per patch. `kernel` is the convolution's weight shape."""

    def __init__(self, kernel_shape: tuple[int, ...], out_features: int, *, bias: bool) -> None:
        in_features = 1
        for side in kernel_shape:
            in_features *= side
        super().__init__(in_features, out_features, bias=bias)
        self.kernel_shape = kernel_shape

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", self.weight.data.view(-1, *self.kernel_shape)
        if self.bias is not None:
            yield "bias", self.bias.data


class Embedding(nn.Module):
    """A table of rows, (count, width)."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.weight)

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", self.weight.data


def checkpoint_targets(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every (checkpoint name, storage to fill) below `module`, by attribute path."""
    views = getattr(module, "checkpoint_views", None)
    if views is not None:
        for name, tensor in views():
            path = f"{prefix.rstrip('.')}/{name}" if name.startswith("../") else f"{prefix}{name}"
            yield _resolve(path), tensor
        return
    for name, parameter in module.named_parameters(recurse=False):
        yield prefix + name, parameter.data
    for name, child in module.named_children():
        yield from checkpoint_targets(child, f"{prefix}{name}.")


def _resolve(path: str) -> str:
    """`a.b.qkv/../q_proj.weight` is `a.b.q_proj.weight`."""
    if "/../" not in path:
        return path
    parent, name = path.split("/../")
    return f"{parent.rpartition('.')[0]}.{name}".lstrip(".")


def pack_linears(module: nn.Module) -> None:
    """Repack every linear map below `module`, one at a time, so that the peak is one weight above the total."""
    for child in module.modules():
        if isinstance(child, Linear):
            child.pack()
