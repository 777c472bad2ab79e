"""docs/gateway-tenants.md names every limit of a tenant, and its example is a keys file."""

from __future__ import annotations

from pathlib import Path

from fovea.access.keys import parse_key_file
from fovea.core.settings import settings_of
from fovea.gateway.tenants.keys import TenantLimits

PAGE = (Path(__file__).resolve().parents[3] / "docs/gateway-tenants.md").read_text(encoding="utf-8")


def test_every_limit_is_named() -> None:
    section = PAGE.split("## Limits")[1].split("### ")[0]
    assert [entry.name for entry in settings_of(TenantLimits) if f"`{entry.name}`" not in section] == []


def test_the_example_is_a_keys_file() -> None:
    example = PAGE.split("```toml\n")[1].split("```")[0]
    records = parse_key_file(example, TenantLimits).records
    assert [record.name for record in records] == ["alice", "team-b"]
    assert records[0].limits.bounds.day[3] == 5_000_000
    assert records[1].limits.models == ("small",)
