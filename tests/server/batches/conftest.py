"""Stores of these tests are small, so descriptions count for nothing, but where a test is about them."""

from __future__ import annotations

import pytest

from fovea.server import batch_store


@pytest.fixture(autouse=True)
def light_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_store, "RECORD", 0)
