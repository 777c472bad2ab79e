"""Rules and alerts, judged by promtool and amtool: each alert fires when it should, and only then."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools.dashboards.outputs import CASES, FOLDER, ROOT

from fovea.core.errors import ConfigError
from fovea.deploy.monitoring.files import (
    alert_rules,
    alertmanager_config,
    grafana_provisioning,
    prometheus_config,
    recording_rules,
)
from fovea.deploy.monitoring.objectives import Targets
from fovea.gateway.metrics import HISTOGRAMS, Metrics
from tests.deploy.queries import alerts
from tests.support.programs import program

RULES = ROOT / FOLDER / "rules"


def run(name: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program(name), *map(str, words)], capture_output=True, text=True, check=False)


def parsed(text: str) -> Any:
    return yaml.load(text, Loader=yaml.CSafeLoader)


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def test_every_alert_fires_and_stays_silent() -> None:
    """The cases of tools/dashboards, and the values that recording rules compute."""
    done = run("promtool", "test", "rules", *sorted((RULES / "tests").glob("*.yml")))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_of_both_kinds() -> None:
    names = [case.alert for cases in CASES.values() for case in cases]
    assert sorted(names) == sorted(alert.name for alert in alerts())
    for name in CASES:
        tests = parsed((RULES / "tests" / f"{name}.yml").read_text())["tests"]
        firing = [any(check["exp_alerts"] for check in test["alert_rule_test"]) for test in tests]
        assert firing == [True, False] * (len(tests) // 2)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("cgroup_memory_limit_bytes", "cgroup_memory_limit"),  # a metric that does not exist
        ("> 0.97", "> 0.99"),  # a bound that is too high
        ("> 1.2 and", "> 0.9 and"),  # a bound that is too low
    ],
)
def test_a_mutated_alert_fails_its_cases(tmp_path: Path, right: str, wrong: str) -> None:
    text = alert_rules()
    assert right in text
    write(tmp_path, {"alerts.yml": text.replace(right, wrong)})
    (tmp_path / "tests").mkdir()
    shutil.copy(RULES / "tests/memory.yml", tmp_path / "tests")
    done = run("promtool", "test", "rules", tmp_path / "tests/memory.yml")
    assert done.returncode == 1
    assert "FAILED" in done.stdout + done.stderr


def test_configurations_are_valid(tmp_path: Path) -> None:
    """Also with other targets than the defaults."""
    targets = Targets(availability=0.99, success=0.95, p50_s=0.5, p95_s=2.5, p99_s=10.0, ttft_s=0.25)
    (tmp_path / "metrics.key").write_text("key")
    write(
        tmp_path,
        {
            "recording.yml": recording_rules(targets),
            "alerts.yml": alert_rules("https://wiki.example/runbooks"),
            "prometheus.yml": prometheus_config(
                ["a:8000", "b:8000"], ["g:8080"], "alertmanager:9093", gateway_key_file="metrics.key"
            ),
            "alertmanager.yml": alertmanager_config("http://hook:1/", critical_url="http://pager:1/"),
        },
    )
    for words in (("check", "config", tmp_path / "prometheus.yml"), ("check", "rules", RULES / "alerts.yml")):
        done = run("promtool", *words)
        assert done.returncode == 0, done.stdout + done.stderr
    done = run("amtool", "check-config", tmp_path / "alertmanager.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_mutated_configurations_are_found(tmp_path: Path) -> None:
    scrape = prometheus_config(["a:1"], rules=())
    deliver = alertmanager_config("http://a/")
    assert "scrape_interval" in scrape
    assert "receiver: team" in deliver
    files = {
        "prometheus.yml": scrape.replace("scrape_interval", "scrape_intervall"),
        "alertmanager.yml": deliver.replace("receiver: team", "receiver: nobody"),
    }
    write(tmp_path, files)
    assert run("promtool", "check", "config", tmp_path / "prometheus.yml").returncode != 0
    assert run("amtool", "check-config", tmp_path / "alertmanager.yml").returncode != 0


def test_alerts_say_what_to_do() -> None:
    for group in parsed(alert_rules("https://wiki.example/r"))["groups"]:
        for alert in group["rules"]:
            notes = alert["annotations"]
            assert alert["labels"]["severity"] in ("critical", "warning", "info")
            assert "$value" in notes["description"], alert["alert"]
            assert notes["summary"]
            assert notes["runbook_url"] == f"https://wiki.example/r#{alert['alert'].lower()}"


def test_targets_are_in_the_rules() -> None:
    def values(text: str) -> dict[str, str]:
        group: dict[str, Any] = parsed(text)["groups"][0]
        return {f"{rule['record']} {rule['labels']['slo']}": rule["expr"] for rule in group["rules"]}

    assert values(recording_rules()) | {"fovea_slo:budget:ratio errors": "vector(0.05)"} == values(
        recording_rules(Targets(success=0.95))
    )
    assert 'le="2.5"' not in recording_rules()
    assert 'le="2.5"' in recording_rules(Targets(p99_s=2.5))
    assert "latency_p99" not in recording_rules(Targets(p99_s=0))


def test_a_target_between_two_buckets_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"p95_s is 0\.3; accepted: 0, or a bound .*0\.25, 0\.5"):
        Targets(p95_s=0.3)


def test_the_gateway_counts_in_the_same_buckets() -> None:
    """Or else an objective would have no series for gateways."""
    metrics = Metrics()
    for name in HISTOGRAMS:
        metrics.observe(name, 0.1, "x")
    text = metrics.exposition().body.decode()
    for objective in Targets().objectives():
        if objective.seconds:
            assert f'fovea_gateway_request_seconds_bucket{{le="{objective.seconds}"' in text


def test_grafana_finds_the_data_source_and_the_dashboards() -> None:
    files = {path: parsed(text) for path, text in grafana_provisioning("http://p:9090", "/d").items()}
    assert files["datasources/fovea.yml"]["datasources"][0]["url"] == "http://p:9090"
    assert files["dashboards/fovea.yml"]["providers"][0]["options"]["path"] == "/d"
