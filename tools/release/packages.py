"""Checks of the files to be published: what the wheels and the source distribution hold, and their sizes."""

from __future__ import annotations

import email.parser
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from email.message import Message
from pathlib import Path, PurePosixPath

from tools import DISTRIBUTION
from tools.wheels.check import NATIVE
from tools.wheels.platforms import PLATFORMS

NAME = DISTRIBUTION.replace("-", "_")
MAXIMAL_MB = {".whl": 40, ".gz": 30}
"""Largest size of a file to publish, by the end of its name. PyPI accepts 100 MB."""
SECTIONS = 5
"""Folders that the listing of a wheel names, the largest first."""


def problems(folder: Path, version: str, root: Path) -> Iterator[str]:
    """Yield what is wrong with the packages in a folder.

    There must be a wheel for each platform and a source distribution, all of one version. They may hold only
    files that the repository tracks, compiled kernels and metadata. No file may name the folder of the build.
    root: folder of the repository.
    """
    names = {f"{NAME}-{version}-py3-none-{each.tag}.whl" for each in PLATFORMS} | {f"{NAME}-{version}.tar.gz"}
    packages = sorted(path for path in folder.iterdir() if path.suffix in MAXIMAL_MB)
    found = {path.name for path in packages}
    yield from (f"{folder.name}: {name} is missing" for name in sorted(names - found))
    yield from (
        f"{folder.name}: {name} does not belong to version {version}" for name in sorted(found - names)
    )
    tracked = subprocess.run(["git", "ls-files"], cwd=root, check=True, capture_output=True, text=True).stdout
    for path in packages:
        megabytes = path.stat().st_size / 1e6
        if megabytes > MAXIMAL_MB[path.suffix]:
            yield f"{path.name} has {megabytes:.1f} MB; at most {MAXIMAL_MB[path.suffix]} are accepted"
        files = read(path)
        yield from foreign(path.name, files, set(tracked.splitlines()), str(root))
        yield from metadata_problems(path.name, files, version)
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, packages)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        yield f"twine check: {done.stdout}{done.stderr}"


def read(path: Path) -> dict[str, bytes]:
    """Return the files of a wheel or source distribution, by their names in it."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return {each.filename: wheel.read(each) for each in wheel.infolist()}
    with tarfile.open(path) as archive:
        opened = [(each.name, archive.extractfile(each)) for each in archive.getmembers() if each.isfile()]
        return {name.partition("/")[2]: file.read() for name, file in opened if file}


def foreign(package: str, files: Mapping[str, bytes], tracked: set[str], root: str) -> Iterator[str]:
    """Yield a line about each file that is not tracked, or that names the repository's folder.

    package: name of the wheel or source distribution. root: path of the repository's folder.
    """
    for name, content in files.items():
        kernel = name.startswith(f"{NATIVE}/lib/") and name.endswith(".so")
        if package.endswith(".whl"):
            known = kernel or f"src/{name}" in tracked or PurePosixPath(name).parts[0].endswith(".dist-info")
        else:
            known = name in tracked or name == "PKG-INFO"
        if not known:
            yield f"{package}: {name} is not a file of the repository"
        if root.encode() in content:
            yield f"{package}: {name} names the folder in which it was built"


def metadata_problems(package: str, files: Mapping[str, bytes], version: str) -> Iterator[str]:
    """Yield what is wrong with the metadata of a wheel or source distribution."""
    name = next((each for each in files if each.endswith(".dist-info/METADATA")), "PKG-INFO")
    fields: Message = email.parser.BytesParser().parsebytes(files[name]) if name in files else Message()
    expected = {"Name": DISTRIBUTION, "Version": version, "Requires-Python": "<3.14,>=3.11"}
    for field, value in expected.items():
        if fields[field] != value:
            yield f"{package}: {field} is {fields[field]}; it must be {value}"
    for field in ("Summary", "License-Expression", "Description-Content-Type"):
        if not fields[field]:
            yield f"{package}: the metadata has no {field}"
    if package.endswith(".whl"):
        points = next((each for each in files if each.endswith("entry_points.txt")), "")
        if not points or b"fovea = fovea.cli.main:main" not in files[points]:
            yield f"{package}: the command `fovea` is not among its entry points"


def listing(wheel: Path) -> str:
    """Return what takes the space in a wheel: files and compressed bytes of its largest folders."""
    sizes: Counter[str] = Counter()
    files: Counter[str] = Counter()
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            folder = "/".join(PurePosixPath(entry.filename).parts[:2])
            sizes[folder] += entry.compress_size
            files[folder] += 1
    lines = [f"{wheel.name}: {sum(files.values())} files, {wheel.stat().st_size / 1e6:.1f} MB"]
    for folder, size in sizes.most_common(SECTIONS):
        lines.append(f"  {folder}: {files[folder]} files, {size / 1e6:.2f} MB")
    return "\n".join(lines)
