"""fovea keys: a key is printed once, its hash is in the file, and a running server can read it any time."""

from __future__ import annotations

from pathlib import Path

import pytest

from fovea.access.keys import digest, read_key_file
from fovea.gateway.tenants.keys import TenantLimits
from fovea.server.clients import Limits
from tests.cli.support import Caller


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "keys.toml"
    monkeypatch.setenv("FOVEA_KEYS_FILE", str(path))
    return path


def test_a_new_key_is_printed_once_and_stored_as_a_hash(file: Path, fovea: Caller) -> None:
    outcome = fovea("keys", "new", "--name", "alice", "--requests-per-minute", 60, "--role", "api")
    key = outcome.out.strip()
    assert (outcome.code, len(key)) == (0, 46)
    assert key not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    (record,) = read_key_file(file, Limits).records
    assert (record.name, record.digest) == ("alice", digest(key.encode()))
    assert record.limits == Limits(requests_per_minute=60)
    assert len(read_key_file(file, Limits).cache_secret) == 32


def test_a_rotation(file: Path, fovea: Caller) -> None:
    fovea("keys", "new", "--name", "alice", "--places", 3, "--role", "admin", "--role", "api")
    file.write_text("# ours\n[default]\nmax_n = 2\n" + file.read_text().partition("\n")[2] + "# the end\n")
    new = fovea("keys", "new", "--name", "alice", "--expires", "2099-01-31").out.strip()
    fovea("keys", "new", "--name", "bob")
    old, young, bob = read_key_file(file, Limits).records
    assert (old.limits, old.roles) == (young.limits, young.roles)
    assert young.limits == Limits(places=3, max_n=2)
    listed = fovea("keys", "list").out.splitlines()
    assert (
        listed[1] == f"alice  {young.fingerprint}  admin,api  until 2099-01-31 00:00 UTC  places=3  max_n=2"
    )
    assert fovea("keys", "revoke", "alice", "--older").out == f"revoked: alice {old.fingerprint}\n"
    assert [record.digest for record in read_key_file(file, Limits).records] == [
        digest(new.encode()),
        bob.digest,
    ]
    assert file.read_text().startswith("# ours\n[default]")
    assert fovea("keys", "revoke", bob.fingerprint).code == 0
    assert fovea("keys", "revoke", "alice").code == 0
    assert read_key_file(file, Limits).records == ()
    assert list(file.parent.iterdir()) == [file], "no temporary file is left"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("new", "--name", "a b"), "[[key]] number 1: name is 'a b'; accepted: 1 to 64 letters"),
        (("new", "--name", 'a"\nroles = ["admin"]\nx = "'), "name is"),
        (("new", "--name", "a", "--places", "-1"), "--places: places is -1; accepted: 0 to 1000000"),
        (("new", "--name", "a", "--expires", "soon"), "--expires is 'soon'; accepted: a day, as 2027-01-31"),
        (("list",), "cannot be read"),
        (("revoke", "a"), "cannot be read"),
    ],
)
def test_mistakes_write_nothing(file: Path, fovea: Caller, words: tuple[str, ...], message: str) -> None:
    outcome = fovea("keys", *words)
    assert outcome.code == 2
    assert message in outcome.error_line
    assert not file.exists()


def test_a_further_key_with_other_limits_says_how_to_change_them(file: Path, fovea: Caller) -> None:
    """The message only said that keys of one name share their limits, and not what to do."""
    fovea("keys", "new", "--name", "alice", "--places", 3)
    file.write_text("[default]\nmax_n = 2\n" + file.read_text().partition("\n")[2])
    before = file.read_text()
    outcome = fovea("keys", "new", "--name", "alice", "--places", 4)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.error_line == (
        "fovea: 'alice' has keys with other limits (places = 3, max_n = 2), and keys of one name share their "
        "limits; accepted: no limits, for a further key with the same ones. To change them, edit all keys of "
        f"'alice' in {file}"
    )
    assert file.read_text() == before
    assert fovea("keys", "new", "--name", "alice", "--places", 3).code == 0, "the same limits may be named"
    assert fovea("keys", "new", "--name", "alice").code == 0


def test_revoking_what_is_not_there_or_cannot_be_cut_out(file: Path, fovea: Caller) -> None:
    fovea("keys", "new", "--name", "alice")
    assert "has no such key to revoke: 'bob'" in fovea("keys", "revoke", "bob").error_line
    record = read_key_file(file, Limits).records[0]
    file.write_text(f'key = [{{name = "alice", hash = "sha256:{record.digest.hex()}"}}]\n')
    assert "is laid out in a way that cannot be changed here" in fovea("keys", "revoke", "alice").error_line
    assert len(read_key_file(file, Limits).records) == 1


def test_a_file_of_others_is_refused(file: Path, fovea: Caller) -> None:
    fovea("keys", "new", "--name", "alice")
    file.chmod(0o666)
    assert "others than its owner may write to it" in fovea("keys", "new", "--name", "bob").error_line


def test_keys_for_the_gateway(file: Path, fovea: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limits are other ones. After the first key the file tells for whom it is."""
    words = ("--text-tokens-per-minute", 100_000, "--cost-per-day", "0.25", "--models", "big,small")
    made = fovea("keys", "new", "--name", "alice", *words, "--response-cache", "false")
    assert made.code == 0, made.error_line
    limits = TenantLimits(
        text_tokens_per_minute=100_000, cost_per_day=0.25, models=("big", "small"), response_cache=False
    )
    assert [record.limits for record in read_key_file(file, TenantLimits).records] == [limits]
    assert fovea("keys", "new", "--name", "alice").code == 0
    assert (
        fovea("keys", "new", "--name", "bob", "--cache-scope", "shared", "--requests-per-minute", 5).code == 0
    )
    *alice, bob = read_key_file(file, TenantLimits).records
    assert [record.limits for record in alice] == [limits, limits]
    assert bob.limits == TenantLimits(cache_scope="shared", requests_per_minute=5)
    monkeypatch.delenv("COLUMNS")  # for a program that reads the list, a key is one line
    listed = fovea("keys", "list").out.splitlines()
    assert listed[0] == (
        f"alice  {alice[0].fingerprint}  api  text_tokens_per_minute=100000  cost_per_day=0.25  "
        'models=["big", "small"]  response_cache=false'
    )
    other = fovea("keys", "new", "--name", "alice", "--cost-per-day", "1")
    assert (
        "has keys with other limits (text_tokens_per_minute = 100000, cost_per_day = 0.25" in other.error_line
    )
    assert fovea("keys", "revoke", "alice", "--older").code == 0
    assert len(read_key_file(file, TenantLimits).records) == 2


def test_limits_of_the_other_program_are_refused(file: Path, fovea: Caller) -> None:
    wrong = fovea("keys", "new", "--name", "a", "--for", "gateway", "--places", 3)
    assert (
        wrong.code,
        "--places is not a limit of the gateway; accepted: requests_per_minute" in wrong.error_line,
    ) == (
        2,
        True,
    )
    mixed = fovea("keys", "new", "--name", "a", "--places", 3, "--weight", 2)
    assert "--places, --weight: no program has all of these limits" in mixed.error_line
    assert not file.exists()
    assert fovea("keys", "new", "--name", "a", "--places", 3).code == 0
    wrong = fovea("keys", "new", "--name", "b", "--weight", 3)
    assert "--weight is not a limit of the server" in wrong.error_line
    assert "unknown field 'places'" in fovea("keys", "list", "--for", "gateway").error_line
    assert len(read_key_file(file, Limits).records) == 1
