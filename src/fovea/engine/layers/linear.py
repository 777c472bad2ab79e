"""Linear maps, norms and feed-forward blocks. Their storage is uninitialised until a checkpoint fills it.

Several checkpoint tensors may fill one weight, and weights may be repacked after loading.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from fovea.engine.layers.ranks import ALONE, Ranks
from fovea.kernels import shared
from fovea.kernels.activation import check_activation, finish
from fovea.kernels.base import Kernels, Product, TableProduct
from fovea.kernels.codes import Codes, Format
from fovea.kernels.torch_kernels import PLAIN


class Linear(nn.Module):
    """The map y = act(x W^T + b) [+ residual], W (out, in).

    Its storage is uninitialised until a checkpoint fills it.

    activation: name of the activation; None: none.
    gated: the activation is applied to the first half of the outputs, which then scales the second half. So y
        is half as wide.
    ranks: the processes of which each multiplies some columns of x with its columns of W. y is the sum of
        their results. Only the first has a bias, and adds the residual.
    """

    ranks: Ranks = ALONE

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
        self.weight = parameter(out_features, in_features)
        self.bias = parameter(out_features) if bias else None
        self.activation = None if activation is None else check_activation(activation)
        self.gated = gated
        self.product: Product | None = None
        self.format: Format | None = None
        self.codes: list[Codes] = []

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.ranks is not ALONE:
            return self.ranks.add(self._product(x, self.ranks.own(residual)))
        return self._product(x, residual)

    def _product(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if self.product is not None:
            return self.product(x, residual)
        y = functional.linear(x, self.weight, self.bias)
        return finish(y, self.activation, self.gated, residual)

    def keep_codes(self, parts: Sequence[Codes]) -> None:
        """Take a quantized weight, which `pack` packs. The plain weight is dropped.

        parts: weights whose rows follow each other.
        """
        self.codes = [part.to(self.weight.device) for part in parts]
        self.weight.data = self.weight.data.new_empty(0)

    def pack(self, kernels: Kernels, format: Format | None = None, *, keep: bool = False) -> None:
        """Pack the weight for the kernels and drop the plain weight. Does nothing if it is packed already.

        format: quantize it to this format; None: not quantized. A weight that is quantized already keeps its
            codes if the kernels can multiply with them.
        keep: keep the plain weight, because something else reads it.
        """
        if self.product is not None:
            return
        bias = None if self.bias is None else self.bias.data
        details = bias, self.activation, self.gated
        if self.codes:
            parts, self.codes = self.codes, []
            self.product = kernels.coded_product(parts, *details, self.weight.dtype)
            if self.product is None or keep:
                self.weight.data = plain_weight(parts, self.weight)
            if self.product is not None:
                self.format = parts[0].format
                return
        self.format = format
        if format is None:
            self.product = kernels.product(self.weight.data, *details)
        else:
            self.product = kernels.quantized_product(self.weight.data, *details, format)
        if self.product is None:
            self.weight.data = shared.keep(self.weight.data)
        elif not keep:
            self.weight.data = self.weight.data.new_empty(0)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight that a product reads, in the form in which it is stored."""
        packed: int | None = getattr(self.product, "nbytes", None)
        plain = self.in_features * self.out_features * self.weight.dtype.itemsize
        return plain if packed is None else packed

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", self.weight.data
        if self.bias is not None:
            yield "bias", self.bias.data


class RMSNorm(nn.Module):
    """RMSNorm (arXiv 1910.07467): scale rows to a root mean square of 1, then by a weight per column.

    centered: the factor is 1 + weight, see `Kernels.rms_norm`.
    """

    kernels: Kernels = PLAIN

    def __init__(self, width: int, eps: float, *, centered: bool = False) -> None:
        super().__init__()
        self.weight = parameter(width)
        self.eps = eps
        self.centered = centered

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps, centered=self.centered)


class UnitNorm(nn.Module):
    """RMSNorm without a weight."""

    kernels: Kernels = PLAIN

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.ones: Tensor
        self.register_buffer("ones", torch.ones(width), persistent=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.ones, self.eps)


class LayerNorm(nn.Module):
    """LayerNorm (arXiv 1607.06450): torch's `layer_norm` with weight and bias."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = parameter(width)
        self.bias = parameter(width)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class FusedLinear(Linear):
    """Several linear maps of one input as one product.

    outputs: number of outputs of each map by its checkpoint name, in order.
    """

    def __init__(
        self,
        in_features: int,
        outputs: dict[str, int],
        *,
        bias: bool,
        activation: str | None = None,
        gated: bool = False,
    ) -> None:
        super().__init__(in_features, sum(outputs.values()), bias=bias, activation=activation, gated=gated)
        self.outputs = outputs

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        row = 0
        for name, rows in self.outputs.items():
            yield f"../{name}.weight", self.weight.data[row : row + rows]
            if self.bias is not None:
                yield f"../{name}.bias", self.bias.data[row : row + rows]
            row += rows


class PatchLinear(Linear):
    """A convolution whose stride is the size of its kernel, computed as one product per patch.

    kernel_shape: shape of the convolution's weight without its outputs, such as (channels, height, width) or
        (channels, frames, height, width). If there are several frames, a patch may have only one, that of a
        still image, and is repeated.
    """

    def __init__(self, kernel_shape: tuple[int, ...], out_features: int, *, bias: bool) -> None:
        in_features = 1
        for side in kernel_shape:
            in_features *= side
        super().__init__(in_features, out_features, bias=bias)
        self.kernel_shape = kernel_shape

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return super().forward(self.repeat_frame(x), residual)

    @property
    def frame_features(self) -> int:
        """Values of a patch of one frame."""
        return self.in_features // (self.kernel_shape[1] if len(self.kernel_shape) == 4 else 1)

    def repeat_frame(self, x: Tensor) -> Tensor:
        """Repeat patches of one frame, (T, channels * height * width), for all frames of the kernel.

        Other patches are returned as they are.
        """
        if x.shape[-1] == self.in_features:
            return x
        channels, frames = self.kernel_shape[:2]
        return x.view(len(x), channels, 1, -1).expand(-1, -1, frames, -1).reshape(len(x), self.in_features)

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", self.weight.data.view(-1, *self.kernel_shape)
        if self.bias is not None:
            yield "bias", self.bias.data


class Embedding(nn.Module):
    """A table of rows, (count, width).

    quantized: product from whose weight the rows are read; then there is no plain table. None: the table is
        plain.
    """

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = parameter(count, width)
        self.count = count
        self.format: Format | None = None
        self.quantized: TableProduct | None = None
        self.codes: list[Codes] = []

    def forward(self, ids: Tensor) -> Tensor:
        if self.quantized is not None:
            return self.quantized.rows(ids).to(self.weight.dtype)
        return functional.embedding(ids, self.weight)

    def keep_codes(self, parts: Sequence[Codes]) -> None:
        """Take a quantized table, which `pack` packs. The plain table is dropped."""
        self.codes = [part.to(self.weight.device) for part in parts]
        self.weight.data = self.weight.data.new_empty(0)

    def pack(self, kernels: Kernels) -> None:
        """Pack a table that is quantized. Other tables stay plain."""
        parts, self.codes = self.codes, []
        if not parts:
            self.weight.data = shared.keep(self.weight.data)
            return
        self.quantized = kernels.coded_product(parts, None, None, False, self.weight.dtype)
        self.format = parts[0].format
        if self.quantized is None:
            self.weight.data = plain_weight(parts, self.weight)

    def share(self, product: TableProduct) -> None:
        """Read rows from the product's weight from now on, and drop the plain table."""
        self.quantized = product
        self.weight.data = self.weight.data.new_empty(0)

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", self.weight.data


def plain_weight(parts: Sequence[Codes], like: Tensor) -> Tensor:
    """Return the values of weights whose rows follow each other, in the type and on the device of `like`."""
    return torch.cat([part.values(like.dtype) for part in parts]).to(like.device)


def checkpoint_targets(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the checkpoint name and the storage of every tensor in a module and its children.

    The names are attribute paths after `prefix`.
    """
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
    """Resolve a path with "..": `a.b.qkv/../q_proj.weight` becomes `a.b.q_proj.weight`."""
    if "/../" not in path:
        return path
    parent, name = path.split("/../")
    return f"{parent.rpartition('.')[0]}.{name}".lstrip(".")


def use_kernels(module: nn.Module, kernels: Kernels) -> None:
    """Set the kernels of every layer in a module. Linear maps get theirs when they are packed."""
    for child in module.modules():
        if hasattr(child, "kernels"):
            setattr(child, "kernels", kernels)  # noqa: B010 - a plain attribute, whatever nn.Module declares


class GatedMLP(nn.Module):
    """The block residual + down(act(gate(x)) * up(x)), with gate and up in one product."""

    def __init__(self, hidden: int, intermediate: int, act: str, *, bias: bool) -> None:
        super().__init__()
        outputs = {"gate_proj": intermediate, "up_proj": intermediate}
        self.gate_up = FusedLinear(hidden, outputs, bias=bias, activation=act, gated=True)
        self.down_proj = Linear(intermediate, hidden, bias=bias)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return self.down_proj(self.gate_up(x), residual)  # type: ignore[no-any-return]


class PlainMLP(nn.Module):
    """The block residual + second(act(first(x))). Without a residual, only the second part.

    names: checkpoint names of the two maps.
    """

    def __init__(self, hidden: int, intermediate: int, act: str, names: tuple[str, str]) -> None:
        super().__init__()
        self.maps = names
        self.add_module(names[0], Linear(hidden, intermediate, bias=True, activation=act))
        self.add_module(names[1], Linear(intermediate, hidden, bias=True))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        first, second = (self.get_submodule(name) for name in self.maps)
        return second(first(x), residual)  # type: ignore[no-any-return]


class LayerList(nn.Module):
    """Layers in order, under the attribute name of the checkpoints."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


def parameter(*shape: int) -> nn.Parameter:
    """Return a tensor of a checkpoint that is not a linear map or norm, uninitialised until it is loaded."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)
