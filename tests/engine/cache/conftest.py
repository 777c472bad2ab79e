"""Fixtures: disk stores on a temporary folder, with a clock that the test advances."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fovea.engine.cache.disk import DiskStore
from tests.support.disks import CAPACITY, Clock, Open


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "features"


@pytest.fixture
def open_store(folder: Path, clock: Clock) -> Iterator[Open]:
    """A function that opens a store on `folder`.

    The store has scanned the folder when the function returns it.
    """
    stores: list[DiskStore] = []

    def open_(capacity: int = CAPACITY, **settings: object) -> DiskStore:
        store = DiskStore(folder, capacity, clock=clock, **settings)  # type: ignore[arg-type]
        stores.append(store)
        assert store.flush(10)
        return store

    yield open_
    for store in stores:
        store.close()
