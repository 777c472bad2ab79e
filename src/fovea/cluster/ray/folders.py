"""Folders in object stores and other file systems: by pyarrow, or by fsspec if pyarrow lacks the scheme."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pyarrow import ArrowException
from pyarrow.fs import FileSelector, FileSystem, FileType, FSSpecHandler, PyFileSystem

from fovea.cluster.batch import Folder, Writer
from fovea.cluster.folders import UNFINISHED, LocalFolder
from fovea.core.errors import ConfigError, InvalidImage

OBJECT_STORES = ("s3", "gcs", "abfs")
"""File systems in which a file becomes visible when it is closed. In others it is renamed."""


def is_address(text: str) -> bool:
    """Return whether a text is the address of an object store or file system, such as s3://bucket/folder."""
    return "://" in text


def _connect(address: str) -> tuple[FileSystem, str]:
    """Return the file system of an address, and the path in it. Raises ConfigError."""
    try:
        try:
            system, path = FileSystem.from_uri(address)
        except ArrowException:
            import fsspec

            inner, path = fsspec.url_to_fs(address)
            system = PyFileSystem(FSSpecHandler(inner))
    except (ArrowException, OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"{address} cannot be opened: {error}; accepted: a path, or an address that pyarrow or fsspec "
            "knows, such as s3://bucket/folder"
        ) from error
    return system, path.rstrip("/")


class ArrowFolder:
    """A folder of a file system of pyarrow. address: its URI."""

    def __init__(self, address: str, *, system: FileSystem | None = None, path: str = "") -> None:
        """system, path: of the address, if they are known already."""
        if system is None:
            system, path = _connect(address)
        self.system, self._path = system, path

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}" if name else self._path

    def kind(self) -> Any:
        """Return pyarrow's FileType of the folder itself. Raises OSError."""
        return self.system.get_file_info(self._path).type

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        with self.system.open_input_file(self._at(name)) as file:
            if start:
                file.seek(start)
            return bytes(file.read() if length is None else file.read(length))

    def write(self, name: str, data: bytes) -> None:
        target = self._at(name)
        if self.system.type_name in OBJECT_STORES:
            self._write(target, data)
            return
        folder, slash, last = target.rpartition("/")
        aside = f"{folder}{slash}.{last}.{uuid.uuid4().hex}{UNFINISHED}"
        self._write(aside, data)
        self.system.move(aside, target)

    def _write(self, path: str, data: bytes) -> None:
        with self.system.open_output_stream(path) as file:
            file.write(data)

    def create(self, name: str) -> AbstractContextManager[Writer]:
        self.system.create_dir(self._path, recursive=True)
        stream: AbstractContextManager[Writer] = self.system.open_output_stream(
            self._at(name), buffer_size=2**20
        )
        return stream

    def names(self) -> set[str]:
        return {info.base_name for info in self._list("") if info.type == FileType.File}

    def walk(self, endings: Sequence[str]) -> Iterator[str]:
        """Yield names, a folder after the other: pyarrow lists all of one folder at once."""
        ends, folders = tuple(endings), [""]
        while folders:
            folder = folders.pop()
            for info in self._list(folder):
                name = f"{folder}/{info.base_name}" if folder else info.base_name
                if info.base_name.startswith("."):
                    continue
                if info.type == FileType.Directory:
                    folders.append(name)
                elif info.base_name.lower().endswith(ends):
                    yield name

    def _list(self, folder: str) -> list[Any]:
        infos: list[Any] = self.system.get_file_info(FileSelector(self._at(folder), allow_not_found=False))
        return infos


def open_folder(place: str) -> Folder:
    """Open a folder: a path of this machine, or an address. Raises ConfigError."""
    return ArrowFolder(place) if is_address(place) else LocalFolder(Path(place))


def find_inputs(place: str) -> tuple[str, str | None]:
    """Return the folder of the inputs, and the name of the file of questions in it; None: it has images.

    Raises ConfigError if there is nothing.
    """
    if not is_address(place):
        path = Path(place)
        if not path.exists():
            raise ConfigError(f"{place} cannot be read: No such file or directory")
        return (place, None) if path.is_dir() else (str(path.parent), path.name)
    try:
        kind = ArrowFolder(place).kind()
    except OSError as error:
        raise ConfigError(f"{place} cannot be read: {error}") from error
    if kind == FileType.NotFound:
        raise ConfigError(f"{place} cannot be read: there is no such file or folder")
    if kind == FileType.Directory:
        return place, None
    head, query = place.partition("?")[::2]
    folder, _, name = head.rpartition("/")
    return (f"{folder}?{query}" if query else folder), name


class ImageReader:
    """Reads images by the names that lines give them. Thread-safe.

    A name is relative to the folder of the inputs, an absolute path, or an address.
    """

    def __init__(self, place: str) -> None:
        self._folder = open_folder(place)
        self._scheme = urlsplit(place).scheme
        self._others: dict[tuple[str, str], FileSystem] = {}

    def read(self, name: str) -> bytes:
        """Return the bytes of an image. Raises InvalidImage."""
        try:
            if is_address(name):
                return self._read_address(name)
            return self._folder.read(name)
        except (OSError, ValueError, ConfigError) as error:
            cause = getattr(error, "strerror", None) or str(error)
            raise InvalidImage(f"{name} cannot be read: {cause}") from error

    def _read_address(self, address: str) -> bytes:
        parts = urlsplit(address)
        folder = self._folder
        if isinstance(folder, ArrowFolder) and parts.scheme == self._scheme:
            system = folder.system
        else:
            system = self._others.get((parts.scheme, parts.netloc)) or _connect(address)[0]
            self._others[parts.scheme, parts.netloc] = system
        return ArrowFolder(
            address, system=system, path=f"{parts.netloc.rpartition('@')[2]}{parts.path}"
        ).read("")
