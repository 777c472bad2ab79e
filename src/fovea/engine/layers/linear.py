"""Linear maps whose storage may be shared by several checkpoint tensors, and may be repacked after loading."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from fovea.kernels.activation import check_activation, finish
from fovea.kernels.quantize import Format
from fovea.kernels.torch.kernels import Product, TableProduct, TorchKernels


class Linear(nn.Module):
    """y = act(x W^T + b) [+ residual], W (out, in). Storage is uninitialised until a checkpoint fills it.

    gated: the first half of the outputs, activated, scales the second, so that y is half as wide.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        activation: str | None = None,
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.activation = None if activation is None else check_activation(activation)
        self.gated = gated
        self.product: Product | None = None
        self.format: Format | None = None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.product is not None:
            return self.product(x, residual)
        y = functional.linear(x, self.weight, self.bias)
        return finish(y, self.activation, self.gated, residual)

    def pack(self, kernels: TorchKernels, format: Format | None = None, *, keep: bool = False) -> None:
        """Repack for this machine, quantized if a format is given, and drop the plain weight; `keep` it where something
        else reads it."""
        if self.product is not None:
            return
        self.format = format
        bias = None if self.bias is None else self.bias.data
        details = bias, self.activation, self.gated
        if format is None:
            self.product = kernels.product(self.weight.data, *details)
        else:
            self.product = kernels.quantized(self.weight.data, *details, format)
        if self.product is not None and not keep:
            self.weight.data = self.weight.data.new_empty(0)

    @property
    def weight_bytes(self) -> int:
        """What a product reads of the weight, in the form in which it is kept."""
        kept: int | None = getattr(self.product, "nbytes", None)
        plain = self.in_features * self.out_features * self.weight.dtype.itemsize
        return plain if kept is None else kept

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", self.weight.data
        if self.bias is not None:
            yield "bias", self.bias.data


class FusedLinear(Linear):
    """Several linear maps of one input as one product. `parts` maps checkpoint names to output rows, in order."""

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        *,
        bias: bool,
        activation: str | None = None,
        gated: bool = False,
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias, activation=activation, gated=gated)
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
    """A table of rows, (count, width). quantized: reads them where a product keeps them, and the plain table is gone."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width), requires_grad=False)
        self.quantized: TableProduct | None = None

    def forward(self, ids: Tensor) -> Tensor:
        if self.quantized is not None:
            return self.quantized.rows(ids).to(self.weight.dtype)
        return functional.embedding(ids, self.weight)

    def share(self, product: TableProduct) -> None:
        """Rows come from the product's weight from now on."""
        self.quantized = product
        self.weight.data = self.weight.data.new_empty(0)

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


def use_kernels(module: nn.Module, kernels: TorchKernels) -> None:
    """Hand the set to every layer below `module`; linear maps get theirs when they are packed."""
    for child in module.modules():
        if hasattr(child, "kernels"):
            setattr(child, "kernels", kernels)  # noqa: B010 - a plain attribute, whatever nn.Module declares
