"""Bodies of text completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fovea.api.bodies.base import BodyOptions, CompletionWriter, add_usage
from fovea.api.bodies.logprobs import prompt_logprobs, text_logprobs
from fovea.api.convert import usage_body
from fovea.core.types import Completion, Delta, TokenLogprob


class CompletionBodies(CompletionWriter):
    """Bodies of one text completion. With several prompts, a choice has the index prompt * n + choice."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, model: str, options: BodyOptions | None = None) -> None:
        super().__init__(model, options)
        self._sent: dict[int, int] = {}
        self._held: dict[int, list[TokenLogprob]] = {}

    def complete(self, answers: Sequence[Completion]) -> dict[str, Any]:
        """The body of the complete answers to all prompts, in their order."""
        choices: list[dict[str, Any]] = []
        for answer in answers:
            for index, text in enumerate(answer.texts):
                logprobs = self.logprobs(answer.logprobs[index], len(text))
                choice = self._choice(len(choices), text, answer.finish_reasons[index], logprobs)
                choice["stop_reason"] = answer.stops[index] if answer.stops else None
                if answer.prompt_logprobs:
                    choice["prompt_logprobs"] = prompt_logprobs(answer.prompt_logprobs)
                if self.options.token_ids:
                    choice["token_ids"] = list(answer.token_ids[index])
                    choice["prompt_token_ids"] = list(answer.prompt_ids)
                choices.append(choice)
        total = add_usage([answer.usage for answer in answers])
        return {**self.head(self.kind), "choices": choices, "usage": usage_body(total).model_dump()}

    def logprobs(self, entries: Sequence[TokenLogprob], length: int) -> dict[str, Any] | None:
        """Log probabilities in the form of text completions; None if there are none.

        length: of the choice's text, in characters.
        """
        return text_logprobs(entries, length) if entries else None

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The chunks of a delta: one, or none while the engine holds text back.

        The log probability of a token comes with the token's text: as long as the text is held back, a stop
        string may still cut it off.
        """
        sent = self._sent[delta.index] = self._sent.get(delta.index, 0) + len(delta.text)
        held = self._held.setdefault(delta.index, [])
        held += delta.logprobs
        ready = len(held)
        if delta.finish_reason is None:
            ready = next((number for number, entry in enumerate(held) if entry.offset >= sent), ready)
        logprobs = self.logprobs(held[:ready], sent)
        del held[:ready]
        if not (delta.text or logprobs or delta.finish_reason):
            return self.finish_chunks(delta, [])
        choice = self._choice(delta.index, delta.text, delta.finish_reason, logprobs)
        return self.finish_chunks(delta, [{**self.head(self.chunk_kind), "choices": [choice]}])

    def _choice(self, index: int, text: str, reason: str | None, logprobs: Any) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def best_choices(answer: Completion, count: int, *, logprobs: bool) -> Completion:
    """Return an answer with the choices whose tokens have the largest mean log probability, best first.

    logprobs: whether the client gets log probabilities.
    """

    def mean(index: int) -> float:
        entries = answer.logprobs[index]
        return sum(entry.logprob or 0.0 for entry in entries) / max(1, len(entries))

    order = sorted(range(len(answer.texts)), key=mean, reverse=True)[:count]
    return replace(
        answer,
        texts=tuple(answer.texts[index] for index in order),
        token_ids=tuple(answer.token_ids[index] for index in order),
        finish_reasons=tuple(answer.finish_reasons[index] for index in order),
        logprobs=tuple(answer.logprobs[index] if logprobs else () for index in order),
        stops=tuple(answer.stops[index] for index in order),
    )


def with_prompt(answer: Completion, text: str, first: str, *, generated: bool) -> Completion:
    """Return an answer whose texts begin with the prompt, and so do its log probabilities if it has any.

    text: of the prompt, as the client sent it. first: text of its first token, which has no log probability.
    generated: whether the text after the prompt was asked for.
    """
    echoed: tuple[TokenLogprob, ...] = ()
    if answer.prompt_logprobs:
        opening = TokenLogprob(answer.prompt_ids[0], first, None)
        echoed = (opening, *(entry for entry in answer.prompt_logprobs[1:] if entry is not None))
    usage = answer.usage if generated else replace(answer.usage, completion=0)
    written = [
        tuple(replace(entry, offset=len(text) + entry.offset) for entry in entries) if generated else ()
        for entries in answer.logprobs
    ]
    return replace(
        answer,
        texts=tuple(text + (part if generated else "") for part in answer.texts),
        logprobs=tuple((*echoed, *entries) for entries in written),
        prompt_logprobs=(),
        usage=usage,
    )
