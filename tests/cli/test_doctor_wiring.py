"""The values that `fovea doctor` hands to its checks: settings, keys, facts about a model, load."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from fovea.bench.measure import Bounds, Failure, Round, Sample, Spread, Summary
from fovea.bench.run import WorkloadResult
from fovea.bench.sla import Sla, judge
from fovea.cli import options
from fovea.cli.common import ALL_KEYS
from fovea.cli.doctor_subject import (
    OWN_FLAGS,
    _environment,
    _figures,
    built_facts,
    checkpoint_facts,
    kernel_facts,
    monitoring_facts,
    read_settings,
    wired,
)
from fovea.cli.main import build_parser
from fovea.core.errors import ConfigError
from fovea.doctor.launch import FAULT_FLAGS
from fovea.doctor.load import DoctorSettings
from fovea.engine.config import EngineConfig
from fovea.engine.vision.built.manifest import BuiltGrid, Manifest, Site, checksum

KEY = "k" * 24


def parsed(*words: str) -> argparse.Namespace:
    return build_parser("doctor").parse_args(["doctor", *words])


@pytest.mark.parametrize(
    ("file", "roles"),
    [
        ({}, []),
        ({"api_key": KEY}, ["api_key"]),
        ({"admin_key": KEY, "metrics_key": [KEY, "b" * 24]}, ["admin_key", "metrics_key"]),
        ({"keys_file": "/keys.toml"}, ["api_key", "admin_key", "metrics_key"]),
    ],
)
def test_an_own_server_is_as_open_as_its_settings(file: dict[str, Any], roles: list[str]) -> None:
    """Roles with keys get one more, which only doctor knows; others stay open."""
    args = parsed("--config", "fovea.toml")
    flat = read_settings(args, file).flat
    env, sent = _environment(args, flat)
    assert sorted(sent) == sorted(roles)
    assert env["FOVEA_CONFIG"] == str(Path("fovea.toml").absolute())
    for role in ("api_key", "admin_key", "metrics_key"):
        keys = env.get(f"FOVEA_{role.upper()}", "").split(",")
        assert keys == [*flat[f"{role}s"], *([sent[role]] if role in sent else [])] or keys == [""]
        assert role not in sent or keys[-1] == sent[role]


def test_settings_are_those_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from the file and from variables, as for `fovea serve`, and have names of all subjects."""
    config = tmp_path / "fovea.toml"
    config.write_text('host = "0.0.0.0"\nmax_queue = 7\nmodel = "fovea-tiny"\n')
    monkeypatch.setenv("FOVEA_MAX_PIXELS", "1000")
    with wired(parsed("--config", str(config), "--image-tokens", "20")) as subject:
        assert subject.name == "fovea-tiny"
        assert [subject.setting(name) for name in ("host", "max_queue", "max_pixels", "api_keys")] == [
            "0.0.0.0", 7, 1000, (),
        ]  # fmt: skip
        assert subject.workload.tokens == 20 + 56 + 64
    with wired(parsed("http://127.0.0.1:1/v1", "--config", str(config), "--api-key", KEY)) as subject:
        assert subject.live is not None
        assert (subject.live.url, subject.live.api_key) == ("http://127.0.0.1:1", KEY)
        assert subject.setting("max_queue") == 7
        assert subject.launcher is None


def test_no_setting_of_doctor_has_the_name_of_a_servers_setting() -> None:
    """Both are read from FOVEA_*, so one name would mean two things."""
    assert not set(options.setting_names(DoctorSettings)) & set(ALL_KEYS)


def test_an_own_server_leaves_alone_what_another_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its flags override folders, logs and traces of the settings, and it knows no collector."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    file = {"batch_dir": str(tmp_path), "access_log": "/var/log/fovea", "otlp_endpoint": "http://c:4318"}
    file |= {"tls_cert": "/cert.pem", "tls_key": "/key.pem"}
    flat = read_settings(parsed(), file).flat
    assert flat["batch_dir"] == tmp_path
    env, _ = _environment(parsed(), flat)
    assert not [name for name in env if name.startswith("OTEL_")]
    served = build_parser("serve").parse_args(["serve", "fovea-tiny", *OWN_FLAGS, *FAULT_FLAGS])
    flat = read_settings(served, file).flat
    names = ("batch_dir", "access_log", "otlp_endpoint", "tls_cert", "tls_key", "allow_private_hosts")
    assert [flat[name] for name in names] == [None, "false", "", None, None, True]


def test_a_simulation_has_no_model_to_check(tmp_path: Path) -> None:
    config = tmp_path / "fovea.toml"
    config.write_text("simulate = true\n")
    with pytest.raises(ConfigError, match="simulate a server"), wired(parsed("--config", str(config))):
        pass


def test_facts_about_built_encoders(tmp_path: Path) -> None:
    engine = EngineConfig.of(encoder_engines=str(tmp_path))
    assert not built_facts("fovea-tiny", EngineConfig()).exists
    assert not built_facts("fovea-tiny", engine).exists
    (tmp_path / "part.pt2").write_bytes(b"machine code")
    site = Site("model", "bfloat16", "cpu", (), {})
    grid = BuiltGrid((1, 28, 28), ("448x448 high",), ("part.pt2",), 0.0)
    sums = {"part.pt2": checksum(tmp_path / "part.pt2")}
    Manifest("aot", "bfloat16", 1, site, (grid,), sums).write(tmp_path)
    whole = built_facts("fovea-tiny", engine)
    assert (whole.exists, whole.grids, list(whole.problems)) == (True, 1, [])
    (tmp_path / "part.pt2").write_bytes(b"other code")
    assert built_facts("fovea-tiny", engine).problems == ["part.pt2 is not the file that was built"]
    (tmp_path / "manifest.json").write_text("{")
    assert "is not JSON" in built_facts("fovea-tiny", engine).problems[0]


def test_facts_about_model_kernels_and_monitoring(tmp_path: Path) -> None:
    facts = checkpoint_facts("fovea-tiny", "")
    assert facts.is_folder
    assert not facts.errors
    assert facts.figures["parameters"] == 8_820_864
    (tmp_path / "config.json").write_text("{}")
    assert checkpoint_facts(str(tmp_path), "").errors
    assert kernel_facts("cpu").gpus == 0
    assert "fovea-server" in monitoring_facts().alerts
    assert "fovea-overview" in monitoring_facts().dashboards


def test_figures_of_load_count_refusals_apart() -> None:
    """Three answers of 0.2, 0.4 and 0.6 s, a refusal, and a broken stream."""
    samples = [Sample(0.0, "text", 0, 4, sent_at=0.0) for _ in range(5)]
    for number, sample in enumerate(samples):
        sample.ended_at = 0.2 * (number + 1)
        sample.events = [0.1, sample.ended_at]
    samples[3].failure, samples[4].failure = Failure("http 429", "full"), Failure("broken stream", "cut")
    summary = Summary.of([Round(samples)], Bounds())
    sla = Sla("test", Bounds(), {"end_to_end_p50_ms": 300.0, "error_rate": 0.5})
    lag = Spread.of(())
    result = WorkloadResult("open", "", True, [], summary, {}, lag, [], verdicts=judge(sla, summary))
    figures = _figures(result, sla)
    assert (figures.requests, figures.failed, figures.refused) == (5, 2, 1)
    assert dict(figures.errors) == {"http 429": 1, "broken stream": 1}
    assert figures.error_rate == 0.4
    assert figures.end_to_end == pytest.approx((400.0, 600.0, 600.0))
    assert list(figures.missed) == ["end_to_end_p50_ms is 400, target 300"]
    assert _figures(result, None).missed == ()
