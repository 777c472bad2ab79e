"""Dialects: the optional fields of OpenAI's chat API that one server accepts.

Not every server knows all of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Self

from fovea.bench.sample import BenchRequest, Sample
from fovea.core.errors import ConfigError

REFUSALS = ("http 400", "http 422", "http 500", "http 501")
"""Failure kinds with which servers answer a request that has an unknown field."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The optional fields that are sent to a server.

    usage: send stream_options.include_usage.
    ignore_eos: send this extension of vLLM, SGLang, llama.cpp and Fovea, so that answers have the requested
        length.
    length: the name of the field that holds the requested length.
    greedy: send temperature 0.
    """

    usage: bool = True
    ignore_eos: bool = True
    length: str = "max_tokens"
    greedy: bool = True

    def body(self, request: BenchRequest, model: str) -> dict[str, Any]:
        """The JSON body of a request, in this dialect."""
        body: dict[str, Any] = {"model": model, "messages": list(request.messages), "stream": True}
        body[self.length] = request.max_tokens
        if self.usage:
            body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.greedy:
            body["temperature"] = 0
        if request.priority:
            body["priority"] = request.priority
        if request.salt:
            body["cache_salt"] = request.salt
        return body

    def without(self, refusal: str) -> Self | None:
        """A smaller dialect to try after a refusal, or None if no optional field is left.

        It omits the field that the refusal's text names. If the text names none, it omits the first one left.
        """
        smaller = {
            "stream_options": replace(self, usage=False),
            "ignore_eos": replace(self, ignore_eos=False),
            "max_tokens": replace(self, length="max_completion_tokens"),
            "temperature": replace(self, greedy=False),
        }
        candidates = {name: dialect for name, dialect in smaller.items() if dialect != self}
        matches = [dialect for name, dialect in candidates.items() if name in refusal]
        return next(iter(matches or candidates.values()), None)

    @property
    def notes(self) -> list[str]:
        """One sentence per omitted field, for the reader of the results."""
        notes = []
        if not self.usage:
            notes.append("the server does not know stream_options: tokens are counted by events")
        if not self.ignore_eos:
            notes.append("the server does not know ignore_eos: answers may end before their length")
        if not self.greedy:
            notes.append("the server refuses temperature 0: it samples answers with its own default")
        return notes


async def negotiate(probe: Callable[[Dialect], Awaitable[Sample]]) -> tuple[Dialect, Sample]:
    """Find the dialect with the most fields that the server accepts. Return it with the sample of that probe.

    probe: sends one short request in the given dialect.
    Raises ConfigError with the server's first refusal if it accepts no dialect.
    """
    dialect = Dialect()
    first_refusal = ""
    while True:
        sample = await probe(dialect)
        failure = sample.failure
        if failure is None or failure.kind == "empty answer":
            return dialect, sample
        # The first refusal is about the full request; later ones are only about what is left of it.
        first_refusal = first_refusal or f"{failure.kind}: {failure.text}"
        smaller = dialect.without(failure.text) if failure.kind in REFUSALS else None
        if smaller is None:
            raise ConfigError(f"the server does not answer a first short question: {first_refusal}")
        dialect = smaller
