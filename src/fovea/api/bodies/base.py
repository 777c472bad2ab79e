"""The common part of the bodies of OpenAI's completions."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any

from fovea.api import sse
from fovea.api.bodies.errors import error_body
from fovea.api.convert import usage_body
from fovea.api.schema import Sampling
from fovea.core.errors import FoveaError
from fovea.core.types import Delta, Usage


@dataclass(frozen=True, slots=True)
class BodyOptions:
    """Options of the body of an answer.

    fingerprint: names what the answer depends on beside the request.
    request_id: part of the answer's id; None: a random one.
    token_ids: whether choices hold the ids of their tokens.
    running_usage: whether every chunk holds the token counts so far.
    """

    fingerprint: str | None = None
    request_id: str | None = None
    token_ids: bool = False
    running_usage: bool = False

    @classmethod
    def of(cls, body: Sampling, fingerprint: str) -> BodyOptions:
        """The options of a request."""
        running = bool(body.stream_options and body.stream_options.continuous_usage_stats)
        return cls(fingerprint, body.request_id, bool(body.return_token_ids), running)


class CompletionWriter:
    """Writer of the bodies of one answer. All of them have the same id, model name and creation time.

    kind, chunk_kind: field `object` of complete bodies, and of chunks. prefix: of the id.
    """

    kind = ""
    chunk_kind = ""
    prefix = ""
    done = sse.DONE
    event = staticmethod(sse.event)

    def __init__(self, model: str, options: BodyOptions | None = None) -> None:
        self.options = options or BodyOptions()
        self.id = f"{self.prefix}-{self.options.request_id or uuid.uuid4().hex}"
        self.model = model
        self.created = int(time.time())
        self._completion = 0
        self._prompt_ids: tuple[int, ...] = ()
        self._held_ids: dict[int, list[int]] = {}

    def closing(self, usage: Usage, include_usage: bool) -> list[dict[str, Any]]:
        """The chunks that end a stream: the token counts if the client requested them."""
        if not include_usage:
            return []
        head = self.head(self.chunk_kind)
        return [{**head, "choices": [], "usage": usage_body(usage).model_dump()}]

    def failure(self, error: FoveaError) -> dict[str, Any]:
        """The chunk of an error that ends a stream."""
        return error_body(error)

    def head(self, kind: str) -> dict[str, Any]:
        """The fields with which every body begins."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.options.fingerprint,
        }

    def finish_chunks(self, delta: Delta, chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add what the options ask for to the chunks of a delta.

        Token ids wait for the next chunk if the delta has none, because its text is held back.
        """
        self._completion += len(delta.token_ids)
        if delta.finish_reason is not None and chunks:
            chunks[-1]["choices"][0]["stop_reason"] = delta.stop
        if self.options.token_ids:
            held = self._held_ids.setdefault(delta.index, [])
            held += delta.token_ids
            if chunks:
                chunks[-1]["choices"][0]["token_ids"] = list(held)
                held.clear()
            self._prompt_ids += delta.prompt_ids
            if self._prompt_ids and chunks:
                chunks[0]["prompt_token_ids"] = list(self._prompt_ids)
                self._prompt_ids = ()
        if self.options.running_usage:
            so_far = Usage(delta.prompt_tokens, self._completion, delta.cached_tokens)
            for chunk in chunks:
                chunk["usage"] = usage_body(so_far).model_dump()
        return chunks


def add_usage(parts: list[Usage]) -> Usage:
    """The sum of the token counts of several answers."""
    return Usage(
        sum(u.prompt for u in parts),
        sum(u.completion for u in parts),
        sum(u.cached for u in parts),
        sum(u.image for u in parts),
        sum(u.reasoning for u in parts),
    )
