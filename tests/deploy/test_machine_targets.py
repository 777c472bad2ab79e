"""The targets docker, compose, local, systemd, nginx, haproxy and envoy: every spec, and their own tools."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings

from fovea.cli.deploy import known_settings
from fovea.core.errors import ConfigError
from fovea.deploy.machine import engines, gateways, service_ports
from fovea.deploy.spec import DeploySpec, Gateway, Monitoring, Pool, Redis
from fovea.deploy.target import CheckOutcome, find_command, render, run_check, target
from fovea.deploy.write import MANIFEST, write
from tests.deploy.specs import FULL, SMALL
from tests.deploy.strategies import specs
from tests.support.programs import MISSING, program
from tests.support.thorough import examples, others_slow

NAMES = ("docker", "compose", "local", "systemd", "nginx", "haproxy", "envoy")


def load(text: str) -> Any:
    """Return the values of YAML."""
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def read(path: str, text: str) -> Any:
    """Return the values of a rendered file. Raises an error if it cannot be read."""
    if path.endswith((".yaml", ".yml")):
        return load(text)
    if path.endswith(".toml"):
        return tomllib.loads(text)
    return json.loads(text) if path.endswith(".json") else text


@settings(max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(specs())
def test_every_spec_is_rendered_for_every_target_and_can_be_read(spec: DeploySpec) -> None:
    for name in NAMES:
        files = render(spec, [name])
        assert render(spec, [name]) == files
        for path, text in files.items():
            assert text.endswith("\n"), path
            read(path, text)


@settings(max_examples=examples(6), deadline=None)
@given(specs())
def test_scripts_are_valid_and_settings_arrive_unchanged(spec: DeploySpec) -> None:
    files = render(spec, ["local"])
    subprocess.run(["sh", "-n"], input=files["run.sh"].encode(), check=True)
    for engine in engines(spec):
        assert engine.pool is not None
        values = tomllib.loads(files[f"{engine.name}.toml"])
        assert values["port"] == engine.port
        assert {name: values[name] for name in engine.pool.settings} == dict(engine.pool.settings)
    for gateway in gateways(spec):
        values = tomllib.loads(files[f"{gateway.name}.toml"])
        assert len(values["backend"]) == len(engines(spec))


@settings(max_examples=examples(6), deadline=None)
@given(specs())
def test_the_services_of_a_compose_stack_have_few_rights(spec: DeploySpec) -> None:
    stack = load(render(spec, ["compose"])["docker-compose.yaml"])
    assert stack["name"] == spec.name
    for name, service in stack["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["restart"] == "unless-stopped"
        assert service["healthcheck"].get("start_period") or name == "collector"
        assert service["deploy"]["resources"]["limits"]["memory"]
        assert "$" not in json.dumps(service), "Compose would replace it"
        image = service["image"].rpartition("/")[2]
        assert ":" in image
        assert not image.endswith(":latest")


def test_every_cuda_engine_of_a_compose_stack_has_a_gpu_of_its_own() -> None:
    spec = DeploySpec(pools=(Pool(name="a", hardware="cuda", replicas=2), Pool(name="b", replicas=1)))
    services = load(render(spec, ["compose"])["docker-compose.yaml"])["services"]

    def devices(name: str) -> list[str]:
        reserved = services[name]["deploy"]["resources"]["reservations"]["devices"]
        return [each for entry in reserved for each in entry["device_ids"]]

    assert devices("engine-a-0") == ["0"]
    assert devices("engine-a-1") == ["1"]
    assert "reservations" not in services["engine-b-0"]["deploy"]["resources"]


REDIS = {"compose": "redis.conf", "local": "redis.conf", "systemd": "config/redis.conf"}


def test_a_compose_stack_stops_engines_after_their_own_grace_period() -> None:
    services = load(render(FULL, ["compose"])["docker-compose.yaml"])["services"]
    for engine in engines(FULL):
        assert engine.pool is not None
        grace = FULL.stop_of(engine.pool).grace_s
        assert services[engine.name]["stop_grace_period"] == f"{grace}s"


def test_no_key_is_in_a_compose_file() -> None:
    files = render(FULL, ["compose"])
    stack = load(files["docker-compose.yaml"])
    assert stack["secrets"] == {"grafana-password": {"file": "./secrets/grafana-password"}}
    assert not any(path.startswith("secrets/") for path in files)
    assert tomllib.loads(files["gateway/gateway.toml"])["keys_file"] == "/etc/fovea/keys/keys.toml"


def test_the_url_of_alerts_comes_from_a_file_and_engines_behind_gateways_get_no_key() -> None:
    monitoring = Monitoring(alert_webhook_file="/etc/vlm/alerts")
    spec = dataclasses.replace(FULL, monitoring=monitoring)
    files = render(spec, ["compose"])
    stack = load(files["docker-compose.yaml"])
    assert stack["secrets"]["alert-webhook"] == {"file": "/etc/vlm/alerts"}
    assert stack["services"]["alertmanager"]["secrets"] == ["alert-webhook"]
    places = {
        "compose": "/run/secrets/alert-webhook",
        "systemd": "/etc/vlm/alerts",
        "local": "/etc/vlm/alerts",
    }
    for name, place in places.items():
        files = render(spec, [name])
        (receiver,) = load(files["alertmanager/alertmanager.yml"])["receivers"]
        assert receiver["webhook_configs"] == [{"url_file": place, "send_resolved": True}]
        config = load(files["prometheus/prometheus.yml"])
        assert "alerting" in config
        keyed = {job["job_name"] for job in config["scrape_configs"] if "authorization" in job}
        assert keyed == (set() if name == "local" else {"fovea-gateway"})
    alone = DeploySpec(pools=(Pool(name="tiny"),), monitoring=monitoring)
    (job,) = load(render(alone, ["systemd"])["prometheus/prometheus.yml"])["scrape_configs"]
    assert job["authorization"] == {"credentials_file": "/etc/fovea/metrics-key"}


def test_redis_answers_the_gateways_of_a_compose_stack() -> None:
    """It has no password there, and by default it refuses other machines without one."""
    lines = {name: render(FULL, [name])[path].splitlines() for name, path in REDIS.items()}
    assert {name: "protected-mode no" in text for name, text in lines.items()} == {
        "compose": True, "local": False, "systemd": False,
    }  # fmt: skip
    stack = load(render(FULL, ["compose"])["docker-compose.yaml"])
    users = {name for name, each in stack["services"].items() if "data" in each["networks"]}
    assert users == {"redis", "gateway-0", "gateway-1"}
    assert stack["networks"]["data"] == {"internal": True}


def test_accounts_in_redis_are_never_evicted_for_answers() -> None:
    files = render(FULL, ["local"])
    assert "maxmemory-policy noeviction" in files["redis.conf"]
    values = tomllib.loads(files["gateway-0.toml"])
    assert values["response_cache_redis_mib"] < 512
    assert values["accounts_sharers"] == 2


def test_the_gateways_of_a_cluster_share_redis_as_those_of_a_machine_do() -> None:
    """While Redis fails, each gateway admits its part of the limits. No account is evicted for an answer."""
    files = render(FULL, ["kubernetes"])
    values = tomllib.loads(files["kubernetes/base/config/vlm-gateway.toml"])
    assert (values["accounts_sharers"], values["response_cache_redis_mib"]) == (2, 384)
    assert "noeviction" in files["kubernetes/base/redis.yaml"]


def test_ports_that_collide_are_refused() -> None:
    spec = DeploySpec(pools=(Pool(name="a", replicas=81),), gateway=Gateway())
    with pytest.raises(ConfigError, match=r"gateway-0 has port 8080, which is also that of engine-a-80"):
        render(spec, ["local"])
    high = DeploySpec(pools=(Pool(name="a", replicas=2),), engine_port=65535)
    with pytest.raises(ConfigError, match=r"port 65536, which is above 65535"):
        render(high, ["systemd"])
    assert len(set(service_ports(spec).values())) == len(service_ports(spec))


def test_a_model_in_a_home_folder_cannot_be_mounted() -> None:
    spec = DeploySpec(pools=(Pool(name="a", model="~/models/x"),))
    with pytest.raises(ConfigError, match="accepted in containers: an absolute folder"):
        render(spec, ["compose"])


def outcomes(
    name: str, spec: DeploySpec, folder: Path, change: tuple[str, str, str] | None = None
) -> list[CheckOutcome]:
    """Render a target, change one file, and return the outcomes of its checks."""
    files = render(spec, [name])
    if change is not None:
        path, old, new = change
        assert old in files[path], f"{old!r} is not in {path}"
        files = {**files, path: files[path].replace(old, new, 1)}
    write(files, folder)
    return [run_check(each, folder) for each in target(name).load().checks(spec)]


def failed(outcomes: list[CheckOutcome]) -> bool:
    """Whether a check failed. Skips the test if none did and a tool is missing, which might have."""
    if any(each.status == "failed" for each in outcomes):
        return True
    if missing := sorted({each.check.tool for each in outcomes if each.status == "skipped"}):
        pytest.skip(f"{MISSING}{', '.join(missing)}")
    return False


@pytest.mark.parametrize("name", NAMES)
def test_rendered_files_pass_the_checks_of_their_own_tools(name: str, tmp_path: Path) -> None:
    if name == "systemd":
        program("redis-server")  # systemd looks for the program of each unit
    assert not failed(outcomes(name, FULL, tmp_path / "full") + outcomes(name, SMALL, tmp_path / "small"))


_UNIT = "units/vlm-gateway-0.service"
MUTATIONS = {
    "no fixed version": ("docker", "Dockerfile", "python:3.12-slim-bookworm", "python"),
    "a relative work folder": ("docker", "Dockerfile", "WORKDIR /src", "WORKDIR src"),
    "an unknown instruction": ("docker", "Dockerfile.cuda", "STOPSIGNAL SIGTERM", "STOPSIGNL SIGTERM"),
    "a word without quotes": ("local", "run.sh", "case $proxy in", "echo $proxy; case $proxy in"),
    "an open quote": ("local", "run.sh", "proxy=${1:-nginx}", 'proxy="${1:-nginx}'),
    "an unknown key": ("systemd", _UNIT, "RestartSec=2", "RestartSek=2"),
    "all rights": (
        "systemd",
        _UNIT,
        "CapabilityBoundingSet=\nAmbientCapabilities=\nProtectSystem=strict\n",
        "",
    ),
    "a missing semicolon": ("nginx", "nginx.conf", "least_conn;", "least_conn"),
    "an unknown directive": ("nginx", "nginx.conf", "client_max_body_size", "client_max_body_sizes"),
    "an unknown balance": ("haproxy", "haproxy.cfg", "balance leastconn", "balance least"),
    "a missing backend": ("haproxy", "haproxy.cfg", "default_backend fovea", "default_backend x"),
    "an unknown field": ("envoy", "envoy.yaml", "lb_policy:", "lb_polisy:"),
    "an unknown cluster": ("envoy", "envoy.yaml", "cluster: fovea", "cluster: engines"),
    "a misspelt key of a service": ("compose", "docker-compose.yaml", "restart", "restrt"),
    "a list for a time": ("compose", "docker-compose.yaml", "grace_period: 80s", "grace_period: [80]"),
    "a mount without a type": ("compose", "docker-compose.yaml", "type: bind", "kind: bind"),
    "a wrong time": ("compose", "prometheus/prometheus.yml", "interval: 15s", "interval: often"),
    "a broken rule": ("compose", "prometheus/alerts.yml", "expr: ", "expr: (("),
}
"""A target, a file, a text in it, and what takes its place."""
ONE_PER_TARGET = {mutation[0]: fault for fault, mutation in reversed(MUTATIONS.items())}.values()


@pytest.mark.parametrize("fault", others_slow(MUTATIONS, ONE_PER_TARGET))
def test_a_file_with_a_fault_fails_its_check(fault: str, tmp_path: Path) -> None:
    name, *change = MUTATIONS[fault]
    path, old, new = change
    assert failed(outcomes(name, FULL, tmp_path, (path, old, new)))


def test_redis_needs_no_more_than_its_memory() -> None:
    spec = DeploySpec(pools=(Pool(name="a"),), gateway=Gateway(), redis=Redis(memory_mib=16))
    values = tomllib.loads(render(spec, ["local"])["gateway-0.toml"])
    assert values["response_cache_redis_mib"] == 12


@pytest.mark.parametrize("name", ["nginx", "haproxy", "envoy"])
def test_the_check_of_a_proxy_with_tls_makes_a_certificate_of_its_own(name: str, tmp_path: Path) -> None:
    """It failed on every machine without files in /etc/fovea/tls."""
    program("openssl")
    spec = DeploySpec(pools=(Pool(name="a"),), tls=True)
    (rendered,) = render(spec, [name])
    assert not failed(outcomes(name, spec, tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {rendered, MANIFEST}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nginx", "192.0.2.7 1;\n        fd00::/8 1;"),
        ("haproxy", "track-sc0 src unless { src 192.0.2.7 fd00::/8 }"),
    ],
)
def test_own_proxies_have_no_limit_of_connections(name: str, words: str, tmp_path: Path) -> None:
    """A load balancer brings the requests of all clients: with the limit of one, they got 429."""
    spec = DeploySpec(pools=(Pool(name="a"),), trusted_proxies=("192.0.2.7", "fd00::/8"))
    (text,) = render(spec, [name]).values()
    assert words in text
    assert not failed(outcomes(name, spec, tmp_path))


@pytest.mark.parametrize("name", ["compose", "local"])
def test_prometheus_keeps_exemplars(name: str) -> None:
    """Without the feature, Grafana has no links from metrics to traces."""
    spec = DeploySpec(pools=(Pool(name="a"),), monitoring=Monitoring())
    assert any("--enable-feature=exemplar-storage" in text for text in render(spec, [name]).values())


def test_every_program_for_compose_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin `docker compose` comes first, but `docker` may be there without it."""
    check = target("compose").load().checks(SMALL)[0]
    monkeypatch.setattr(
        "fovea.deploy.target.find_program", lambda name: shutil.which(name, path=str(tmp_path))
    )
    words = "docker compose, docker-compose, podman compose, podman-compose"
    assert run_check(check, tmp_path).output == f"not installed: {words}"
    for name, script in {
        "podman-compose": "exit 0",
        "docker": "exit 1",
        "podman": 'test "$1" = compose',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    assert find_command(check) == [str(tmp_path / "podman"), "compose"]
    (tmp_path / "podman").unlink()
    assert find_command(check) == [str(tmp_path / "podman-compose")]


@pytest.mark.parametrize("name", ["local", "compose", "systemd"])
def test_every_server_sends_its_traces_to_the_collector(name: str) -> None:
    files = render(FULL, [name])
    servers = [path for path in files if path.endswith(".toml")]
    assert len(servers) >= 4
    assert all(tomllib.loads(files[path])["otlp_endpoint"] == "http://otel:4318" for path in servers)
    silent = render(SMALL, [name])
    assert not any("otlp_endpoint" in text for text in silent.values())


@pytest.mark.parametrize("name", ["local", "compose", "systemd"])
def test_every_rendered_setting_is_one_of_the_program(name: str) -> None:
    known = known_settings()
    for path, text in render(FULL, [name]).items():
        if path.endswith(".toml"):
            is_gateway = "gateway" in path
            names = {*(known.gateway if is_gateway else known.engine), "host", "port", "model"}
            assert set(tomllib.loads(text)) <= {*names, *(["backend"] if is_gateway else [])}, path


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("compose", "prometheus/alerts.yml"),
        ("kubernetes", "kubernetes/components/monitoring/rules.yaml"),
    ],
)
def test_alerts_lead_to_the_runbooks_of_the_spec(name: str, path: str) -> None:
    address = "https://wiki.example.com/runbooks.md"
    spec = DeploySpec(pools=(Pool(name="tiny"),), monitoring=Monitoring(runbooks=address))
    text = render(spec, [name])[path]
    assert f"runbook_url: {address}#foveadown" in text
    assert "runbooks.invalid" not in text
