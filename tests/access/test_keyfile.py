"""Tests of the keys file: what it accepts, and the names of its errors."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from fovea.access.keys import (
    Keys,
    check_private,
    digest,
    keys_of_file,
    keys_of_flags,
    new_key,
    parse_key_file,
    read_key_file,
    tenant_of_client,
    tenant_of_key,
)
from fovea.core.errors import ConfigError
from fovea.server.clients import NO_LIMITS, Limits

HASH = "sha256:" + hashlib.sha256(b"key").hexdigest()
OTHER = "sha256:" + hashlib.sha256(b"other").hexdigest()


def entry(name: str = "alice", hashed: str = HASH, *lines: str) -> str:
    return "\n".join(["[[key]]", f'name = "{name}"', f'hash = "{hashed}"', *lines, ""])


def test_a_file_with_defaults() -> None:
    text = (
        'cache_secret = "s"\n[default]\nrequests_per_minute = 60\nmax_n = 2\n'
        + entry(
            "alice", HASH, "requests_per_minute = 600", 'roles = ["api", "metrics"]', "expires = 2027-01-31"
        )
        + entry("bob", OTHER, "expires = 2027-01-31T12:00:00+02:00")
    )
    file = parse_key_file(text, Limits)
    alice, bob = file.records
    assert file.cache_secret == "s"
    assert alice.limits == Limits(requests_per_minute=600, max_n=2)
    assert bob.limits == Limits(requests_per_minute=60, max_n=2)
    assert (alice.roles, bob.roles) == ({"api", "metrics"}, {"api"})
    assert (alice.expires, bob.expires) == (1801353600.0, 1801389600.0)
    assert alice.digest == digest(b"key")
    assert "6b6579" not in repr(file)
    assert HASH[7:] not in repr(file)


def test_an_empty_file_has_no_keys() -> None:
    assert parse_key_file("", Limits).records == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("key = 1", "accepted: a table"),
        ("[[key]\n", "it is not TOML"),
        ("[" * 100_000, "it is not TOML"),
        ("[keys]", "the file: unknown field 'keys'; did you mean 'key'?"),
        ("[default]\nname = 'x'", r"\[default\]: unknown field 'name'"),
        ("[default]\nplaces = -1", r"\[default\]: places is -1; accepted: 0 to 1000000"),
        ("[[key]]\nhash = 'x'", r"\[\[key\]\] number 1: name is None"),
        (entry("a b"), r"number 1: name is 'a b'"),
        (entry("api-key:1"), "name is 'api-key:1'"),
        (entry("alice", "sha256:12"), "key 'alice': hash is not sha256: and 64 hex digits"),
        (
            entry("alice", HASH, "request_per_minute = 1"),
            "key 'alice': unknown field 'request_per_minute'; did you m",
        ),
        (entry("alice", HASH, "requests_per_minute = 1.5"), "key 'alice': requests_per_minute is 1.5"),
        (entry("alice", HASH, "cache_share = 2"), "key 'alice': cache_share is 2; accepted: 0 to 1"),
        (
            entry("alice", HASH, "roles = []"),
            r"key 'alice': roles is \[\]; accepted: a list of api, admin, metrics",
        ),
        (entry("alice", HASH, "roles = ['root']"), r"key 'alice': roles is \['root'\]"),
        (entry("alice", HASH, "roles = 'api'"), "key 'alice': roles is 'api'"),
        (entry("alice", HASH, "roles = [['api']]"), "key 'alice': roles is"),
        (
            entry("alice", HASH, "expires = '2027-01-31'"),
            "expires is '2027-01-31'; accepted: a date or a time of TOML",
        ),
        (entry("alice", HASH, "expires = 2027-01-31T12:00:00"), "key 'alice': expires has no time zone"),
        (entry() + entry("bob"), "key 'bob': the hash 2c70e12b... is listed twice"),
        (entry() + entry("alice", OTHER, "places = 3"), "key 'alice' is listed with different limits"),
    ],
)
def test_wrong_files(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_key_file(text, Limits)


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    """Whoever can write to the file can let himself in."""
    path = tmp_path / "keys.toml"
    path.write_text(entry())
    for mode in (0o666, 0o660, 0o602):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=f"has mode {mode:o}: others than its owner may write to it"):
            read_key_file(path, Limits)
    path.chmod(0o644)
    assert len(read_key_file(path, Limits).records) == 1


def test_a_file_that_another_user_can_replace_is_refused(tmp_path: Path) -> None:
    """Only the mode of the file itself was checked. Whoever may write to its folder, or to one above, or to
    the folder of a link, can put another file in its place.
    """
    real, links = tmp_path / "real", tmp_path / "links"
    for folder in (real, links):
        folder.mkdir()
    path, link = real / "keys.toml", links / "keys.toml"
    path.write_text(entry())
    path.chmod(0o600)
    link.symlink_to(path)
    for good in (path, link, real / "none.toml"):
        check_private(good)
    for folder, names in ((tmp_path, (path, link)), (real, (path, link)), (links, (link,))):
        folder.chmod(0o777)
        for name in names:
            with pytest.raises(
                ConfigError, match=f"another user could add keys: others may write to {folder}"
            ):
                check_private(name)
        folder.chmod(0o1777)  # only the owner of the file may replace it there, as in /tmp
        for name in names:
            check_private(name)
        folder.chmod(0o700)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(entry())
    path.chmod(0o600)
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match="keys.toml belongs to user 12345; accepted: .* to this user or to"):
        check_private(path)
    os.chown(path, 0, -1)
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(ConfigError, match=f"{tmp_path} belongs to user 12345"):
        check_private(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_key_file(tmp_path / "none.toml", Limits)
    path = tmp_path / "keys.toml"
    path.write_bytes(b"\xff\xfe")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="keys.toml"):
        read_key_file(path, Limits)


def test_keys_are_long_and_random() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert {len(key) for key in keys} == {46}


def test_a_key_is_found_by_its_hash_only() -> None:
    keys = Keys(
        [
            *keys_of_file(parse_key_file(entry(), Limits)),
            *keys_of_flags(["one", "two"], ["one"], ["m"], NO_LIMITS),
        ]
    )
    found = keys.find(digest(b"key"))
    assert found is not None
    assert found.name == "alice"
    both = keys.find(digest(b"one"))
    assert both is not None
    assert (both.name, both.roles) == ("api-key:1", {"api", "admin"})
    assert keys.find(digest(b"ke")) is None
    assert keys.find(bytes.fromhex(HASH[7:])[:31]) is None
    assert keys.find(HASH.encode()) is None, "the hash itself is not a key"


def test_a_clients_part_of_the_caches_survives_a_new_key() -> None:
    """The disk tier would be useless after every rotation if its entries were named after the key."""
    old, new = (
        next(keys_of_file(parse_key_file(entry("alice", hashed), Limits))) for hashed in (HASH, OTHER)
    )
    assert old.digest != new.digest
    assert old.tenant == new.tenant == tenant_of_client("alice", "")
    assert (
        tenant_of_client("alice", "")
        != tenant_of_client("alice", "secret")
        != tenant_of_client("bob", "secret")
    )
    flag = next(keys_of_flags(["key"], [], [], NO_LIMITS))
    assert flag.tenant == tenant_of_key(b"key") == "6613b843da11eaa18b0b6a4c49d2feab"
