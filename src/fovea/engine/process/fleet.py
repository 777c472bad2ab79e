"""Several engines that serve one model, as one `EngineClient`. They share nothing but their weights.

A request goes to the engine whose caches may know its first image, or the beginning of its text: the same
key goes to the same engine, unless that one has much more work than the others (`engine.peers.choose`). So
the turns of a conversation stay at one engine, and an image is encoded once.

An engine that dies takes its own requests with it. The others go on, and it is started again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from fovea.core.errors import EngineError, FoveaError, Overloaded, Unavailable
from fovea.core.protocols import CacheStage, EngineClient, EngineStatus
from fovea.core.types import (
    ChatPrompt,
    Delta,
    GenerationRequest,
    ImagePart,
    ModelInfo,
    PlannedPrompt,
    Prompt,
    Rendered,
    TextPart,
    TextPrompt,
    TokenPrompt,
)
from fovea.engine.peers.choose import Peer, PeerTable
from fovea.observe.table import FIGURES, GAUGES

LARGEST = frozenset(
    (
        *("oldest_waiting_seconds", "oldest_waiting_ready_seconds", "oldest_waiting_image_seconds"),
        *("queued_work_seconds", "queued_encode_seconds", "speculating", "step_time_margin"),
        *("kv_block_tokens", "kv_block_bytes", "window_block_bytes", "encoder_engines"),
        # One folder, which all engines share.
        *("embed_disk_bytes", "embed_disk_capacity_bytes", "embed_disk_entries", "embed_disk_off"),
    )
)
"""Gauges of which the largest of all engines is shown. The engines work beside each other, so times that
requests wait do not add up; sizes of blocks are the same in all."""
SMALLEST = frozenset(("step_tokens_allowed", "target_itl_possible"))
"""Gauges of which the smallest of all engines is shown. All others, and all counters, are sums."""
BALANCE = 1.25
"""An engine is passed over if it has more than this many times the average work, the new request included."""
IMAGE_TOKENS = 512
"""Assumed tokens of an image, before any engine has planned it."""
ANSWER_TOKENS, LONGEST_ANSWER = 256, 1024
"""Assumed tokens of an answer without a limit, and the most that a limit counts as: few answers reach it."""
KEY_CHARACTERS, KEY_IDS = 1024, 256
"""Characters, or token ids, of the beginning of a prompt that name it."""
LOOK_S = 0.2
"""Seconds between two looks at an engine that runs."""
PAUSE_S = 1.0
"""Seconds between the end of an engine and its next start."""
STARTS, STARTS_S = 3, 60.0
"""An engine is started again at most so many times in so many seconds."""
Load = Callable[[], EngineClient]
log = logging.getLogger("fovea.server")


@dataclass
class Slot:
    """The place of one engine, which may be started several times.

    number: from 1.
    load: starts the engine, and waits until it is loaded.
    peer: its entry in the table that chooses.
    engine: None: it has died and is not loaded again yet.
    counts: what the counters of earlier engines of this place had reached.
    starts: times of the latest starts, by the monotonic clock.
    """

    number: int
    load: Load
    peer: Peer
    engine: EngineClient | None
    counts: Counter[str] = field(default_factory=Counter)
    starts: deque[float] = field(default_factory=lambda: deque(maxlen=STARTS))


class EngineFleet:
    """Several engines as one. It implements `core.protocols.EngineClient`, for one event loop.

    Each engine has its own caches and limits, so those of all together are as many times as large.
    """

    def __init__(
        self, loads: Sequence[Load], *, pause_s: float = PAUSE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Load all engines at the same time. Raises the first error; then no engine is left running.

        loads: one function for each engine, which is called in a thread, also when the engine has died.
        """
        self._pause_s, self._clock = pause_s, clock
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._failed = False
        self._table = PeerTable([f"engine {number}" for number in range(1, len(loads) + 1)], BALANCE)
        engines = _load_all(loads)
        self._slots = [
            Slot(peer_number, load, peer, engine)
            for peer_number, (load, peer, engine) in enumerate(
                zip(loads, self._table.peers, engines, strict=True), 1
            )
        ]
        first = engines[0].info
        self._info = replace(first, max_running=first.max_running * len(engines))
        self._threads = [
            threading.Thread(
                target=self._watch, args=(slot,), name=f"fovea-engine-{slot.number}", daemon=True
            )
            for slot in self._slots
        ]
        for thread in self._threads:
            thread.start()

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def status(self) -> EngineStatus:
        """ "ready" as long as one engine is; "stopped" if the last one cannot be started again."""
        if self._closing.is_set():
            return "stopped"
        if self._ready():
            return "ready"
        return "stopped" if self._failed else "loading"

    @property
    def engines(self) -> tuple[EngineClient | None, ...]:
        """The engines in order; None for one that has died and is not loaded again yet."""
        return tuple(slot.engine for slot in self._slots)

    def check_room(self, choices: int, reserved: int = 0) -> None:
        ready = self._require_ready()
        with_room, error = _with_room(ready, choices, -(-reserved // len(ready)))
        if not with_room and error is not None:
            raise error

    async def stream(self, request: GenerationRequest, /) -> AsyncIterator[Delta]:
        peer, engine, tokens = self._choose(request, self._table.choose)
        try:
            deltas: Any = engine.stream(request)
            async with aclosing(deltas):
                async for delta in deltas:
                    yield delta
        finally:
            self._table.end(peer, tokens, self._clock(), failed=False)

    async def tokenize(self, prompt: Prompt) -> list[int]:
        return await _engine(self._require_ready()[0]).tokenize(prompt)

    async def render(self, request: GenerationRequest, /) -> Rendered:
        """Ask the engine that would get the request now: its load may decide about the detail of images."""
        return await self._choose(request, self._table.look)[1].render(request)

    def _choose(
        self, request: GenerationRequest, by: Callable[..., Peer | None]
    ) -> tuple[Peer, EngineClient, int]:
        """Return the entry of the chosen engine, the engine, and the tokens of the request.

        by: a method of the table that chooses.
        """
        ready = self._require_ready()
        choices, tokens = request.sampling.n, tokens_of(request)
        # If no engine has room, the chosen one says so.
        candidates = _with_room(ready, choices)[0] or ready
        without = {slot.peer.url for slot in self._slots} - {slot.peer.url for slot in candidates}
        key, is_image = key_of(request)
        # To encode an image twice costs more than to wait for one other request.
        slack = tokens if is_image else 0
        peer = by(key, tokens, self._clock(), slack=slack, without=without)
        assert peer is not None
        return peer, _engine(next(slot for slot in candidates if slot.peer is peer)), tokens

    async def detokenize(self, ids: Sequence[int]) -> str:
        return await _engine(self._require_ready()[0]).detokenize(ids)

    def stats(self) -> Mapping[str, float]:
        """Return the figures of all engines together. Counters of engines that have died are kept."""
        with self._lock:
            live = [slot.engine.stats() for slot in self._slots if slot.engine is not None]
            return combine([*live, *(slot.counts for slot in self._slots if slot.counts)])

    async def release_offers(self, offers: Sequence[Mapping[str, Any]]) -> None:
        for slot in self._require_ready():  # each knows its own
            with suppress(EngineError, Unavailable):
                await _engine(slot).release_offers(offers)

    def clear_caches(self, *stages: CacheStage) -> None:
        for slot in self._require_ready():
            engine = _engine(slot)
            try:
                engine.clear_caches(*stages)
            except (EngineError, Unavailable):
                if engine.status == "ready":  # otherwise its caches have gone with it
                    raise

    async def close(self, drain_s: float = 0.0) -> None:
        self._closing.set()
        engines = [slot.engine for slot in self._slots if slot.engine is not None]
        await asyncio.gather(*(engine.close(drain_s) for engine in engines))

    def _ready(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.engine is not None and slot.engine.status == "ready"]

    def _require_ready(self) -> list[Slot]:
        ready = [] if self._closing.is_set() else self._ready()
        if not ready:
            shutting_down = self._closing.is_set()
            raise Unavailable(
                "the server is shutting down" if shutting_down else "the engines have stopped and start again"
            )
        return ready

    def _watch(self, slot: Slot) -> None:
        """Start an engine again whenever it has died, in a thread of its own, until the fleet is closed."""
        while not self._closing.wait(LOOK_S):
            engine = slot.engine
            if engine is not None:
                if engine.status != "stopped":
                    continue
                self._retire(slot, engine)
            if self._closing.wait(self._wait_s(slot)):
                return
            self._start(slot)

    def _retire(self, slot: Slot, engine: EngineClient) -> None:
        """Take an engine that has died out of its slot."""
        log.error(
            "engine %d of %d%s has stopped; it is started again", slot.number, len(self._slots), _pid(engine)
        )
        with self._lock:
            slot.engine = None
            slot.counts.update({name: value for name, value in engine.stats().items() if is_counter(name)})
        try:
            asyncio.run(engine.close())
        except Exception:
            log.exception("engine %d, which has stopped, could not be closed", slot.number)

    def _wait_s(self, slot: Slot) -> float:
        """Return the seconds until an engine may be started."""
        if len(slot.starts) < STARTS:
            return self._pause_s
        return max(self._pause_s, slot.starts[0] + STARTS_S - self._clock())

    def _start(self, slot: Slot) -> None:
        slot.starts.append(self._clock())
        try:
            engine = slot.load()
        except Exception as error:
            known = isinstance(error, FoveaError)
            log.error(
                "engine %d could not be started again: %s",
                slot.number,
                error,
                exc_info=None if known else error,
            )
            self._failed = not self._ready()
            return
        log.info("engine %d of %d%s is ready again", slot.number, len(self._slots), _pid(engine))
        slot.engine = engine
        if self._closing.is_set():
            with suppress(Exception):
                asyncio.run(engine.close())


def _load_all(loads: Sequence[Load]) -> list[EngineClient]:
    """Call all functions at the same time. If one raises, the other engines are closed."""
    with ThreadPoolExecutor(len(loads), "fovea-load") as executor:
        futures = [executor.submit(load) for load in loads]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        for future in futures:
            if future.exception() is None:
                asyncio.run(future.result().close())
        raise errors[0]
    return [future.result() for future in futures]


def _engine(slot: Slot) -> EngineClient:
    if slot.engine is None:  # it has died since it was ready
        raise Unavailable("the engine has stopped")
    return slot.engine


def _pid(engine: EngineClient) -> str:
    pid = getattr(engine, "pid", None)
    return "" if pid is None else f" (process {pid})"


def _with_room(
    slots: Iterable[Slot], choices: int, reserved: int = 0
) -> tuple[list[Slot], Overloaded | Unavailable | None]:
    """Return the slots whose engines would accept a request, and the first error of the others.

    Raises InvalidRequest if no engine would ever accept it.
    """
    found, first = [], None
    for slot in slots:
        try:
            _engine(slot).check_room(choices, reserved)
            found.append(slot)
        except (Overloaded, Unavailable) as error:
            first = first or error
    return found, first


def key_of(request: GenerationRequest) -> tuple[str, bool]:
    """Return what names the caches that may know a request, and whether it is an image or a video.

    It is the first image of the conversation, so later turns have it as well. Without images it is the text
    up to the end of the first message of the user, or the beginning of another prompt.
    """
    prompt, image = request.prompt, ""
    if isinstance(prompt, ChatPrompt):
        parts = (part for message in prompt.messages for part in message.parts)
        media = next((part for part in parts if not isinstance(part, TextPart)), None)
        if media is not None:
            image = (media.image if isinstance(media, ImagePart) else media.video).identity
    elif isinstance(prompt, TextPrompt | PlannedPrompt) and prompt.images:
        image = prompt.images[0].image.identity
    return f"{request.cache_salt}\0{image or _beginning(prompt)}", bool(image)


def _beginning(prompt: Prompt) -> str:
    if isinstance(prompt, TextPrompt):
        return prompt.text[:KEY_CHARACTERS]
    if isinstance(prompt, TokenPrompt | PlannedPrompt):
        return repr(prompt.ids[:KEY_IDS])
    texts = []
    for message in prompt.messages:
        texts += [part.text for part in message.parts if isinstance(part, TextPart)]
        if message.role == "user":
            break
    return "\0".join(texts)


def tokens_of(request: GenerationRequest) -> int:
    """Return about how many tokens a request is. Engines are compared by it, so it need not be exact."""
    prompt, asked = request.prompt, request.sampling.max_tokens
    if isinstance(prompt, ChatPrompt):
        parts = [part for message in prompt.messages for part in message.parts]
        characters = sum(len(part.text) for part in parts if isinstance(part, TextPart))
        media = sum(not isinstance(part, TextPart) for part in parts)
    elif isinstance(prompt, TextPrompt):
        characters, media = len(prompt.text), len(prompt.images)
    else:
        characters, media = 4 * len(prompt.ids), 0
    answer = min(asked or ANSWER_TOKENS, LONGEST_ANSWER) * request.sampling.n
    return 1 + characters // 4 + media * IMAGE_TOKENS + answer


def is_counter(name: str) -> bool:
    """Whether a figure only grows while an engine lives."""
    return name in FIGURES and name not in GAUGES


def combine(figures: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the figures of several engines as those of one: sums, except those of LARGEST and SMALLEST."""
    total: dict[str, float] = {}
    for engine in figures:
        for name, value in engine.items():
            if name in LARGEST:
                total[name] = max(total.get(name, -math.inf), value)
            elif name in SMALLEST:
                total[name] = min(total.get(name, math.inf), value)
            else:
                total[name] = total.get(name, 0) + value
    return total
