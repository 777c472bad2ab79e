"""Files and batches on disk: owners, the ceiling, and what a crash leaves."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from fovea.core.errors import ConfigError, NotFound, PayloadTooLarge, Unavailable
from fovea.server.batch_store import BatchStore, Record, public, read_lines

CAPACITY = 10_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "batches"


@pytest.fixture
def store(folder: Path) -> BatchStore:
    return BatchStore(folder, CAPACITY)


def add(store: BatchStore, content: bytes = b"{}\n", owner: str = "me", name: str = "in.jsonl") -> Record:
    path = store.new_upload()
    path.write_bytes(content)
    return store.add_file(path, owner, filename=name, purpose="batch")


def batch(number: int, status: str = "in_progress", created_at: int = 1, owner: str = "me") -> Record:
    ids = {"id": f"batch_{number:032x}", "output_file_id": None, "error_file_id": None}
    return {**ids, "status": status, "created_at": created_at, "owner": owner}


def test_files_are_read_again_after_a_restart(store: BatchStore, folder: Path) -> None:
    record = add(store, b"one\n")
    again = BatchStore(folder, CAPACITY)
    assert again.file(record["id"], "me") == record
    assert again.content_path(record["id"]).read_bytes() == b"one\n"
    assert (record["bytes"], record["filename"], record["purpose"]) == (4, "in.jsonl", "batch")


def test_an_owner_sees_only_its_own(store: BatchStore) -> None:
    mine, other = add(store), add(store, owner="other")
    store.add_batch(batch(1))
    assert store.files("me") == [mine]
    assert store.files("other") == [other]
    assert store.batches("other") == []
    with pytest.raises(NotFound) as caught:
        store.file(mine["id"], "other", "input_file_id")
    assert (caught.value.param, caught.value.code) == ("input_file_id", "file_not_found")
    with pytest.raises(NotFound, match="batch"):
        store.batch(batch(1)["id"], "other")
    with pytest.raises(NotFound):
        store.drop_file(mine["id"], "other")


@pytest.mark.parametrize("name", ["../secret", "file-..", "", "file-" + "0" * 32])
def test_names_are_no_paths(store: BatchStore, folder: Path, name: str) -> None:
    (folder.parent / "secret.data").write_text("secret")
    with pytest.raises(NotFound):
        store.file(name, "me")


def test_description_hides_its_owner(store: BatchStore) -> None:
    record = add(store)
    assert "owner" in record
    assert "owner" not in public(record)


def test_ceiling_counts_files_and_results(store: BatchStore) -> None:
    store.check_room(CAPACITY)
    record = add(store, b"x" * 6000)
    with pytest.raises(PayloadTooLarge) as caught:
        store.check_room(4001)
    assert caught.value.code == "batch_store_full"
    store.append(batch(1)["id"], "out", b"y" * 4000)
    with pytest.raises(PayloadTooLarge):
        store.append(batch(1)["id"], "err", b"z")
    store.drop_file(record["id"], "me")
    store.append(batch(1)["id"], "err", b"z")


def test_results_become_a_file_of_the_owner(store: BatchStore) -> None:
    record = batch(1)
    store.append(record["id"], "out", b"one\n")
    store.append(record["id"], "out", b"two\n")
    used = store.used
    store.finish_lines(record)
    file = record["output_file_id"]
    assert store.content_path(file).read_bytes() == b"one\ntwo\n"
    assert store.file(file, "me")["purpose"] == "batch_output"
    assert store.used == used
    store.finish_lines(record)
    assert (record["output_file_id"], record["error_file_id"]) == (file, None)


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        (b'{"a":1}\n{"b":2}\n', b'{"a":1}\n{"b":2}\n'),
        (b'{"a":1}\n{"b"', b'{"a":1}\n'),
        (b'{"a"', b""),
        (b"", b""),
        (b"x\n" + b"y" * 200_000, b"x\n"),
        (b"y" * 200_000, b""),
    ],
    ids=["whole", "cut", "first cut", "empty", "long", "long first"],
)
def test_cut_last_line_is_dropped(store: BatchStore, folder: Path, left: bytes, kept: bytes) -> None:
    """A crash while a line is written leaves a part of it. Its request is answered again."""
    store.add_batch(batch(1))
    store.lines_path(batch(1)["id"], "out").write_bytes(left)
    again = BatchStore(folder, CAPACITY)
    assert again.lines_path(batch(1)["id"], "out").read_bytes() == kept


def test_uploads_that_did_not_end_are_removed(store: BatchStore, folder: Path) -> None:
    store.new_upload().write_bytes(b"half")
    again = BatchStore(folder, CAPACITY)
    assert list((folder / "files").iterdir()) == []
    assert again.used == 0


def test_results_are_not_lost_by_a_crash_before_their_description_is_written(
    store: BatchStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content of a new file is moved first. Without a description, nobody would find it again."""

    class Crash(BaseException):
        """The process ends here."""

    def crash(kind: str, record: Record) -> None:
        raise Crash

    record = batch(1)
    name = record["id"]
    store.add_batch(record)
    store.append(name, "out", b'{"custom_id": "a"}\n')
    monkeypatch.setattr(store, "_write", crash)
    with pytest.raises(Crash):
        store.finish_lines(record)
    again = BatchStore(folder, CAPACITY)
    contents = [again.content_path(record["id"]) for record in again.files("me")]
    left = [*contents, again.lines_path(name, "out")]
    assert [path.read_bytes() for path in left if path.is_file()] == [b'{"custom_id": "a"}\n']


def test_unfinished_batches_come_in_the_order_of_their_creation(store: BatchStore, folder: Path) -> None:
    records = [batch(3, created_at=1), batch(1, "validating", 2), batch(2, "completed", 3)]
    records += [batch(4, "cancelling", 4), batch(5, "finalizing", 5), batch(6, "failed", 6)]
    for record in records:
        store.add_batch(record)
    expected = [batch(number)["id"] for number in (3, 1, 4, 5)]
    assert [record["id"] for record in store.unfinished()] == expected
    assert [record["id"] for record in BatchStore(folder, CAPACITY).unfinished()] == expected
    assert [record["id"] for record in store.batches("me")][0] == batch(6)["id"]


def test_folder_that_cannot_be_used(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError) as caught:
        BatchStore(blocked, CAPACITY)
    assert caught.value.param == "batch_dir"
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError):
        BatchStore(tmp_path / "open", CAPACITY)


def test_description_that_is_no_json_is_named(store: BatchStore, folder: Path) -> None:
    record = add(store)
    path = folder / "files" / f"{record['id']}.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match=record["id"]):
        BatchStore(folder, CAPACITY)


def test_lines_are_read_without_their_ends(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\r\ntwo\n\nlast")
    assert list(read_lines(path)) == [b"one", b"two", b"", b"last"]
    assert list(read_lines(tmp_path / "none")) == []


def test_descriptions_are_private(store: BatchStore, folder: Path) -> None:
    add(store)
    store.add_batch(batch(1))
    assert folder.stat().st_mode & 0o077 == 0
    records: list[Any] = [json.loads(path.read_text()) for path in folder.rglob("*.json")]
    assert len(records) == 2


def test_a_full_disk_refuses_a_file_and_leaves_no_trace_of_it(
    store: BatchStore, folder: Path, limit_file_size: Callable[[int], AbstractContextManager[None]]
) -> None:
    """The system refuses to write more than a few bytes, as a full disk does."""
    path, used = store.new_upload(), store.used
    path.write_bytes(b"{}\n")
    with limit_file_size(16), pytest.raises(Unavailable, match="cannot be written now") as caught:
        store.add_file(path, "me", filename="in.jsonl", purpose="batch")
    assert (caught.value.status, caught.value.code) == (503, "batch_dir_failed")
    assert (store.files("me"), store.used) == ([], used)
    assert list((folder / "files").iterdir()) == [path]
    assert BatchStore(folder, CAPACITY).files("me") == []


def test_a_line_that_a_full_disk_has_cut_does_not_damage_the_next_one(
    store: BatchStore, limit_file_size: Callable[[int], AbstractContextManager[None]]
) -> None:
    record = batch(1)
    store.add_batch(record)
    store.append(record["id"], "out", b"first\n")
    used = store.used
    with limit_file_size(9), pytest.raises(Unavailable):
        store.append(record["id"], "out", b"second\n")
    assert store.used == used
    store.append(record["id"], "out", b"third\n")
    assert list(read_lines(store.lines_path(record["id"], "out"))) == [b"first", b"third"]


@pytest.fixture
def limit_file_size() -> Callable[[int], AbstractContextManager[None]]:
    """A limit on the size of files: writing beyond it fails after a part has been written."""

    @contextmanager
    def limit(size: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, before)

    return limit
