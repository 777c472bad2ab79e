"""Offers as JSON, settings of connectors, and several connectors as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.core.errors import ConfigError
from fovea.engine.transfer.connect import ConnectorSettings
from fovea.engine.transfer.connector import MOST, Offer, TransferFailed

SUM = "0" * 32
GOOD: dict[str, Any] = {
    "connector": "shm",
    "place": "/tmp/x.sock",
    "name": "ab",
    "size": 3,
    "checksum": SUM,
    "start": 64,
    "lease": 7,
}
HEX = "0123456789abcdef"


@given(
    connector=st.sampled_from(["shm", "mooncake", "folder"]),
    place=st.text("/:.-ab é漢", min_size=1, max_size=50),
    name=st.text(HEX, min_size=1, max_size=64),
    size=st.integers(0, MOST),
    checksum=st.text(HEX, min_size=32, max_size=32),
    start=st.integers(0, MOST),
    lease=st.integers(0, MOST),
)
def test_offers_survive_json(**fields: Any) -> None:
    offer = Offer(**fields)
    assert Offer.from_json(json.loads(json.dumps(offer.to_json()))) == offer


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("connector", "SHM"),
        ("connector", None),
        ("place", ""),
        ("place", "/tmp/\0"),
        ("place", "x" * 1025),
        ("place", 3),
        ("name", "../ab"),
        ("name", ""),
        ("name", "ab\n"),
        ("size", -1),
        ("size", True),
        ("size", 1.0),
        ("size", "3"),
        ("size", MOST + 1),
        ("start", -64),
        ("start", 1 << 80),
        ("lease", -1),
        ("lease", None),
        ("checksum", SUM[1:]),
        ("checksum", SUM.replace("0", "A")),
        ("colour", "red"),
    ],
)
def test_a_wrong_field_is_named(field: str, value: object) -> None:
    with pytest.raises(TransferFailed, match=field):
        Offer.from_json(GOOD | {field: value})


@pytest.mark.parametrize("field", ["connector", "place", "name", "size", "checksum"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(TransferFailed, match=field):
        Offer.from_json({key: value for key, value in GOOD.items() if key != field})


@given(
    st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists)
    | st.dictionaries(st.text(), st.text())
)
def test_other_json_is_refused(value: object) -> None:
    with pytest.raises(TransferFailed):
        Offer.from_json(value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kind": "pigeon"}, "pigeon"),
        ({"kind": "shm"}, "folder"),
        ({"kind": "mooncake"}, "host"),
        ({"kind": "folder", "folder": Path("/x"), "capacity_bytes": -1}, "capacity_bytes"),
        ({"kind": "mooncake", "host": "a", "landing_bytes": 0}, "landing_bytes"),
        ({"kind": "shm", "folder": Path("/x"), "lease_s": float("nan")}, "lease_s"),
    ],
)
def test_a_wrong_setting_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ConnectorSettings(**fields)
