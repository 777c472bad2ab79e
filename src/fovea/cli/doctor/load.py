"""Load for `fovea doctor`, sent by the load generator of `fovea bench`."""

from __future__ import annotations

import uuid

from fovea.bench import event_loop
from fovea.bench.run import WorkloadResult
from fovea.bench.sample import Sample
from fovea.bench.session import Session, measure
from fovea.bench.settings import Shape, Target, Traffic
from fovea.bench.sla import DEFAULT_SLA, Sla
from fovea.doctor.load_test import LoadFigures, LoadTest
from fovea.doctor.server import Server
from fovea.doctor.settings import DoctorSettings

REFUSED = ("http 429", "http 503")


class Silent:
    """An observer that shows nothing."""

    def begin(self, name: str, total: int) -> None:
        """Ignore the beginning of a workload."""

    def advance(self, sample: Sample) -> None:
        """Ignore the end of a request."""


def load_test(settings: DoctorSettings, sla: Sla | None) -> LoadTest:
    """Return a load test. sla: targets; None: latencies are not judged."""
    shape = Shape(
        visual_tokens=(settings.image_tokens,),
        token_side=settings.token_side,
        prompt_tokens=settings.prompt_tokens,
        output_tokens=settings.output_tokens,
        repeats=1,
        warmup=0,
    )

    def closed(server: Server, clients: int, requests: int) -> LoadFigures:
        traffic = Traffic(clients=clients, requests=requests)
        return _figures(_measure(server, "closed", shape, traffic, sla), sla)

    def arriving(server: Server, rate: float, requests: int) -> LoadFigures:
        traffic = Traffic(rate=(rate,), requests=requests)
        return _figures(_measure(server, "open", shape, traffic, sla), sla)

    return LoadTest(closed, arriving, settings, judged=sla is not None)


def _measure(server: Server, name: str, shape: Shape, traffic: Traffic, sla: Sla | None) -> WorkloadResult:
    session = Session(
        target=Target(server.url, api_key=server.api_key or None),
        names=(name,),
        shape=shape,
        traffic=traffic,
        nonce=uuid.uuid4().hex[:8],
        sla=sla or DEFAULT_SLA,
    )
    return event_loop.run(measure(session, Silent())).results[0]


def _figures(result: WorkloadResult, sla: Sla | None) -> LoadFigures:
    summary = result.summary
    missed = [
        f"{each.name} is {each.value:.6g}, target {each.limit:.6g}"
        for each in result.verdicts
        if each.met is False
    ]
    return LoadFigures(
        requests=summary.requests,
        failed=summary.failed,
        refused=sum(count for kind, (count, _) in summary.errors.items() if kind in REFUSED),
        errors={kind: count for kind, (count, _) in summary.errors.items()},
        seconds=summary.seconds,
        per_second=summary.requests_per_s,
        ttft=(summary.ttft.p50, summary.ttft.p95, summary.ttft.p99),
        end_to_end=(summary.end_to_end.p50, summary.end_to_end.p95, summary.end_to_end.p99),
        missed=missed if sla is not None else (),
    )
