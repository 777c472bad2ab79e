"""What a folder of built encoders says of itself, and whether it fits here: JSON and comparisons, no tensors.

manifest.json     version, format, site (for what, where and with what it was built), grids
<name>.<suffix>   what the parts of the grids are made of; a file may be the part of several places
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

VERSION = 1
NAME = "manifest.json"
Grid = tuple[int, int, int]


class Unusable(Exception):
    """Why a folder, or a grid of it, is not used."""


@dataclass(frozen=True, slots=True)
class FormatFacts:
    """exact: packages that must have the version that built it. machine_code: it runs where the instructions are."""

    exact: tuple[str, ...]
    machine_code: bool


FORMATS: Mapping[str, FormatFacts] = {
    "aot": FormatFacts(("torch",), machine_code=True),
    "onnx": FormatFacts((), machine_code=False),
    "tensorrt": FormatFacts(("tensorrt",), machine_code=True),
}


@dataclass(frozen=True, slots=True)
class Site:
    """model: fingerprint of the encoder's weights and type. dtype: of the model. device: cpu or cuda. capability: of the
    processor, in words. versions: by package."""

    model: str
    dtype: str
    device: str
    capability: tuple[str, ...]
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class BuiltGrid:
    """grid: (frames, rows, columns) of patches. sources: the resolutions and levels that become it. parts: file names in
    order. difference: largest from the eager encoder, over the largest output, measured when it was built."""

    grid: Grid
    sources: tuple[str, ...]
    parts: tuple[str, ...]
    difference: float


@dataclass(frozen=True, slots=True)
class Manifest:
    """blocks: of the tower, in a part. precision: in which the parts compute. checksums: SHA-256 by file name."""

    format: str
    precision: str
    blocks: int
    site: Site
    grids: tuple[BuiltGrid, ...]
    checksums: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises Unusable."""
        try:
            values = json.loads((folder / NAME).read_text(encoding="utf-8"))
        except OSError as error:
            raise Unusable(f"its {NAME} can not be read: {error.strerror}") from error
        except ValueError as error:
            raise Unusable(f"its {NAME} is not JSON: {error}") from error
        if not isinstance(values, dict) or values.get("version") != VERSION:
            raise Unusable(f"its {NAME} is not of version {VERSION}")
        try:
            return cls._of(values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Unusable(f"its {NAME} is damaged: {type(error).__name__}: {error}") from error

    @classmethod
    def _of(cls, values: dict[str, Any]) -> Self:
        site = values["site"]
        made = cls(
            str(values["format"]),
            str(values["precision"]),
            int(values["blocks"]),
            Site(**{**site, "capability": tuple(site["capability"]), "versions": dict(site["versions"])}),
            tuple(
                BuiltGrid(
                    _grid(item["grid"]),
                    tuple(item["sources"]),
                    tuple(item["parts"]),
                    float(item["difference"]),
                )
                for item in values["grids"]
            ),
            dict(values["checksums"]),
        )
        if made.format not in FORMATS:
            raise ValueError(f"format {made.format!r}")
        for name in {name for grid in made.grids for name in grid.parts}:
            if Path(name).name != name or name not in made.checksums:
                raise ValueError(f"part {name!r}")
        return made

    def write(self, folder: Path) -> None:
        """Whole or not at all. Raises OSError."""
        text = json.dumps({"version": VERSION, **asdict(self)}, indent=1)
        temporary = folder / f".{NAME}.{secrets.token_hex(8)}.tmp"
        try:
            temporary.write_text(text + "\n", encoding="utf-8")
            os.replace(temporary, folder / NAME)
        finally:
            temporary.unlink(missing_ok=True)

    def misfit(self, here: Site) -> str | None:
        """Why it can not be used here, None when it can."""
        facts, built = FORMATS[self.format], self.site
        for name in ("model", "dtype", "device"):
            was, is_now = getattr(built, name), getattr(here, name)
            if was != is_now:
                return f"it was built for {name} {was}, this one is {is_now}"
        for package in facts.exact:
            was, is_now = built.versions.get(package, "none"), here.versions.get(package, "none")
            if was != is_now:
                return f"it was built with {package} {was}, here is {is_now}"
        lacking = sorted(set(built.capability) - set(here.capability))
        if facts.machine_code and lacking:
            return f"it was built for a processor with {', '.join(lacking[:4])}, which this one has not"
        return None

    def check(self, folder: Path, grid: BuiltGrid) -> None:
        """Raises Unusable when a file of the grid is not what was built."""
        for name in dict.fromkeys(grid.parts):
            try:
                found = checksum(folder / name)
            except OSError as error:
                raise Unusable(f"{name} can not be read: {error.strerror}") from error
            if found != self.checksums[name]:
                raise Unusable(f"{name} is not the file that was built")

    @property
    def digest(self) -> str:
        """Of all that decides outputs."""
        parts = [
            self.format,
            self.precision,
            *(f"{name} {self.checksums[name]}" for name in sorted(self.checksums)),
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def checksum(path: Path) -> str:
    """SHA-256 of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _grid(values: Any) -> Grid:
    frames, rows, columns = (int(value) for value in values)
    if min(frames, rows, columns) < 1:
        raise ValueError(f"grid {values}")
    return frames, rows, columns
