"""Who may come in: requests and answers in flight, and the KV that they may come to take.

A request is counted twice: as so many answers when it arrives, and in blocks as soon as its tokens are known, which is
from the headers of its images alone. Both are given back when it ends, however it ends.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from fovea.core.errors import InvalidRequest, Overloaded

USUAL_ANSWER = 256
"""What an answer without a limit of its own is taken to need."""


@dataclass(frozen=True, slots=True)
class RequestSize:
    """Tokens of KV that a request may take. Prefixes that are found make it cheaper; nobody relies on that."""

    prompt: int
    visual: int
    answers: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.answers


def request_size(prompt: int, visual: int, asked: int | None, choices: int) -> RequestSize:
    """asked: the request's own limit for an answer. The prompt of several answers is there once."""
    return RequestSize(prompt, visual, choices * (USUAL_ANSWER if asked is None else asked))


class Admission:
    """room: answers that run and wait; 0 is no bound. refuse: whether one that finds no KV now is refused, not queued.

    Thread-safe: requests come in on many threads.
    """

    def __init__(self, room: int, kv_tokens: int, token_bytes: int, *, refuse: bool) -> None:
        self._room = room
        self._kv_tokens = kv_tokens
        self._token_bytes = token_bytes
        self._refuse = refuse
        self._lock = threading.Lock()
        self._answers = 0
        self._tokens = 0

    @property
    def in_flight(self) -> int:
        return self._answers

    @property
    def load(self) -> float:
        """What is in flight in parts of what there is room for; above 1 where requests wait for KV."""
        with self._lock:
            answers = self._answers / self._room if self._room else 0.0
            return max(answers, self._tokens / self._kv_tokens)

    def check(self, answers: int, reserved: int = 0) -> None:
        """Raises InvalidRequest for what never has room, Overloaded for what has none now.

        reserved: answers that a server has let in and whose images it still fetches.
        """
        with self._lock:
            self._check(answers, reserved)

    def enter(self, answers: int) -> Ticket:
        """Raises as `check` does."""
        with self._lock:
            self._check(answers)
            self._answers += answers
        return Ticket(self, answers)

    def commit(self, ticket: Ticket, needed: RequestSize) -> None:
        """What the request of the ticket will take. Raises Overloaded where that is not to be waited for."""
        with self._lock:
            if self._refuse and self._tokens and self._tokens + needed.tokens > self._kv_tokens:
                raise Overloaded(self._full(needed), retry_after=1.0)
            self._tokens += needed.tokens
            ticket.tokens = needed.tokens

    def leave(self, ticket: Ticket) -> None:
        with self._lock:
            self._answers -= ticket.answers
            self._tokens -= ticket.tokens
            ticket.answers = ticket.tokens = 0

    def _check(self, answers: int, reserved: int = 0) -> None:
        if not self._room:
            return
        if answers > self._room:
            raise InvalidRequest(
                f"{answers} answers are asked for; at most {self._room} run and wait here", param="n"
            )
        taken = self._answers + reserved
        if taken + answers > self._room:
            raise Overloaded(
                f"{taken} requests are running or waiting, {self._room} is the limit", retry_after=1.0
            )

    def _full(self, needed: RequestSize) -> str:
        return (
            f"the request may take {self._mib(needed.tokens)} of KV ({needed.prompt} tokens of prompt, "
            f"{needed.visual} of them visual, {needed.answers} of answers); requests in flight have "
            f"{self._mib(self._tokens)} of {self._mib(self._kv_tokens)}"
        )

    def _mib(self, tokens: int) -> str:
        return f"{tokens * self._token_bytes / (1 << 20):.1f} MiB"


@dataclass(slots=True)
class Ticket:
    """One request's place. Leaving with it twice is leaving once."""

    owner: Admission
    answers: int
    tokens: int = 0

    def commit(self, needed: RequestSize) -> None:
        self.owner.commit(self, needed)

    def leave(self) -> None:
        self.owner.leave(self)
