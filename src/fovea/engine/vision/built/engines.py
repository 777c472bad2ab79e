"""The built encoders of a running engine: one per grid, and the eager encoder for all others.

Which of the two encodes an image depends on its grid alone, never on load, so that equal images have equal tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from fovea.engine.vision.built.format import RunPart, format_named
from fovea.engine.vision.built.manifest import BuiltGrid, Grid, Manifest, Site, Unusable
from fovea.engine.vision.slices import Slices

log = logging.getLogger("fovea.engine")
CutTower = Callable[[Grid, int], Sequence[nn.Module]]
"""A grid and the number of blocks of a part to the parts, over the model's own layers."""


class EncoderEngines:
    """hits, misses: images that had a built encoder, and that had none although there are some.

    digest: of what is loaded; "" for nothing.
    """

    def __init__(self, grids: Mapping[Grid, Sequence[RunPart]] | None = None, digest: str = "") -> None:
        self._grids = dict(grids or {})
        self.digest = digest
        self.hits = self.misses = 0

    def __len__(self) -> int:
        return len(self._grids)

    def find(self, grid: Grid) -> Sequence[RunPart] | None:
        parts = self._grids.get(grid)
        if parts is not None:
            self.hits += 1
        elif self._grids:
            self.misses += 1
        return parts


def run_parts(parts: Sequence[RunPart], patches: Tensor) -> Slices[tuple[Tensor, list[Tensor]]]:
    """As the tower's own `slices`: a part is a slice."""
    x, features = patches, []
    for part in parts:
        x, *tapped = part(x)
        features += tapped
        yield
    return x.to(patches.dtype), [feature.to(patches.dtype) for feature in features]


def open_engines(folder: Path, manifest: Manifest, here: Site, cut: CutTower) -> EncoderEngines:
    """What of the folder can be used here. All that can not is told by name."""
    reason = manifest.misfit(here)
    if reason is not None:
        log.warning("encoder engines of %s are not used: %s", folder, reason)
        return EncoderEngines()
    grids: dict[Grid, Sequence[RunPart]] = {}
    for built in manifest.grids:
        try:
            grids[built.grid] = _load(folder, manifest, built, cut)
        except Exception as error:  # noqa: BLE001 - whatever a foreign library raises, the eager encoder is there
            log.warning("the encoder engine of %s for %s is not used: %s", folder, _shown(built), error)
    if grids:
        shown = "; ".join(_shown(built) for built in manifest.grids if built.grid in grids)
        log.info("%s encoder engines of %s, in %s: %s", manifest.format, folder, manifest.precision, shown)
    return EncoderEngines(grids, manifest.digest if grids else "")


def read_manifest(folder: Path) -> Manifest | None:
    """None, and a warning, where there is none to be used."""
    try:
        return Manifest.read(folder)
    except Unusable as error:
        log.warning("no encoder engines from %s: %s", folder, error)
        return None


@torch.inference_mode()
def _load(folder: Path, manifest: Manifest, built: BuiltGrid, cut: CutTower) -> list[RunPart]:
    manifest.check(folder, built)
    format = format_named(manifest.format)
    modules = cut(built.grid, manifest.blocks)
    if len(modules) != len(built.parts):
        raise Unusable(f"{len(built.parts)} parts for {len(modules)} of the tower")
    return [format.load(folder / name, module) for name, module in zip(built.parts, modules, strict=True)]


def _shown(built: BuiltGrid) -> str:
    return f"{built.grid[1]}x{built.grid[2]} patches ({', '.join(built.sources)})"
