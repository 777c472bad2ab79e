"""Targets of alerts: predicted where a plan can be made, stated where not, and judged by promtool."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fovea.cli.deploy import known_settings
from fovea.core.errors import ConfigError
from fovea.deploy.gpus import GPUS, hardware_of
from fovea.deploy.monitoring.files import rules_of
from fovea.deploy.monitoring.objectives import Targets
from fovea.deploy.monitoring.targets import targets_of
from fovea.deploy.read import spec_of
from fovea.deploy.spec import DeploySpec, Monitoring, Pool
from fovea.observe.table import SECONDS
from fovea.planner import emit
from fovea.planner.hardware import find, known_hardware
from fovea.planner.precision import RECIPES
from fovea.planner.recommend import recommend
from fovea.planner.shape import find as find_model
from fovea.planner.targets import MARGIN, bucket, usual_targets
from fovea.planner.workload import ImageTokens, Kind, Workload
from tests.support.programs import program

MODEL = "Qwen/Qwen3-VL-8B-Instruct"
L4 = Pool(name="qwen", model=MODEL, hardware="cuda", gpu="L4")
CHAT = 'route="/v1/chat/completions"'
MINUTES = 120


def spec(*pools: Pool, **targets: float) -> DeploySpec:
    return DeploySpec(pools=pools or (L4,), monitoring=Monitoring(targets=targets))


def test_a_known_model_on_a_known_gpu_has_predicted_targets() -> None:
    """A VLM of 8 B on an L4 takes many seconds for an answer; 0.5 s for 95% paged at once."""
    slow, (note,) = targets_of(spec())
    quick, _ = targets_of(spec(Pool(name="qwen", model=MODEL, hardware="cuda", gpu="H200-141GB")))
    assert slow.itl_s > quick.itl_s
    assert slow.p50_s > quick.p50_s
    assert slow.p50_s > 10
    assert slow.p95_s == 0.0  # answers of some hundred tokens take longer than the largest bucket
    assert f"{MODEL} on L4, planned at 85% of its highest rate" in note
    assert f"each time is {MARGIN:g} times the predicted one" in note
    both, notes = targets_of(spec(L4, Pool(name="fast", model=MODEL, hardware="cuda", gpu="H200-141GB")))
    assert both == slow
    assert len(notes) == 2


@pytest.mark.parametrize(
    ("pool", "reason"),
    [
        (Pool(name="a"), "a spec does not name the kind of CPU"),
        (Pool(name="a", model="my/model", hardware="cuda", gpu="L4"), "does not know the model my/model"),
        (Pool(name="a", model=MODEL, hardware="cuda"), "it names no GPU"),
        (Pool(name="a", model=MODEL, hardware="cuda", gpu="A100-40GB", mig="3g.20gb"), "slices of a GPU"),
        (Pool(name="a", model=MODEL, hardware="cuda", gpu="A30"), "does not know the GPU 'A30'"),
        (Pool(name="a", model="Qwen/Qwen2.5-VL-72B-Instruct", hardware="cuda", gpu="L4"), "the weights take"),
    ],
)
def test_the_rendered_file_says_why_a_pool_was_not_planned(pool: Pool, reason: str) -> None:
    recording, _ = rules_of(spec(pool))
    head = [line for line in recording.splitlines() if line.startswith("#")]
    assert any("Pool a: documented defaults, because" in line and reason in line for line in head), head
    assert targets_of(spec(pool))[0] == Targets()


def test_a_pool_whose_engine_would_refuse_its_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fp8 needs compute capability 9\.0; L4 has 8\.9; accepted here"):
        Pool(name="a", hardware="cuda", gpu="L4", settings={"quantization": "fp8"})
    with pytest.raises(ConfigError, match="keys and values in fp8 need compute capability 8.9; A100-40GB"):
        Pool(name="a", hardware="cuda", gpu="A100-40GB", settings={"kv_dtype": "fp8"})
    Pool(name="a", hardware="cuda", gpu="A100-40GB", settings={"kv_dtype": "fp8", "kernels": "torch"})
    Pool(name="a", hardware="cuda", gpu="H200-141GB", settings={"quantization": "fp8", "kv_dtype": "fp8"})


def test_a_pool_can_have_every_gpu_that_a_plan_can_recommend() -> None:
    known = {each.name for each in known_hardware() if each.kind == "gpu" and each.vendor == "nvidia"}
    named = {each.name for each in map(hardware_of, GPUS) if each is not None}
    assert named == known
    with pytest.raises(ConfigError, match=r"fp8 needs compute capability 9\.0; RTX-4090 has 8\.9"):
        Pool(name="a", hardware="cuda", gpu="RTX-4090", settings={"quantization": "fp8"})
    targets, notes = targets_of(spec(Pool(name="a", model=MODEL, hardware="cuda", gpu="RTX-4090")))
    assert targets != Targets()
    assert f"Pool a: {MODEL} on RTX-4090, planned at" in notes[0]


def test_targets_of_the_spec_win_and_wrong_ones_are_refused() -> None:
    values = {
        "pool": [{"name": "a", "model": MODEL, "hardware": "cuda", "gpu": "L4"}],
        "monitoring": {"targets": {"ttft_s": 2.5, "success": 0.99, "queue_s": 45}},
    }
    read = spec_of(values, known_settings())
    targets, notes = targets_of(read)
    assert (targets.ttft_s, targets.success, targets.queue_s) == (2.5, 0.99, 45)
    assert targets.p50_s == targets_of(spec())[0].p50_s
    assert notes[0] == "Targets that the spec states: ttft_s, success, queue_s."
    _, alerts = rules_of(read)
    assert "fovea:oldest_waiting_seconds > 45" in alerts
    for wrong, words in (
        ({"ttft_s": 3}, r"monitoring.targets\]: ttft_s is 3; accepted: 0, or a bound"),
        ({"ttft": 2.5}, "unknown key 'ttft'; did you mean 'ttft_s'"),
        ({"success": 2}, "success is 2; accepted: 0.5 to"),
    ):
        values["monitoring"] = {"targets": wrong}  # type: ignore[dict-item]
        with pytest.raises(ConfigError, match=words):
            spec_of(values, known_settings())


@given(st.floats(1e-4, 500))
def test_a_bucket_is_the_next_bound(seconds: float) -> None:
    found = bucket(seconds)
    assert found in (0.0, *SECONDS)
    assert not found or found >= seconds * (1 - 1e-6)
    assert not [bound for bound in SECONDS if seconds <= bound < found]


def test_an_emitted_spec_has_the_targets_of_its_workload(tmp_path: Path) -> None:
    shape = find_model(MODEL)
    assert shape is not None
    workload = Workload((Kind("image", images=((1024, 768),), answer=100),), rate=2, ttft_ms=2000)
    hardware = [find("H100-SXM", known_hardware())]
    found = recommend(
        shape,
        hardware,
        workload,
        lambda width, height: ImageTokens(768, 768),
        precisions=("none",),
        devices=(1,),
    )
    assert found.best is not None
    text = emit.deploy_toml(found.best, workload, {"H100-SXM": "H100-80GB"})
    read = spec_of(tomllib.loads(text), known_settings())
    targets, notes = targets_of(read)
    assert targets.ttft_s == 2.5  # the bound from the workload's own 2 s on
    assert 0 < targets.p50_s <= targets.p95_s <= targets.p99_s
    assert found.best.option.speed is not None
    assert targets.itl_s >= MARGIN * found.best.option.speed.itl_p_s
    assert notes[0].startswith("Targets that the spec states: p50_s, p95_s, p99_s, ttft_s, itl_s, queue_s")


def alert_test(
    targets: Targets, within: float, waiting_s: float, expected: dict[str, list[str]]
) -> dict[str, Any]:
    """A case for promtool: a share of all times is within its target, and a request waits for so long.

    expected: objectives by the alert that fires for them.
    """

    def rate(share: float) -> str:
        return f"0+{100 * share:g}x{MINUTES}"

    own = 'job="fovea", instance="a:8000"'
    series = {
        f'fovea:requests_total{{{own}, {CHAT}, status="200"}}': rate(1),
        f"fovea:request_seconds_count{{{own}, {CHAT}}}": rate(1),
        f"fovea:ready{{{own}}}": f"1x{MINUTES}",
        f"up{{{own}}}": f"1x{MINUTES}",
        f"fovea:requests_waiting{{{own}}}": f"2x{MINUTES}",
        f"fovea:oldest_waiting_seconds{{{own}}}": f"{waiting_s:g}x{MINUTES}",
    }
    for seconds in sorted({targets.p50_s, targets.p95_s, targets.p99_s} - {0.0}):
        series[f'fovea:request_seconds_bucket{{{own}, {CHAT}, le="{seconds}"}}'] = rate(within)
    for name, seconds in (("ttft", targets.ttft_s), ("itl", targets.itl_s)):
        series[f"fovea:{name}_seconds_count{{{own}}}"] = rate(1)
        series[f'fovea:{name}_seconds_bucket{{{own}, le="{seconds}"}}'] = rate(within)
    names = ("FoveaBudgetBurnFastest", "FoveaBudgetBurnFast", "FoveaBudgetBurnSlow", "FoveaQueueSlow")
    counted = [
        {
            "expr": f'count by (alertname, slo) (ALERTS{{alertname="{name}", alertstate="firing"}})',
            "eval_time": "117m",
            "exp_samples": [
                {"labels": f'{{alertname="{name}"{slo and f", slo={slo!r}"}}}'.replace("'", '"'), "value": 1}
                for slo in expected.get(name, [])
            ],
        }
        for name in names
    ]
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": counted,
    }


def judge(folder: Path, deployment: DeploySpec, case: dict[str, Any]) -> str:
    """Let promtool run a case against the rendered rules. Returns what it found wrong."""
    for name, text in zip(("recording.yml", "alerts.yml"), rules_of(deployment), strict=True):
        (folder / name).write_text(text)
    rules = {"rule_files": ["recording.yml", "alerts.yml"], "evaluation_interval": "3m", "tests": [case]}
    (folder / "test.yml").write_text(yaml.safe_dump(rules))
    words = [program("promtool"), "test", "rules", str(folder / "test.yml")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_alerts_are_silent_at_the_planned_load_and_fire_over_the_targets(tmp_path: Path) -> None:
    """At the planned load 95% of the times are within the predicted P95, and more within twice that."""
    gpu = "H100-80GB"
    deployment = spec(Pool(name="qwen", model=MODEL, hardware="cuda", gpu=gpu))
    targets, _ = targets_of(deployment)
    shape = find_model(MODEL)
    assert shape is not None
    predicted, reason = usual_targets(shape, find(gpu, known_hardware()), RECIPES["none"], 1)
    assert not reason
    assert targets.ttft_s == predicted["ttft_s"]
    assert judge(tmp_path, deployment, alert_test(targets, 0.995, targets.queue_s - 1, {})) == ""
    late = [name for name in ("latency_p95", "latency_p99") if getattr(targets, f"{name[8:]}_s")]
    tokens = ["itl", "ttft"]
    expected = {
        "FoveaBudgetBurnFastest": sorted([*late, *tokens]),
        "FoveaBudgetBurnFast": sorted([*late, *tokens]),
        "FoveaBudgetBurnSlow": sorted([*late, *tokens]),
        "FoveaQueueSlow": [""],
    }
    assert judge(tmp_path, deployment, alert_test(targets, 0.1, targets.queue_s + 1, expected)) == ""
