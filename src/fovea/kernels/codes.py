"""Rows of a weight as small whole numbers, with the scales that make values of them.

Every published format of quantized checkpoints whose levels are evenly spaced is read into `Codes` without
loss. Kernels multiply with them in layouts of their own. `CodedProduct` is what their products are compared
with, and runs where they cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from fovea.kernels.activation import finish

VALUES_AT_ONCE = 1 << 20
"""Number of values that are computed together, through copies in float32."""
MULTIPLY_VALUES = 1 << 24
"""Number of weights whose values are computed together for a product."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format of quantized weights.

    name: its name in the configuration.
    number: its number in C++ (native/cpu/kernels.h); 0: C++ does not have it.
    group: values of k that share a scale; 0: all values of a row.
    bits: bits of a value, without its scale.
    """

    name: str
    number: int
    group: int
    bits: int


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight (n, k): value = scale * (code - zero) + minimum, computed in float32 in this order.

    A group is a run of `group` consecutive values of k within one row; the last one of a row may be shorter.

    codes: (n, k) uint8, each below 2**bits.
    bits: bits of a code, from 2 to 8.
    group: values of k that share a scale.
    scale: (n, groups) float32.
    zero: the code that stands for zero: one number for all groups, or (n, groups) uint8.
    minimum: (n, groups) float32; None: 0.
    outer, outer_minimum: GGUF's K formats store scales as products. Then `scale` and `minimum` are whole
        numbers, and outer (n, groups / outer_groups) float32 multiplies the scales of `outer_groups`
        consecutive groups; outer_minimum multiplies their minima. None: scale and minimum are complete.
    outer_groups: number of consecutive groups that share a number in `outer`.
    """

    codes: Tensor
    bits: int
    group: int
    scale: Tensor
    zero: int | Tensor = 0
    minimum: Tensor | None = None
    outer: Tensor | None = None
    outer_minimum: Tensor | None = None
    outer_groups: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def format(self) -> Format:
        """The format of products with these codes, for figures about a model."""
        return Format("int4" if self.bits <= 4 else "int8", 0, self.group, self.bits)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values, (n, k). They are computed in float32 and rounded once."""
        n, k = self.shape
        out = torch.empty(n, k, dtype=dtype, device=self.codes.device)
        step = max(1, VALUES_AT_ONCE // max(1, k))
        for first in range(0, n, step):
            out[first : first + step] = self.rows(slice(first, first + step))._values()
        return out

    def rows(self, rows: slice | Tensor) -> Codes:
        """Return the codes of some rows."""
        return replace(self, **{name: tensor[rows] for name, tensor in self.tensors().items()})  # type: ignore[arg-type]

    def full_scales(self) -> tuple[Tensor, Tensor | None]:
        """Return scale and minimum of each group, (n, groups) float32; the minimum is None if all are 0."""
        scale, minimum = self.scale, self.minimum
        if self.outer is not None:
            scale = scale * self._spread(self.outer)
        if minimum is not None and self.outer_minimum is not None:
            minimum = minimum * self._spread(self.outer_minimum)
        return scale, minimum

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by the names of their fields."""
        names = ("codes", "scale", "zero", "minimum", "outer", "outer_minimum")
        return {name: value for name in names if isinstance(value := getattr(self, name), Tensor)}

    def _spread(self, outer: Tensor) -> Tensor:
        return outer.repeat_interleave(self.outer_groups, dim=1)[:, : self.scale.shape[1]]

    def _values(self) -> Tensor:
        scale, minimum = self.full_scales()
        n, k = self.shape
        # Groups that end with the row are an axis of their own, so that nothing is repeated.
        whole = k % self.group == 0
        values = self.codes.float().view(n, -1, self.group if whole else 1)

        def wide(groups: Tensor) -> Tensor:
            return (groups if whole else groups.repeat_interleave(self.group, dim=1)[:, :k])[:, :, None]

        if not isinstance(self.zero, int):
            values.sub_(wide(self.zero.float()))
        elif self.zero:
            values.sub_(self.zero)
        values.mul_(wide(scale))
        if minimum is not None:
            values.add_(wide(minimum))
        return values.view(n, k)


class CodedProduct:
    """A product with codes on any device and in any float type. It is a `kernels.base.TableProduct`.

    Every call computes the values of the weight, some rows at a time. This saves memory, not time. Rows of x
    are not rounded.

    parts: weights whose rows follow each other. Codes of 4 bits are kept in pairs, the first of a pair in the
        low half of a byte.
    """

    def __init__(
        self, parts: Sequence[Codes], bias: Tensor | None, activation: str | None, gated: bool
    ) -> None:
        self._k = parts[0].shape[1]
        self._paired = [part.bits <= 4 and self._k % 2 == 0 for part in parts]
        self._parts = [
            replace(part, codes=part.codes[:, ::2] | part.codes[:, 1::2] << 4) if paired else part
            for part, paired in zip(parts, self._paired, strict=True)
        ]
        self._bias, self._activation, self._gated = bias, activation, gated

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        step = max(1, MULTIPLY_VALUES // self._k)
        parts = [
            functional.linear(x, self._values(number, slice(first, first + step), x.dtype))
            for number, part in enumerate(self._parts)
            for first in range(0, part.shape[0], step)
        ]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        if self._bias is not None:
            y = y + self._bias
        return finish(y, self._activation, self._gated, residual)

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows of the weight: (*ids, k) float32."""
        flat, first = ids.flatten(), 0
        out = torch.empty(len(flat), self._k, device=flat.device)
        for number, part in enumerate(self._parts):
            mine = (flat >= first) & (flat < first + part.shape[0])
            out[mine] = self._values(number, flat[mine] - first, torch.float32)
            first += part.shape[0]
        return out.view(*ids.shape, self._k)

    def _values(self, part: int, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        some = self._parts[part].rows(rows)
        if self._paired[part]:
            some = replace(some, codes=torch.stack((some.codes & 15, some.codes >> 4), dim=-1).flatten(-2))
        return some.values(dtype)
