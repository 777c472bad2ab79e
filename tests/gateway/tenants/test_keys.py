"""Tenants by their keys: what a key opens, whose limits it has, and a keys file that changes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from fovea.access.keys import PREFIX, digest, tenant_of_client, tenant_of_key
from fovea.core.errors import ConfigError, NotFound, Unauthorized
from fovea.gateway.tenants.keys import EVERYONE, NO_LIMITS, TenantLimits, Tenants

ADMIN = frozenset(("admin",))


def entry(name: str, key: str, *lines: str) -> str:
    return "\n".join(
        ["[[key]]", f'name = "{name}"', f'hash = "{PREFIX}{digest(key.encode()).hex()}"', *lines, ""]
    )


def write(path: Path, *parts: str) -> Path:
    new = path.with_suffix(".new")
    new.write_text("\n".join(parts))
    new.chmod(0o600)
    os.replace(new, path)
    return path


def refused(tenants: Tenants, header: bytes, roles: frozenset[str] = frozenset(("api",))) -> str:
    with pytest.raises(Unauthorized) as error:
        tenants.authenticate(header, roles)
    return error.value.code


def test_keys_of_a_file_have_limits_and_scopes(tmp_path: Path) -> None:
    tenants = Tenants(
        write(
            tmp_path / "keys.toml",
            'cache_secret = "s"',
            "[default]\ntext_tokens_per_minute = 1000\ncost_per_day = 0.25",
            entry("alice", "a", 'models = ["big", "small"]', "weight = 2"),
            entry("bob", "b", 'cache_scope = "shared"', 'roles = ["api", "admin"]', "cost_per_day = 1"),
        )
    )
    alice, bob = tenants.authenticate(b"Bearer a"), tenants.authenticate(b"bearer  b ")
    assert alice.limits == TenantLimits(
        text_tokens_per_minute=1000, cost_per_day=0.25, models=("big", "small"), weight=2
    )
    assert bob.limits.bounds.day == (0, 0, 0, 1_000_000)
    assert (alice.name, alice.scope, bob.scope) == ("alice", tenant_of_client("alice", "s"), "")
    assert (alice.roles, bob.roles) == ({"api"}, {"api", "admin"})
    alice.check_model("small")
    with pytest.raises(NotFound, match="key 'alice' may not use the model 'other'; accepted: big, small"):
        alice.check_model("other")
    bob.check_model("other")
    assert tenants.authenticate(b"Bearer b", ADMIN) is bob
    assert refused(tenants, b"Bearer a", ADMIN) == "invalid_api_key"
    assert refused(tenants, b"") == "missing_api_key"
    assert refused(tenants, b"Basic a") == "missing_api_key"
    assert refused(tenants, b"Bearer c") == "invalid_api_key"
    assert refused(tenants, b"Bearer " + b"a" * 10_000) == "invalid_api_key"
    assert not tenants.open


def test_keys_of_flags_have_no_limits() -> None:
    tenants = Tenants(api_keys=("one",), admin_keys=("root",))
    tenant = tenants.authenticate(b"Bearer one")
    assert (tenant.name, tenant.limits, tenant.scope) == ("api-key:1", NO_LIMITS, tenant_of_key(b"one"))
    assert tenants.authenticate(b"Bearer root", ADMIN).name == "admin-key:1"
    assert refused(tenants, b"Bearer root") == "invalid_api_key"
    assert tenants.authenticate(b"Bearer one", frozenset(("metrics",))) is tenant, "there are no metrics keys"


def test_no_keys_are_one_open_tenant() -> None:
    tenants = Tenants()
    assert tenants.authenticate(b"") is EVERYONE
    assert tenants.authenticate(b"Bearer x", ADMIN) is EVERYONE
    assert (EVERYONE.name, EVERYONE.limits, EVERYONE.scope) == ("", NO_LIMITS, "")
    guarded = Tenants(admin_keys=("root",))
    assert guarded.authenticate(b"") is EVERYONE
    assert refused(guarded, b"", ADMIN) == "missing_api_key"


def test_an_empty_file_closes_the_gateway(tmp_path: Path) -> None:
    tenants = Tenants(write(tmp_path / "keys.toml", ""))
    assert [refused(tenants, b"Bearer x", frozenset((role,))) for role in ("api", "admin", "metrics")] == [
        "invalid_api_key"
    ] * 3


def test_a_key_expires(tmp_path: Path) -> None:
    now = [1e9]
    path = write(tmp_path / "keys.toml", entry("alice", "a", "expires = 2001-09-10"))
    tenants = Tenants(path, now=lambda: now[0])
    tenants.authenticate(b"Bearer a")
    now[0] = 1_000_080_000
    assert refused(tenants, b"Bearer a") == "expired_api_key"


@pytest.mark.parametrize("line", ["places = 1", "requests_per_minute = 1.5", "cost_per_day = -1"])
def test_a_file_with_other_limits_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match="keys file .*: key 'alice'.*"):
        Tenants(write(tmp_path / "keys.toml", entry("alice", "a", line)))


async def test_the_file_is_read_again_while_requests_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fovea.access.key_table.CHECK_S", 0.001)
    path = write(tmp_path / "keys.toml", entry("alice", "a", "max_in_flight = 1"))
    tenants = Tenants(path)
    async with tenants.watching():
        write(path, entry("alice", "new", "max_in_flight = 2"))
        while tenants.stats()["keys_file_broken"] or not _opens(tenants, b"Bearer new"):
            await asyncio.sleep(0.001)
        assert tenants.authenticate(b"Bearer new").limits.max_in_flight == 2
        assert refused(tenants, b"Bearer a") == "invalid_api_key"
        write(path, "[[key")
        while not tenants.stats()["keys_file_broken"]:
            await asyncio.sleep(0.001)
        assert tenants.authenticate(b"Bearer new").name == "alice", "a slip of an editor locks nobody out"
    write(path, entry("bob", "b"))
    assert tenants.reload()
    assert not tenants.reload()
    assert tenants.stats() == {"keys": 1, "keys_file_broken": 0}


def _opens(tenants: Tenants, header: bytes) -> bool:
    try:
        tenants.authenticate(header)
    except Unauthorized:
        return False
    return True
