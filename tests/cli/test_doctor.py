"""fovea doctor as a command: against simulated servers, and (slow) against servers of its own."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fovea.cli.doctor import ended_by_signals
from fovea.deploy.monitoring.files import alert_rules, prometheus_config, recording_rules
from fovea.doctor.checks import CHECKS
from tests.cli.support import Caller, Outcome, finish, start, until
from tests.support import servers
from tests.support.checkpoints import write
from tests.support.servers import free_port

KEY, ADMIN = "k" * 24, "a" * 24


@contextlib.contextmanager
def simulated(*words: str, **variables: str) -> Iterator[str]:
    """A simulated server. Yields its URL."""
    port = free_port()
    process = start("serve", "--simulate", *words, "--port", port, **variables)
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        assert process.poll() is None, process.communicate()
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/ready").status_code == 200
        return False

    try:
        until(ready)
        yield url
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def careless() -> Iterator[str]:
    """A server that is open to all, fetches from everywhere and may be used by every page."""
    words = ("--allow-private-hosts", "true", "--cors-origins", "*", "--fetch-timeout-s", "1")
    with simulated(*words) as url:
        yield url


def verdicts(outcome: Outcome) -> dict[str, tuple[str, str]]:
    """The status and all words of each check, by its path."""
    return {
        result["check"]: (
            result["status"],
            " | ".join(result[name] for name in ("figure", "reason", "fix")),
        )
        for result in outcome.json["results"]
    }


def test_a_guarded_server_and_a_careless_one(fovea: Caller, careless: str, tmp_path: Path) -> None:
    """One server has keys, the other fetches from everywhere, and its settings are examined, too."""
    with simulated(FOVEA_API_KEY=KEY, FOVEA_ADMIN_KEY=ADMIN) as url:
        words = ("doctor", url, "--json", "--api-key", KEY, "--admin-key", ADMIN, "--metrics-key", ADMIN)
        good = fovea(*words)
        without = fovea("doctor", url, "--only", "answers/text", "--only", "exposure/api")
    found = verdicts(good)
    assert set(found) == {check.path for check in CHECKS}
    for name in ("api", "admin", "metrics", "private-images", "files"):
        assert found[f"exposure/{name}"][0] == "pass", found
    assert found["answers/image"][0] == found["answers/image-cache"][0] == "pass"
    assert found["faults/drain"][0] == found["load/ramp"][0] == "not applicable"
    assert found["limits/keys"] == (
        "not applicable",
        " | the server's settings are not known: --config FILE | ",
    )
    assert good.code == int(any(status == "fail" for status, _ in found.values()))
    assert good.json["counts"]["not applicable"] == sum(s == "not applicable" for s, _ in found.values())
    assert without.code == 1
    assert "FAIL text: " in without.out
    assert "no key" in without.out or "API key" in without.out

    config = tmp_path / "fovea.toml"
    config.write_text("max_queue = 0\ndrain_seconds = 0\n")
    names = ("exposure", "limits/queue", "limits/drain-time", "limits/slow-log")
    bad = fovea(
        "doctor", careless, "--json", "--config", config, *(w for name in names for w in ("--only", name))
    )
    strict = [
        fovea("doctor", careless, "--only", "exposure/browsers", *extra) for extra in ((), ("--strict",))
    ]
    found = verdicts(bad)
    assert bad.code == 1
    assert found["exposure/private-images"][0] == "fail"
    assert "fetched an image from a loopback address" in found["exposure/private-images"][1]
    assert found["exposure/api"][0] == found["exposure/browsers"][0] == "warn"
    assert found["exposure/files"][0] == found["limits/slow-log"][0] == "pass"
    assert found["limits/queue"][0] == found["limits/drain-time"][0] == "fail"
    assert [outcome.code for outcome in strict] == [0, 1]


def test_a_live_server_gets_load_and_faults_only_if_that_is_asked_for(
    fovea: Caller, careless: str, tmp_path: Path
) -> None:
    sla = tmp_path / "sla.toml"
    sla.write_text("[targets]\nend_to_end_p50_ms = 0.001\n")
    short = ("--load-seconds", "0.1", "--max-clients", "2", "--output-tokens", "4", "--image-tokens", "16")
    groups = ("--only", "load", "--only", "faults", "--json")
    spared = verdicts(fovea("doctor", careless, *groups, *short))
    tried = verdicts(fovea("doctor", careless, *groups, *short, "--destructive", "--sla", sla))
    assert {path for path, (status, _) in spared.items() if status != "not applicable"} == {"load/warm-up"}
    assert tried["load/saturation"][0] in ("pass", "warn")
    assert "requests/s" in tried["load/saturation"][1]
    assert tried["load/ramp"][0] == "fail"
    assert "100%: P50/P95/P99" in tried["load/ramp"][1]
    assert "at 50% these targets are missed: end_to_end_p50_ms is " in tried["load/ramp"][1]
    assert tried["faults/image-hosts"][1].startswith("9 of 9 refused"), tried
    assert tried["faults/image-too-large"][0] == tried["faults/prompt-too-long"][0] == "pass"
    assert all(tried[f"faults/{name}"][0] == "not applicable" for name in ("drain", "kill-and-restart"))


def test_the_machine_alone_needs_no_server(fovea: Caller) -> None:
    outcome = fovea("doctor", "--only", "machine", "--json")
    found = verdicts(outcome)
    assert set(found) == {check.path for check in CHECKS if check.group == "machine"}
    assert outcome.code == int(any(status == "fail" for status, _ in found.values()))
    text = fovea("doctor", "--only", "machine/memory")
    assert text.out.splitlines()[0] == "machine"
    assert " can be allocated" in text.out.splitlines()[1]
    assert text.out.splitlines()[-1].endswith(" s")


def test_the_list_of_checks(fovea: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(map(len, fovea("doctor", "--list").out.splitlines())) <= 80
    monkeypatch.delenv("COLUMNS")  # for a program that reads the list, a check is one line
    lines = fovea("doctor", "--list").out.splitlines()
    assert [line.split()[0] for line in lines] == [check.path for check in CHECKS]
    quick = fovea("doctor", "--list", "--quick", "--only", "load", "--only", "exposure", "--json").json
    assert {each["check"].split("/")[0] for each in quick} == {"exposure"}
    assert quick[0]["question"].endswith("?")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--only", "exposur"), "did you mean 'exposure'?"),
        (("--only", "nothing/at-all"), "accepted: machine, model"),
        (("--destructive",), "--destructive is for a live server"),
        (("http://",), "accepted: http:// or https://"),
        (("http://user:word@host",), "without credentials"),
        (("http://127.0.0.1:1", "--revision", "abc"), "--revision is for a MODEL"),
        (("--prometheus", "prometheus:9090"), "--prometheus is"),
        (("--load-seconds", "0"), "load_seconds"),
        (("--sla", "/no/such/file"), "cannot be read"),
    ],
)
def test_wrong_arguments(fovea: Caller, words: tuple[str, ...], message: str) -> None:
    outcome = fovea("doctor", *words)
    assert outcome.code == 2
    assert message in outcome.error_line


def test_a_server_that_is_not_there(fovea: Caller) -> None:
    outcome = fovea("doctor", "http://127.0.0.1:1", "--quick", "--json", "--only", "engine/ready")
    assert outcome.code == 1
    assert verdicts(outcome)["engine/ready"][0] == "fail"


@pytest.mark.slow
def test_the_bundled_model(fovea: Caller) -> None:
    """Everything, with servers that doctor starts, kills and starts again: no check fails."""
    outcome = fovea("doctor", "--json", "--load-seconds", "1", "--max-clients", "4")
    found = verdicts(outcome)
    assert {path: text for path, (status, text) in found.items() if status == "fail"} == {}
    assert outcome.code == 0
    for path in (
        "engine/ready", "answers/schema", "exposure/private-images", "load/warm-up", "faults/prompt-too-long",
        "faults/image-hosts", "faults/kill-and-restart", "faults/damaged-entry", "faults/drain",
    ):  # fmt: skip
        assert found[path][0] == "pass", found[path]
    assert "100%: P50/P95/P99" in found["load/ramp"][1]


@pytest.mark.slow
def test_settings_decide_what_an_own_server_shows(fovea: Caller, tmp_path: Path) -> None:
    """With keys in its settings the own server asks for them; a checkpoint that is cut is not started."""
    config = tmp_path / "fovea.toml"
    config.write_text(f'api_key = "{KEY}"\nadmin_key = "{ADMIN}"\nallow_private_hosts = true\n')
    outcome = fovea("doctor", "--quick", "--json", "--config", config)
    found = verdicts(outcome)
    assert outcome.code == 1
    assert [path for path, (status, _) in found.items() if status == "fail"] == ["exposure/private-images"]
    assert all(found[f"exposure/{name}"][0] == "pass" for name in ("api", "admin", "metrics"))
    assert found["limits/keys"][0] == found["limits/admin-key"][0] == "pass"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    broken = fovea("doctor", tmp_path / "model", "--only", "model", "--only", "answers/text", "--json")
    assert broken.code == 1
    found = verdicts(broken)
    assert found["model/checkpoint"][0] == found["answers/text"][0] == "fail"
    assert "the server ended with status" in found["answers/text"][1]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["lfm2_vl", "mllama"])
def test_faults_of_other_families(fovea: Caller, tmp_path: Path, family: str) -> None:
    """A decoder with states, and one whose images lie outside of the prompt."""
    outcome = fovea("doctor", write(family, tmp_path / family), "--json", "--only", "faults")
    assert {path: found for path, found in verdicts(outcome).items() if found[0] != "pass"} == {}


@pytest.mark.slow
def test_settings_that_lose_requests_at_an_update(fovea: Caller, tmp_path: Path) -> None:
    config = tmp_path / "fovea.toml"
    config.write_text("drain_seconds = 0\nlame_duck_s = 0\n")
    outcome = fovea("doctor", "--json", "--only", "faults/drain", "--config", config)
    assert outcome.code == 1
    assert "accepted requests were lost" in verdicts(outcome)["faults/drain"][1]


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGHUP])
def test_signals_end_the_block_unless_they_are_ignored(name: signal.Signals) -> None:
    before = signal.signal(name, signal.SIG_DFL)  # nohup ignores SIGHUP for all that it starts
    try:
        with pytest.raises(KeyboardInterrupt), ended_by_signals():
            signal.raise_signal(name)
        assert signal.getsignal(name) is signal.SIG_DFL
        signal.signal(name, signal.SIG_IGN)
        with ended_by_signals():
            signal.raise_signal(name)
        assert signal.getsignal(name) is signal.SIG_IGN
    finally:
        signal.signal(name, before)


@pytest.mark.slow
def test_no_server_is_left_behind_by_sigterm() -> None:
    process = start("doctor", "--only", "faults/drain")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until(lambda: bool(children.read_text().split()))
    child = int(children.read_text().split()[0])
    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    assert (ended.code, ended.out) == (130, "")
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.slow
def test_prometheus_that_scrapes_and_alerts(fovea: Caller) -> None:
    """A real Prometheus: with the rules of a deployment, without them, and without the server."""

    def asked(address: str, server: str) -> dict[str, Any]:
        return verdicts(
            fovea("doctor", server, "--prometheus", f"http://{address}", "--only", "monitoring", "--json")
        )

    with simulated() as url:
        target = url.removeprefix("http://")
        rules = {"recording.yml": recording_rules(), "alerts.yml": alert_rules()}
        full = {
            "prometheus.yml": prometheus_config([target], alertmanager="127.0.0.1:9", interval="1s"),
            **rules,
        }
        with servers.prometheus(full) as address:

            def scraped() -> bool:
                targets = httpx.get(f"http://{address}/api/v1/targets").json()["data"]["activeTargets"]
                return bool(targets) and targets[0]["health"] == "up"

            until(scraped)
            good = asked(address, url)
            elsewhere = asked(address, "http://127.0.0.1:1")
        bare = {"prometheus.yml": json.dumps({"scrape_configs": []})}
        with servers.prometheus(bare) as address:
            none = asked(address, url)
    names = ("scraped", "rules", "alerts", "receivers")
    assert [good[f"monitoring/{name}"][0] for name in names] == ["pass"] * 4, good
    assert elsewhere["monitoring/scraped"][0] == "fail"
    assert [none[f"monitoring/{name}"][0] for name in names] == ["fail", "fail", "fail", "warn"], none
    assert "missing: fovea-budgets" in none["monitoring/alerts"][1]
