"""The built encoders that a running engine uses: one per grid. The eager encoder encodes all other grids.

Which of the two encodes an image depends on its grid alone, never on load, so that equal images have
equal
tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from fovea.engine.vision.built.format import RunSegment, format_named
from fovea.engine.vision.built.manifest import BuiltGrid, Grid, Manifest, Site, UnusableEngine
from fovea.engine.vision.encoding import Slices


class StaticSegment(Protocol):
    """A run of an encoder's blocks for one grid.

    The first segment also contains the patch embedding, the last one the merger.
    """

    @property
    def module(self) -> nn.Module: ...

    @property
    def shape(self) -> tuple[object, ...]:
        """Description of the code, equal for segments of one grid that differ only in their weights."""
        ...


class StaticEncoder(Protocol):
    """An encoder that can be built."""

    def segments(self, grid: Grid, blocks: int) -> Sequence[StaticSegment]:
        """Cut the encoder for a grid into segments of `blocks` blocks. They use the model's own layers."""
        ...

    def input_shape(self, grid: Grid) -> tuple[int, int]:
        """Shape of the encoder's input for a grid: (patches, values per patch)."""
        ...

    def slices(self, patches: Tensor, grid: Grid) -> Slices[tuple[Tensor, list[Tensor]]]:
        """Run the eager encoder. The result is the visual tokens, and one such tensor per DeepStack block."""
        ...

    def cast(self, dtype: torch.dtype) -> None:
        """Convert the model's own weights to a type."""
        ...


log = logging.getLogger("fovea.engine")
CutTower = Callable[[Grid, int], Sequence[nn.Module]]
"""Function from a grid and a number of blocks per segment to the segments, over the model's own layers."""


class EncoderEngines:
    """The built encoders of a model by grid.

    hits: images that a built encoder encoded.
    misses: images without a built encoder for their grid; counted only if there are encoders for other grids.
    digest: identifies the loaded encoders, as `Manifest.digest`; "" if there are none.
    """

    def __init__(self, grids: Mapping[Grid, Sequence[RunSegment]] | None = None, digest: str = "") -> None:
        self._grids = dict(grids or {})
        self.digest = digest
        self.hits = self.misses = 0

    def __len__(self) -> int:
        return len(self._grids)

    def find(self, grid: Grid) -> Sequence[RunSegment] | None:
        """Return the segments of the encoder for a grid, or None, and count a hit or a miss."""
        segments = self._grids.get(grid)
        if segments is not None:
            self.hits += 1
        elif self._grids:
            self.misses += 1
        return segments


def run_segments(segments: Sequence[RunSegment], patches: Tensor) -> Slices[tuple[Tensor, list[Tensor]]]:
    """Run a built encoder, one segment per slice. The result is that of the tower's own `slices`."""
    x, features = patches, []
    for segment in segments:
        x, *tapped = segment(x)
        features += tapped
        yield
    return x.to(patches.dtype), [feature.to(patches.dtype) for feature in features]


def open_engines(folder: Path, manifest: Manifest, here: Site, cut: CutTower) -> EncoderEngines:
    """Load the encoders of a folder that fit here. For every other one, a warning in the log says why not.

    here: the site of the running model.
    cut: makes the segments of a grid over the model's layers.
    """
    reason = manifest.misfit(here)
    if reason is not None:
        log.warning("encoder engines of %s are not used: %s", folder, reason)
        return EncoderEngines()
    grids: dict[Grid, Sequence[RunSegment]] = {}
    for built in manifest.grids:
        try:
            grids[built.grid] = _load(folder, manifest, built, cut)
        except Exception as error:  # noqa: BLE001 - a library may raise anything; the eager encoder remains
            log.warning("the encoder engine of %s for %s is not used: %s", folder, _describe(built), error)
    if grids:
        names = "; ".join(_describe(built) for built in manifest.grids if built.grid in grids)
        log.info("%s encoder engines of %s, in %s: %s", manifest.format, folder, manifest.precision, names)
    return EncoderEngines(grids, manifest.digest if grids else "")


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of a folder. Logs a warning and returns None if there is no usable one."""
    try:
        return Manifest.read(folder)
    except UnusableEngine as error:
        log.warning("no encoder engines from %s: %s", folder, error)
        return None


@torch.inference_mode()
def _load(folder: Path, manifest: Manifest, built: BuiltGrid, cut: CutTower) -> list[RunSegment]:
    manifest.check(folder, built)
    format = format_named(manifest.format)
    modules = cut(built.grid, manifest.blocks)
    if len(modules) != len(built.parts):
        raise UnusableEngine(f"it has {len(built.parts)} segments, the tower has {len(modules)}")
    return [format.load(folder / name, module) for name, module in zip(built.parts, modules, strict=True)]


def _describe(built: BuiltGrid) -> str:
    return f"{built.grid[1]}x{built.grid[2]} patches ({', '.join(built.sources)})"
