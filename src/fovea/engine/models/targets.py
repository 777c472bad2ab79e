"""The tensors of a model that a checkpoint fills, and the forms in which checkpoints store them.

Usually a tensor of the file is a tensor of the model. But a file may hold several of the model's tensors as
one (`fused_tensors`), and it may hold the experts of a layer one by one, which are one tensor in the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from torch import Tensor

from fovea.engine.models.fused_tensors import FusedTensor

NOTHING_FUSED: Mapping[str, FusedTensor] = MappingProxyType({})
_EXPERT = re.compile(r"^(.*\.experts)\.(\d{1,6})\.(gate|up|down)_proj\.weight$", re.ASCII)


class Targets:
    """The tensors that are not filled yet, by canonical name.

    fused: tensors of the files that may hold the rows of several targets, by canonical name.
    """

    def __init__(
        self, targets: Iterable[tuple[str, Tensor]], fused: Mapping[str, FusedTensor] = NOTHING_FUSED
    ) -> None:
        self.fused = fused
        self._left = dict(targets)
        self._loaded: set[str] = set()
        self._pieces: dict[str, int] = {}

    @property
    def missing(self) -> list[str]:
        """Names of the tensors that are not filled, or not completely."""
        return list(self._left)

    def is_loaded(self, name: str) -> bool:
        """Whether the tensor of that name in a file, or a part of it, is loaded already."""
        return not self._loaded.isdisjoint(self._parts(name))

    def find(self, name: str) -> list[Tensor]:
        """The storage that a tensor of the files fills, one for each of its parts; empty if there is none."""
        found = [self._find(part) for part in self._parts(name)]
        return [tensor for tensor in found if tensor is not None] if None not in found else []

    def mark_filled(self, name: str) -> list[str]:
        """Note that a tensor of the files is loaded. Returns the names of targets that are complete now."""
        complete = []
        for part in self._parts(name):
            self._loaded.add(part)
            target = part if part in self._left else self._count_expert(part)
            if target is not None:
                del self._left[target]
                complete.append(target)
        return complete

    def _parts(self, name: str) -> list[str]:
        return [part for part, _ in self.fused[name].parts] if name in self.fused else [name]

    def _find(self, name: str) -> Tensor | None:
        if name in self._left:
            return self._left[name]
        whole, expert, part = _expert(name)
        if whole not in self._left or expert >= len(self._left[whole]):
            return None
        maps = self._left[whole][expert]
        half = len(maps) // 2
        return {"down": maps, "gate": maps[:half], "up": maps[half:]}[part]

    def _count_expert(self, name: str) -> str | None:
        """Count one map of an expert. Returns the name of the tensor of all experts if it is complete."""
        piece, (whole, _, _) = self._find(name), _expert(name)
        assert piece is not None
        self._pieces[whole] = self._pieces.get(whole, 0) + piece.numel()
        return whole if self._pieces[whole] == self._left[whole].numel() else None


def _expert(name: str) -> tuple[str, int, str]:
    """Split the name of one expert's map: name of the tensor of all experts, expert, and gate, up or down.

    For other names, the first part is empty.
    """
    match = _EXPERT.match(name)
    if match is None:
        return "", 0, ""
    prefix, number, part = match.groups()
    return f"{prefix}.{'down' if part == 'down' else 'gate_up'}_proj", int(number), part
