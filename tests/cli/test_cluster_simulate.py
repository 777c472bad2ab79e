"""fovea cluster simulate: a table with a column per policy, and errors that name what is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.support import Caller

SMALL = ("cluster", "simulate", "--replicas", 3, "--rate", 30, "--requests", 200, "--output-tokens", 10)


def test_a_column_per_policy(fovea: Caller) -> None:
    words = ("--route", "least-busy", "--route", "events")
    outcome = fovea(*SMALL, *words)
    assert (outcome.code, outcome.err) == (0, "")
    assert max(map(len, outcome.out.splitlines())) <= 80
    summary, _, table = outcome.out.partition("\n\n")
    head, *rows = table.splitlines()
    assert summary.startswith("200 requests, 30/s in the mean; costs: built in: fovea-tiny")
    assert head.split() == ["least-busy", "events"]
    assert rows[0].split() == ["requests", "200", "200"]
    assert rows[-1].split() == ["US", "dollars", "per", "1,000", "good", "-", "-"]
    routes = fovea(*SMALL, *words, "--json").json["routes"]
    assert routes["events"]["outcomes"]["good"] == 200
    assert routes["events"]["encoder_hits"] > routes["least-busy"]["encoder_hits"]


def test_losses_and_autoscaling(fovea: Caller) -> None:
    words = ("--preempted", 200, "--rack", 2, "--rack-lost-at", 2, "--cold-start-s", 1, "--price", 2)
    outcome = fovea(
        *SMALL, *words, "--route", "events", "--autoscale", "--replicas-max", 5, "--shape", "bursty"
    )
    assert outcome.code == 0
    assert float(outcome.out.splitlines()[-1].split()[-1]) > 0


def test_a_replica_of_the_planner(fovea: Caller) -> None:
    words = ("--model", "Qwen/Qwen2.5-VL-7B-Instruct", "--hardware", "l40s", "--route", "events")
    outcome = fovea(*SMALL, *words)
    assert "costs: roofline: Qwen/Qwen2.5-VL-7B-Instruct on 1 x L40S" in " ".join(outcome.out.split())
    assert "US dollars per 1,000 good       -" not in outcome.out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--route", "random"), "route is 'random'; accepted: round-robin, least-busy, cache-affine, events"),
        (("--replicas-max", 3), "--replicas-max needs --autoscale"),
        (("--autoscale",), "--autoscale begins with --replicas 3; accepted: --replicas-max from there on"),
        (("--hardware", "L4"), "--hardware needs --model"),
        (("--model", "fovea-tiny"), "--model needs --hardware, and takes no --cost"),
        (("--model", "Qwen/Qwen2.5-VL-72B-Instruct", "--hardware", "L4"), "on L4: the weights take"),
        (("--price", -1), "--price is -1; accepted"),
        (("--ttft-ms", 0), "--ttft-ms is 0; accepted: above 0"),
        (("--shape", "weekly"), "shape"),
    ],
)
def test_errors(fovea: Caller, words: tuple[object, ...], error: str) -> None:
    outcome = fovea(*SMALL, *words)
    assert outcome.code == 2
    assert error in outcome.error_line


def test_the_number_of_replicas_is_needed(fovea: Caller) -> None:
    assert (
        "--replicas is missing; accepted: the number of engines that answer"
        in fovea("cluster", "simulate").error_line
    )


def test_a_trace_is_served(fovea: Caller, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    made = fovea("simulate", "--policy", "dual", "--requests", 50, "--rate", 20, "--save-trace", path)
    assert made.code == 0
    outcome = fovea("cluster", "simulate", "--replicas", 2, "--trace", path, "--route", "events")
    assert outcome.out.startswith("50 requests, ")
    assert outcome.out.partition("\n\n")[2].splitlines()[1].split() == ["requests", "50"]
    both = fovea("cluster", "simulate", "--replicas", 2, "--trace", path, "--rate", 3)
    assert "either --trace or a load, not both: --rate is given too" in both.error_line
