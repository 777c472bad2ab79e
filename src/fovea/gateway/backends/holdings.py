"""Follows what the caches of engines hold, by their events, so that routing knows what an engine has dropped.

The hash of an image says which backend should have it. An engine that has restarted, or whose caches are too
small, has it no longer, and another one may have it since a busy moment. Engines that announce their caches
(`fovea serve --encoder-events ... --kv-events ...`, formats in `api.cache_events`) tell, and the policy
cache-affine prefers those that have the image. It is a hint: a wrong one costs one more encoding, and the
answer is still right.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from fovea.api.cache_events import (
    AllBlocksCleared,
    AllEncoderOutputsCleared,
    BlockEvent,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    EncoderOutputRemoved,
    EncoderOutputStored,
    OutputEvent,
    pack_number,
    unpack,
    unpack_number,
)
from fovea.gateway.backends.backend import Backend

ASK_AGAIN_S = 10.0
"""Seconds after which an engine that has not replayed its events is asked again."""
MOST_WAITING = 10_000
"""Messages that are kept while earlier ones are asked for."""
MOST_NAMES = 4_000_000
"""Most blocks, and most encoder outputs, that are noted of one engine. Further ones are ignored."""
log = logging.getLogger("fovea.gateway")


class Holdings:
    """The images that one engine has in its caches: their encoder outputs, or keys and values of them."""

    def __init__(self) -> None:
        self._outputs: dict[tuple[str, str], str] = {}  # (medium, name): identity
        self._blocks: dict[tuple[str | None, int], tuple[str, ...]] = {}  # (medium, hash): names of images
        self._counts: Counter[str] = Counter()  # entries of both by the name of their image
        self._names: dict[str, set[str]] = {}  # identity: names that it has had
        self._identities: dict[str, str] = {}  # name: identity

    def __contains__(self, identity: object) -> bool:
        return any(self._counts[name] > 0 for name in self._names.get(str(identity), ()))

    def __len__(self) -> int:
        """Number of images."""
        return len(self._names)

    def apply(self, events: Iterable[CacheEvent]) -> None:
        """Note what an engine has told, in order."""
        for event in events:
            if isinstance(event, BlockStored | BlockRemoved | AllBlocksCleared):
                self._apply_blocks(event)
            else:
                self._apply_outputs(event)

    def _apply_outputs(self, event: OutputEvent) -> None:
        if isinstance(event, EncoderOutputStored):
            for name, identity in zip(event.mm_hashes, event.identities, strict=False):
                self._store_output((event.medium, name), identity)
        elif isinstance(event, EncoderOutputRemoved):
            for name in event.mm_hashes:
                self._remove_output((event.medium, name))
        else:
            for key in list(self._outputs):
                self._remove_output(key)

    def _apply_blocks(self, event: BlockEvent) -> None:
        if isinstance(event, BlockStored):
            for hash_, keys in zip(event.block_hashes, event.extra_keys or (), strict=False):
                self._store_block((event.medium, hash_), tuple(_images(keys)))
        elif isinstance(event, BlockRemoved):
            for hash_ in event.block_hashes:
                self._forget(self._blocks.pop((event.medium, hash_), ()))
        else:
            for block in list(self._blocks):
                self._forget(self._blocks.pop(block))

    def _store_output(self, key: tuple[str, str], identity: str) -> None:
        if key in self._outputs or len(self._outputs) >= MOST_NAMES:
            return
        name = key[1]
        self._outputs[key] = identity
        self._counts[name] += 1
        self._identities[name] = identity
        self._names.setdefault(identity, set()).add(name)

    def _remove_output(self, key: tuple[str, str]) -> None:
        if self._outputs.pop(key, None) is not None:
            self._forget((key[1],))

    def _store_block(self, key: tuple[str | None, int], names: tuple[str, ...]) -> None:
        if names and key not in self._blocks and len(self._blocks) < MOST_NAMES:
            self._blocks[key] = names
            self._counts.update(names)

    def _forget(self, names: Iterable[str]) -> None:
        """Count an entry of each name less. The last one of an image takes its names with it."""
        for name in names:
            self._counts[name] -= 1
            if self._counts[name] > 0:
                continue
            del self._counts[name]
            identity = self._identities.pop(name, None)
            if identity is not None:
                self._names[identity].discard(name)
                if not self._names[identity]:
                    del self._names[identity]


def _images(keys: list[Any] | None) -> Iterator[str]:
    """Yield the names of images among the extra keys of a block: the first of each pair."""
    for key in keys or ():
        if isinstance(key, list) and key and isinstance(key[0], str):
            yield key[0]


class Stream:
    """The messages of one socket of an engine, put into order and without gaps.

    It does no I/O, so that every order of messages can be tested.

    apply: takes events. clear: forgets all that came by this stream.
    can_ask: whether earlier messages can be asked for.
    complete: whether no earlier message is waited for. Without replays, true as soon as it is connected.
    """

    def __init__(
        self, apply: Callable[[list[CacheEvent]], None], clear: Callable[[], None], *, can_ask: bool
    ) -> None:
        self._apply, self._clear, self._can_ask = apply, clear, can_ask
        self._next = 0
        self._waiting: deque[tuple[int, bytes]] = deque(maxlen=MOST_WAITING)
        self.complete = False

    def connected(self) -> int | None:
        """The engine can be reached, perhaps again. Returns the number to ask for; None: nothing."""
        self._clear()
        self._waiting.clear()
        self._next, self.complete = 0, not self._can_ask
        return 0 if self._can_ask else None

    def disconnected(self) -> None:
        """The engine cannot be reached: it may have been restarted."""
        self.complete = False

    def live(self, number: int, payload: bytes) -> int | None:
        """Take a message as it was sent. Returns the number from which on earlier ones are to be asked for.

        Raises ValueError for a message that is not understood.
        """
        if not self._can_ask:
            if number != self._next:
                self._clear()
            self._take(number, payload)
            return None
        if not self.complete:
            self._waiting.append((number, payload))
        elif number == self._next:
            self._take(number, payload)
        elif number > self._next:
            self.complete = False
            self._waiting.append((number, payload))
            return self._next
        else:  # numbers begin again: another engine has the address
            return self.connected()
        return None

    def replayed(self, number: int, payload: bytes) -> int | None:
        """Take a message that was asked for; -1 ends them. Returns what `live` returns."""
        if number >= self._next:
            self._take(number, payload)
        if number >= 0 or self.complete:
            return None
        self.complete = True
        waiting = list(self._waiting)
        self._waiting.clear()
        for place, (later, content) in enumerate(waiting):
            if later < self._next:
                continue
            ask = self.live(later, content)
            if ask is not None:
                self._waiting.extend(waiting[place + 1 :])
                return ask
        return None

    @property
    def missing(self) -> int:
        """The number of the first message that is not known."""
        return self._next

    def _take(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        self._apply(unpack(payload).events)


class Follower:
    """Follows the events of one backend, by up to two sockets, and keeps its `holdings` true."""

    def __init__(self, backend: Backend, context: zmq.asyncio.Context, clock: Callable[[], float]) -> None:
        self.backend = backend
        self._context, self._clock = context, clock
        self._holdings = Holdings()
        self._streams: list[Stream] = []
        config = backend.config
        host = urlsplit(config.url).hostname or ""
        wanted: tuple[tuple[str, str, CacheEvent], ...] = (
            (config.encoder_events, config.encoder_events_replay, AllEncoderOutputsCleared()),
            (config.kv_events, config.kv_events_replay, AllBlocksCleared()),
        )
        self._tasks = [
            asyncio.get_running_loop().create_task(
                self._follow(address_at(address, host), address_at(replay, host), nothing)
            )
            for address, replay, nothing in wanted
            if address
        ]

    def stop(self) -> None:
        """End the following. The backend's holdings are not known any more."""
        self.backend.holdings = None
        for task in self._tasks:
            task.cancel()

    def _note(self) -> None:
        """Let routing know the holdings as long as every stream is complete."""
        self.backend.holdings = self._holdings if all(one.complete for one in self._streams) else None

    async def _follow(self, address: str, replay: str, nothing: CacheEvent) -> None:
        """Follow one socket for ever."""
        stream = Stream(self._holdings.apply, lambda: self._holdings.apply([nothing]), can_ask=bool(replay))
        self._streams.append(stream)
        socket, questions = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        socket.set_hwm(MOST_WAITING)
        socket.subscribe(b"")
        monitor = socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        try:
            socket.connect(address)
            if replay:
                questions.connect(replay)
            await self._read(stream, socket, questions, monitor)
        except zmq.ZMQError as error:
            log.error("events of backend %s at %s cannot be read: %s", self.backend.name, address, error)
        finally:
            stream.complete = False
            self.backend.holdings = None
            socket.disable_monitor()
            for one in (socket, questions):
                one.close(linger=0)

    async def _read(self, stream: Stream, socket: Any, questions: Any, monitor: Any) -> None:
        """Read all messages, and ask for missing ones, until one is not understood."""
        poller = zmq.asyncio.Poller()
        for one in (socket, questions, monitor):
            poller.register(one, zmq.POLLIN)
        heard_at = 0.0
        while True:
            ready = {one for one, _ in await poller.poll(1000)}
            try:
                ask = await _take(stream, ready, socket, questions, monitor)
            except ValueError as error:  # it may be another program's socket
                log.warning("backend %s sends events that are not understood: %s", self.backend.name, error)
                return
            now = self._clock()
            if questions in ready:
                heard_at = now
            if ask is None and not stream.complete and now - heard_at > ASK_AGAIN_S:
                ask = stream.missing
            if ask is not None:
                heard_at = now
                with suppress(zmq.Again):
                    await questions.send_multipart([b"", pack_number(ask)], flags=zmq.NOBLOCK)
            self._note()


async def _take(stream: Stream, ready: set[Any], socket: Any, questions: Any, monitor: Any) -> int | None:
    """Read one message of each socket that has one. Returns the number to ask for; None: nothing is missing.

    Raises ValueError for a message that is not understood.
    """
    ask: int | None = None
    if monitor in ready:
        if (await recv_monitor_message(monitor))["event"] == zmq.EVENT_CONNECTED:
            ask = stream.connected()
        else:
            stream.disconnected()
    if questions in ready:
        *_, number, payload = await questions.recv_multipart()
        ask = stream.replayed(unpack_number(number), payload)
    if socket in ready and ask is None:
        *_, number, payload = await socket.recv_multipart()
        ask = stream.live(unpack_number(number), payload)
    return ask


class Followers:
    """A follower for each backend that announces its caches. For the event loop's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._context = zmq.asyncio.Context()
        self._followers: dict[int, Follower] = {}

    def update(self, backends: Iterable[Backend]) -> None:
        """Follow these backends, and no others."""
        wanted = {id(one): one for one in backends if one.config.encoder_events or one.config.kv_events}
        for key in self._followers.keys() - wanted.keys():
            self._followers.pop(key).stop()
        for key, backend in wanted.items():
            if key not in self._followers:
                self._followers[key] = Follower(backend, self._context, self._clock)

    async def aclose(self) -> None:
        self.update(())
        await asyncio.sleep(0)
        self._context.destroy(linger=0)


def address_at(address: str, host: str) -> str:
    """Return an address with a backend's host in place of "*"."""
    shown = f"[{host}]" if ":" in host else host
    return address.replace("//*:", f"//{shown}:")
