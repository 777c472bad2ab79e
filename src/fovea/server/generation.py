"""One generation of a request: from its hand-over to the engine to its last delta.

A request has one generation, or one per prompt of /v1/completions. Each charges its tokens to the client.

An estimate is taken before the engine gets the request, so that many simultaneous requests cannot exceed a
limit together. It is replaced by the real usage at the end. A request whose client leaves, or whose timeout
runs out, has no usage. The limit is charged with the estimate or with what was generated, whichever is more:
otherwise a client that always leaves before the end would pay nothing. Totals, metrics and the access log get
the prompt and what was generated. A request that the engine refuses costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from fovea.api import sse
from fovea.core.errors import DeadlineExceeded, EngineError, FoveaError
from fovea.core.types import (
    AnswerBuilder,
    ChatPrompt,
    Completion,
    Delta,
    GenerationRequest,
    PlannedPrompt,
    Prompt,
    TextPart,
    TextPrompt,
    Usage,
)
from fovea.server.request import Request

SILENCE_S = 10.0
"""Seconds without a first token after which a stream sends a comment, and again after as many."""
BYTES_PER_TOKEN = 4
"""Usual bytes of text per token."""
IMAGE_TOKENS = 256
"""Assumed tokens of an image or video of a request that ends without usage."""
log = logging.getLogger("fovea.server")


class Charge:
    """The tokens of one generation, charged to the client of its request.

    check: whether the client must have enough left. A request with several prompts is checked once, with the
        first of them; otherwise a request with more prompts than tokens per minute would never get through.

    media: images and videos of the prompt.

    Raises Overloaded on construction if the client has too few left.
    """

    def __init__(self, request: Request, asked: GenerationRequest, *, check: bool = True) -> None:
        text, media = _prompt_size(asked.prompt)
        answer = asked.sampling.max_tokens or asked.usual_tokens or 0
        self.media = media
        self._request = request
        self._prompt_text = text // BYTES_PER_TOKEN
        self._prompt = self._prompt_text + media * IMAGE_TOKENS
        self._generated = 0
        self._used: int | None = None
        self._estimate = 0 if asked.encode_only else self._prompt_text + answer * asked.sampling.n
        self._held = request.caller.client.hold_tokens(self._estimate, check=check)

    def add(self, delta: Delta) -> None:
        """Count a delta of the answer."""
        self._generated += len(delta.token_ids)
        self._prompt = delta.prompt_tokens or self._prompt
        if delta.usage is not None:
            usage = delta.usage
            self._used = max(usage.prompt, usage.image) + usage.completion
            self._count(max(usage.prompt, usage.image), usage.cached, usage.completion)

    def refuse(self, error: Exception) -> None:
        """Charge nothing if the engine refused the request before it began. error: the engine's error."""
        if isinstance(error, FoveaError) and not isinstance(error, DeadlineExceeded) and not self._generated:
            self._used = 0

    def settle(self) -> Usage | None:
        """Replace the estimate by the real usage. To be called once, at the end.

        Returns what a generation has used that did not reach its end; None: the engine has told it, or has
        refused the request.
        """
        used, cut = self._used, None
        if used is None:
            used = max(self._estimate, self._prompt_text + self._generated) + self.media * IMAGE_TOKENS
            cut = Usage(self._prompt, self._generated)
            self._count(self._prompt, 0, self._generated)
        self._request.caller.client.settle_tokens(self._held, used)
        return cut

    def _count(self, prompt: int, cached: int, completion: int) -> None:
        """Add the tokens and images of the generation to the request and to its client. To be called once."""
        self._request.prompt_tokens += prompt
        self._request.completion_tokens += completion
        totals = self._request.caller.client.totals
        totals.prompt_tokens += prompt
        totals.cached_tokens += cached
        totals.completion_tokens += completion
        totals.images += self.media


class Generation:
    """One generation that the engine has, for metrics, traces and the admin page as well.

    number: differs from that of all others since the server started.
    id: the id of its request, which logs and responses name, too.
    caller: name of its client.
    media: images and videos in its prompt.
    choices: answers that it asks for.
    started: when the engine got it, on the clock of `time.perf_counter`.
    tokens: tokens that were generated so far, of all choices.
    generating: whether it has its first token.
    """

    def __init__(self, request: Request, asked: GenerationRequest) -> None:
        """Nothing is begun before the first delta is asked for."""
        self.id = request.request_id
        self.caller = request.caller.client.name
        self.choices = asked.sampling.n
        self.media = 0
        self.started = 0.0
        self.tokens = 0
        self.generating = False
        self._request = request
        self._asked = asked
        self._last: dict[int, float] = {}
        self._ended = False

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Hand the request over to the engine and yield its deltas. To be called once, and to be closed.

        Raises Overloaded if its client has too few tokens left.
        """
        stream = self._begin()
        try:
            async for delta in stream:
                self._note(delta)
                yield delta
        except Exception as error:
            self._fail(error)
            raise
        except asyncio.CancelledError:
            if (cut := self._request.cut_error) is not None:
                self._fail(cut)
            raise
        finally:
            self._end()
            await stream.aclose()  # type: ignore[attr-defined]

    async def answer(self) -> Completion:
        """Run the generation to its end and return the complete answer."""
        answer = AnswerBuilder(self.choices)
        async for delta in self.deltas():
            answer.add(delta)
        return answer.build()

    def _begin(self) -> AsyncIterator[Delta]:
        request, state, client = self._request, self._request.state, self._request.caller.client
        asked = self._asked
        self._asked = asked = replace(
            asked,
            id=f"{request.request_id}-{asked.id}",
            cache_share=client.limits.cache_share,
            client=asked.client if any(asked.client) else request.party,
        )
        stream = state.engine.stream(asked)
        self._charge = Charge(request, asked, check=not request.begun)
        self.media = self._charge.media
        request.hand_over(self.choices)
        self.started = time.perf_counter()
        self._run = state.tracking.start(request.timeline, asked, state.engine.info.name)
        self.number = state.in_flight.add(self)
        state.metrics.begin_answer(self.choices, asked.sampling.max_tokens)
        return stream

    def _note(self, delta: Delta) -> None:
        if delta.offers and not delta.token_ids and delta.usage is None:
            return  # nothing of an answer
        state, last, now = self._request.state, self._last, time.perf_counter()
        state.tracking.note(self._run, delta, now)
        if not last:
            self.generating = True
            seconds = self._asked.fetch_s + self._asked.media_decode_s + now - self.started
            state.metrics.observe_first_token(seconds, self._request.timeline.recorded_id)
            state.in_flight.count_first_token(seconds)
        self.tokens += len(delta.token_ids)
        self._ended = delta.usage is not None
        if delta.index in last and delta.token_ids:
            state.metrics.observe_gap(now - last[delta.index])
        last[delta.index] = now
        state.metrics.observe_delta(delta, self.choices, self._request.timeline.recorded_id)
        self._charge.add(delta)

    def _fail(self, error: Exception) -> None:
        self._run.error = error.code if isinstance(error, FoveaError) else EngineError.default_code
        self._charge.refuse(error)

    def _end(self) -> None:
        """Give back what the generation holds."""
        state, cut = self._request.state, self._charge.settle()
        state.in_flight.remove(self)
        if not self._ended:
            state.metrics.count_cut("error" if self._run.error else "abort", cut)
            self._run.error = self._run.error or "client_gone"
        self._request.caller.client.places -= self.choices
        state.media.release(self._asked.prompt)


class StreamWriter(Protocol):
    """Writer of the events of one kind of answer, such as ChatBodies.

    done: bytes that end a stream without an error.
    """

    done: bytes

    def chunks(self, delta: Delta) -> list[dict[str, Any]]: ...

    def closing(self, usage: Usage, include_usage: bool) -> list[dict[str, Any]]: ...

    def failure(self, error: FoveaError) -> dict[str, Any]: ...

    def event(self, payload: Any, /) -> bytes: ...


async def stream(
    request: Request, asked: GenerationRequest, writer: StreamWriter, *, include_usage: bool
) -> None:
    """Answer a request with a stream of server-sent events.

    Nothing is sent before the first delta, so that an error of the request still becomes an HTTP status, but
    for no longer than SILENCE_S: clients and proxies take a longer silence for a dead connection. Once status
    200 is sent, an error becomes an event, and the stream ends without its mark of the end.
    """
    deltas = Generation(request, asked).deltas()
    first = asyncio.ensure_future(anext(deltas))
    try:
        await _wait(request, first)
        await _send(request, first.result(), deltas, writer, include_usage)
    except FoveaError as error:
        await _break_off(request, writer, error, error)
    except asyncio.CancelledError as cancelled:
        if request.cut_error is None:
            raise
        await _break_off(request, writer, request.cut_error, cancelled)
    except Exception as error:  # the client must see that the stream broke
        log.error("a stream broke off", exc_info=error)
        await _break_off(request, writer, EngineError("the answer broke off; see the server's log"), error)
    finally:
        if not first.done():  # a generator cannot be closed while it computes a delta
            first.cancel()
            with suppress(asyncio.CancelledError, FoveaError, StopAsyncIteration):
                await first
        await deltas.aclose()


async def _wait(request: Request, first: asyncio.Future[Delta]) -> None:
    """Wait for the first delta, and send the beginning of the answer with comments if that takes long."""
    while not first.done():
        await asyncio.wait({first}, timeout=SILENCE_S)
        if not first.done():
            if not request.status:
                await _start(request)
            await request.write(sse.COMMENT)


async def _send(
    request: Request,
    first: Delta,
    rest: AsyncGenerator[Delta, None],
    writer: StreamWriter,
    include_usage: bool,
) -> None:
    if not request.status:
        await _start(request)
    usage, delta = Usage(), first
    while True:
        for chunk in writer.chunks(delta):
            await request.write(writer.event(chunk))
        usage = delta.usage or usage
        following = await anext(rest, None)
        if following is None:
            break
        delta = following
    for chunk in writer.closing(usage, include_usage):
        await request.write(writer.event(chunk))
    if writer.done:
        await request.write(writer.done)
    await request.write(b"", more=False)


async def _start(request: Request) -> None:
    await request.start(200, {"content-type": sse.MEDIA_TYPE, **sse.HEADERS})


async def _break_off(request: Request, writer: StreamWriter, error: FoveaError, cause: BaseException) -> None:
    """Send an error as the last event. If nothing was sent yet, raise what has caused it instead."""
    if not request.status:
        raise cause
    await request.write(writer.event(writer.failure(error)))
    await request.write(b"", more=False)


async def answer_all(request: Request, asked: Sequence[GenerationRequest]) -> list[Completion]:
    """Run several generations at once, and return their complete answers."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(Generation(request, one).answer()) for one in asked]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def _prompt_size(prompt: Prompt) -> tuple[int, int]:
    """Return the bytes of text of a prompt, and its number of images and videos."""
    if isinstance(prompt, ChatPrompt):
        parts = [part for message in prompt.messages for part in message.parts]
        texts = [part.text for part in parts if isinstance(part, TextPart)]
        return _bytes(texts), len(parts) - len(texts)
    if isinstance(prompt, TextPrompt):
        return _bytes([prompt.text]), len(prompt.images)
    return len(prompt.ids) * BYTES_PER_TOKEN, len(prompt.images) if isinstance(prompt, PlannedPrompt) else 0


def _bytes(texts: list[str]) -> int:
    return sum(len(text.encode("utf-8", "replace")) for text in texts)
