"""Keys by the API of a gateway: who may change them, what is written, and what is said about it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from fovea.access.audit import Audit
from fovea.access.key_edit import editing
from fovea.access.keys import digest, read_key_file
from fovea.core.errors import ConfigError
from fovea.gateway.admin.keys import KeyDesk, Operator
from fovea.gateway.tenants.keys import TenantLimits, Tenants
from tests.gateway.support import FakeEngine, Running, running

ADMIN = "an-admin-key"
HEADERS = {"authorization": f"Bearer {ADMIN}"}
FILE = f"""# ours
cache_secret = "secret of the caches"

[default]
requests_per_minute = 100

[[key]]
name = "ops"
hash = "sha256:{digest(ADMIN.encode()).hex()}"
roles = ["admin"]

[[key]]  # the first tenant
name = "alice"
hash = "sha256:{digest(b"of alice").hex()}"
models = ["m"]
# the end
"""
ADDER = """
import sys
from pathlib import Path
from fovea.access.key_edit import editing
from fovea.gateway.tenants.keys import TenantLimits

for _ in range(10):
    with editing(Path(sys.argv[1]), TenantLimits) as draft:
        draft.add(sys.argv[2])
        draft.write()
"""
"""A program that adds ten keys, as `fovea keys new` does."""
ALICE = digest(b"of alice").hex()[:8]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    path.chmod(0o600)
    return path


@asynccontextmanager
async def gateway(file: Path, **settings: Any) -> AsyncIterator[Running]:
    async with FakeEngine() as engine, running(engine, keys_file=file, **settings) as running_gateway:
        yield running_gateway


async def send(on: Running, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
    return await on.client.request(method, path, json=body, headers={**HEADERS, **headers})


def error_of(answer: httpx.Response) -> tuple[int, str]:
    error = answer.json()["error"]
    return answer.status_code, error["message"]


async def test_a_key_is_made_used_limited_and_revoked(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The whole life of a key. Its text is in one answer, and in no file, list or log."""
    audit = file.parent / "audit.jsonl"
    caplog.set_level(logging.DEBUG)
    async with gateway(file, audit_log=str(audit)) as on:
        wanted = {"name": "bob", "expires": "2099-01-31", "limits": {"requests_per_day": 2, "models": ["m"]}}
        made = await send(on, "POST", "/admin/keys", wanted, **{"x-request-id": "the-request"})
        assert made.status_code == 201
        assert made.headers["cache-control"] == "no-store"
        key, digits = made.json()["key"], made.json()["fingerprint"]
        own = {"authorization": f"Bearer {key}"}
        assert (await on.ask(headers=own)).status_code == 200
        (row,) = [
            each for each in (await send(on, "GET", "/admin/keys")).json()["keys"] if each["name"] == "bob"
        ]
        assert row == {"name": "bob", "fingerprint": digits, "roles": ["api"], "expired": False,
                       "expires": "2099-01-31T00:00:00Z", "fixed": False}  # fmt: skip
        used = (await send(on, "GET", "/admin/tenants")).json()["tenants"]
        (bob,) = [each for each in used if each["name"] == "bob"]
        assert bob["limits"] == {"requests_per_minute": 100, "requests_per_day": 2, "models": ["m"]}
        assert {"name": "requests_per_day", "used": 1, "limit": 2} in bob["used"]
        changed = await send(
            on, "PATCH", "/admin/tenants/bob", {"limits": {"requests_per_day": 1, "models": None}}
        )
        assert changed.json() == {"name": "bob", "limits": {"requests_per_day": 1, "models": []}}
        assert (await on.ask(headers=own)).status_code == 429
        assert (await send(on, "DELETE", f"/admin/keys/{digits}")).status_code == 200
        assert (await on.ask(headers=own)).status_code == 401
        texts = [await each.aread() for each in (await send(on, "GET", "/admin/keys"),)]
    assert file.read_text() == FILE.rstrip("\n") + "\n\n", "comments and the other keys are as they were"
    lines = [json.loads(line) for line in audit.read_text().splitlines() if '"event"' in line]
    assert [line["event"] for line in lines] == ["key_created", "limits_changed", "key_revoked"]
    first = lines[0]
    assert (first["by"], first["by_key"]) == ("ops", digest(ADMIN.encode()).hex()[:8])
    assert (first["address"], first["id"], first["name"]) == ("127.0.0.1", "the-request", "bob")
    assert (first["fingerprint"], first["limits"]) == (digits, {"requests_per_day": 2, "models": ["m"]})
    assert [line for line in caplog.messages if line.startswith("changed ")][0].endswith(json.dumps(first)), (
        "the same in the log"
    )
    for text in (audit.read_text(), caplog.text, *(each.decode() for each in texts)):
        assert key not in text
        assert ADMIN not in text


async def test_only_an_admin_key_opens_the_routes(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with gateway(file) as on:
        routes = [
            ("GET", "/admin/keys"), ("POST", "/admin/keys"), ("PATCH", f"/admin/keys/{ALICE}"),
            ("DELETE", f"/admin/keys/{ALICE}"), ("PATCH", "/admin/tenants/alice"), ("GET", "/admin/tenants"),
            ("GET", "/admin/usage"), ("GET", "/admin/experiments"), ("GET", "/admin/live"),
        ]  # fmt: skip
        for key in ("", "Bearer of alice", "Bearer wrong"):
            for method, path in routes:
                headers = {"authorization": key} if key else {}
                body = {"name": "eve", "roles": ["admin"]} if method in ("POST", "PATCH") else None
                answer = await on.client.request(method, path, json=body, headers=headers)
                assert answer.status_code == 401, (method, path)
        assert file.read_text() == FILE
    assert sum(line.startswith("refused ") for line in caplog.messages) == 20, (
        "bounded lines in the audit log"
    )


@pytest.mark.parametrize(
    ("method", "path", "body", "message"),
    [
        ("POST", "keys", {}, "name is None; accepted: 1 to 64 letters"),
        ("POST", "keys", {"name": ["b" * 90] * 9}, "bbb; accepted: 1 to 64 letters"),
        ("POST", "keys", {"name": "a b"}, "name is 'a b'; accepted: 1 to 64 letters"),
        ("POST", "keys", {"name": 'a"\nroles = ["admin"]'}, "accepted: 1 to 64 letters"),
        ("POST", "keys", {"name": "b", "rols": []}, "unknown field 'rols'; did you mean"),
        ("POST", "keys", {"name": "b", "roles": ["root"]}, "accepted: a list of api, admin, metrics"),
        ("POST", "keys", {"name": "b", "roles": []}, "accepted: a list of api, admin, metrics"),
        ("POST", "keys", {"name": "b", "expires": "soon"}, "expires is 'soon'; accepted: a later day, as 20"),
        ("POST", "keys", {"name": "b", "expires": "2001-01-01"}, "accepted: a later day"),
        ("POST", "keys", {"name": "b", "expires": "2099-01-01T10:00:00"}, "a time with its zone"),
        ("POST", "keys", {"name": "b", "expires": "9999-12-31T23:00:00-12:00"}, "accepted: a later day"),
        ("POST", "keys", {"name": "b", "limits": {"requests": 1}}, "limits: unknown limit 'requests'"),
        ("POST", "keys", {"name": "b", "limits": {"weight": -1}}, "weight is -1; accepted: 0.01 to 100"),
        ("POST", "keys", {"name": "b", "limits": {"models": ["x" * 300, 1]}}, "models has 1; accepted"),
        ("POST", "keys", {"name": "b", "limits": []}, "limits is not an object"),
        ("POST", "keys", {"name": "alice", "limits": {"weight": 2}}, "'alice' has keys with other limits"),
        ("PATCH", "tenants/nobody", {"limits": {"weight": 2}}, "has no key of 'nobody'"),
        ("PATCH", "tenants/alice", {}, "limits is empty; accepted: requests_per_minute, "),
        ("PATCH", f"keys/{ALICE}", {}, "the body is empty; accepted: roles, expires"),
        ("PATCH", "keys/12345678", {"roles": ["api"]}, "has no key with the fingerprint '12345678'"),
        ("DELETE", "keys/12345678", None, "has no key with the fingerprint '12345678'"),
        ("PUT", "keys", {}, "PUT is not accepted at /admin/keys; accepted: GET, POST"),
    ],
)
async def test_mistakes_change_nothing_and_say_what_is_accepted(
    file: Path, method: str, path: str, body: Any, message: str
) -> None:
    async with gateway(file) as on:
        answer = await send(on, method, f"/admin/{path}", body)
        status, text = error_of(answer)
        assert 400 <= status < 500
        assert message in text
        assert file.read_text() == FILE


async def test_roles_and_the_end_of_a_key_change(file: Path) -> None:
    async with gateway(file) as on:
        for body, expires in (
            (
                {"roles": ["api", "metrics"], "expires": "2099-05-01T10:00:00+02:00"},
                4_081_564_800.0 + 33 * 86_400,
            ),
            ({"expires": None}, None),
        ):
            answer = await send(on, "PATCH", f"/admin/keys/{ALICE}", body)
            assert answer.status_code == 200
            record = read_key_file(file, TenantLimits).records[1]
            assert record.roles == {"api", "metrics"}
            assert (record.expires is None) == (expires is None)
        assert "# the first tenant" in file.read_text()


async def test_the_last_admin_key_stays(file: Path) -> None:
    """An operator could lock everybody out. Another admin key, or one of a flag, makes it possible."""
    digits = digest(ADMIN.encode()).hex()[:8]
    async with gateway(file) as on:
        for answer in (
            await send(on, "DELETE", f"/admin/keys/{digits}"),
            await send(on, "PATCH", f"/admin/keys/{digits}", {"roles": ["metrics"]}),
        ):
            assert error_of(answer) == (
                400, "no key with the role admin would be left; accepted: make another one before"
            )  # fmt: skip
        assert file.read_text() == FILE
    async with gateway(file, admin_keys=("of a flag",)) as on:
        assert (await send(on, "DELETE", f"/admin/keys/{digits}")).status_code == 200


async def test_without_a_keys_file_and_with_one_that_cannot_be_written(file: Path) -> None:
    async with FakeEngine() as engine, running(engine, admin_keys=(ADMIN,), api_keys=("k",)) as on:
        status, text = error_of(await send(on, "POST", "/admin/keys", {"name": "bob"}))
        assert (status, "accepted: --keys-file" in text) == (400, True)
        listed = (await send(on, "GET", "/admin/keys")).json()
        assert [(each["name"], each["fixed"]) for each in listed["keys"]] == [
            ("api-key:1", True), ("admin-key:1", True)
        ]  # fmt: skip
        assert listed["writable"] is False
    async with gateway(file) as on:
        file.write_text("nonsense")
        answer = await send(on, "POST", "/admin/keys", {"name": "bob"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "keys_file_unusable")
        assert file.read_text() == "nonsense"


async def test_limits_are_written_as_they_were_given(file: Path) -> None:
    """A cost of more than 15 digits, and letters outside of Unicode's first plane, were refused."""
    limits = {"cost_per_day": 0.1 + 0.2, "models": ["m-\U0001f600", "m\x7f"]}
    async with gateway(file) as on:
        assert (await send(on, "PATCH", "/admin/tenants/alice", {"limits": limits})).json()[
            "limits"
        ] == limits
    alice = read_key_file(file, TenantLimits).records[1].limits
    assert (alice.cost_per_day, list(alice.models)) == (limits["cost_per_day"], limits["models"])


async def test_changes_that_wait_for_the_file_leave_threads_to_others(file: Path) -> None:
    """They took all threads of the process: nothing else could ask the name service or read a file."""
    async with gateway(file) as on:
        with editing(file, TenantLimits):
            made = [
                asyncio.create_task(send(on, "POST", "/admin/keys", {"name": f"n{n}"})) for n in range(40)
            ]
            await asyncio.sleep(0.2)
            async with asyncio.timeout(3):
                await asyncio.to_thread(lambda: None)
        assert {answer.status_code for answer in await asyncio.gather(*made)} == {201}


async def test_a_change_is_noted_if_its_request_is_cut(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The thread that waits for the file cannot be stopped, so it writes the line of the audit log, too."""
    desk = KeyDesk(Tenants(file), Audit(), time.time)
    with editing(file, TenantLimits):
        revoking = asyncio.create_task(desk.revoke(Operator("ops", "0" * 8, "::1", "r1"), ALICE))
        await asyncio.sleep(0.05)
        revoking.cancel()
        with suppress(asyncio.CancelledError):
            await revoking
    async with asyncio.timeout(10):
        while "key_revoked" not in caplog.text:
            await asyncio.sleep(0.01)
    assert [record.name for record in read_key_file(file, TenantLimits).records] == ["ops"]


def test_comments_below_a_revoked_key_stay(file: Path) -> None:
    """They may be about the next key."""
    with editing(file, TenantLimits) as draft:
        draft.add("bob")
        draft.revoke(draft.named("alice"))
        draft.write()
    text = file.read_text()
    assert "alice" not in text
    assert '# the end\n\n[[key]]\nname = "bob"' in text


def test_a_client_may_have_any_name(file: Path) -> None:
    """A client named "probe" with limits of its own stopped all further keys of known clients."""
    with editing(file, TenantLimits) as draft:
        draft.add("probe", given={"requests_per_minute": 5})
        draft.add("probe")
        draft.add("alice")
        assert [record.limits.requests_per_minute for record in draft.file.records] == [100, 100, 5, 5, 100]


def test_a_file_does_not_become_one_that_cannot_be_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fovea.access.key_edit.LARGEST_FILE", len(FILE) + 100)
    with editing(file, TenantLimits) as draft:
        with pytest.raises(ConfigError, match="is none of Unicode"):
            draft.add("bob", given={"models": ("\ud800",)})
        draft.add("bob")
        with pytest.raises(ConfigError, match="would be too large"):
            draft.write()
    assert file.read_text() == FILE


def test_a_file_of_another_layout_is_left_to_an_editor(file: Path) -> None:
    file.write_text(f'key = [{{name = "a", hash = "sha256:{"1" * 64}"}}]\n')
    with editing(file, TenantLimits) as draft:
        for change in (lambda: draft.add("b"), lambda: draft.revoke(draft.named("a"))):
            with pytest.raises(ConfigError, match="cannot be changed here; use an editor"):
                change()


async def test_another_gateway_with_the_same_file_sees_a_change(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fovea.access.key_table.CHECK_S", 0.02)
    async with gateway(file) as first, gateway(file) as second:
        key = (await send(first, "POST", "/admin/keys", {"name": "bob"})).json()["key"]
        own = {"authorization": f"Bearer {key}"}
        for wanted in (200, 401):
            while (await second.ask(headers=own)).status_code != wanted:
                await asyncio.sleep(0.01)
            await send(first, "DELETE", f"/admin/keys/{digest(key.encode()).hex()[:8]}")


async def test_changes_at_the_same_time_are_all_kept(file: Path) -> None:
    """Two gateways, and the command in other processes, change one file: no change overwrites another."""
    command = [sys.executable, "-c", ADDER, str(file)]
    async with gateway(file) as first, gateway(file) as second:
        others = [await asyncio.create_subprocess_exec(*command, f"other-{n}") for n in range(2)]
        made = await asyncio.gather(
            *(send((first, second)[n % 2], "POST", "/admin/keys", {"name": f"n{n}"}) for n in range(20))
        )
        assert [await each.wait() for each in others] == [0, 0]
        assert {each.status_code for each in made} == {201}
        hashes = {digest(each.json()["key"].encode()) for each in made}
        records = read_key_file(file, TenantLimits).records
        assert len(records) == 2 + 20 + 20
        assert hashes <= {record.digest for record in records}
        await asyncio.gather(
            *(
                send((first, second)[n % 2], "DELETE", f"/admin/keys/{each.json()['fingerprint']}")
                for n, each in enumerate(made)
            )
        )
        assert len(read_key_file(file, TenantLimits).records) == 2 + 20
    assert [path.name for path in file.parent.iterdir()] == ["keys.toml"], "nothing is left beside it"


def test_whoever_waits_too_long_for_the_lock_is_told(file: Path) -> None:
    with (
        editing(file, TenantLimits),
        pytest.raises(ConfigError, match="is being changed by another process"),
        editing(file, TenantLimits, patience_s=0.05),
    ):
        pass


def test_of_two_that_make_the_file_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"

    def make(name: str) -> str:
        try:
            with editing(path, TenantLimits, create=True) as draft:
                draft.add(name)
                draft.write()
        except ConfigError as error:
            return error.message
        return ""

    with ThreadPoolExecutor(4) as pool:
        problems = list(pool.map(make, "abcd"))
    kept = {record.name for record in read_key_file(path, TenantLimits).records}
    assert kept == {name for name, problem in zip("abcd", problems, strict=True) if not problem}
    assert kept
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_mounted_to_be_read_alone_is_not_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Secret of Kubernetes is such a file: the page offered to make a key, and saving it failed."""
    (path := tmp_path / "keys.toml").write_text(FILE)
    desk = KeyDesk(Tenants(path), Audit(), time.time)
    assert desk.listed()["writable"] is True
    may = os.access
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != tmp_path and may(place, mode))
    assert desk.listed()["writable"] is False
