"""The manifest of a folder of built encoders, and the check whether they fit the running model. No tensors.

manifest.json     version, format, precision, blocks, site, grids, checksums: see `Manifest`
<name>.<suffix>   the built segments of the grids; one file may serve several segments
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

from fovea.core.private_files import exposure, open_private, read_private

VERSION = 2
NAME = "manifest.json"
FILE_MODE, FOLDER_MODE = 0o644, 0o755
"""Modes of what a build writes, whatever the umask: files that others could change would not be used."""
Grid = tuple[int, int, int]


class UnusableEngine(Exception):
    """A folder of built encoders, or one of its grids, cannot be used. The message says why."""


@dataclass(frozen=True, slots=True)
class FormatFacts:
    """Requirements of a format.

    exact: packages that must have the same version as when the encoder was built.
    machine_code: the files hold machine code, so the processor must have the instructions of the one that
        built them.
    """

    exact: tuple[str, ...]
    machine_code: bool


FORMATS: Mapping[str, FormatFacts] = {
    "aot": FormatFacts(("torch",), machine_code=True),
    "onnx": FormatFacts((), machine_code=False),
    "tensorrt": FormatFacts(("tensorrt",), machine_code=True),
}


@dataclass(frozen=True, slots=True)
class Site:
    """The model and the machine that encoders are built for, or run on.

    model: fingerprint of the encoder's weights and their type.
    dtype: the model's type.
    device: cpu or cuda.
    capability: instruction sets of the CPU, or name and generation of the GPU.
    versions: installed versions by package; "none" if a package is missing.
    """

    model: str
    dtype: str
    device: str
    capability: tuple[str, ...]
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class BuiltGrid:
    """The built encoder of one grid.

    grid: (frames, rows, columns) of patches.
    sources: the resolutions and detail levels of the images that have this grid.
    parts: file names of the segments, in order; the name of this field is also the key in manifest.json.
    difference: largest difference from the eager encoder, relative to its largest output, measured after the
        build.
    """

    grid: Grid
    sources: tuple[str, ...]
    parts: tuple[str, ...]
    difference: float


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of manifest.json.

    format: name of the format, a key of `FORMATS`.
    precision: type in which the segments compute.
    blocks: blocks of the tower per segment.
    site: the model and the machine that the encoders were built for.
    grids: one built encoder each.
    checksums: SHA-256 by file name.
    """

    format: str
    precision: str
    blocks: int
    site: Site
    grids: tuple[BuiltGrid, ...]
    checksums: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read and check the manifest of a folder that no other user can change. Raises UnusableEngine."""
        reason = exposure(folder, may_be_link=True)
        if reason is not None:
            raise UnusableEngine(f"its files are machine code, and {reason}")
        try:
            values = json.loads(read_private(folder / NAME))
        except OSError as error:
            raise UnusableEngine(f"its {NAME} cannot be read: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise UnusableEngine(f"its {NAME} is not JSON: {error}") from error
        if not isinstance(values, dict) or values.get("version") != VERSION:
            raise UnusableEngine(f"its {NAME} is not of version {VERSION}")
        try:
            return cls._of(values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UnusableEngine(f"its {NAME} is damaged: {type(error).__name__}: {error}") from error

    @classmethod
    def _of(cls, values: dict[str, Any]) -> Self:
        site = values["site"]
        manifest = cls(
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
        if manifest.format not in FORMATS:
            raise ValueError(f"format {manifest.format!r}")
        for name in {name for grid in manifest.grids for name in grid.parts}:
            if Path(name).name != name or name not in manifest.checksums:
                raise ValueError(f"part {name!r}")
        return manifest

    def write(self, folder: Path) -> None:
        """Write manifest.json atomically. Raises OSError."""
        text = json.dumps({"version": VERSION, **asdict(self)}, indent=1)
        temporary = folder / f".{NAME}.{secrets.token_hex(8)}.tmp"
        try:
            temporary.write_text(text + "\n", encoding="utf-8")
            temporary.chmod(FILE_MODE)
            os.replace(temporary, folder / NAME)
        finally:
            temporary.unlink(missing_ok=True)

    def misfit(self, here: Site) -> str | None:
        """Return why the encoders cannot be used at the site `here`, or None if they can."""
        facts, built = FORMATS[self.format], self.site
        for name in ("model", "dtype", "device"):
            old, new = getattr(built, name), getattr(here, name)
            if old != new:
                return f"it was built for {name} {old}, this one is {new}"
        for package in facts.exact:
            old, new = built.versions.get(package, "none"), here.versions.get(package, "none")
            if old != new:
                return f"it was built with {package} {old}, here is {new}"
        missing = sorted(set(built.capability) - set(here.capability))
        if facts.machine_code and missing:
            return f"it was built for a processor with {', '.join(missing[:4])}, which this one does not have"
        return None

    def check(self, folder: Path, grid: BuiltGrid) -> None:
        """Raise UnusableEngine if a file of the grid is not the one that was built.

        Nobody else can change the files afterwards, because `read` has checked the folder.
        """
        for name in dict.fromkeys(grid.parts):
            try:
                actual = checksum(folder / name)
            except OSError as error:
                raise UnusableEngine(f"{name} cannot be read: {error.strerror or error}") from error
            if actual != self.checksums[name]:
                raise UnusableEngine(f"{name} is not the file that was built")

    @property
    def digest(self) -> str:
        """SHA-256 of everything that decides outputs: format, precision and files."""
        lines = [
            self.format,
            self.precision,
            *(f"{name} {self.checksums[name]}" for name in sorted(self.checksums)),
        ]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits.

    Raises OSError, also for a link and for a file that another user can change.
    """
    with open_private(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _grid(values: Any) -> Grid:
    frames, rows, columns = (int(value) for value in values)
    if min(frames, rows, columns) < 1:
        raise ValueError(f"grid {values}")
    return frames, rows, columns
