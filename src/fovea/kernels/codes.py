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
from fovea.kernels.shared import keep

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
    scale: (n, groups), any type of float or whole numbers.
    zero: the code that stands for zero: one number for all groups, or (n, groups) uint8.
    minimum: (n, groups) float32; None: 0.
    outer, outer_minimum: GGUF's K formats store scales as products. Then `scale` and `minimum` are whole
        numbers, and outer (n, groups / outer_groups) multiplies the scales of `outer_groups`
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

    def columns(self, start: int, stop: int) -> Codes:
        """Return the codes of consecutive columns. Raises ValueError if a group would be divided."""
        k, size = self.shape[1], self.group
        outer = size * self.outer_groups
        for unit in (size, outer):
            inside = start // unit == (stop - 1) // unit
            if start % unit and not inside or (stop % unit and stop != k and not inside):
                raise ValueError(f"columns {start} to {stop} divide groups of {unit}")
        found = {}
        for name, tensor in self.tensors().items():
            unit = 1 if name == "codes" else outer if name.startswith("outer") else size
            found[name] = tensor[:, start // unit : -(-stop // unit)].contiguous()
        return replace(self, **found)  # type: ignore[arg-type]

    def times(self, factors: Tensor) -> Codes:
        """Return the codes of the weight with each row times its factor. factors: (n,), powers of two."""
        names = ("scale", "minimum") if self.outer is None else ("outer", "outer_minimum")
        tensors = {name: tensor for name, tensor in self.tensors().items() if name in names}
        scaled = {name: tensor * factors[:, None].to(tensor.dtype) for name, tensor in tensors.items()}
        return replace(self, **scaled)  # type: ignore[arg-type]

    def to(self, device: torch.device) -> Codes:
        """Return the codes on a device."""
        return replace(self, **{name: tensor.to(device) for name, tensor in self.tensors().items()})  # type: ignore[arg-type]

    def full_scales(self) -> tuple[Tensor, Tensor | None]:
        """Return scale and minimum of each group, (n, groups) float32; the minimum is None if all are 0."""
        scale, minimum = self.scale.float(), self.minimum
        if self.outer is not None:
            scale = scale * self._spread(self.outer.float())
        if minimum is not None:
            minimum = minimum.float()
            if self.outer_minimum is not None:
                minimum = minimum * self._spread(self.outer_minimum.float())
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
        size = min(self.group, k)
        whole = k % size == 0
        values = self.codes.float().view(n, -1, size if whole else 1)

        def wide(groups: Tensor) -> Tensor:
            return (groups if whole else groups.repeat_interleave(size, dim=1)[:, :k])[:, :, None]

        if not isinstance(self.zero, int):
            values.sub_(wide(self.zero.float()))
        elif self.zero:
            values.sub_(self.zero)
        values.mul_(wide(scale))
        if minimum is not None:
            values.add_(wide(minimum))
        return values.view(n, k)


def join(parts: Sequence[Codes]) -> Codes:
    """Return the rows of several weights of one scheme as one weight."""
    first = parts[0]
    names = first.tensors()
    tensors = {name: torch.cat([part.tensors()[name] for part in parts]) for name in names}
    return replace(first, **tensors)  # type: ignore[arg-type]


def exactly(numbers: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return numbers in another type; None: some would change."""
    if dtype is torch.int8 and not bool((numbers.abs() <= 127).all()):
        return None
    converted = numbers.to(dtype)
    return converted if torch.equal(converted.float(), numbers.float()) else None


def _in_small_types(codes: Codes) -> Codes:
    """Return codes whose scales take as few bytes as they can without a change."""
    small: dict[str, Tensor] = {}
    for name, tensor in codes.tensors().items():
        if tensor.is_floating_point():
            types = (*([torch.int8] if codes.outer is not None else []), torch.float16, torch.bfloat16)
            found = (exactly(tensor, dtype) for dtype in types)
            small[name] = next((each for each in found if each is not None), tensor)
    return replace(codes, **small)  # type: ignore[arg-type]


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
        pairs = [_in_pairs(part) for part in map(_in_small_types, parts)]
        self._parts = [replace(part, codes=keep(part.codes)) for part in pairs]
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
        if some.bits <= 4:
            pairs = torch.stack((some.codes & 15, some.codes >> 4), dim=-1)
            some = replace(some, codes=pairs.flatten(-2)[:, : self._k])
        return some.values(dtype)


def _in_pairs(codes: Codes) -> Codes:
    """Return codes of which two are in a byte, if they have at most 4 bits."""
    if codes.bits > 4:
        return codes
    even = functional.pad(codes.codes, (0, codes.shape[1] % 2))
    return replace(codes, codes=even[:, ::2] | even[:, 1::2] << 4)
