"""Checkpoint tensors that hold the rows of several tensors of the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class FusedTensor:
    """The layout of a checkpoint tensor whose rows belong to several tensors.

    Its rows are equal groups. Every group has some rows of each part, one part after the other.

    name: canonical name of the checkpoint's tensor.
    groups: number of groups.
    parts: canonical name of each part, and its rows in one group.
    """

    name: str
    groups: int
    parts: tuple[tuple[str, int], ...]

    @property
    def rows(self) -> int:
        """Rows of the checkpoint's tensor."""
        return self.groups * sum(size for _, size in self.parts)

    def split(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the rows of each part; the rows of all groups follow each other.

        tensor: the checkpoint's, (rows, ...).
        """
        shape = tensor.shape[1:]
        groups = tensor.view(self.groups, -1, *shape)
        row = 0
        for name, size in self.parts:
            yield name, groups[:, row : row + size].reshape(-1, *shape)
            row += size
