"""Bring the pictures of pictures.toml from Debian's packages to this machine, and check them.

    python benchmarks/pictures.py [--folder FOLDER]

The packages of all pictures are about 95 MB. Each package is downloaded with `apt-get download` into a
temporary folder and unpacked there: nothing is installed, and nothing needs root. Only the pictures stay, in
--folder, so a later run downloads nothing. The licence of a picture is in its package, in
/usr/share/doc/PACKAGE/copyright.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIST = Path(__file__).with_name("pictures.toml")
FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fovea-bench/pictures"
DOWNLOAD, UNPACK = "apt-get", "dpkg-deb"
SYSTEM = "Debian 12 (bookworm)"
Box = tuple[float, float, float, float]
"""Left, top, right and bottom as shares of the sides of a picture."""


class PictureError(Exception):
    """A picture cannot be downloaded, or is not the one of the list."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question about one part of a picture.

    box: the part.
    unrelated: a question about another part of the same picture.
    """

    text: str
    box: Box
    unrelated: str


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture in a package of Debian, with its questions.

    kind: photo, screenshot, diagram or sheet.
    path: path of the picture in the package.
    sha256: of the file.
    """

    name: str
    kind: str
    package: str
    version: str
    path: str
    sha256: str
    questions: tuple[Question, ...]

    def file(self, folder: Path) -> Path:
        """The picture in a folder that `download` filled."""
        return folder / f"{self.name}{Path(self.path).suffix}"


def read_list(path: Path = LIST) -> tuple[Picture, ...]:
    """Read the list of pictures and questions. Downloads nothing."""
    entries = tomllib.loads(path.read_text())["picture"]
    return tuple(
        Picture(questions=tuple(map(_question, entry.pop("question"))), **entry) for entry in entries
    )


def download(pictures: Iterable[Picture], folder: Path = FOLDER) -> None:
    """Bring the pictures that are not in the folder yet, one package after the other. Raises PictureError."""
    folder.mkdir(parents=True, exist_ok=True)
    missing: dict[tuple[str, str], list[Picture]] = {}
    for picture in pictures:
        if not _is_right(picture.file(folder), picture):
            missing.setdefault((picture.package, picture.version), []).append(picture)
    for program in (DOWNLOAD, UNPACK) if missing else ():
        if shutil.which(program) is None:
            raise PictureError(f"{program} is not on this machine; the pictures are in packages of {SYSTEM}")
    for (package, version), wanted in missing.items():
        with tempfile.TemporaryDirectory() as temporary:
            tree = _unpack(package, version, Path(temporary))
            for picture in wanted:
                _take(picture, tree / picture.path, folder)


def _question(entry: dict[str, Any]) -> Question:
    left, top, right, bottom = entry["box"]
    return Question(entry["question"], (left, top, right, bottom), entry["unrelated"])


def _unpack(package: str, version: str, folder: Path) -> Path:
    """Download and unpack a package below an empty folder; return the root of its files."""
    _run([DOWNLOAD, "download", f"{package}={version}"], folder, f"cannot download {package} {version}")
    [archive] = folder.glob("*.deb")
    tree = folder / "tree"
    _run([UNPACK, "--extract", str(archive), str(tree)], folder, f"cannot unpack {archive.name}")
    return tree


def _run(command: list[str], folder: Path, failure: str) -> None:
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise PictureError(
            f"{failure}: {reason}; needed are the lists of {SYSTEM}, which `apt-get update` brings"
        )


def _take(picture: Picture, source: Path, folder: Path) -> None:
    """Copy an unpacked picture into the folder."""
    where = f"{picture.path} of {picture.package} {picture.version}"
    if not source.is_file():
        raise PictureError(f"picture {picture.name}: there is no {where}")
    if not _is_right(source, picture):
        raise PictureError(
            f"picture {picture.name}: {where} has the sha256 {_sha256(source)}, expected {picture.sha256}"
        )
    shutil.copyfile(source, picture.file(folder))


def _is_right(path: Path, picture: Picture) -> bool:
    return path.is_file() and _sha256(path) == picture.sha256


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the pictures are stored")
    args = parser.parse_args()
    pictures = read_list()
    try:
        download(pictures, args.folder)
    except PictureError as error:
        raise SystemExit(str(error)) from None
    for picture in pictures:
        print(picture.file(args.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
