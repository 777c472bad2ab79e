"""What a server understands of a chat request. OpenAI's API has options that not every server knows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Self

from fovea.bench.sample import Ask, Sample
from fovea.core.errors import ConfigError

REFUSALS = ("http 400", "http 422", "http 500", "http 501")
"""How servers answer a field that they do not know."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """Which optional fields are sent.

    usage: stream_options.include_usage. ignore_eos: an extension that vLLM, SGLang, llama.cpp and Fovea have, so that
    answers have the length that is asked for. length: the name of the field with that length. greedy: temperature 0.
    """

    usage: bool = True
    ignore_eos: bool = True
    length: str = "max_tokens"
    greedy: bool = True

    def body(self, ask: Ask, model: str) -> dict[str, Any]:
        body: dict[str, Any] = {"model": model, "messages": list(ask.messages), "stream": True}
        body[self.length] = ask.max_tokens
        if self.usage:
            body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.greedy:
            body["temperature"] = 0
        if ask.priority:
            body["priority"] = ask.priority
        if ask.salt:
            body["cache_salt"] = ask.salt
        return body

    def without(self, refusal: str) -> Self | None:
        """The dialect without the field that a refusal names, or, where it names none, without one of them."""
        steps = {
            "stream_options": replace(self, usage=False),
            "ignore_eos": replace(self, ignore_eos=False),
            "max_tokens": replace(self, length="max_completion_tokens"),
            "temperature": replace(self, greedy=False),
        }
        left = {name: after for name, after in steps.items() if after != self}
        named = [after for name, after in left.items() if name in refusal]
        return next(iter(named or left.values()), None)

    @property
    def notes(self) -> list[str]:
        said = []
        if not self.usage:
            said.append("the server does not know stream_options: tokens are counted by events")
        if not self.ignore_eos:
            said.append("the server does not know ignore_eos: answers may end before their length")
        if not self.greedy:
            said.append("the server refuses temperature 0: answers are sampled as it likes")
        return said


async def negotiate(ask: Callable[[Dialect], Awaitable[Sample]]) -> tuple[Dialect, Sample]:
    """The fullest dialect that the server answers in, and that answer. Raises ConfigError with the server's last words."""
    dialect = Dialect()
    refused = ""
    while True:
        sample = await ask(dialect)
        failure = sample.failure
        if failure is None or failure.kind == "empty answer":
            return dialect, sample
        # The first refusal speaks of the whole request; later ones only of what was left of it.
        refused = refused or f"{failure.kind}: {failure.text}"
        after = dialect.without(failure.text) if failure.kind in REFUSALS else None
        if after is None:
            raise ConfigError(f"the server does not answer a first short question: {refused}")
        dialect = after
