"""Publishes what an engine's caches hold, for routers: over ZMQ, in the format of vLLM (`api.cache_events`).

The engine's thread only notes changes (`engine.changes`). A thread for each kind of event takes them, numbers
them, and sends them to all subscribers. It keeps the latest messages for those who have missed some, and the
state before these messages, so that a router that comes late or was away for long can learn everything, too.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple

from fovea.core.errors import ConfigError
from fovea.core.names import install_command
from fovea.engine.changes import (
    BlockChanges,
    Changes,
    K,
    Net,
    OutputChanges,
    StoredBlock,
    StoredOutput,
    V,
)
from fovea.engine.config import EngineConfig
from fovea.engine.config.others import EventSettings
from fovea.engine.kv.hashing import mm_hash

COLLECT_S = 0.005
"""Seconds for which changes are collected before they are sent as one message."""
MOST_WAITING = 10_000
"""Most messages that wait for a slow subscriber. Later ones are dropped, and it has to ask for them."""
log = logging.getLogger("fovea.engine")


class Message(NamedTuple):
    """A numbered batch of events."""

    number: int
    payload: bytes


class ReplayLog(Generic[K, V]):
    """The latest messages, and the state of the cache before them. Not thread-safe.

    most: messages that are kept as they were sent.
    encode: turns changes into the payload of a message.
    """

    def __init__(self, most: int, encode: Callable[[Net[K, V]], bytes]) -> None:
        self.most = most
        self._encode = encode
        self._kept: deque[tuple[Message, Net[K, V]]] = deque()
        self._before: dict[K, V] = {}
        self._next = 0

    def add(self, net: Net[K, V]) -> Message:
        """Number the next changes."""
        message = Message(self._next, self._encode(net))
        self._next += 1
        self._kept.append((message, net))
        if len(self._kept) > self.most:
            self._forget(self._kept.popleft()[1])
        return message

    def since(self, number: int) -> Iterator[Message]:
        """Yield the messages from a number on.

        If some of them are not kept any more, the first message clears everything and stores the state after
        the newest message that is no longer kept. It has that message's number.
        """
        oldest = self._kept[0][0].number if self._kept else self._next
        if number < oldest:
            yield Message(oldest - 1, self._encode(Net(True, dict(self._before), [])))
        for message, _ in self._kept:
            if message.number >= number:
                yield message

    def _forget(self, net: Net[K, V]) -> None:
        """Put changes into the state before the messages that are kept."""
        if net.cleared:
            self._before.clear()
        self._before.update(net.stored)
        for key in net.removed:
            self._before.pop(key, None)


def short_hash(name: bytes) -> int:
    """Return the 64 bits of a block's name by which routers know it, as vLLM sends them."""
    return int.from_bytes(name[-8:], "big")


def pack_blocks(net: Net[tuple[str, bytes], StoredBlock], block_size: int, rank: int = 0) -> bytes:
    """Return changes of blocks as a batch. Blocks that continue each other become one event."""
    from fovea.api.cache_events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, pack

    events: list[Any] = [AllBlocksCleared()] if net.cleared else []
    before: tuple[str, bytes | None] = ("", None)
    for medium, name in parents_first(net.stored):
        block = net.stored[medium, name]
        if block.parent is None or (medium, block.parent) != before:
            parent = None if block.parent is None else short_hash(block.parent)
            events.append(BlockStored([], parent, [], block_size, None, medium, None, []))
        event = events[-1]
        event.block_hashes.append(short_hash(name))
        event.token_ids.extend(block.tokens)
        event.extra_keys.append(list(block.keys) or None)
        before = medium, name
    for medium, names in _by_medium(net.removed).items():
        events.append(BlockRemoved([short_hash(name) for name in names], medium))
    return pack(Batch(time.time(), events, rank))


def parents_first(stored: dict[tuple[str, bytes], StoredBlock]) -> list[tuple[str, bytes]]:
    """Return the keys of blocks, each after that of its parent, if that is among them."""
    ordered: dict[tuple[str, bytes], None] = {}
    for key in stored:
        chain: list[tuple[str, bytes]] = []
        while key in stored and key not in ordered:
            chain.append(key)
            parent = stored[key].parent
            if parent is None:
                break
            key = (key[0], parent)
        ordered.update(dict.fromkeys(reversed(chain)))
    return list(ordered)


def pack_outputs(net: Net[tuple[str, str], StoredOutput], rank: int = 0) -> bytes:
    """Return changes of encoder outputs as a batch."""
    from fovea.api.cache_events import (
        AllEncoderOutputsCleared,
        Batch,
        EncoderOutputRemoved,
        EncoderOutputStored,
        pack,
    )

    events: list[Any] = [AllEncoderOutputsCleared()] if net.cleared else []
    for medium, keys in _by_medium(net.stored).items():
        sizes = [net.stored[medium, key].size for key in keys]
        events.append(EncoderOutputStored([*map(mm_hash, keys)], [*map(identity_of, keys)], sizes, medium))
    for medium, keys in _by_medium(net.removed).items():
        events.append(EncoderOutputRemoved([*map(mm_hash, keys)], medium))
    return pack(Batch(time.time(), events, rank))


def identity_of(key: str) -> str:
    """Return the identity of the image in an encoder output's key; "": the key has none."""
    _, _, rest = key.partition("\x00")
    return rest.partition("\x00")[0]


def _by_medium(keys: Any) -> dict[str, list[Any]]:
    """Return keys without their medium, by medium."""
    found: dict[str, list[Any]] = {}
    for medium, key in keys:
        found.setdefault(medium, []).append(key)
    return found


class Publisher(Generic[K, V]):
    """Sends the changes of one cache to subscribers, and replays them, in a thread of its own.

    messages: how many were sent. replays: how often earlier ones were asked for.
    """

    def __init__(
        self,
        changes: Changes[K, V],
        replay_log: ReplayLog[K, V],
        *,
        address: str,
        replay_address: str,
        topic: str,
        param: str,
    ) -> None:
        """Listen. address: for subscribers; replay_address: for questions, or "".

        param: name of the setting of the address. Raises ConfigError if an address cannot be listened on.
        """
        zmq = _zmq()
        self.messages = self.replays = 0
        self._changes, self._log, self._topic = changes, replay_log, topic.encode()
        self._param = param
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.set_hwm(MOST_WAITING)
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.set_hwm(replay_log.most + MOST_WAITING)  # beyond it, the rest of a replay would be lost
        for socket, wanted, name in (
            (self._socket, address, param),
            (self._replay, replay_address, f"{param}_replay"),
        ):
            try:
                if wanted:
                    socket.bind(wanted)
            except zmq.ZMQError as error:
                self._context.destroy(linger=0)
                raise ConfigError(f"cannot listen on {name} {wanted}: {error}", param=name) from error
        self._closing = self._confused = False
        self._sleeper, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        changes.on_change = self._wake
        self._thread = threading.Thread(target=self._run, name=f"fovea-{param}", daemon=True)
        self._thread.start()
        self._wake()  # for what has changed before

    def close(self) -> None:
        """Send what is left, and stop."""
        self._closing = True
        self._wake()
        self._thread.join(timeout=5)

    def _wake(self) -> None:
        with suppress(BlockingIOError, OSError):  # the pipe is full of wake-ups, or closed
            os.write(self._waker, b"\0")

    def _run(self) -> None:
        zmq = _zmq()
        poller = zmq.Poller()
        poller.register(self._replay, zmq.POLLIN)
        poller.register(self._sleeper, zmq.POLLIN)
        try:
            while not self._closing:
                ready = dict(poller.poll())
                if self._sleeper in ready:
                    os.read(self._sleeper, 4096)
                    if not self._closing:
                        time.sleep(COLLECT_S)
                    self._publish()
                if self._replay in ready:
                    self._answer(self._replay.recv_multipart())
        except Exception:  # without events the engine serves as well
            log.exception("the publishing of %s has stopped", self._param)
        finally:
            self._changes.on_change = _ignore
            self._context.destroy(linger=100)
            os.close(self._sleeper)
            os.close(self._waker)

    def _publish(self) -> None:
        net = self._changes.take()
        if net:
            self._send(self._socket, [], self._log.add(net))
            self.messages += 1

    def _answer(self, frames: list[bytes]) -> None:
        """Send the messages that a subscriber asks for. frames: identity, nothing, number."""
        from fovea.api.cache_events import END, unpack_number

        try:
            identity, nothing, number = frames
            first = unpack_number(number)
        except ValueError as error:
            if not self._confused:  # not a line for each: anyone may ask
                log.warning("a request for earlier %s is not understood: %s", self._param, error)
            self._confused = True
            return
        self.replays += 1
        for message in self._log.since(first):
            self._send(self._replay, [identity, nothing], message)
        self._replay.send_multipart([identity, nothing, self._topic, END, b""])

    def _send(self, socket: Any, head: list[bytes], message: Message) -> None:
        from fovea.api.cache_events import pack_number

        socket.send_multipart([*head, self._topic, pack_number(message.number), message.payload])


def _ignore() -> None:
    """Nobody publishes any more."""


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """The events of one engine; without settings for them, there are none.

    blocks, outputs: where the caches note their changes; None: nobody wants to know.
    """

    blocks: BlockChanges | None = None
    outputs: OutputChanges | None = None
    _publishers: list[Publisher[Any, Any]] = field(default_factory=list)

    @classmethod
    def open(cls, config: EngineConfig) -> CacheEvents:
        """Listen on the addresses of the settings. Raises ConfigError if that cannot be done."""
        settings = config.events
        if not settings.kv_events and not settings.encoder_events:
            return cls()
        _zmq()
        if settings.kv_events and not config.kv.prefix_cache:
            raise ConfigError(
                "kv_events announces keys and values that requests share, and prefix_cache is false; "
                "accepted: prefix_cache true",
                param="kv_events",
            )
        events = cls(
            BlockChanges() if settings.kv_events else None,
            OutputChanges() if settings.encoder_events else None,
        )
        pack = partial(pack_blocks, block_size=config.kv.block_size, rank=settings.event_rank)
        try:
            if events.blocks is not None:
                events._publish(events.blocks, pack, settings, "kv_events", settings.kv_events_topic)
            if events.outputs is not None:
                outputs = partial(pack_outputs, rank=settings.event_rank)
                events._publish(events.outputs, outputs, settings, "encoder_events")
        except ConfigError:
            events.close()
            raise
        return events

    def _publish(
        self,
        changes: Changes[K, V],
        pack: Callable[[Net[K, V]], bytes],
        settings: EventSettings,
        param: str,
        topic: str = "",
    ) -> None:
        publisher = Publisher(
            changes,
            ReplayLog(settings.events_kept, pack),
            address=settings.address(param),
            replay_address=settings.address(f"{param}_replay"),
            topic=topic,
            param=param,
        )
        self._publishers.append(publisher)

    def stats(self) -> dict[str, float]:
        """Return figures by the names of `observe.table`."""
        if not self._publishers:
            return {}
        return {
            "event_messages": sum(one.messages for one in self._publishers),
            "event_replays": sum(one.replays for one in self._publishers),
        }

    def close(self) -> None:
        for publisher in self._publishers:
            publisher.close()


def _zmq() -> Any:
    """Return the module zmq. Raises ConfigError if a package is missing."""
    try:
        import msgspec  # noqa: F401
        import zmq
    except ImportError as error:
        raise ConfigError(
            f"events of caches need two packages: {install_command('events')} ({error.name} is missing)",
            param="kv_events",
        ) from error
    return zmq
