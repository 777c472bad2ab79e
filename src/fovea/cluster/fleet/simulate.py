"""Runs a fleet on a virtual clock: clients, the gateway, replicas, and what disturbs them.

    arrival     the gateway's router chooses a replica, and another one if that refuses or is gone
    wake        a replica ends its step: first tokens and ends of answers; clients think, and ask again
    ready       an encoder has handed over the output of an image
    scale       `scaling.Scaler` looks at the signals of all replicas
    notice      a spot machine is taken back: its replica takes no new requests, and ends 30 s later
    rack        all replicas of a rack end at once
    probe       the gateway's health check of a replica that drains, or is gone

All of these are entries of one heap. A request that had no first byte when its replica went away is sent
again, within the gateway's own bounds of retries; one that had is lost, because an answer is never continued
by another engine. Connections of a lost replica break at once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from random import Random

from fovea.cluster.fleet.front import Front, Wanted, load_of
from fovea.cluster.fleet.load import AnyLoad, Conversation
from fovea.cluster.fleet.replica import Replica, ReplicaSpec, Request
from fovea.cluster.fleet.report import FleetFigures, Tally
from fovea.cluster.scaling import Scaler, ScaleSettings
from fovea.core.errors import ConfigError
from fovea.core.settings import check_settings, setting
from fovea.engine.peers.choose import PeerTable
from fovea.engine.simulate.executor import Noise, NoiseSettings
from fovea.engine.simulate.fleet import Encoder, Fleet
from fovea.engine.simulate.run import Bounds
from fovea.gateway.backends.backend import CONNECT, Backend, stage_of
from fovea.gateway.backends.backend import Load as Outstanding
from fovea.gateway.breaker import RetryBudget
from fovea.gateway.settings import ResilienceSettings

ROUTES = ("round-robin", "least-busy", "cache-affine", "events", "lod-cost")
"""Policies of the gateway. events: cache-affine, with engines that publish what their caches hold."""
PAUSE_S = 1.0
"""Seconds for which a full replica gets no requests, as `generate.dispatch` pauses one that names none."""
FEWEST_ANSWERS = 20
"""Answers between two looks of the scaler below which their share of good ones says nothing."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """Losses of machines, cold starts, and the period of the scaler. Raises ConfigError for wrong values."""

    preempted: float = setting(
        0.0,
        "How often each replica is taken back per hour, in the mean, as spot machines are; 2 is twice.",
        low=0,
        high=1000,
    )
    notice_s: float = setting(
        30.0, "Seconds between the notice and the end of a spot machine.", low=0, high=3600
    )
    rack: int = setting(16, "Replicas of one rack.", low=1, high=10_000)
    rack_lost_at: float = setting(
        0.0, "Second in which all replicas of a rack end at once; 0: never.", low=0, high=1e8
    )
    cold_start_s: float = setting(
        150.0,
        "Seconds from the decision to add a replica, or from the notice that one ends, until another one "
        "answers: a machine, an image, and weights.",
        low=0,
        high=1e5,
    )
    scale_every_s: float = setting(5.0, "Seconds between two looks of the scaler.", low=0.1, high=3600)

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True)
class PaperFleet:
    """A fleet to simulate.

    spec: abilities of a replica.
    size: replicas at the beginning, encoders, and hand-overs.
    route: one of ROUTES.
    conditions: losses and cold starts. scale: bounds and targets of autoscaling; None: the size stays.
    bounds: of a good answer. price_per_h: US dollars of one replica and hour; None: not known.
    interval_s: length of an interval of the timeline.
    """

    spec: ReplicaSpec
    size: Fleet
    route: str = "cache-affine"
    conditions: Conditions = field(default_factory=Conditions)
    scale: ScaleSettings | None = None
    bounds: Bounds = field(default_factory=Bounds)
    resilience: ResilienceSettings = field(default_factory=ResilienceSettings)
    price_per_h: float | None = None
    interval_s: float = 10.0

    def __post_init__(self) -> None:
        if self.route not in ROUTES:
            raise ConfigError(f"route is {self.route!r}; accepted: {', '.join(ROUTES)}", param="route")


def simulate_paper_fleet(fleet: PaperFleet, load: AnyLoad) -> FleetFigures:
    """Serve a load to its end. The same fleet and load give the same figures."""
    return _World(fleet, load).serve()


@dataclass(slots=True, eq=False)
class _Flight:
    """A request of a client, with all its attempts."""

    request: Request
    conversation: Conversation
    turn: int
    wanted: Wanted
    work: Outstanding
    tried: list[str] = field(default_factory=list)
    backend: Backend | None = None


@dataclass(slots=True, eq=False)
class _Server:
    """A replica with its time. began: when it was asked for. ended: when it was given back."""

    replica: Replica
    number: int
    began: float
    ended: float = math.inf


Action = Callable[[float], None]


class _World:
    """One run."""

    def __init__(self, fleet: PaperFleet, load: AnyLoad) -> None:
        self._fleet, self._system = fleet, load.system_tokens
        self._random = Random(f"disturbances {load.seed}")
        policy = "cache-affine" if fleet.route == "events" else fleet.route
        self._front = Front(policy, fleet.resilience)
        self._budget = RetryBudget(fleet.resilience.retry_share)
        self._tally = Tally(fleet.bounds, fleet.interval_s)
        self._scaler = None if fleet.scale is None else Scaler(fleet.scale)
        self._heap: list[tuple[float, int, Action]] = []
        self._pushed = 0
        self._flights: dict[Request, _Flight] = {}
        self._servers: dict[str, _Server] = {}
        self._gone: list[_Server] = []
        self._starting: list[_Server] = []
        self._created = self._most = 0
        self._conversations: Iterator[Conversation] = load.conversations()
        self._open = 0
        cost, capacity = fleet.spec.cost, fleet.spec.output_bytes
        self._encoders = {
            f"http://encoder-{number}": Encoder(cost, capacity, Noise(NoiseSettings()))
            for number in range(fleet.size.encoders)
        }
        self._encoding = PeerTable([*self._encoders])

    def serve(self) -> FleetFigures:
        self._start([self._create(0.0) for _ in range(self._fleet.size.replicas)], 0.0)
        conditions = self._fleet.conditions
        if conditions.rack_lost_at:
            self._at(conditions.rack_lost_at, self._lose_rack)
        if conditions.preempted:
            self._next_notice(0.0)
        if self._scaler is not None:
            self._at(conditions.scale_every_s, self._scale)
        self._next_conversation(0.0)
        heap = self._heap
        while self._open:
            now, _, action = heapq.heappop(heap)
            action(now)
        return self._figures()

    def _at(self, at: float, action: Action) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (at, self._pushed, action))

    # Clients

    def _next_conversation(self, now: float) -> None:
        """Wait for the conversation that begins next, so that only one of the future is in memory."""
        conversation = next(self._conversations, None)
        if conversation is None:
            self._tally.until = now
            return
        self._open += 1
        self._at(conversation.at, lambda now: self._begin_conversation(conversation, now))

    def _begin_conversation(self, conversation: Conversation, now: float) -> None:
        self._next_conversation(now)
        self._ask(conversation, 0, 0, now)

    def _ask(self, conversation: Conversation, turn: int, history: int, now: float) -> None:
        """A client sends a question. history: tokens of its conversation so far."""
        question = conversation.turns[turn]
        request = Request(
            conversation.key,
            conversation.image,
            self._system,
            conversation.visual,
            history,
            question.text,
            question.output,
            now,
            pictures=conversation.pictures,
        )
        wanted = Wanted(conversation.image, conversation.key)
        flight = _Flight(request, conversation, turn, wanted, load_of(request.prompt, conversation.visual))
        self._flights[request] = flight
        self._tally.requests += 1
        self._budget.count_request()
        self._send(flight, now)

    def _leave(self, flight: _Flight, outcome: str, now: float) -> None:
        """A client gets an error, and ends its conversation."""
        del self._flights[flight.request]
        self._tally.lost(outcome, now)
        self._open -= 1

    # The gateway

    def _send(self, flight: _Flight, now: float, *, budgeted: bool = False) -> None:
        """Send a request until a replica accepts it, as `generate.dispatch` does.

        budgeted: whether the next attempt needs a retry of the budget, because one before cost something.
        """
        request, vision = flight.request, flight.wanted.has_images
        outcome = "failed" if budgeted else "refused"
        while len(flight.tried) < self._fleet.resilience.max_attempts:
            choice = self._front.choose(flight.wanted, flight.work, now, flight.tried)
            if choice is None or (budgeted and not self._budget.take()):
                break
            backend = choice.backend
            self._tally.retries += bool(flight.tried)
            flight.tried.append(backend.name)
            self._front.begin(backend, flight.work, now, vision=vision)
            server = self._servers.get(backend.name)
            if server is not None and server.replica.accepts(request):
                flight.backend = backend
                self._submit(server.replica, request, now)
                return
            backend.end(flight.work)
            if server is None or not server.replica.alive:
                self._front.unreachable(backend, now)
                budgeted, outcome = False, "failed"
            else:
                self._front.pause(backend, now + PAUSE_S)
                budgeted, outcome = True, "refused"
        self._leave(flight, outcome, now)

    def _submit(self, replica: Replica, request: Request, now: float) -> None:
        if self._encoders and replica.lacks_image(request):
            ready = self._encode(request, now)
            replica.submit(request, now, ready=False)
            self._at(ready, lambda now: self._make_ready(replica, request, now))
            return
        replica.submit(request, now)
        self._watch(replica)

    def _make_ready(self, replica: Replica, request: Request, now: float) -> None:
        replica.make_ready(request, now)
        self._watch(replica)

    def _encode(self, request: Request, now: float) -> float:
        """Have an encoder encode the image of a request; return when its output is handed over."""
        peer = self._encoding.choose(request.image, request.visual, now)
        assert peer is not None  # none fails
        encoder = self._encoders[peer.url]
        before = encoder.images
        encoded = encoder.encode(request.image, request.visual, now)
        request.fresh = encoder.images > before
        size = request.visual * self._fleet.spec.cost.visual_token_bytes
        ready = encoded + self._fleet.size.transfer_s(size)
        self._at(ready, lambda now: self._encoding.end(peer, request.visual, now, failed=False))
        return ready

    def _watch(self, replica: Replica) -> None:
        """Wake a replica at the end of what it computes."""
        if replica.wake_at < math.inf:
            version = replica.version
            self._at(replica.wake_at, lambda now: self._wake(replica, version, now))

    def _wake(self, replica: Replica, version: int, now: float) -> None:
        if version != replica.version:
            return  # something else has come before
        began, ended = replica.wake(now)
        self._watch(replica)
        for request in began:
            self._begin_answer(self._flights[request])
        for request in ended:
            self._end_answer(self._flights.pop(request), now)
        if replica.draining and ended:
            self._retire(replica, now)

    def _begin_answer(self, flight: _Flight) -> None:
        request, backend = flight.request, flight.backend
        assert backend is not None
        backend.answered_at = request.first
        backend.breakers[CONNECT].succeed()
        backend.breakers[stage_of(vision=flight.wanted.has_images)].begin_stream()
        backend.note_first_byte(request.first - request.arrival)
        backend.begin_answer(flight.work)

    def _end_answer(self, flight: _Flight, now: float) -> None:
        request, backend, conversation = flight.request, flight.backend, flight.conversation
        assert backend is not None
        backend.end(flight.work, begun=True)
        backend.breakers[stage_of(vision=flight.wanted.has_images)].succeed()
        self._tally.answered(request)
        turn = flight.turn + 1
        if turn == len(conversation.turns):
            self._open -= 1
            return
        history = request.prompt + request.output
        at = now + conversation.turns[turn].think_s
        self._at(at, lambda now: self._ask(conversation, turn, history, now))

    # Replicas that come and go

    def _create(self, now: float) -> _Server:
        """Ask for a replica; it costs from now on."""
        number = self._created
        self._created += 1
        return _Server(Replica(self._fleet.spec, f"replica-{number}"), number, now)

    def _start(self, servers: list[_Server], now: float) -> None:
        """Let replicas answer."""
        for server in servers:
            self._servers[server.replica.name] = server
        self._front.update(now, [server.replica.name for server in servers], [])
        for server in servers:
            backend = self._front.fleet.get(server.replica.name)
            assert backend is not None
            backend.note_check(now, passed=True)
            if self._fleet.route == "events":
                backend.holdings = server.replica.holdings
        self._count(now)

    def _add(self, number: int, now: float) -> None:
        """Ask for more replicas, which answer after a cold start."""
        for _ in range(number):
            server = self._create(now)
            self._starting.append(server)

            def ready(now: float, server: _Server = server) -> None:
                if server in self._starting:
                    self._starting.remove(server)
                    self._start([server], now)

            self._at(now + self._fleet.conditions.cold_start_s, ready)
        self._count(now)

    def _count(self, now: float) -> None:
        answering = [server for server in self._servers.values() if not server.replica.draining]
        self._tally.replicas(now, len(answering))
        self._most = max(self._most, len(self._servers) + len(self._starting))

    def _end_server(self, server: _Server, now: float) -> None:
        server.ended = now
        self._gone.append(server)
        del self._servers[server.replica.name]
        self._count(now)

    def _retire(self, replica: Replica, now: float) -> None:
        """Give back a replica that the scaler drains, once it has no request."""
        backend = self._front.fleet.get(replica.name)
        if backend is not None and backend.draining and not replica.in_flight and replica.alive:
            replica.kill()
            self._end_server(self._servers[replica.name], now)
            self._front.update(now, [], [replica.name])

    def _next_notice(self, now: float) -> None:
        rate = self._fleet.conditions.preempted * self._fleet.size.replicas / 3600
        self._at(now + self._random.expovariate(rate), self._notice)

    def _notice(self, now: float) -> None:
        """A spot machine is to be taken back: its engine drains, and another machine is asked for."""
        self._next_notice(now)
        servers = [one for one in self._servers.values() if not one.replica.draining]
        if not servers:
            return
        server = self._random.choice(servers)
        server.replica.draining = True
        self._probe_later(server.replica, now)
        self._at(now + self._fleet.conditions.notice_s, lambda now: self._lose([server], now))
        if self._scaler is None:
            self._add(1, now)
        self._count(now)

    def _lose_rack(self, now: float) -> None:
        rack = [one for one in self._servers.values() if one.number < self._fleet.conditions.rack]
        self._lose(rack, now)
        for server in rack:
            self._probe_later(server.replica, now)
        if self._scaler is None:
            self._add(len(rack), now)

    def _lose(self, servers: list[_Server], now: float) -> None:
        """Replicas end at once, and the connections to them break."""
        lost = []
        for server in servers:
            if server.replica.alive:
                lost += server.replica.kill()
                self._end_server(server, now)
        for request in lost:
            flight = self._flights[request]
            assert flight.backend is not None
            flight.backend.end(flight.work, begun=request.first < math.inf)
            flight.backend.breakers[stage_of(vision=flight.wanted.has_images)].fail(now)
            self._front.changed()
            if request.first < math.inf:
                self._leave(flight, "failed", now)
            else:
                self._retry(flight, now)

    def _retry(self, flight: _Flight, now: float) -> None:
        """Send a request again that had no first byte when its replica went away."""
        old = flight.request
        del self._flights[old]
        flight.request = replace(old, fresh=False, cached=0)
        self._flights[flight.request] = flight
        self._send(flight, now, budgeted=True)

    def _probe_later(self, replica: Replica, now: float) -> None:
        """Check the health of a replica at a random time of the period, and then in each period."""
        every = self._fleet.resilience.probe_every_s
        if every:
            self._at(now + every * self._random.random(), lambda now: self._probe(replica, now))

    def _probe(self, replica: Replica, now: float) -> None:
        """The gateway's health check. A replica that is gone is no longer listed when it is unhealthy."""
        backend = self._front.fleet.get(replica.name)
        if backend is None:
            return
        backend.note_check(now, passed=replica.alive and not replica.draining, draining=replica.alive)
        self._front.changed()
        if backend.healthy:
            every = self._fleet.resilience.probe_every_s
            self._at(now + every, lambda now: self._probe(replica, now))
        else:
            self._front.update(now, [], [replica.name])

    def _scale(self, now: float) -> None:
        assert self._scaler is not None
        self._at(now + self._fleet.conditions.scale_every_s, self._scale)
        good, answers = self._tally.recent
        share = good / answers if answers >= FEWEST_ANSWERS else None
        self._tally.recent = [0, 0]
        servers = [one for one in self._servers.values() if not one.replica.draining]
        signals = [one.replica.signals(now, share) for one in servers]
        replicas = len(servers) + len(self._starting)
        wanted = self._scaler.decide(now, signals, replicas).replicas
        if wanted > replicas:
            self._add(wanted - replicas, now)
        for _ in range(replicas - wanted):
            if self._starting:
                server = self._starting.pop()
                server.ended = now
                self._gone.append(server)
                continue
            server = min(servers, key=lambda one: (one.replica.in_flight, -one.number))
            servers.remove(server)
            self._drain(server.replica, now)

    def _drain(self, replica: Replica, now: float) -> None:
        backend = self._front.fleet.get(replica.name)
        assert backend is not None
        replica.draining = backend.draining = True
        self._front.changed()
        self._count(now)
        self._retire(replica, now)

    def _figures(self) -> FleetFigures:
        until = self._tally.until
        servers = [*self._gone, *self._servers.values(), *self._starting]
        seconds = sum(max(0.0, min(server.ended, until) - server.began) for server in servers)
        hours = (seconds + until * len(self._encoders)) / 3600
        replicas = [server.replica for server in servers]
        images = sum(one.encoded for one in replicas) + sum(one.images for one in self._encoders.values())
        return self._tally.figures(replicas, images, hours, self._most, self._fleet.price_per_h)
