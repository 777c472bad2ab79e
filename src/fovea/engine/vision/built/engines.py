"""The built encoders that a running engine uses: one per grid. The eager encoder encodes all other grids.

Which of the two encodes an image depends on its grid alone, never on load, so that equal images have equal
tokens.

`Builder` builds a folder of them. Every segment is written, read back and run. The result of each encoder is
compared with the eager encoder.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fovea.core.errors import ConfigError, EngineError
from fovea.engine.vision.built.formats import Format, RunSegment, format_named
from fovea.engine.vision.built.manifest import (
    FILE_MODE,
    FOLDER_MODE,
    NAME,
    BuiltGrid,
    Grid,
    Manifest,
    Site,
    UnusableEngine,
    checksum,
)
from fovea.engine.vision.encoding import run_to_end

if TYPE_CHECKING:
    from fovea.engine.vision.qwen import StaticQwen

log = logging.getLogger("fovea.engine")
CutTower = Callable[[Grid, int], Sequence[nn.Module]]
"""Function from a grid and a number of blocks per segment to the segments, over the model's own layers."""


class EncoderEngines:
    """The built encoders of a model by grid.

    hits: images and regions that a built encoder encoded.
    misses: those without a built encoder for their grid; counted only if there are encoders for other grids.
    digest: identifies the loaded encoders, as `Manifest.digest`; "" if there are none.
    """

    def __init__(self, grids: Mapping[Grid, Sequence[RunSegment]] | None = None, digest: str = "") -> None:
        self._grids = dict(grids or {})
        self.digest = digest
        self.hits = self.misses = 0

    def __len__(self) -> int:
        return len(self._grids)

    def find(self, grid: Grid, count: int = 1) -> Sequence[RunSegment] | None:
        """Return the segments of the encoder for a grid, or None, and count as many hits or misses."""
        segments = self._grids.get(grid)
        if segments is not None:
            self.hits += count
        elif self._grids:
            self.misses += count
        return segments


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


TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference from the eager encoder that a build may have, relative to the largest output, by type.

Differences by rounding alone are far smaller.
"""


@dataclass(slots=True)
class Builder:
    """Builds the encoders of one model for given grids.

    encoder: the model's encoder, with plain weights.
    format_name: name of the format, a key of `manifest.FORMATS`.
    blocks: blocks of the tower per segment.
    device, dtype: those of the model.
    site: written to the manifest.
    folder: where the files go; it is created if necessary.
    progress: called with each line of progress.
    """

    encoder: StaticQwen
    format_name: str
    blocks: int
    device: torch.device
    dtype: torch.dtype
    site: Site
    folder: Path
    progress: Callable[[str], None] = field(default=lambda line: None)
    _checksums: dict[str, str] = field(default_factory=dict)

    def build(self, grids: Mapping[Grid, Sequence[str]]) -> Manifest:
        """Build an encoder for every grid. When all are built, they replace the old encoders of the folder.

        grids: for each grid, the resolutions and levels of the images that have it.

        Raises ConfigError if the format or the folder cannot be used, EngineError if a result is wrong.
        """
        format = format_named(self.format_name)
        format.check(self.device)
        precision = format.precision(self.dtype)
        self.encoder.cast(precision)
        with _replacing(self.folder):
            built = tuple(
                self._grid(format, precision, grid, tuple(sources)) for grid, sources in grids.items()
            )
            manifest = Manifest(
                self.format_name,
                str(precision).removeprefix("torch."),
                self.blocks,
                self.site,
                built,
                self._checksums,
            )
            manifest.write(self.folder)
        return manifest

    def _grid(
        self, format: Format, precision: torch.dtype, grid: Grid, sources: tuple[str, ...]
    ) -> BuiltGrid:
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randn(self.encoder.input_shape(grid), generator=generator)
        patches = pixels.to(self.device, precision)
        x, names = self._rows(patches, grid), []
        runs: list[RunSegment] = []
        names_by_shape: dict[tuple[object, ...], str] = {}
        for number, segment in enumerate(self.encoder.segments(grid, self.blocks)):
            name = names_by_shape.get(segment.shape) if format.shares_weights else None
            if name is None:
                name = self._segment(format, segment, x, f"{grid[1]}x{grid[2]}-{number:02d}")
                names_by_shape[segment.shape] = name
                self.progress(f"{name} for {', '.join(sources)}")
            run = format.load(self.folder / name, segment)
            x = run(x)[0].to(self.device, precision)
            names.append(name)
            runs.append(run)
        return BuiltGrid(grid, sources, tuple(names), self._difference(runs, patches, grid))

    def _segment(self, format: Format, segment: torch.nn.Module, x: Tensor, stem: str) -> str:
        """Build one segment and return the name of its file.

        The name contains a checksum, so no file of an earlier build is overwritten: a running engine may
        still read it.
        """
        temporary = self.folder / f".{secrets.token_hex(8)}{format.suffix}"
        try:
            format.build(segment, x, temporary)
            temporary.chmod(FILE_MODE)
            digest = checksum(temporary)
            name = f"{stem}-{digest[:12]}{format.suffix}"
            os.replace(temporary, self.folder / name)
        finally:
            temporary.unlink(missing_ok=True)
        self._checksums[name] = digest
        return name

    @torch.no_grad()
    def _rows(self, patches: Tensor, grid: Grid) -> Tensor:
        return run_to_end(self.encoder.tower.embed(patches, grid))

    @torch.no_grad()
    def _difference(self, runs: Sequence[RunSegment], patches: Tensor, grid: Grid) -> float:
        tokens, features = run_to_end(self.encoder.run(runs, patches, grid))
        eager_tokens, eager_features = run_to_end(self.encoder.slices(patches, grid))
        pairs = zip((tokens, *features), (eager_tokens, *eager_features), strict=True)
        worst = max(largest_difference(actual, expected) for actual, expected in pairs)
        # Written as "not <=", because every comparison with NaN is false.
        if not worst <= TOLERANCE[patches.dtype]:
            raise EngineError(
                f"the encoder built for {grid[1]}x{grid[2]} patches differs from the eager encoder by "
                f"{worst:.2g} of its largest output; accepted: at most {TOLERANCE[patches.dtype]:.2g}. "
                "The new files are deleted"
            )
        return worst


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference, relative to the largest absolute value of `expected`."""
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).abs().max() / expected.abs().max())


@contextmanager
def _replacing(folder: Path) -> Iterator[None]:
    """Replace the encoders of a folder by those that are written inside the context.

    Afterwards the files that only the old manifest names are deleted. After a failure the new files are
    deleted, and the folder is as it was before. Raises ConfigError if the folder cannot be written.
    """
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True)
            folder.chmod(FOLDER_MODE)
        (probe := folder / f".{secrets.token_hex(8)}.tmp").touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error.strerror}; --out names another folder", param="out"
        ) from error
    before = {path.name for path in folder.iterdir()}
    try:
        old = set(Manifest.read(folder).checksums)
    except UnusableEngine:
        old = set()
    try:
        yield None
    except BaseException:
        for path in folder.iterdir():
            if path.name not in before and path.name != NAME:
                path.unlink()
        raise
    for name in old - set(Manifest.read(folder).checksums):
        (folder / name).unlink(missing_ok=True)
