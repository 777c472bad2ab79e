"""Files and batches on disk, in one folder with a ceiling in bytes.

    DIR/files/file-ID.json    what is known about a file
    DIR/files/file-ID.data    its content
    DIR/batches/batch_ID.json a batch
    DIR/batches/batch_ID.out  answers so far, a line of JSON each; they become a file at the end
    DIR/batches/batch_ID.err  requests that failed, likewise

Descriptions are replaced as a whole, so that a crash leaves the old or the new one. A line that a crash has
cut is dropped when the folder is opened, and its request is answered again. If the disk is full, what could
not be written is taken back at once, and the caller gets Unavailable.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fovea.core.errors import ConfigError, NotFound, Overloaded, PayloadTooLarge, Unavailable
from fovea.core.private_files import private_folder

log = logging.getLogger("fovea.server")
Record = dict[str, Any]
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")
RECORD = 4096
"""Bytes that a description counts for."""
MOST_OPEN, MOST_ENDED = 100, 1000
"""Most batches of one owner that have not ended, and most that have and are still described."""
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
OWNER = "owner"
"""Field of a description that clients do not see: the client that owns it."""


class BatchStore:
    """The files and batches of one server. For the event loop's thread, except to read contents.

    capacity: ceiling in bytes.
    used: bytes that are taken now.
    arriving: bytes of uploads that are not complete yet.

    Raises ConfigError if the folder cannot be used.
    """

    def __init__(self, folder: Path, capacity: int) -> None:
        self.capacity = capacity
        self.arriving = 0
        self._folder = folder
        reason = private_folder(folder)
        if reason is not None:
            raise ConfigError(f"batch_dir: {reason}", param="batch_dir")
        for name in ("files", "batches"):
            (folder / name).mkdir(mode=0o700, exist_ok=True)
        self._files = self._read("files")
        self._batches = self._read("batches")
        for name in self._batches:
            for kind in ("out", "err"):
                _drop_cut_line(self.lines_path(name, kind))
        contents = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".json")
        self.used = sum(path.stat().st_size for path in contents)
        self.used += RECORD * (len(self._files) + len(self._batches))

    def check_room(self, size: int, *, uploads: bool = True) -> None:
        """Raise PayloadTooLarge if so many bytes more do not fit.

        uploads: also count those that are arriving. Results do not: an upload must not end a batch.
        """
        taken = self.used + (self.arriving if uploads else 0)
        if taken + size > self.capacity:
            raise PayloadTooLarge(
                f"files and batches take {taken} bytes, and {size} more do not fit into {self.capacity} "
                "(batch_store_mib); delete some",
                code="batch_store_full",
            )

    @contextmanager
    def arrival(self) -> Iterator[Callable[[int], None]]:
        """Count an upload until it is complete. Call what this yields with the bytes of each of its parts.

        It raises PayloadTooLarge.
        """
        size = 0

        def add(count: int) -> None:
            nonlocal size
            self.check_room(count)
            size += count
            self.arriving += count

        try:
            yield add
        finally:
            self.arriving -= size

    def content_path(self, name: str) -> Path:
        """Path of a file's content. name: id of a file of this store."""
        return self._folder / "files" / f"{name}.data"

    def lines_path(self, name: str, kind: str) -> Path:
        """Path of the results of a batch. name: id of a batch of this store. kind: out or err."""
        return self._folder / "batches" / f"{name}.{kind}"

    def new_upload(self) -> Path:
        """Path of a file that is arriving."""
        return self._folder / "files" / f"{uuid.uuid4().hex}.part"

    def add_file(
        self, source: Path, owner: str, *, filename: str, purpose: str, name: str | None = None
    ) -> Record:
        """Take over a file, and return its description. name: its id; None: a new one.

        The description is written first, so that a crash leaves no content without one.
        Raises Unavailable if the disk cannot be written; the store is then as before.
        """
        name = name or new_file_id()
        size = source.stat().st_size
        record = {
            "id": name,
            "object": "file",
            "bytes": size,
            "created_at": int(time.time()),
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
            OWNER: owner,
        }
        try:
            self._write("files", record)
            with writing():
                source.replace(self.content_path(name))
        except Unavailable:
            with suppress(OSError):
                self._description("files", name).unlink(missing_ok=True)
            raise
        self.used += size + RECORD
        self._files[name] = record
        return record

    def file(self, name: str, owner: str, param: str | None = None) -> Record:
        """Return the description of an owner's file. Raises NotFound."""
        return _find(self._files, name, owner, "file", param)

    def files(self, owner: str) -> list[Record]:
        """Return the descriptions of an owner's files, newest first."""
        return _newest(self._files, owner)

    def drop_file(self, name: str, owner: str) -> None:
        """Remove an owner's file. Raises NotFound."""
        record = self.file(name, owner)
        del self._files[name]
        self.content_path(name).unlink(missing_ok=True)
        (self._folder / "files" / f"{name}.json").unlink(missing_ok=True)
        self.used -= record["bytes"] + RECORD

    def add_batch(self, record: Record) -> None:
        """Add a batch. The oldest ones of its owner that have ended make room.

        Raises Overloaded if too many have not ended, PayloadTooLarge if the store is full, Unavailable if the
        disk cannot be written.
        """
        mine = self.batches(record[OWNER])
        running = sum(batch["status"] in UNFINISHED for batch in mine)
        if running >= MOST_OPEN:
            raise Overloaded(
                f"{running} batches have not ended; accepted: at most {MOST_OPEN}",
                retry_after=60.0,
                scope="request",
            )
        for batch in [batch for batch in mine if batch["status"] not in UNFINISHED][MOST_ENDED:]:
            del self._batches[batch["id"]]
            (self._folder / "batches" / f"{batch['id']}.json").unlink(missing_ok=True)
            self.used -= RECORD
        self.check_room(RECORD)
        self._write("batches", record)
        self._batches[record["id"]] = record
        self.used += RECORD

    def batch(self, name: str, owner: str) -> Record:
        """Return an owner's batch. Raises NotFound."""
        return _find(self._batches, name, owner, "batch", None)

    def batches(self, owner: str) -> list[Record]:
        """Return an owner's batches, newest first."""
        return _newest(self._batches, owner)

    def unfinished(self) -> list[Record]:
        """Return the batches of all owners that have not ended, oldest first."""
        open_ones = (record for record in self._batches.values() if record["status"] in UNFINISHED)
        return sorted(open_ones, key=lambda record: int(record["created_at"]))

    def save_batch(self, record: Record) -> None:
        self._write("batches", record)

    def append(self, name: str, kind: str, line: bytes) -> None:
        """Add a line to the results of a batch.

        Raises PayloadTooLarge if the store is full, Unavailable if the disk cannot be written.
        """
        self.check_room(len(line), uploads=False)
        path = self.lines_path(name, kind)
        before = path.stat().st_size if path.is_file() else 0
        try:
            with writing(), path.open("ab") as file:
                file.write(line)
        except Unavailable:
            with suppress(OSError):
                os.truncate(path, before)  # or else the next line would continue a part of this one
            raise
        self.used += len(line)

    def finish_lines(self, record: Record) -> None:
        """Turn the results of a batch into files. May be called again after a crash; it then goes on.

        The batch names its files before they exist.
        """
        kinds = {"out": "output", "err": "error"}
        for kind, title in kinds.items():
            if record[f"{title}_file_id"] is None and self.lines_path(record["id"], kind).is_file():
                record[f"{title}_file_id"] = new_file_id()
        self.save_batch(record)
        for kind, title in kinds.items():
            path = self.lines_path(record["id"], kind)
            if path.is_file():
                size = path.stat().st_size
                self.add_file(
                    path,
                    record[OWNER],
                    filename=f"{record['id']}_{title}.jsonl",
                    purpose="batch_output",
                    name=record[f"{title}_file_id"],
                )
                self.used -= size

    def unname_missing(self, record: Record) -> None:
        """Let a batch name no file that could not be made."""
        for title in ("output", "error"):
            if record[f"{title}_file_id"] not in self._files:
                record[f"{title}_file_id"] = None

    def _read(self, kind: str) -> dict[str, Record]:
        records = {}
        for path in sorted((self._folder / kind).iterdir()):
            if path.suffix in (".part", ".new"):
                path.unlink()
            elif path.suffix == ".json" and _ID.fullmatch(path.stem):
                try:
                    records[path.stem] = json.loads(path.read_text())
                except ValueError as error:
                    raise ConfigError(f"{path} is not JSON: {error}", param="batch_dir") from error
        return records

    def _write(self, kind: str, record: Record) -> None:
        """Replace a description as a whole. Raises Unavailable."""
        path = self._description(kind, record["id"])
        part = path.with_suffix(".new")
        try:
            with writing():
                with part.open("w") as file:
                    json.dump(record, file)
                    file.flush()
                    os.fsync(file.fileno())
                part.replace(path)
        except Unavailable:
            with suppress(OSError):  # the disk may have become read-only
                part.unlink(missing_ok=True)
            raise

    def _description(self, kind: str, name: str) -> Path:
        return self._folder / kind / f"{name}.json"


@contextmanager
def writing() -> Iterator[None]:
    """Turn errors of the disk into Unavailable."""
    try:
        yield
    except OSError as error:
        log.warning("files and batches cannot be written: %s", error)
        raise Unavailable(
            f"files and batches cannot be written now ({error.strerror}); try again later",
            code="batch_dir_failed",
        ) from error


def new_file_id() -> str:
    """A new id of a file."""
    return f"file-{uuid.uuid4().hex}"


def public(record: Record) -> Record:
    """A description as clients see it."""
    return {name: value for name, value in record.items() if name != OWNER}


def read_lines(path: Path, longest: int = -1) -> Iterator[bytes]:
    """Yield the lines of a file without their ends; none if there is no file.

    longest: bytes after which a line is cut into several; -1: any length.
    """
    if path.is_file():
        with path.open("rb") as file:
            while line := file.readline(longest):
                yield line.rstrip(b"\r\n")


def _find(records: dict[str, Record], name: str, owner: str, noun: str, param: str | None) -> Record:
    record = records.get(name)
    if record is None or record[OWNER] != owner:
        raise NotFound(f"there is no {noun} {name[:64]!r}", param=param, code=f"{noun}_not_found")
    return record


def _newest(records: dict[str, Record], owner: str) -> list[Record]:
    mine = [record for record in records.values() if record[OWNER] == owner]
    mine.reverse()  # times are whole seconds; within one, the record that was added last comes first
    return sorted(mine, key=lambda record: -int(record["created_at"]))


def _drop_cut_line(path: Path) -> None:
    """Drop the end of a file behind its last line break."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        file.seek(0, os.SEEK_END)
        end = file.tell()
        while end:
            start = max(0, end - 65536)
            file.seek(start)
            at = file.read(end - start).rfind(b"\n")
            if at >= 0:
                file.truncate(start + at + 1)
                return
            end = start
        file.truncate(0)
