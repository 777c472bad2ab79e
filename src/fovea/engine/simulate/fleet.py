"""Several engines on one virtual clock, with or without engines of their own for images.

Every engine that answers is the real scheduler (`run.Run`). Requests are dealt to them by their first image,
and images to encoders, as engines deal work to their peers (`engine.peers.choose`). An encoder is a queue:
it encodes one image after another, in the order in which they come, and keeps outputs in a cache. An output
that is not cached where it is needed is asked of an encoder and handed over. The request may be scheduled
when all its outputs are there, and then costs no time of an encoder.

Hand-overs do not wait for each other, and nothing fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fovea.core.settings import check_settings, setting
from fovea.core.trace import Trace, TraceRequest
from fovea.engine.cache.embeddings import EmbeddingCache
from fovea.engine.config import MIB, EngineConfig
from fovea.engine.peers.choose import Peer, PeerTable
from fovea.engine.schedule.itl_limit import BatchControl
from fovea.engine.simulate.assemble import simulated_stepper
from fovea.engine.simulate.executor import CostExecutor, Noise, NoiseSettings
from fovea.engine.simulate.report import Record, Report
from fovea.engine.simulate.run import Bounds, Next, Run, at_once, report_of, to_sequence
from fovea.planner.cost import CostModel


@dataclass(frozen=True, slots=True)
class Fleet:
    """The engines of a simulation. Raises ConfigError for a value out of range."""

    replicas: int = setting(1, "Engines that answer.", low=1, high=1000)
    encoders: int = setting(
        0,
        "Engines that only encode images for those that answer. With any, there is also a column in which "
        "all engines do everything.",
        low=0,
        high=1000,
    )
    transfer_ms: float = setting(
        2.0, "Milliseconds of a hand-over from an encoder, without its bytes.", low=0, high=1e6
    )
    transfer_mb_s: float = setting(
        1000.0, "Rate of hand-overs, in 10^6 bytes per second.", low=1e-3, high=1e9
    )

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def integrated(self) -> Fleet:
        """A fleet of the same size in which all engines do everything."""
        return replace(self, replicas=self.replicas + self.encoders, encoders=0)

    @property
    def title(self) -> str:
        if self.encoders:
            return f"{self.encoders} encode + {self.replicas} answer"
        return f"{self.replicas} integrated"

    def transfer_s(self, size: int) -> float:
        """Return the seconds in which so many bytes are handed over."""
        return self.transfer_ms / 1e3 + size / (self.transfer_mb_s * 1e6)


@dataclass(frozen=True, slots=True)
class FleetReport:
    """The figures of a fleet.

    report: of all requests. Its `images_encoded` and `encode_seconds` are those of the encoders if there are
        any, and its `steps` and `busy` those of the engines that answer.
    encoders_busy: share of the time in which the encoders encoded; 0 without any.
    transfers, transfer_bytes, transfer_s: outputs that were handed over, their bytes and their seconds.
    records: of each request, in the order of the trace.
    """

    report: Report
    encoders_busy: float
    transfers: int
    transfer_bytes: int
    transfer_s: float
    records: list[Record]


def simulate_fleet(
    trace: Trace,
    config: EngineConfig,
    cost: CostModel,
    fleet: Fleet,
    *,
    encoder_cost: CostModel | None = None,
    control: Callable[[], BatchControl | None] | None = None,
    bounds: Bounds | None = None,
    following: Mapping[int, Next] | None = None,
    prepare: Callable[[TraceRequest], float] | None = None,
    noise: NoiseSettings | None = None,
) -> FleetReport:
    """Serve a trace to its end by several engines.

    encoder_cost: costs of images in encoders; None: those of the other engines.
    control: returns the limit of batches of one engine.
    Other arguments as for `simulate`. A request that follows another one goes to the same engine.
    """
    run = _Serving(
        trace,
        config,
        cost,
        fleet,
        encoder_cost or cost,
        control or (lambda: None),
        following or {},
        prepare or at_once,
        noise or NoiseSettings(),
    )
    return run.serve(bounds or Bounds())


class Encoder:
    """An engine that encodes images, one after another.

    free_at: when it has encoded all that it was given.
    busy: seconds in which it encoded.
    """

    def __init__(self, cost: CostModel, capacity: int, noise: Noise) -> None:
        self._cost = cost
        self._noise = noise
        self._cache: EmbeddingCache[float] = EmbeddingCache(capacity)
        self.free_at = 0.0
        self.busy = 0.0
        self.images = 0

    def encode(self, key: str, tokens: int, now: float) -> float:
        """Return the time at which the output of an image is ready, which is asked for now."""
        if key in self._cache:
            return max(now, self._cache.get(key))
        seconds = self._noise.disturb(self._cost.image(tokens))
        self.free_at = max(now, self.free_at) + seconds
        self.busy += seconds
        self.images += 1
        self._cache.put(key, self.free_at, tokens * self._cost.visual_token_bytes, set())
        return self.free_at


@dataclass(frozen=True, slots=True)
class _Work:
    """A piece of work that counts in a table of peers until it has ended."""

    table: PeerTable
    peer: Peer
    tokens: int
    ended: Callable[[float], bool]


class _Serving:
    """One run of a fleet."""

    def __init__(
        self,
        trace: Trace,
        config: EngineConfig,
        cost: CostModel,
        fleet: Fleet,
        encoder_cost: CostModel,
        control: Callable[[], BatchControl | None],
        following: Mapping[int, Next],
        prepare: Callable[[TraceRequest], float],
        noise: NoiseSettings,
    ) -> None:
        self._trace, self._cost, self._fleet = trace, cost, fleet
        self._prepare = prepare
        self._later = {follower.number for follower in following.values()}

        def noise_of(number: int) -> NoiseSettings:
            return replace(noise, noise_seed=(noise.noise_seed + number) % 2**31)

        own = replace(cost, image_s=0.0, visual_s=0.0, visual_pair_s=0.0) if fleet.encoders else cost

        def engine(number: int) -> Run:
            def executor(embeddings: EmbeddingCache[None]) -> CostExecutor:
                return CostExecutor(own, embeddings, lambda seq: len(seq.output_ids), noise_of(number))

            stepper = simulated_stepper(config, own, executor, control=control())
            return Run(trace, config, own, stepper, following, prepare)

        engines = [engine(number) for number in range(fleet.replicas)]
        encoders = [
            Encoder(encoder_cost, config.outputs.embed_cache_mib * MIB, Noise(noise_of(fleet.replicas + n)))
            for n in range(fleet.encoders)
        ]
        self._engines = {f"http://engine-{number}": one for number, one in enumerate(engines)}
        self._encoders = {f"http://encoder-{number}": one for number, one in enumerate(encoders)}
        self._answering, self._encoding = PeerTable([*self._engines]), PeerTable([*self._encoders])
        self._works: list[_Work] = []
        self._transfers = 0
        self._transfer_bytes = 0
        self._transfer_s = 0.0

    def serve(self, bounds: Bounds) -> FleetReport:
        trace = self._trace
        due = {n: one.at + self._prepare(one) for n, one in enumerate(trace) if n not in self._later}
        for number in sorted(due, key=lambda number: (due[number], number)):
            for engine in self._engines.values():
                engine.advance(due[number])
            self._deal(number, due[number])
        for engine in self._engines.values():
            engine.to_the_end()
        return self._report(bounds)

    def _deal(self, number: int, now: float) -> None:
        """Give a request to an engine, and the images that the engine lacks to encoders."""
        self._count_ended(now)
        request = self._trace[number]
        key = request.images[0][0] if request.images else f"request {number}"
        tokens = request.prompt_tokens + request.output
        peer = self._choose(self._answering, key, tokens, now)
        engine = self._engines[peer.url]
        record = engine.records[number]
        self._works.append(
            _Work(self._answering, peer, tokens, lambda now: record.ended is not None and record.ended <= now)
        )
        ready = now if not self._encoders else self._encode(number, engine, now)
        engine.send(number, request.at, ready)

    def _encode(self, number: int, engine: Run, now: float) -> float:
        """Return when all outputs are there that an engine needs for a request."""
        scheduler = engine.stepper.scheduler
        seq = to_sequence(self._trace[number], number)
        cached = scheduler.kv.cached_prefix(seq)
        wanted = {
            span.key: span.tokens
            for span in seq.spans
            if span.end > cached and span.key not in scheduler.embeddings
        }
        ready = now
        for key, tokens in wanted.items():
            peer = self._choose(self._encoding, key, tokens, now)
            encoded = self._encoders[peer.url].encode(key, tokens, now)
            size = tokens * self._cost.visual_token_bytes
            seconds = self._fleet.transfer_s(size)
            self._transfers += 1
            self._transfer_bytes += size
            self._transfer_s += seconds
            there = encoded + seconds
            self._works.append(_Work(self._encoding, peer, tokens, lambda now, there=there: there <= now))  # type: ignore[misc]
            ready = max(ready, there)
        return ready

    def _choose(self, table: PeerTable, key: str, tokens: int, now: float) -> Peer:
        peer = table.choose(key, tokens, now)
        assert peer is not None  # none fails
        return peer

    def _count_ended(self, now: float) -> None:
        left = []
        for work in self._works:
            if work.ended(now):
                work.table.end(work.peer, work.tokens, now, failed=False)
            else:
                left.append(work)
        self._works = left

    def _report(self, bounds: Bounds) -> FleetReport:
        engines, encoders = list(self._engines.values()), list(self._encoders.values())
        records = [
            next((run.records[n] for run in engines if run.records[n].reason), engines[0].records[n])
            for n in range(len(self._trace))
        ]
        report = report_of(engines, records, self._trace, bounds)
        busy = sum(encoder.busy for encoder in encoders)
        if encoders:
            images = sum(encoder.images for encoder in encoders)
            asked = sum(len(request.images) for request in self._trace)
            spared = 1 - images / asked if asked else report.images_spared
            report = replace(report, images_encoded=images, encode_seconds=busy, images_spared=spared)
        whole = report.seconds * len(encoders)
        return FleetReport(
            report,
            busy / whole if whole else 0.0,
            self._transfers,
            self._transfer_bytes,
            self._transfer_s,
            records,
        )
