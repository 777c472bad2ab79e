"""Tests of what a gateway knows of engines' caches: by any order of messages, it ends with the truth."""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from fovea.api.cache_events import (
    AllBlocksCleared,
    AllEncoderOutputsCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    EncoderOutputRemoved,
    EncoderOutputStored,
    pack,
)
from fovea.gateway.backends.holdings import Holdings, Stream, address_at


def stored(name: str, identity: str, medium: str = "GPU") -> EncoderOutputStored:
    return EncoderOutputStored([name], [identity], [1], medium)


def block(number: int, *names: str, medium: str = "GPU") -> BlockStored:
    keys: list[Any] = [[name, 0] for name in names]
    return BlockStored([number], None, [1], 1, None, medium, None, [[*keys, "salt"] if keys else None])


def test_an_image_is_held_as_long_as_any_cache_has_its_output_or_its_keys_and_values() -> None:
    holdings = Holdings()
    holdings.apply([stored("plan a", "image"), stored("plan b", "image"), stored("plan a", "image", "CPU")])
    assert "image" in holdings
    assert len(holdings) == 1
    holdings.apply([EncoderOutputRemoved(["plan a", "plan b"], "GPU")])
    assert "image" in holdings, "a copy is in host memory"
    holdings.apply([block(1), block(2, "plan a"), block(3, "plan a")])
    holdings.apply([EncoderOutputRemoved(["plan a"], "CPU")])
    assert "image" in holdings, "its keys and values are cached"
    holdings.apply([BlockRemoved([3, 1], "GPU")])
    assert "image" in holdings
    holdings.apply([BlockRemoved([2], "GPU"), BlockRemoved([2, 77], "GPU")])
    assert "image" not in holdings
    assert len(holdings) == 0


def test_keys_and_values_that_are_told_before_the_output_count_when_the_image_is_known() -> None:
    """They come by another socket, so the order is not certain."""
    holdings = Holdings()
    holdings.apply([block(1, "plan")])
    assert len(holdings) == 0
    holdings.apply([stored("plan", "image"), EncoderOutputRemoved(["plan"], "GPU")])
    assert "image" in holdings
    holdings.apply([AllBlocksCleared()])
    assert "image" not in holdings


def test_a_cleared_cache_holds_nothing_of_its_kind() -> None:
    holdings = Holdings()
    holdings.apply([stored("a", "one"), stored("b", "two"), block(1, "b"), AllEncoderOutputsCleared()])
    assert "one" not in holdings
    assert "two" in holdings


NAMES = [f"name {number}" for number in range(4)]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["store", "remove"]), st.sampled_from(NAMES), st.sampled_from("GC")),
            st.tuples(st.sampled_from(["block", "unblock"]), st.sampled_from(NAMES), st.integers(0, 5)),
            st.tuples(st.sampled_from(["clear", "unblock all"]), st.just(""), st.just(0)),
        ),
        max_size=50,
    )
)
def test_holdings_agree_with_a_naive_account(steps: list[tuple[str, str, Any]]) -> None:
    holdings = Holdings()
    outputs: set[tuple[str, str]] = set()
    blocks: dict[int, str] = {}
    known: set[str] = set()
    for what, name, extra in steps:
        if what == "store":
            outputs.add((name, extra))
            known.add(name)
            holdings.apply([stored(name, f"image of {name}", extra)])
        elif what == "remove":
            outputs.discard((name, extra))
            holdings.apply([EncoderOutputRemoved([name], extra)])
        elif what == "block" and extra not in blocks:
            blocks[extra] = name
            holdings.apply([block(extra, name)])
        elif what == "unblock":
            blocks.pop(extra, None)
            holdings.apply([BlockRemoved([extra], "GPU")])
        elif what == "clear":
            outputs.clear()
            holdings.apply([AllEncoderOutputsCleared()])
        elif what == "unblock all":
            blocks.clear()
            holdings.apply([AllBlocksCleared()])
        alive = {name for name, _ in outputs} | set(blocks.values())
        known &= alive
        assert {name for name in NAMES if f"image of {name}" in holdings} == known


class Engine:
    """Numbers events as an engine does, and forgets old messages."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def tell(self, event: CacheEvent) -> tuple[int, bytes]:
        self.messages.append(pack(Batch(0.0, [event])))
        return len(self.messages) - 1, self.messages[-1]

    def replay(self, first: int) -> list[tuple[int, bytes]]:
        return [*enumerate(self.messages)][first:] + [(-1, b"")]


@given(st.integers(0, 1 << 32))
def test_a_stream_with_lost_and_crossing_messages_ends_complete_and_in_order(seed: int) -> None:
    """Live messages are lost now and then, replays arrive late, the engine is restarted now and then."""
    chance = random.Random(seed)
    seen: list[CacheEvent] = []
    stream = Stream(seen.extend, seen.clear, can_ask=True)
    engine = Engine()
    told: list[CacheEvent] = []
    replies: list[tuple[int, bytes]] = []

    def ask(number: int | None) -> None:
        if number is not None:
            replies.extend(engine.replay(number))

    ask(stream.connected())
    for number in range(60):
        roll = chance.random()
        if roll < 0.05:
            engine, told, replies = Engine(), [], []
            stream.disconnected()
            assert not stream.complete
            ask(stream.connected())
        elif roll < 0.6:
            event = BlockRemoved([number], "GPU")
            told.append(event)
            message = engine.tell(event)
            if chance.random() < 0.7:
                ask(stream.live(*message))
        elif replies:
            ask(stream.replayed(*replies.pop(0)))
        if stream.complete:
            assert seen == told[: len(seen)], "events are in order and without gaps"
    event = BlockRemoved([1000], "GPU")
    told.append(event)
    ask(stream.live(*engine.tell(event)))
    while replies:
        ask(stream.replayed(*replies.pop(0)))
    assert stream.complete
    assert seen == told


def test_without_replays_a_gap_forgets_everything() -> None:
    seen: list[CacheEvent] = []
    stream = Stream(seen.extend, seen.clear, can_ask=False)
    engine = Engine()
    messages = [engine.tell(BlockRemoved([number], "GPU")) for number in range(4)]
    assert stream.connected() is None
    assert stream.complete
    stream.live(*messages[0])
    stream.live(*messages[1])
    assert len(seen) == 2
    stream.live(*messages[3])
    assert [event.block_hashes for event in seen] == [[3]]  # type: ignore[union-attr]


def test_numbers_that_begin_again_are_another_engine() -> None:
    seen: list[CacheEvent] = []
    stream = Stream(seen.extend, seen.clear, can_ask=True)
    engine = Engine()
    assert stream.connected() == 0
    for number in range(3):
        stream.replayed(*engine.tell(BlockRemoved([number], "GPU")))
    stream.replayed(-1, b"")
    assert stream.complete
    assert stream.live(*Engine().tell(AllBlocksCleared())) == 0
    assert not stream.complete
    assert seen == []


def test_a_star_in_an_address_is_the_host_of_the_backend() -> None:
    assert address_at("tcp://*:5557", "10.0.0.7") == "tcp://10.0.0.7:5557"
    assert address_at("tcp://*:5557", "::1") == "tcp://[::1]:5557"
    assert address_at("tcp://other:5557", "10.0.0.7") == "tcp://other:5557"
