"""Admission of requests, by the choices in flight and by the KV that these may come to use.

A request is counted twice: by its number of choices when it arrives, and by its tokens of KV as soon as these
are known, for which the headers of its images suffice. Both are given back when the request ends, for any
reason.

A request whose first token would be late is degraded, or refused with the figures (`FirstTokenGate`).
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from dataclasses import dataclass

from fovea.core.errors import InvalidRequest, Overloaded
from fovea.engine.config.schedule import ScheduleSettings
from fovea.engine.job import Event, Sink
from fovea.engine.schedule.first_tokens import Expectation, FirstTokens
from fovea.engine.sequence import Sequence

ASSUMED_ANSWER_TOKENS = 256
"""Assumed tokens of an answer whose request names no limit."""


@dataclass(frozen=True, slots=True)
class RequestSize:
    """Tokens of KV that a request may use. Prefix hits may make it cheaper; admission does not count on them.

    prompt: tokens of the prompt.
    visual: how many of these are visual tokens.
    answers: tokens of the answers of all choices together.
    """

    prompt: int
    visual: int
    answers: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.answers


def request_size(prompt: int, visual: int, max_tokens: int | None, choices: int) -> RequestSize:
    """Return the size of a request. Its choices share the KV of the prompt.

    prompt, visual: tokens of the prompt, and how many of them are visual.
    max_tokens: the request's own limit for an answer; None: `ASSUMED_ANSWER_TOKENS` is assumed.
    choices: number of choices of the request.
    """
    return RequestSize(
        prompt, visual, choices * (ASSUMED_ANSWER_TOKENS if max_tokens is None else max_tokens)
    )


class Admission:
    """Counts choices and KV tokens of the requests in flight, and refuses requests beyond the limits.

    Thread-safe.

    max_in_flight: most choices that may run or wait; 0: no limit.
    kv_tokens: tokens of the KV pool.
    token_bytes: bytes of KV per token, for messages.
    refuse: whether a request for which there is no KV now is refused instead of queued.
    """

    def __init__(self, max_in_flight: int, kv_tokens: int, token_bytes: int, *, refuse: bool) -> None:
        self._max_in_flight = max_in_flight
        self._kv_tokens = kv_tokens
        self._token_bytes = token_bytes
        self._refuse = refuse
        self._lock = threading.Lock()
        self._choices = 0
        self._tokens = 0

    @property
    def in_flight(self) -> int:
        """Number of choices in flight."""
        return self._choices

    @property
    def load(self) -> float:
        """Choices in flight as a share of their limit, or KV as a share of the pool, whichever is larger.

        Above 1, requests wait for KV.
        """
        with self._lock:
            choices = self._choices / self._max_in_flight if self._max_in_flight else 0.0
            return max(choices, self._tokens / self._kv_tokens)

    def check(self, choices: int, reserved: int = 0) -> None:
        """Check whether a request has room. Nothing is counted.

        choices: choices of the request.
        reserved: choices that the server has admitted and whose images it still fetches.
        Raises InvalidRequest for a request that can never have room, Overloaded for one that has none now.
        """
        with self._lock:
            self._check(choices, reserved)

    def enter(self, choices: int) -> Ticket:
        """Count the choices of a request. Raises the errors of `check`."""
        with self._lock:
            self._check(choices)
            self._choices += choices
        return Ticket(self, choices)

    def commit(self, ticket: Ticket, size: RequestSize) -> None:
        """Count the KV of the ticket's request.

        Raises Overloaded if it does not fit beside the others and requests are refused instead of queued.
        """
        with self._lock:
            if self._refuse and self._tokens and self._tokens + size.tokens > self._kv_tokens:
                raise Overloaded(self._refusal(size), retry_after=1.0, scope="request")
            self._tokens += size.tokens
            ticket.tokens = size.tokens

    def leave(self, ticket: Ticket) -> None:
        """Give back everything that the ticket counted. A second call does nothing."""
        with self._lock:
            self._choices -= ticket.choices
            self._tokens -= ticket.tokens
            ticket.choices = ticket.tokens = 0

    def _check(self, choices: int, reserved: int = 0) -> None:
        if not self._max_in_flight:
            return
        if choices > self._max_in_flight:
            raise InvalidRequest(
                f"{choices} choices are requested; at most {self._max_in_flight} may run and wait here",
                param="n",
            )
        occupied = self._choices + reserved
        if occupied + choices > self._max_in_flight:
            raise Overloaded(
                f"{occupied} choices are running or waiting; at most {self._max_in_flight} may",
                retry_after=1.0,
                scope="engine" if occupied >= self._max_in_flight else "request",
            )

    def _refusal(self, size: RequestSize) -> str:
        return (
            f"the request may take {self._mib(size.tokens)} of KV ({size.prompt} tokens of prompt, "
            f"{size.visual} of them visual, {size.answers} of answers); requests in flight have "
            f"{self._mib(self._tokens)} of {self._mib(self._kv_tokens)}"
        )

    def _mib(self, tokens: int) -> str:
        return f"{tokens * self._token_bytes / (1 << 20):.1f} MiB"


@dataclass(slots=True)
class Ticket:
    """One admitted request.

    owner: the admission that counts it.
    choices: choices that are counted.
    tokens: tokens of KV that are counted.
    """

    owner: Admission
    choices: int
    tokens: int = 0

    def commit(self, size: RequestSize) -> None:
        """Count the request's KV, see `Admission.commit`."""
        self.owner.commit(self, size)

    def leave(self) -> None:
        """Give everything back. A second call does nothing."""
        self.owner.leave(self)


def leave_at_end(ticket: Ticket, sink: Sink) -> Sink:
    """Return a sink that gives the ticket's places back after the last event of the last choice.

    They are free then even if the client reads the events slowly or never. For one thread, the loop's.

    ticket: of the request. sink: gets every event.
    """
    unfinished = ticket.choices

    def deliver(event: Event) -> None:
        nonlocal unfinished
        try:
            sink(event)
        finally:
            if event.finish_reason is not None:
                unfinished -= 1
                if not unfinished:
                    ticket.leave()

    return deliver


MOST_STEPS_DOWN = 2
"""Most steps by which the detail of images is lowered (`visual_budget.detail`)."""
PROBE = 32
"""Number of refusals in a row of requests with images to encode, or of those without, before one enters."""


class FirstTokenGate:
    """Decides whether a request enters, by its expected first token. Thread-safe.

    Without it, a queue that is too long makes every request late. Whoever is refused at once can ask
    elsewhere, or later.

    Expectations are learnt from requests that entered. An expectation that is wrong, for example after a
    stall, could refuse all requests of a kind, and nothing would correct it. So after PROBE refusals in a
    row, one such request enters, unless its first token is expected late even without the margin of
    experience.

    attempts: steps down in the detail of images that are tried one after the other until the first token is
        in time.
    refused: number of requests that were refused because their first token would have been late.
    degraded: number of requests that entered with less detail for that reason.
    target_s: the target in seconds; 0: none.
    """

    def __init__(self, first_tokens: FirstTokens, settings: ScheduleSettings) -> None:
        self.attempts = range(1 + MOST_STEPS_DOWN if settings.when_late == "degrade" else 1)
        self.refused = 0
        self.degraded = 0
        self._first_tokens = first_tokens
        self._lock = threading.Lock()
        self._in_a_row: Counter[bool] = Counter()
        self.target_s = 0.0 if settings.when_late == "wait" else settings.target_ttft_ms / 1000

    def expect(self, seq: Sequence) -> Expectation:
        """Predict the first token of a sequence that only describes the request."""
        return self._first_tokens.expect(seq)

    def late(self, seq: Sequence, expected: Expectation) -> bool:
        """Whether the first token would be late. Requests that only encode have none."""
        return not seq.encode_only and expected.late(self.target_s)

    def enter(self, seq: Sequence, expected: Expectation, steps_down: int) -> None:
        """Count a request until its first token or its end.

        steps_down: steps by which its detail was lowered.
        Raises Overloaded, with the figures, if the first token would be late.
        """
        if self.late(seq, expected) and not self._probes(expected):
            over = expected.seconds * expected.factor - self.target_s
            raise Overloaded(
                f"the first token would be later than the target of {self.target_s:g} s: {expected.reason}",
                retry_after=float(max(1, math.ceil(over))),
                # Ready requests are served first. If even they would be late, everyone is.
                scope="engine"
                if expected.cost.ready and expected.ahead.seconds > self.target_s
                else "request",
            )
        with self._lock:
            self.degraded += steps_down > 0
            self._in_a_row[expected.cost.ready] = 0
        self._first_tokens.enter(seq, seq.arrival, expected)

    def _probes(self, expected: Expectation) -> bool:
        """Count a refusal; or return that the request enters after all, so that its kind can be measured."""
        ready = expected.cost.ready
        with self._lock:
            if self._in_a_row[ready] >= PROBE and (expected.idle or expected.seconds <= self.target_s):
                return True
            self._in_a_row[ready] += 1
            self.refused += 1
            return False

    def leave(self, seq: Sequence) -> None:
        """Stop counting a request. A second call does nothing."""
        self._first_tokens.leave(seq.id)

    def stats(self) -> dict[str, float]:
        """Return the counters by the names of `observe.table`."""
        return {"requests_refused_late": self.refused, "requests_degraded_late": self.degraded}
