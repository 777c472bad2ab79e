"""The invariants, checked on one answer. Pure: what was asked, what came, and what was disturbing it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tests.chaos.answers import Answer, read
from tests.chaos.client import Outcome
from tests.chaos.orders import Order, secret

Verdict = Literal["ok", "degraded", "refused", "cut", "cancelled", "damaged", "wrong"]
HANGING = frozenset(("silent", "one-way", "bandwidth"))
"""Faults between client and gateway that make the client wait until its own time is over."""
HARMLESS = ("cache", "stop redis", "kill redis", "full disk", "read-only cache", "clock", "flood", "media")
"""Beginnings of kinds of episodes that may not make any request fail, beside that of a flooding tenant."""
TEMPORARY = frozenset((408, 429, 502, 503, 504))
"""Statuses of a request that was right. 500 is a defect."""
MEDIA_STATUSES = frozenset((400, 403, 413)) | TEMPORARY
DAMAGED_STATUSES = frozenset((400, 401, 403, 404, 405, 413, 414, 415, 431, 501, 505)) | TEMPORARY
TRACES = ("Traceback (most recent", 'File "/', "site-packages", "redis://", ".py:", '.py"')
"""Parts of texts that no error may show."""


class Violation(NamedTuple):
    """An invariant that an answer breaks. rule: its short name. detail: what was seen."""

    rule: str
    marker: str
    detail: str


@dataclass(frozen=True, slots=True)
class Context:
    """Everything beside the request and its answer that the rules need.

    known: the undisturbed answer; None: the request has to be refused.
    others: undisturbed answers of the requests that were in flight at the same time.
    keys: the tenants' keys, which no answer may show.
    injected: faults that the proxy before the gateway injected into this connection.
    active: kinds of the episodes that may have disturbed it.
    limited: whether its tenant floods, so that it is over its limits.
    """

    known: str | None
    others: frozenset[str] = frozenset()
    keys: tuple[str, ...] = ()
    injected: frozenset[str] = frozenset()
    active: frozenset[str] = frozenset()
    limited: bool = False

    @property
    def excused(self) -> bool:
        """Whether anything happened after which a request that is right may fail."""
        return bool(self.injected) or any(not kind.startswith(HARMLESS) for kind in self.active)

    @property
    def flips(self) -> bool:
        """Whether a proxy damaged bytes anywhere on the way."""
        return any("flip" in kind for kind in self.injected | self.active)


@dataclass(slots=True)
class Judgement:
    """The result for one request. answer: its content, if it has status 200."""

    verdict: Verdict
    violations: list[Violation]
    answer: Answer | None = None


class Judge:
    """Collects the violations of one request."""

    def __init__(self, order: Order, outcome: Outcome, context: Context) -> None:
        self._order, self._outcome, self._context = order, outcome, context
        self._found: list[Violation] = []

    def judge(self) -> Judgement:
        """Check all rules and return the result."""
        outcome, answer = self._outcome, None
        self._check_secrets()
        if outcome.status == 200:
            answer = read(self._order.api, outcome.body, stream=self._order.stream)
            verdict = self._judge_answer(answer)
        elif outcome.status and outcome.ending == "complete":
            verdict = self._judge_error()
        else:
            verdict = self._judge_end()
        return Judgement("wrong" if self._found else verdict, self._found, answer)

    def _add(self, rule: str, detail: str) -> None:
        self._found.append(Violation(rule, self._order.marker, detail[:400]))

    def _check_secrets(self) -> None:
        body = self._outcome.body.decode(errors="replace")
        for part in (*self._context.keys, secret(self._order.marker)):
            if part in body:
                self._add("secret", f"the answer shows {part[:12]}...")

    def _judge_end(self) -> Verdict:
        """Judge a request whose answer did not arrive as a whole."""
        ending = self._outcome.ending
        if ending == "timeout" and not self._context.injected & HANGING:
            self._add("hang", f"no end after {self._outcome.end_s - self._outcome.begin_s:.0f} s")
        if ending == "damaged" and not self._context.flips:
            self._add("protocol", "the bytes are not HTTP, and no proxy has damaged any")
        if ending in ("cut", "unreachable") and not self._context.excused:
            self._add("no cause", f"the connection ended ({ending}) and there was no fault")
        if ending == "cancelled":
            return "cancelled"
        return "damaged" if ending == "damaged" else "cut"

    def _judge_answer(self, answer: Answer) -> Verdict:
        """Judge status 200: its head is right, and its text is the known one, or a part of it."""
        order, outcome, context = self._order, self._outcome, self._context
        if context.known is None:
            if outcome.ending == "complete" and not answer.error and not answer.damage:
                self._add("media", f"{order.media}: was answered: {answer.text!r}")
            return "refused" if answer.error else self._judge_end()
        self._check_identity(answer)
        degraded = "x-fovea-degraded" in outcome.headers
        whole = outcome.ending == "complete"
        if not order.stream and not whole:
            return self._judge_end()
        if answer.damage:
            if not context.flips:
                self._add("unreadable", f"{answer.damage}: {outcome.body[-200:]!r}")
            return "damaged"
        if not degraded:
            self._check_text(answer)
        if answer.error is not None:
            return self._judge_broken_stream(answer, answer.error)
        if answer.done:
            return "degraded" if degraded else "ok"
        if whole:
            self._add(
                "short stream", f"it ended properly, without a mark of success: {outcome.body[-200:]!r}"
            )
        return self._judge_end()

    def _judge_broken_stream(self, answer: Answer, error: Mapping[str, Any]) -> Verdict:
        self._check_error(error, "the stream's last event")
        if answer.done:
            self._add("short stream", "an error, and the mark of success after it")
        if not self._context.excused:
            self._add("no cause", f"the stream broke, and there was no fault: {json.dumps(error)}")
        return "refused"

    def _check_identity(self, answer: Answer) -> None:
        """The answer must be the one to this request: its id, and the id in its head."""
        marker, headers = self._order.marker, self._outcome.headers
        if headers.get("x-request-id") != marker and not self._context.flips:
            self._add("crossing", f"x-request-id is {headers.get('x-request-id')!r}")
        stored = headers.get("x-fovea-cache") in ("hit", "stale")
        if self._order.api == "chat" and answer.answer_id and not stored and marker not in answer.answer_id:
            self._add("crossing", f"the answer's id is {answer.answer_id!r}")

    def _check_text(self, answer: Answer) -> None:
        known, text = self._context.known or "", answer.text
        right = text == known if answer.done else known.startswith(text)
        if not right:
            crossed = text in self._context.others
            headers = {
                name: value for name, value in self._outcome.headers.items() if name.startswith("x-fovea")
            }
            self._add("crossing" if crossed else "wrong answer", f"{text!r} instead of {known!r}; {headers}")

    def _judge_error(self) -> Verdict:
        outcome, context = self._outcome, self._context
        try:
            value = json.loads(outcome.body)
            error = value["error"]
        except (ValueError, KeyError, TypeError):
            if not context.flips:
                self._add("error body", f"{outcome.status}: {outcome.body[:200]!r}")
            return "refused"
        self._check_error(error, f"status {outcome.status}")
        if outcome.status not in self._accepted_statuses():
            self._add("status", f"{outcome.status}: {json.dumps(error)}")
        if outcome.status == 429 and not outcome.headers.get("retry-after", "").isdecimal():
            self._add("status", f"429 without Retry-After: {json.dumps(error)}")
        if context.known is not None and not context.limited and not context.excused:
            self._add("no cause", f"{outcome.status} and there was no fault: {json.dumps(error)}")
        return "refused"

    def _accepted_statuses(self) -> frozenset[int]:
        if self._context.flips:
            return DAMAGED_STATUSES
        if self._context.known is None:
            return MEDIA_STATUSES
        return TEMPORARY

    def _check_error(self, error: Mapping[str, Any], where: str) -> None:
        """An error names a type and a reason, and shows nothing of the inside."""
        message = error.get("message") if isinstance(error, dict) else None
        if not isinstance(message, str) or not message or not isinstance(error.get("type"), str):
            if not self._context.flips:
                self._add("error body", f"{where}: {error!r}")
            return
        for part in TRACES:
            if part in message:
                self._add("secret", f"{where} shows {part!r}: {message}")


def judge(order: Order, outcome: Outcome, context: Context) -> Judgement:
    """Check one answer against all rules."""
    return Judge(order, outcome, context).judge()
