"""A folder of built encoders: every part is written, read back, run, and the whole compared with the eager encoder."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fovea.core.errors import ConfigError, EngineError
from fovea.engine.vision.built.engines import run_parts
from fovea.engine.vision.built.format import Format, RunPart, format_named
from fovea.engine.vision.built.manifest import NAME, BuiltGrid, Grid, Manifest, Site, Unusable, checksum
from fovea.engine.vision.built.static import StaticEncoder
from fovea.engine.vision.slices import finished

TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference from the eager encoder, over its largest output, that a build may have. Rounding leaves far less."""


@dataclass(slots=True)
class Builder:
    """encoder: with plain weights. device, dtype: of the model. blocks: of a part. tell: progress, a line at a time."""

    encoder: StaticEncoder
    format_name: str
    blocks: int
    device: torch.device
    dtype: torch.dtype
    site: Site
    folder: Path
    tell: Callable[[str], None] = field(default=lambda line: None)
    _checksums: dict[str, str] = field(default_factory=dict)

    def build(self, grids: Mapping[Grid, Sequence[str]]) -> Manifest:
        """grids: what becomes each of them. What the folder held before is replaced when all is built.

        Raises ConfigError where the format or the folder can not be used, EngineError when a result is wrong.
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
        x, names = patches, []
        runs: list[RunPart] = []
        made: dict[tuple[object, ...], str] = {}
        for number, part in enumerate(self.encoder.parts(grid, self.blocks)):
            name = made.get(part.shape) if format.shares_weights else None
            if name is None:
                name = self._part(format, part.module, x, f"{grid[1]}x{grid[2]}-{number:02d}")
                made[part.shape] = name
                self.tell(f"{name} for {', '.join(sources)}")
            run = format.load(self.folder / name, part.module)
            x = run(x)[0].to(self.device, precision)
            names.append(name)
            runs.append(run)
        return BuiltGrid(grid, sources, tuple(names), self._difference(runs, patches, grid))

    def _part(self, format: Format, part: torch.nn.Module, x: Tensor, stem: str) -> str:
        """Named by its content: a running engine may still read what stood here before."""
        temporary = self.folder / f".{secrets.token_hex(8)}{format.suffix}"
        try:
            format.build(part, x, temporary)
            found = checksum(temporary)
            name = f"{stem}-{found[:12]}{format.suffix}"
            os.replace(temporary, self.folder / name)
        finally:
            temporary.unlink(missing_ok=True)
        self._checksums[name] = found
        return name

    @torch.no_grad()
    def _difference(self, runs: Sequence[RunPart], patches: Tensor, grid: Grid) -> float:
        wanted, wanted_features = finished(self.encoder.slices(patches, grid))
        found, found_features = finished(run_parts(runs, patches))
        pairs = zip((found, *found_features), (wanted, *wanted_features), strict=True)
        worst = max(largest_difference(got, want) for got, want in pairs)
        # Not "above the bound": a NaN is not above anything.
        if not worst <= TOLERANCE[patches.dtype]:
            raise EngineError(
                f"what was built for {grid[1]}x{grid[2]} patches differs from the eager encoder by {worst:.2g} of its "
                f"largest output, {TOLERANCE[patches.dtype]:.2g} is accepted; nothing was kept"
            )
        return worst


def largest_difference(found: Tensor, wanted: Tensor) -> float:
    """Over the largest value of what is wanted."""
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).abs().max() / wanted.abs().max())


@contextmanager
def _replacing(folder: Path) -> Iterator[None]:
    """New files become part of the folder, and the old manifest's leave it; after a failure it is as it was."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (probe := folder / f".{secrets.token_hex(8)}.tmp").touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"{folder} can not be written: {error.strerror}; --out names another", param="out"
        ) from error
    before = {path.name for path in folder.iterdir()}
    try:
        old = set(Manifest.read(folder).checksums)
    except Unusable:
        old = set()
    try:
        yield
    except BaseException:
        for path in folder.iterdir():
            if path.name not in before and path.name != NAME:
                path.unlink()
        raise
    for name in old - set(Manifest.read(folder).checksums):
        (folder / name).unlink(missing_ok=True)
