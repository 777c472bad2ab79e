"""The experiments of one gateway process: chooses variants, counts outcomes, and follows decisions.

The calls on the data path (`choose`, `shadow`, `record`) read and write memory alone. A thread writes new
sums to the state file once a second, reads the states that other processes or a person set, and checks the
guard rails in turn with the other processes.

A request gets the same variant for the same sticky value, on every worker, without memory. Every variant
draws a number for the sticky value: its hash, as a point u between 0 and 1, gives the time -ln(u) / weight of
an exponential clock, and the earliest clock wins. A variant wins with a probability in proportion to its
weight. If the weight of one variant grows, its clocks become earlier and all others stay as they are, so
requests move to that variant only, and no more than have to. (Weighted rendezvous hashing: Thaler and
Ravishankar 1998; the weighted form is that of Schindelhauer and Schomaker 2005.)
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from fovea.core.errors import InvalidRequest
from fovea.gateway.experiments.config import Experiment, ExperimentConfig, Variant
from fovea.gateway.experiments.statistics import Outcome, Statistics
from fovea.gateway.experiments.store import ACTIVE, Delta, Key, State, Store
from fovea.gateway.experiments.verdict import MICRO, ROLL_BACK, Verdict, verdicts

SPLIT = "split"
HEADER = "header"
SHADOW = "shadow"
PROMOTED = "promoted"
ROLLED_BACK = "rolled_back"
ELSEWHERE = -1
"""Generation of outcomes that do not count, because other processes run other variants meanwhile."""
log = logging.getLogger("fovea.gateway.experiments")


class Experiments:
    """The experiments of a gateway process. Its calls come from one thread, except `rate` and `sync`."""

    def __init__(
        self,
        config: ExperimentConfig,
        *,
        clock: Callable[[], float] = time.time,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """Open the state file, and register the experiments in it.

        clock: seconds of the epoch.
        draw: a random number from 0 to below 1, for requests without a sticky value.

        Raises ConfigError.
        """
        self._config = config
        self._clock = clock
        self._draw = draw
        self._store = Store(config.path)
        self._by_model = {experiment.model: _Running(experiment) for experiment in config.experiments}
        self._by_name = {running.experiment.name: running for running in self._by_model.values()}
        self._deltas: dict[Key, Delta] = {}
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            for experiment in config.experiments:
                self._store.register(experiment, clock())
            self._follow()
        except BaseException:
            self._store.close()
            raise

    @property
    def path(self) -> Path:
        """The state file."""
        return self._config.path

    def of(self, model: str) -> Experiment | None:
        """Return the experiment of a model, which tells the header and the sticky value to read; or None."""
        running = self._by_model.get(model)
        return None if running is None else running.experiment

    def choose(self, model: str, header: str | None, sticky: str | None) -> Assignment | None:
        """Return the variant of a request; None if its model has no experiment.

        header: value of the experiment's header, which names a variant; None or empty: none was sent.
        sticky: the value whose requests stay together; None or empty: the request is drawn by itself.

        Raises InvalidRequest if the header names no variant.
        """
        running = self._by_model.get(model)
        if running is None:
            return None
        if header:
            return self._named(running, header)
        if running.fixed is not None:
            return running.fixed
        experiment = running.experiment
        variant = running.splitter.choose(sticky or repr(self._draw()))
        return Assignment(experiment.name, variant.name, variant.model, SPLIT, running.generation)

    def shadow(self, model: str) -> Assignment | None:
        """Return the variant that gets a copy of a request; None if there is to be no copy.

        The caller ends the copy with `record`, or with `drop` if there is no outcome.
        """
        running = self._by_model.get(model)
        if running is None or not running.experiment.shadow.variant or running.fixed is not None:
            return None
        experiment, settings = running.experiment, running.experiment.shadow
        variant = experiment.variant(settings.variant)
        if variant is None or variant.name in running.state.removed:
            return None
        running.owed = min(1.0, running.owed) + settings.share
        if running.owed < 1 or running.copies >= settings.in_flight:
            return None
        running.owed -= 1
        running.copies += 1
        return Assignment(experiment.name, variant.name, variant.model, SHADOW, running.generation)

    def record(self, assignment: Assignment, outcome: Outcome) -> None:
        """Count the outcome of a request or of a copy, unless the client chose its variant itself."""
        running = self._by_name[assignment.experiment]
        if assignment.reason == SHADOW:
            running.copies -= 1
        if not assignment.is_counted:
            return
        key = (assignment.experiment, assignment.variant, assignment.generation)
        with self._lock:
            delta = self._deltas.get(key)
            if delta is None:
                delta = self._deltas[key] = Delta(Statistics(), [])
            delta.statistics.add(outcome, running.experiment.largest_cost * MICRO)
            if outcome.request_id and assignment.reason != SHADOW:
                delta.requests.append(outcome.request_id)

    def drop(self, assignment: Assignment) -> None:
        """End a copy that has no outcome, such as one that could not be sent."""
        if assignment.reason == SHADOW:
            self._by_name[assignment.experiment].copies -= 1

    def rate(self, request_id: str, rating: int) -> bool:
        """Rate an answered request, 1 to 5 (see `rating_of`). The last rating of a request counts.

        It writes to the state file, so call it in a worker thread. A request that another process answered is
        known after that process wrote its sums, within about a second.

        Returns False if the request is not known, or not any more. Raises sqlite3.Error.
        """
        if self._store.rate(request_id, rating):
            return True
        self.flush()
        return self._store.rate(request_id, rating)

    def verdicts(self, name: str) -> tuple[Verdict, ...]:
        """Return the verdicts on an experiment's variants, from the sums of all processes."""
        return verdicts(self._by_name[name].experiment, self._store.sums(name))

    def flush(self) -> None:
        """Write new sums to the state file. Raises sqlite3.Error; then they are kept for the next time."""
        with self._writing:
            with self._lock:
                deltas, self._deltas = self._deltas, {}
            if not deltas:
                return
            try:
                self._store.add(deltas, self._config.settings.recent_requests)
            except BaseException:
                with self._lock:
                    self._restore(deltas)
                raise

    def sync(self) -> None:
        """Write new sums, check the guard rails if they are due, and follow the states of the file.

        Raises sqlite3.Error.
        """
        self.flush()
        for running in self._by_name.values():
            if running.fixed is None:
                self._check(running)
        self._follow()

    def start(self) -> None:
        """Start the thread that calls `sync`."""
        self._thread = threading.Thread(target=self._run, name="fovea-experiments", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, write what is left, and close the file."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        try:
            self.flush()
        except sqlite3.Error as error:
            log.error("the last sums of the experiments could not be written: %s", error)
        self._store.close()

    def _named(self, running: _Running, header: str) -> Assignment:
        experiment = running.experiment
        variant = experiment.variant(header)
        if variant is None or variant.name in running.state.removed:
            names = [each.name for each in experiment.variants if each.name not in running.state.removed]
            raise InvalidRequest(
                f"the header {experiment.header} is {header!r}; accepted: {', '.join(names)}, or no header",
                param=experiment.header,
            )
        return Assignment(experiment.name, variant.name, variant.model, HEADER, running.generation)

    def _run(self) -> None:
        while not self._stopping.wait(self._config.settings.flush_s):
            try:
                self.sync()
            except sqlite3.Error as error:
                log.error("experiments: the state file cannot be used now: %s", error)
            except Exception:  # the thread must go on, because nobody else writes the sums
                log.exception("experiments: the state could not be updated")

    def _check(self, running: _Running) -> None:
        """Roll back the variants that violate a guard rail, if no other process checked them just now."""
        name, now = running.experiment.name, self._clock()
        if not self._store.claim_check(name, now, self._config.settings.check_s):
            return
        for verdict in self.verdicts(name):
            if verdict.decision == ROLL_BACK and verdict.variant not in running.state.removed:
                reason = f"automatic: {verdict.variant}: {verdict.words}"
                if self._store.roll_back(name, [verdict.variant], reason, now):
                    log.warning("experiment %s: %s is rolled back: %s", name, verdict.variant, verdict.words)

    def _follow(self) -> None:
        states = self._store.states()
        for name, running in self._by_name.items():
            state = states.get(name)
            if state is not None and state != running.state:
                running.follow(state)

    def _restore(self, deltas: dict[Key, Delta]) -> None:
        """Put sums back that could not be written."""
        for key, delta in deltas.items():
            newer = self._deltas.get(key)
            if newer is not None:
                delta.statistics.merge(newer.statistics)
                delta.requests += newer.requests
            del delta.requests[: -self._config.settings.recent_requests]
            self._deltas[key] = delta


class Assignment(NamedTuple):
    """The variant that a request gets, and why.

    model: name of the served model.
    reason: `split` (by weight), `header` (the client named it), `shadow` (a copy), `promoted` or
        `rolled_back` (the experiment is decided).
    generation: that of the numbers to which the outcome belongs.
    """

    experiment: str
    variant: str
    model: str
    reason: str
    generation: int = 0

    @property
    def is_counted(self) -> bool:
        """Whether the outcome belongs into the comparison: who gets the variant was chosen at random."""
        return self.reason in (SPLIT, SHADOW)


class Splitter:
    """The weights of an experiment's variants, ready to choose."""

    def __init__(self, experiment: Experiment, removed: Iterable[str] = ()) -> None:
        """removed: names of variants that get no more requests."""
        gone = {*removed, experiment.shadow.variant}
        self._clocks: list[tuple[Variant, Callable[[], hashlib.blake2b], float]] = [
            (variant, _salted(experiment.name, variant.name).copy, 1 / variant.weight)
            for variant in experiment.variants
            if variant.name not in gone and variant.weight > 0
        ]

    def choose(self, sticky: str) -> Variant:
        """Return the variant of a sticky value."""
        data = sticky.encode("utf-8", "surrogatepass")
        best, earliest = self._clocks[0][0], math.inf
        for variant, start, scale in self._clocks:
            digest = start()
            digest.update(data)
            point = (int.from_bytes(digest.digest(), "big") + 0.5) / 18446744073709551616.0
            time = -math.log(point) * scale
            if time < earliest:
                best, earliest = variant, time
        return best


def _salted(experiment: str, variant: str) -> hashlib.blake2b:
    """Return a hash that differs between experiments, so that their splits are independent."""
    return hashlib.blake2b(f"{experiment}\0{variant}\0".encode(), digest_size=8)


class _Running:
    """One experiment in this process.

    fixed: the assignment of all requests once the experiment is decided; None while it is active.
    splitter: chooses by weight.
    generation: that of the numbers to which outcomes are added.
    copies: copies in flight.
    owed: share of the next copy that is due already.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.copies = 0
        self.owed = 0.0
        self.follow(State())

    def follow(self, state: State) -> None:
        """Change to a state."""
        experiment = self.experiment
        self.state = state
        self.generation = state.generation if state.identity in ("", experiment.identity) else ELSEWHERE
        self.splitter = Splitter(experiment, state.removed)
        self.fixed = None
        if state.state != ACTIVE:
            variant = experiment.variant(state.promoted) or experiment.baseline
            self.fixed = Assignment(
                experiment.name, variant.name, variant.model, state.state, self.generation
            )
