"""Tests of the keys of a server while it runs: rotation, removal, broken files, expiry, floods in logs."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from fovea.access.audit import LINES, WINDOW_S, Audit
from fovea.access.keys import PREFIX, digest
from fovea.access.log import AccessLog
from fovea.core.errors import ConfigError, Unauthorized
from fovea.server.access import ANY, Access, Rules
from fovea.server.clients import Caller
from fovea.server.settings import ServerSettings
from tests.core.test_ledger import Clock

MODELS = "/v1/models"


def entry(name: str, key: str, *lines: str) -> str:
    hashed = f"{PREFIX}{digest(key.encode()).hex()}"
    return "\n".join(["[[key]]", f'name = "{name}"', f'hash = "{hashed}"', *lines, ""])


class KeysFile:
    """A keys file that a test changes, and the access that reads it."""

    def __init__(self, path: Path, *entries: str, **settings: Any) -> None:
        self.path, self.clock = path, Clock()
        self.write(*entries)
        self.access = Access(
            ServerSettings.of(keys_file=path, **settings), self.clock, now=lambda: 1e9 + self.clock.now
        )

    def write(self, *entries: str) -> None:
        """Replace the file by renaming, as editors and `fovea keys` do."""
        new = self.path.with_suffix(".new")
        new.write_text("".join(entries))
        new.chmod(0o600)
        os.replace(new, self.path)

    def ask(self, key: str, path: str = MODELS) -> Caller:
        caller = Caller()
        self.access.authenticate(path, f"Bearer {key}".encode(), caller)
        return caller

    def refuses(self, key: str, path: str = MODELS) -> str:
        with pytest.raises(Unauthorized) as error:
            self.ask(key, path)
        return error.value.code


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def test_a_key_is_rotated_without_a_restart(path: Path) -> None:
    keys = KeysFile(path, entry("alice", "old", "requests_per_minute = 2"))
    client = keys.ask("old").client
    client.count_request()
    keys.write(
        entry("alice", "old", "requests_per_minute = 2"), entry("alice", "new", "requests_per_minute = 2")
    )
    assert keys.access.reload()
    assert keys.ask("new").client is keys.ask("old").client is client, "both keys share the limits"
    assert client.requests is not None
    assert client.requests.remaining == 1, "a new key brings no fresh limits"
    keys.write(entry("alice", "new", "requests_per_minute = 2"))
    assert keys.access.reload()
    assert keys.refuses("old") == "invalid_api_key"
    assert not keys.access.reload(), "the file has not changed since"


@pytest.mark.parametrize("broken", ["[[key]", '[[key]]\nname = "x"\n', 'secret = "x"\n'])
def test_a_broken_file_keeps_the_keys_and_is_logged_once(
    path: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a slip of an editor would lock everyone out, or let everyone in."""
    keys = KeysFile(path, entry("alice", "a"))
    keys.write(broken)
    with caplog.at_level(logging.ERROR, "fovea.server"):
        assert [keys.access.reload() for _ in range(3)] == [False] * 3
    assert [record.message.split(":")[0] for record in caplog.records] == ["the keys stay what they were"]
    assert keys.ask("a").client.name == "alice"
    assert keys.refuses("x") == "invalid_api_key"
    assert keys.access.stats() == {"keys": 1, "keys_file_broken": 1.0}
    keys.write(entry("bob", "b"))
    assert keys.access.reload()
    assert keys.access.stats() == {"keys": 1, "keys_file_broken": 0.0}
    assert keys.refuses("a") == "invalid_api_key"


async def test_a_disk_that_hangs_delays_nobody(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys file may lie on a network disk: while it hangs, the event loop and the known keys go on."""
    keys = KeysFile(path, entry("alice", "a"))
    hanging, released = threading.Event(), threading.Event()

    def look() -> None:
        hanging.set()
        released.wait(60)

    monkeypatch.setattr("fovea.access.key_table.CHECK_S", 0.001)
    monkeypatch.setattr(keys.access._table, "_look", look)
    async with keys.access.watching():
        while not hanging.is_set():
            await asyncio.sleep(0.001)
        for _ in range(100):
            await asyncio.sleep(0)
            assert keys.ask("a").client.name == "alice"
        assert not released.is_set()
        released.set()


def test_a_removed_or_writable_file_keeps_the_keys(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = KeysFile(path, entry("alice", "a"))
    with caplog.at_level(logging.ERROR, "fovea.server"):
        path.chmod(0o666)
        assert not keys.access.reload()
        path.unlink()
        assert not keys.access.reload()
    writable, removed = caplog.messages
    assert f"others may write to {path} (mode 0666" in writable
    assert f"{path} cannot be read: No such file" in removed
    assert keys.ask("a").client.name == "alice"
    keys.write(entry("alice", "a"))
    assert keys.access.reload(), "a file that comes back is read"


def test_a_folder_that_others_may_write_keeps_the_keys(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another user could have replaced the file, so what it holds now is not believed."""
    keys = KeysFile(path, entry("alice", "one"))
    path.parent.chmod(0o777)
    keys.write(entry("mallory", "two"))
    assert not keys.access.reload()
    assert keys.refuses("two") == "invalid_api_key"
    assert keys.ask("one").client.name == "alice"
    assert "the keys stay what they were: keys file" in caplog.text
    assert "another user could add keys: others may write to" in caplog.text
    assert keys.access.stats()["keys_file_broken"] == 1
    with pytest.raises(ConfigError, match="another user could add keys"):
        Access(ServerSettings.of(keys_file=path))
    path.parent.chmod(0o700)
    assert keys.access.reload()
    assert keys.ask("two").client.name == "mallory"


def test_no_keys_left_does_not_mean_open(path: Path) -> None:
    """A server whose last key was revoked, or whose last admin key was, must not open to all."""
    keys = KeysFile(path, entry("root", "r", 'roles = ["admin"]'), entry("alice", "a"))
    keys.write("")
    assert keys.access.reload()
    assert [keys.refuses("a", each) for each in (MODELS, "/admin/caches", "/metrics", "/docs", "/none")] == [
        "invalid_api_key"
    ] * 5
    keys.write(entry("alice", "a"))
    assert keys.access.reload()
    assert keys.refuses("a", "/admin/caches") == "invalid_api_key"


def test_keys_of_flags_stay_beside_the_file(path: Path) -> None:
    keys = KeysFile(path, entry("alice", "a"), api_keys=("flag",), metrics_keys=("m",))
    assert keys.ask("flag").client.name == "api-key:1"
    assert keys.ask("m", "/metrics").client.name == "metrics-key:1"
    keys.write("")
    assert keys.access.reload()
    assert keys.ask("flag").client.name == "api-key:1"


def test_an_expired_key(path: Path) -> None:
    keys = KeysFile(path, entry("alice", "a", "expires = 2001-09-10"))
    keys.ask("a")
    keys.clock.now = 1_000_080_000 - 1e9
    assert keys.refuses("a") == "expired_api_key"


def test_roles_open_their_routes_only(path: Path) -> None:
    keys = KeysFile(
        path, entry("a", "a"), entry("r", "r", 'roles = ["admin"]'), entry("m", "m", 'roles = ["metrics"]')
    )
    opened = {
        key: [
            each
            for each in (MODELS, "/admin/caches", "/metrics", "/version")
            if not _refused(keys, key, each)
        ]
        for key in "arm"
    }
    assert opened == {
        "a": [MODELS, "/version"],
        "r": ["/admin/caches", "/metrics", "/version"],
        "m": ["/metrics", "/version"],
    }


def _refused(keys: KeysFile, key: str, path: str) -> bool:
    try:
        keys.ask(key, path)
    except Unauthorized:
        return True
    return False


def test_a_path_without_a_rule_needs_a_key() -> None:
    """Paths that a proxy, a router or a later release may read in another way than the rules do."""
    rules = Rules(api=True, admin=True)
    for path in (
        "/",
        "/v1",
        "//v1/models",
        "/V1/models",
        "/health/",
        "/metrics/",
        "/adminx",
        "/tokenize/x",
        "/docs/",
    ):
        assert rules.roles(path) == {"api"}, path
    for path in ("/admin", "/admin/", "/admin/caches"):
        assert rules.roles(path) == {"admin"}, path
    assert rules.roles("/version") == ANY
    assert rules.roles("/health") == rules.roles("/ready") == frozenset()
    assert Rules(api=True, open_metrics=True, docs="on").roles("/metrics") == frozenset()
    assert Rules(api=True, docs="on").roles("/openapi.json") == frozenset()
    assert Rules().roles("/anything") == frozenset()


def test_tenants_exist_only_if_caches_are_separated(path: Path) -> None:
    shared = KeysFile(path, entry("alice", "a"))
    assert shared.ask("a").tenant == ""
    separate = KeysFile(path, entry("alice", "a", "cache_share = 0.25"), cache_scope="key")
    tenant = separate.ask("a").tenant
    assert len(tenant) == 32
    assert (separate.access.share_of(tenant), separate.access.share_of("other")) == (0.25, 1.0)
    with pytest.raises(
        ConfigError, match="key 'alice': cache_share is 0.25, but the clients share the caches"
    ):
        Access(ServerSettings.of(keys_file=path))


def test_a_server_does_not_start_with_a_broken_file(path: Path) -> None:
    path.write_text("[[key]")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="is not TOML"):
        Access(ServerSettings.of(keys_file=path))


def test_a_key_that_is_too_long_is_not_hashed(path: Path) -> None:
    """An attacker sent keys of megabytes to keep the processor busy with hashing."""
    keys = KeysFile(path, entry("alice", "a"), api_keys=("x" * 700,))
    caller = Caller()
    with pytest.raises(Unauthorized):
        keys.access.authenticate(MODELS, b"Bearer " + b"x" * 701, caller)
    assert caller.fingerprint == "-"
    assert keys.ask("x" * 700).client.name == "api-key:1"


def test_a_flood_of_refusals_does_not_fill_the_disk(caplog: pytest.LogCaptureFixture) -> None:
    """Somebody tries a million keys: the log gets a bounded number of lines, and how many there were."""
    clock = Clock()
    audit = Audit(clock)
    for _ in range(LINES + 1234):
        audit.refused(401, "invalid_api_key", "192.0.2.1", "/v1/models", "0011aabb", "id")
    assert len(caplog.records) == LINES
    clock.now += WINDOW_S
    audit.flush()
    assert caplog.records[-1].message == "refused: and 1,234 more in 10 s"
    audit.refused(403, "forbidden", "192.0.2.1", "/v1/x\n2026 W forged", "-", "id")
    audit.flush(final=True)
    assert len(caplog.records) == LINES + 2
    assert caplog.records[-1].levelno == logging.WARNING
    line = caplog.records[-1].message
    assert "\n" not in line
    assert json.loads(line.removeprefix("refused "))["path"] == "/v1/x\n2026 W forged"


def test_access_log_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    log = AccessLog(str(path))
    log.write({"path": "/v1/\r\n\x1b[31mforged\u2028", "key": "-"})
    log.close()
    log.write({"path": "after the end"})
    line = path.read_text()
    assert line.count("\n") == 1
    assert line.isascii()
    assert line[:-1].isprintable()
    assert json.loads(line)["path"] == "/v1/\r\n\x1b[31mforged\u2028"
    assert path.stat().st_mode & 0o777 == 0o600


def test_access_log_drops_lines_instead_of_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that hangs must delay no request."""
    monkeypatch.setattr("fovea.access.log.WAITING_LINES", 2)
    monkeypatch.setattr("logging.handlers.QueueListener.start", lambda listener: None)
    monkeypatch.setattr("logging.handlers.QueueListener.stop", lambda listener: None)
    log = AccessLog(str(tmp_path / "access.log"))
    for number in range(5):
        log.write({"number": number})
    waiting = log._handler.queue
    first = waiting.get_nowait()
    waiting.get_nowait()
    log.write({"number": 5})
    assert first.getMessage() == '{"number": 0}'
    assert [waiting.get_nowait().getMessage() for _ in range(2)] == ['{"dropped_lines": 3}', '{"number": 5}']
    log.close()


def test_access_log_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        AccessLog(str(tmp_path))


def test_access_log_that_is_off() -> None:
    log = AccessLog("false")
    log.write({})
    log.close()
    assert not log.on
