"""Targets of alerts from a plan: its predicted times at the planned load, with a margin.

    first tokens    P95 at the planned load, from the formulas of `steady`
    gaps            P95 of the time between tokens, the same way
    whole answers   first token + length * mean gap. Lengths of answers are taken to be geometrically
                    distributed, so half of them have up to 0.69 of their mean, 95% up to 3.0, 99% up to 4.6
    queue           ten times P95 of the first token, at least 30 s

Each is multiplied by MARGIN and rounded up to a bound of the histograms' buckets, because Prometheus cannot
tell times between two bounds. Where the workload has a target of its own, that is taken without a margin.
"""

from __future__ import annotations

from fovea.observe.table import SECONDS
from fovea.planner.hardware import Hardware
from fovea.planner.option import HEADROOM, Option, evaluate
from fovea.planner.precision import Precision
from fovea.planner.roofline import TYPICAL_TOKENS, Setup
from fovea.planner.shape import ModelShape
from fovea.planner.steady import Speed, mean_demand, open_load
from fovea.planner.workload import ImageTokens, Kind, Workload

MARGIN = 2.0
"""Multiple of a predicted time. Plans are off by up to 1.6, and P95 of first tokens by up to 2."""
LENGTHS = {"p50_s": 0.69, "p95_s": 3.0, "p99_s": 4.6}
"""Lengths of answers through their mean, at 50%, 95% and 99%: -ln(1 - share) of a geometric distribution."""
SHORTEST_WAIT_S, WAITS = 30.0, 10.0
USUAL = Kind("usual", images=((1024, 768),), text=60, answer=256)
"""The request that is planned with where a deployment says nothing about its requests."""


def alert_targets(option: Option, workload: Workload) -> dict[str, float]:
    """Return targets of [monitoring.targets] by name, in seconds, for a configuration and its load.

    0: no bucket of the histograms is large enough. Without a speed at that load there are none.
    """
    rate = workload.requests_per_s / max(1, option.replicas)
    speed = open_load(option.cost, option.mix, rate, option.max_running, 95)
    if speed is None:
        return {}
    found = _targets(speed, mean_demand(option.mix).tokens)
    for name, target_ms in (("ttft_s", workload.ttft_ms), ("itl_s", workload.itl_ms)):
        if target_ms:
            found[name] = bucket(target_ms / 1e3)
    return found


def usual_targets(
    shape: ModelShape, hardware: Hardware, precision: Precision, devices: int
) -> tuple[dict[str, float], str]:
    """Return the targets of a replica that gets `option.HEADROOM` of its highest rate of usual requests.

    Returns ({}, the reason) for a configuration that is not possible.
    """
    obstacle = precision.obstacle(hardware.device)
    if obstacle is not None:
        return {}, str(obstacle)
    kind = USUAL if shape.takes_images else Kind("usual", text=USUAL.text, answer=USUAL.answer)
    tokens = ImageTokens(1 if shape.cross else TYPICAL_TOKENS, TYPICAL_TOKENS)
    setup = Setup(shape, hardware, precision, devices)
    option = evaluate(setup, Workload((kind,)), lambda width, height: tokens)
    if option.problem or not option.rate:
        return {}, option.problem
    speed = open_load(option.cost, option.mix, HEADROOM * option.rate, option.max_running, 95)
    return ({}, "it cannot keep up") if speed is None else (_targets(speed, USUAL.answer), "")


def bucket(seconds: float) -> float:
    """Return the smallest bound of the histograms' buckets from some seconds on; 0: there is none."""
    return next((bound for bound in map(float, SECONDS) if bound >= seconds * (1 - 1e-9)), 0.0)


def _targets(speed: Speed, answer: float) -> dict[str, float]:
    """answer: mean tokens of an answer."""
    late = LENGTHS["p99_s"] / LENGTHS["p95_s"]  # of the tail of waiting, which is exponential
    first = {"p50_s": speed.ttft_s, "p95_s": speed.ttft_p_s, "p99_s": late * speed.ttft_p_s}
    whole = {
        name: bucket(MARGIN * (seconds + LENGTHS[name] * answer * speed.itl_s))
        for name, seconds in first.items()
    }
    return {
        **whole,
        "ttft_s": bucket(MARGIN * speed.ttft_p_s),
        "itl_s": bucket(MARGIN * speed.itl_p_s),
        "queue_s": max(SHORTEST_WAIT_S, float(round(WAITS * speed.ttft_p_s))),
    }
