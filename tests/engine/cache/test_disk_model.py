"""Tests of the disk store against a dictionary, while files are damaged, removed and added in its folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fovea.engine.cache.disk import DiskStore
from fovea.engine.cache.disk_files import Array, Arrays, path_of
from tests.support.disks import arrays_of
from tests.support.thorough import examples

KEYS = st.sampled_from("abcdef")
FOREIGN = b"not an entry"


class DiskMachine(RuleBasedStateMachine):
    """Random operations on a store, and on the files in its folder.

    A store that does not share its folder never exceeds its ceiling, except after a test lengthened its
    files.
    """

    @initialize(capacity=st.integers(2000, 6000), ttl=st.one_of(st.none(), st.integers(1, 100)))
    def start(self, capacity: int, ttl: int | None) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.folder = self.root / "features"
        self.capacity = capacity
        self.ttl = ttl
        self.now = 1_800_000_000.0
        self.values: dict[str, Arrays] = {}
        self.written_at: dict[str, float] = {}
        self.serial = 0
        self.lengthened = False
        self.foreign: set[Path] = set()
        self.open()

    def open(self) -> None:
        self.store = DiskStore(self.folder, self.capacity, ttl_s=self.ttl, clock=lambda: self.now)
        assert self.store.flush(10)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.root)

    @rule(key=KEYS, size=st.integers(0, 1500))
    def put(self, key: str, size: int) -> None:
        self.serial += 1
        data = self.serial.to_bytes(4, "little") + bytes(size)
        value = Arrays(
            (Array("embeds", "uint8", (len(data),), data), Array("empty", "bfloat16", (0, 8), b""))
        )
        self.store.put(key, value)
        self.values[key], self.written_at[key] = value, self.now
        assert self.store.flush(10)
        assert key in self.store
        assert arrays_of(self.store, key) == value, "the entry that was just written_at is missing"

    @rule(key=KEYS)
    def get(self, key: str) -> None:
        result = arrays_of(self.store, key)
        if result is None:
            return
        assert result == self.values[key]
        assert self.ttl is None or self.now - self.written_at[key] < self.ttl

    @rule(key=KEYS)
    def drop(self, key: str) -> None:
        self.store.drop(key)
        self.values.pop(key, None)
        assert key not in self.store
        assert arrays_of(self.store, key) is None

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.values.clear()
        assert self.entries() == []

    @rule(key=KEYS, where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
    def corrupt(self, key: str, where: float, flip: int) -> None:
        path = path_of(self.folder, key)
        if path.is_file():
            data = bytearray(path.read_bytes())
            if data:
                data[int(where * len(data))] ^= flip
            path.write_bytes(data)
            before = self.store.stats()
            assert arrays_of(self.store, key) is None
            after = self.store.stats()
            assert (after.corrupt + after.expirations) - (before.corrupt + before.expirations) == 1
            assert not path.exists()

    @rule(key=KEYS, where=st.floats(0, 1, exclude_max=True))
    def cut(self, key: str, where: float) -> None:
        path = path_of(self.folder, key)
        if path.is_file():
            os.truncate(path, int(where * path.stat().st_size))

    @rule(key=KEYS, more=st.integers(1, 3000))
    def lengthen(self, key: str, more: int) -> None:
        path = path_of(self.folder, key)
        if path.is_file():
            os.truncate(path, path.stat().st_size + more)
            self.lengthened = True

    @rule(key=KEYS)
    def remove_file(self, key: str) -> None:
        path_of(self.folder, key).unlink(missing_ok=True)

    @rule(key=KEYS)
    def remove_sub_folder(self, key: str) -> None:
        shard = path_of(self.folder, key).parent
        shutil.rmtree(shard, ignore_errors=True)
        self.foreign = {path for path in self.foreign if path.parent != shard}

    @rule(key=KEYS)
    def swap(self, key: str) -> None:
        """Move a valid entry to the path of another key."""
        source, target = path_of(self.folder, key), path_of(self.folder, "other")
        if source.is_file():
            target.parent.mkdir(exist_ok=True)
            os.replace(source, target)
            assert arrays_of(self.store, "other") is None

    @rule(key=KEYS, name=st.sampled_from(["notes.txt", "model.safetensors"]))
    def add_foreign(self, key: str, name: str) -> None:
        shard = path_of(self.folder, key).parent
        path = self.folder / "notes.txt" if name == "notes.txt" else shard / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(FOREIGN)
        self.foreign.add(path)

    @rule(seconds=st.floats(0, 400))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def sweep(self) -> None:
        self.store.sweep()
        self.lengthened = False
        stats = self.store.stats()
        assert (stats.bytes, stats.entries) == (self.size(), len(self.entries()))
        assert self.size() <= self.capacity

    @rule(capacity=st.integers(2000, 6000))
    def restart(self, capacity: int) -> None:
        self.store.close()
        self.capacity = capacity
        self.open()
        self.lengthened = False

    def entries(self) -> list[Path]:
        return list(self.folder.glob("*/*.fovea.safetensors"))

    def size(self) -> int:
        return sum(path.stat().st_size for path in self.entries())

    @invariant()
    def below_the_ceiling_and_on(self) -> None:
        if not hasattr(self, "store"):
            return
        assert self.lengthened or self.size() <= self.capacity
        assert self.store.stats().off is None
        assert all(path.read_bytes() == FOREIGN for path in self.foreign)
        assert not list(self.folder.rglob("*.tmp"))


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=examples(80), stateful_step_count=40, deadline=None)
