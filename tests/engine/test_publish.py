"""Tests of announcements over real sockets: every subscriber ends with the true state, whenever it comes."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
import zmq
from hypothesis import given

from fovea.api.cache_events import END, unpack, unpack_number
from fovea.core.errors import ConfigError
from fovea.engine.changes import DEVICE, HOST, Changes, Net, StoredBlock, StoredOutput
from fovea.engine.config import EngineConfig
from fovea.engine.config.others import check_event_addresses
from fovea.engine.kv.hashing import mm_hash
from fovea.engine.publish import (
    CacheEvents,
    Message,
    Publisher,
    ReplayLog,
    identity_of,
    pack_blocks,
    pack_outputs,
    parents_first,
    short_hash,
)

WAIT_MS = 10_000


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def net_of(stored: dict[int, int], removed: list[int], cleared: bool = False) -> Net[int, int]:
    return Net(cleared, stored, removed)


@given(
    most=st.integers(1, 5),
    steps=st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=40),
    start=st.integers(0, 45),
)
def test_a_replay_leads_to_the_true_state_from_any_number_on(
    most: int, steps: list[tuple[int, bool]], start: int
) -> None:
    log: ReplayLog[int, int] = ReplayLog(most, msgspec.msgpack.encode)
    cache: dict[int, int] = {}
    at_start: dict[int, int] = {}
    for number, (key, clear) in enumerate(steps):
        if number == start:
            at_start = dict(cache)
        if clear:
            cache = {key: number}
            net = net_of({key: number}, [], True)
        elif key in cache:
            del cache[key]
            net = net_of({}, [key])
        else:
            cache[key] = number
            net = net_of({key: number}, [])
        assert log.add(net).number == number
    if start >= len(steps):
        return
    known = at_start
    numbers = []
    for message in log.since(start):
        cleared, stored, removed = msgspec.msgpack.decode(message.payload)
        numbers.append(message.number)
        known = ({} if cleared else known) | {int(key): value for key, value in stored.items()}
        known = {key: value for key, value in known.items() if key not in removed}
    assert known == cache
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == len(steps) - 1


def test_blocks_that_continue_each_other_are_one_event() -> None:
    stored = {
        (DEVICE, name(1)): StoredBlock(None, (1, 2), ()),
        (DEVICE, name(2)): StoredBlock(name(1), (3, 4), (("image", 1), "salt")),
        (DEVICE, name(9)): StoredBlock(name(7), (5, 6), ()),
        (HOST, name(1)): StoredBlock(None, (1, 2), ()),
    }
    payload = pack_blocks(Net(True, stored, [(DEVICE, name(4)), (HOST, name(5)), (DEVICE, name(6))]), 2)
    stamp, events, rank = msgspec.msgpack.decode(payload)
    assert abs(stamp - time.time()) < 60
    assert rank == 0
    common = {"type": "BlockStored", "block_size": 2, "lora_id": None, "lora_name": None}
    assert events == [
        {"type": "AllBlocksCleared"},
        common
        | {
            "block_hashes": [1, 2],
            "parent_block_hash": None,
            "token_ids": [1, 2, 3, 4],
            "medium": "GPU",
            "extra_keys": [None, [["image", 1], "salt"]],
        },
        common
        | {
            "block_hashes": [9],
            "parent_block_hash": 7,
            "token_ids": [5, 6],
            "medium": "GPU",
            "extra_keys": [None],
        },
        common
        | {
            "block_hashes": [1],
            "parent_block_hash": None,
            "token_ids": [1, 2],
            "medium": "CPU",
            "extra_keys": [None],
        },
        {"type": "BlockRemoved", "block_hashes": [4, 6], "medium": "GPU"},
        {"type": "BlockRemoved", "block_hashes": [5], "medium": "CPU"},
    ]
    assert unpack(payload).events[1].block_hashes == [1, 2]  # type: ignore[union-attr]


def test_a_parent_that_came_again_later_is_told_before_its_children() -> None:
    """A router drops a block whose parent it does not know."""
    stored = {(DEVICE, name(n)): StoredBlock(name(n - 1) if n > 1 else None, (n,), ()) for n in (3, 2, 5, 1)}
    assert parents_first(stored) == [(DEVICE, name(n)) for n in (1, 2, 3, 5)]


def test_a_hash_is_the_last_64_bits_of_a_name() -> None:
    assert short_hash(bytes(range(32))) == 0x18191A1B1C1D1E1F


def test_encoder_outputs_are_told_with_the_identities_of_their_images() -> None:
    key = "salt\x00identity\x00plan"
    net = Net(False, {(DEVICE, key): StoredOutput(40)}, [(HOST, "other")])
    _, events, rank = msgspec.msgpack.decode(pack_outputs(net, 3))
    assert rank == 3
    assert events == [
        {
            "type": "EncoderOutputStored",
            "mm_hashes": [mm_hash(key)],
            "identities": ["identity"],
            "sizes": [40],
            "medium": "GPU",
        },
        {"type": "EncoderOutputRemoved", "mm_hashes": [mm_hash("other")], "medium": "CPU"},
    ]
    assert identity_of("no key of an image") == ""


def free_ports(count: int) -> list[str]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [f"tcp://127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    finally:
        for one in sockets:
            one.close()


class Subscriber:
    """A router's two sockets."""

    def __init__(self, address: str, replay: str) -> None:
        self._context = zmq.Context()
        self._sub, self._ask = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self._sub.subscribe(b"")
        self._sub.connect(address)
        self._ask.connect(replay)
        for one in (self._sub, self._ask):
            one.rcvtimeo = WAIT_MS

    def next(self) -> tuple[bytes, int, Any]:
        topic, number, payload = self._sub.recv_multipart()
        return topic, unpack_number(number), msgspec.msgpack.decode(payload)

    def ask(self, number: int, pause_s: float = 0.0) -> list[Message]:
        self._ask.send_multipart([b"", number.to_bytes(8, "big")])
        time.sleep(pause_s)
        found = []
        while True:
            nothing, _, number_, payload = self._ask.recv_multipart()
            assert nothing == b""
            if number_ == END:
                assert payload == b""
                return found
            found.append(Message(unpack_number(number_), payload))

    def ask_rubbish(self) -> None:
        self._ask.send_multipart([b"x"])
        self._ask.send_multipart([b"", b"short"])
        self._ask.send_multipart([b"", b"", b"", b""])

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def announced(**settings: Any) -> Iterator[tuple[CacheEvents, Subscriber, Subscriber]]:
    ports = free_ports(4)
    names = ("kv_events", "kv_events_replay", "encoder_events", "encoder_events_replay")
    config = EngineConfig.of(**dict(zip(names, ports, strict=True)), block_size=16, **settings)
    events = CacheEvents.open(config)
    blocks, outputs = Subscriber(*ports[:2]), Subscriber(*ports[2:])
    try:
        yield events, blocks, outputs
    finally:
        blocks.close()
        outputs.close()
        events.close()


def block(number: int) -> tuple[tuple[str, bytes], StoredBlock]:
    return (DEVICE, name(number)), StoredBlock(name(number - 1) if number > 1 else None, (number,), ())


def test_subscribers_get_changes_and_can_ask_for_earlier_ones() -> None:
    with announced(kv_events_topic="kv@pod@model", events_kept=2) as (events, blocks, outputs):
        assert events.blocks is not None
        assert events.outputs is not None
        for number in range(1, 7):
            events.blocks.store([block(number)])
            until = time.monotonic() + 10
            while events.stats()["event_messages"] < number and time.monotonic() < until:
                time.sleep(0.002)  # so that each is a message of its own
        late = blocks.ask(0)
        assert [message.number for message in late] == [3, 4, 5], "of the first four, the state is left"
        first = unpack(late[0].payload).events
        assert [type(event).__name__ for event in first] == ["AllBlocksCleared", "BlockStored"]
        assert first[1].block_hashes == [1, 2, 3, 4]  # type: ignore[union-attr]
        assert [message.number for message in blocks.ask(5)] == [5]
        assert blocks.ask(6) == []
        blocks.ask_rubbish()
        assert blocks.ask(6) == [], "questions that make no sense change nothing"

        events.blocks.store([block(7)])
        topic, number, (_, [event], _) = blocks.next()  # the first one that came after it had connected
        assert topic == b"kv@pod@model"
        while event["block_hashes"][-1] < 7:
            before = number
            topic, number, (_, [event], _) = blocks.next()
            assert number == before + 1
        assert event["block_hashes"][-1] == 7

        events.outputs.store([((DEVICE, "\x00identity\x00plan"), StoredOutput(8))])
        until = time.monotonic() + 10
        while not (told := outputs.ask(0)) and time.monotonic() < until:
            time.sleep(0.01)
        assert unpack(told[0].payload).events[0].identities == ["identity"]  # type: ignore[union-attr]
        assert events.stats()["event_replays"] >= 5


def test_a_long_replay_is_whole_though_the_subscriber_reads_late() -> None:
    many = 45_000
    kept: ReplayLog[int, int] = ReplayLog(many, lambda net: bytes(400))
    for number in range(many):
        kept.add(net_of({number: number}, []))
    address, replay = free_ports(2)
    publisher = Publisher(
        Changes(), kept, address=address, replay_address=replay, topic="", param="kv_events"
    )
    subscriber = Subscriber(address, replay)
    try:
        assert [message.number for message in subscriber.ask(0, pause_s=0.5)] == list(range(many))
    finally:
        subscriber.close()
        publisher.close()


def test_a_slow_or_absent_subscriber_costs_no_memory() -> None:
    """A pool of ten blocks that changes a hundred thousand times leaves at most twenty changes to tell."""
    changes: Changes[tuple[str, bytes], StoredBlock] = Changes()
    for number in range(1, 100_001):
        changes.store([block(number)])
        if number > 10:
            changes.remove(block(number - 10)[0])
    net = changes.take()
    assert len(net.stored) == 10
    assert net.removed == []


def test_an_address_in_use_and_settings_that_make_no_sense_are_errors() -> None:
    [port] = free_ports(1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(port.rpartition(":")[2])))
        taken.listen()
        with pytest.raises(ConfigError, match=r"cannot listen on kv_events tcp://127"):
            CacheEvents.open(EngineConfig.of(kv_events=port))
        with pytest.raises(ConfigError, match="cannot listen on encoder_events_replay"):
            CacheEvents.open(EngineConfig.of(encoder_events=free_ports(1)[0], encoder_events_replay=port))
    for wrong in ("http://x:1", "tcp://host", "tcp://host:0", "tcp://host:70000", "5557"):
        with pytest.raises(ConfigError, match="accepted: .*tcp://HOST:PORT"):
            EngineConfig.of(kv_events=wrong)
    with pytest.raises(ConfigError, match="kv_events_replay needs kv_events"):
        EngineConfig.of(kv_events_replay=port)
    with pytest.raises(ConfigError, match="must be different addresses"):
        EngineConfig.of(kv_events=port, encoder_events=port)
    with pytest.raises(ConfigError, match="prefix_cache is false"):
        CacheEvents.open(EngineConfig.of(kv_events=port, prefix_cache=False))


def test_engines_behind_one_server_have_addresses_of_their_own() -> None:
    config = EngineConfig.of(kv_events="tcp://*:5557", encoder_events="ipc:///run/x", event_rank=2)
    assert config.events.address("kv_events") == "tcp://*:5559"
    assert config.events.address("encoder_events") == "ipc:///run/x-2"
    assert config.events.address("kv_events_replay") == ""


def test_engines_behind_one_server_may_not_share_an_address() -> None:
    """The story: the second engine's announcements had the port of the first one's replays."""
    near = EngineConfig.of(kv_events="tcp://*:5557", kv_events_replay="tcp://*:5558").events
    check_event_addresses(near, 1)
    with pytest.raises(ConfigError, match="ports at least 2 apart"):
        check_event_addresses(near, 2)
    far = EngineConfig.of(kv_events="tcp://*:5557", kv_events_replay="tcp://*:5657").events
    check_event_addresses(far, 100)


def test_without_settings_nothing_listens() -> None:
    events = CacheEvents.open(EngineConfig())
    assert events.blocks is None
    assert events.outputs is None
    assert events.stats() == {}
    events.close()
