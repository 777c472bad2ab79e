"""docs/gateway-limits.md lists every limit and setting with default, range and help, as the code does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fovea.access.keys import parse_key_file
from fovea.core.settings import settings_of, type_in_words
from fovea.gateway.tenants.limits import TenantLimits
from fovea.gateway.tenants.settings import AccountSettings

PAGE = (Path(__file__).resolve().parents[3] / "docs/gateway-limits.md").read_text(encoding="utf-8")


def table(cls: type) -> str:
    """Return the rows of a table of settings: name, default, accepted values, help."""
    return "\n".join(
        f"| `{entry.name}` | {_shown(entry.default)} | {entry.rule.accepted or type_in_words(entry.hint)} | "
        f"{entry.rule.help} |"
        for entry in settings_of(cls)
    )


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "empty" if value == () else f"{value}"


@pytest.mark.parametrize("cls", [TenantLimits, AccountSettings])
def test_the_table_is_what_the_code_says(cls: type) -> None:
    assert table(cls) in PAGE


def test_the_example_is_a_keys_file() -> None:
    example = PAGE.split("```toml\n")[1].split("```")[0]
    records = parse_key_file(example, TenantLimits).records
    assert [record.name for record in records] == ["alice", "team-b"]
    assert records[0].limits.bounds.day[3] == 5_000_000
    assert records[1].limits.models == ("small",)
