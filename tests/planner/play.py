"""Plays the load of the planner's formulas on the simulator, for tests that compare both."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from statistics import fmean

from fovea.core.measure import percentile
from fovea.core.trace import TraceRequest
from fovea.engine.config import EngineConfig
from fovea.engine.simulate.report import Record
from fovea.engine.simulate.run import Next, simulated_records
from fovea.planner.cost import CostModel
from fovea.planner.steady import Mix, demand
from fovea.planner.workload import Tokens


@dataclass(frozen=True)
class Load:
    """Requests of one kind: tokens of the text and of the answer, and visual tokens of each image."""

    text: int
    answer: int
    images: tuple[int, ...] = ()

    def mix(self, cost: CostModel) -> Mix:
        """Return the load as the formulas take it, with no preparation."""
        visual = sum(self.images)
        prompt = self.text + visual
        tokens = Tokens(
            images=self.images, encoder_rows=self.images, visual=visual, encoded=1.0 if visual else 0.0,
            prompt=prompt, computed=prompt, answer=self.answer, chosen=self.answer, last=prompt + self.answer,
        )  # fmt: skip
        return [(1.0, demand(cost, tokens))]

    def request(self, at: float, number: int) -> TraceRequest:
        images = tuple((f"image {number} {place}", tokens) for place, tokens in enumerate(self.images))
        return TraceRequest(at, self.text, self.answer, images, 0)


@dataclass(frozen=True)
class Seen:
    """Times that the clients of the simulated engine saw, in seconds, and answers per second.

    requests_per_s: of clients that wait for their answers; otherwise 0.
    """

    ttft_s: float
    ttft_p_s: float
    itl_s: float
    requests_per_s: float


def play_open(cost: CostModel, load: Load, rate: float, count: int = 60) -> Seen:
    """Simulate independent arrivals at a rate."""
    random, at, trace = Random(7), 0.0, []
    for number in range(count):
        at += random.expovariate(rate)
        trace.append(load.request(at, number))
    return _seen(simulated_records(tuple(trace), _config(), cost))


def play_closed(cost: CostModel, load: Load, clients: int, each: int = 5) -> Seen:
    """Simulate clients, each of which sends its next request after its answer.

    The first two requests of each client are left out.
    """
    total = clients * each
    trace = tuple(load.request(0.0, number) for number in range(total))
    following = {number: Next(number + clients) for number in range(total - clients)}
    return _seen(simulated_records(trace, _config(), cost, following=following), clients)


def _config() -> EngineConfig:
    return EngineConfig.of(kv_cache_mib=16_000, max_running=256, max_queue=0, max_context=0)


def _seen(records: list[Record], clients: int = 0) -> Seen:
    """Figures of the records. Clients that wait answer at the rate of their number over the mean latency."""
    kept = records[2 * clients :]
    ttft = sorted(record.tokens[0] - record.arrival for record in kept)
    gaps = [gap for record in kept for gap in record.gaps]
    whole = fmean(record.tokens[-1] - record.arrival for record in kept)
    return Seen(fmean(ttft), percentile(ttft, 95), fmean(gaps), clients / whole)
