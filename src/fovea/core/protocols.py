"""Protocols through which one package uses another without importing its implementation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

from fovea.core.media import Detail
from fovea.core.types import Delta, GenerationRequest, ModelInfo, Prompt, Rendered

EngineStatus = Literal["loading", "ready", "stopped"]
CacheStage = Literal["kv", "pixels", "encoder", "regions", "host", "disk", "answers"]
CACHE_STAGES: tuple[CacheStage, ...] = get_args(CacheStage)


class Tokenizer(Protocol):
    """Converts text to token ids and back.

    The result of `decode` may end in half a character; `engine.request.detokenize` handles that.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class EngineClient(Protocol):
    """The interface of an engine, local, remote or simulated, for a server, gateway or benchmark."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def status(self) -> EngineStatus:
        """The state of the engine; it accepts requests only when "ready"."""
        ...

    def stream(self, request: GenerationRequest, /) -> AsyncIterator[Delta]:
        """Generate the answer: yield the deltas of all choices, interleaved.

        Closing the iterator cancels the request and frees its memory. Raises RequestError before the first
        delta if the request is wrong, and EngineError for a defect of the engine.
        """
        ...

    def check_room(self, choices: int, reserved: int = 0) -> None:
        """Check, before its images are fetched, that a request with `choices` choices would be accepted now.

        reserved: choices of other requests that were accepted but whose images are still being fetched.
        Raises Overloaded or Unavailable if the request would be refused now, InvalidRequest if it always
        would be.
        """
        ...

    async def tokenize(self, prompt: Prompt) -> list[int]: ...

    async def render(self, request: GenerationRequest, /) -> Rendered:
        """Return the prompt that the engine would compute for this request now. No pixel is read.

        It takes no place in the queue. An engine renders one request at a time.

        Raises the errors of a request that cannot run, and InvalidRequest with the code "needs_pixels" if the
        tokens or names follow from pixels.
        """
        ...

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included.

        Raises InvalidRequest for an id that the model does not have.
        """
        ...

    def stats(self) -> Mapping[str, float]:
        """Return gauges and running totals under the names in `observe.table`."""
        ...

    async def release_offers(self, offers: Sequence[Mapping[str, Any]]) -> None:
        """End offers to other engines, which have fetched their values. Unknown ones are ignored."""
        ...

    def clear_caches(self, *stages: CacheStage) -> None:
        """Clear the caches of these stages, or of all stages if none is given.

        Entries in use stay until they are released. Blocks until the end of the current step: call it in a
        thread.
        """
        ...

    async def close(self, drain_s: float = 0.0) -> None:
        """Finish the running requests within `drain_s` seconds, abort the rest, and stop the engine."""
        ...


class VisualTokenRule(Protocol):
    """The number of visual tokens of an image, from its dimensions alone. Thread-safe.

    It tells what a request will cost before an engine has seen it. The tokens of videos are not known from
    the outside, because they depend on the frames that an engine samples.
    """

    @property
    def name(self) -> str:
        """The model or the kind of rule, for logs and metrics."""
        ...

    def tokens(
        self, width: int, height: int, *, detail: Detail = "auto", images: int = 1,
        min_pixels: int | None = None, max_pixels: int | None = None,
    ) -> int:  # fmt: skip
        """Return the number of visual tokens that the image takes in the prompt.

        width, height: of the image, in pixels.
        detail: the client's detail level; "auto" counts as the model's own limit.
        images: how many images the conversation holds; few models use it.
        min_pixels, max_pixels: the client's bounds of the area after resizing, in pixels; None: no bound.
        Raises InvalidImage for unusable dimensions, InvalidRequest for bounds that the model refuses.
        """
        ...
