"""Connectors of every kind that can be opened here."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fovea.engine.transfer.connector import Connector
from tests.support.transfer import KINDS, connector_of, why_skipped


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    reason = why_skipped(kind)
    if reason is not None:
        pytest.skip(reason)
    return kind


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder with a short path: those of sockets have 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="fovea-") as folder:
        yield Path(folder)


@pytest.fixture
def producer(kind: str, home: Path) -> Iterator[Connector]:
    connector = connector_of(kind, home)
    yield connector
    connector.close()


@pytest.fixture
def consumer(kind: str, home: Path) -> Iterator[Connector]:
    connector = connector_of(kind, home)
    yield connector
    connector.close()
