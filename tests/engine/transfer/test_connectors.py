"""One suite for all connectors: equal bytes, or a TransferFailed that says why."""

from __future__ import annotations

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fovea.engine.transfer.connector import MOST, Connector, TransferFailed
from tests.support.thorough import examples
from tests.support.transfer import SLAB, connector_of, random_bytes


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, (1 << 20) + 1, 4 << 20])
def test_bytes_arrive(producer: Connector, consumer: Connector, size: int) -> None:
    data = random_bytes(size)
    offer = producer.offer("ab", [data])
    assert offer is not None
    assert offer.size == size
    assert producer.has("ab")
    for connector in (consumer, producer):
        received = connector.fetch(offer, 5.0)
        assert isinstance(received, bytearray)
        assert received == data
    consumer.release(offer)
    consumer.release(offer)


def test_pieces_arrive_as_one(producer: Connector, consumer: Connector) -> None:
    numbers = memoryview(bytes(range(24))).cast("B", (2, 3, 4))
    pieces = [b"", b"abc", bytearray(b"defg"), numbers, memoryview(b"").cast("B"), b"z"]
    offer = producer.offer("ab", pieces)
    assert offer is not None
    assert consumer.fetch(offer, 5.0) == b"abcdefg" + bytes(range(24)) + b"z"


def test_pieces_with_gaps_are_a_mistake_of_the_caller(producer: Connector) -> None:
    with pytest.raises(TypeError):
        producer.offer("ab", [memoryview(b"abcd")[::2]])


def test_a_value_that_can_never_fit_is_refused_and_counted(producer: Connector, consumer: Connector) -> None:
    assert producer.offer("ab", [bytes(SLAB), b"x"]) is None
    assert not producer.has("ab")
    assert producer.stats()["refusals"] == 1
    offer = producer.offer("ab", [b"small"])
    assert offer is not None
    assert consumer.fetch(offer, 5.0) == b"small"


def test_many_threads_offer_and_fetch(producer: Connector, consumer: Connector) -> None:
    def hand_over(seed: int) -> bool:
        data = random_bytes(random.Random(seed).randrange(200_000), seed)
        offer = producer.offer(f"{seed:x}", [data])
        assert offer is not None
        try:
            return consumer.fetch(offer, 20.0) == data
        finally:
            consumer.release(offer)
            producer.release(offer)

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(hand_over, range(60)))
    assert producer.stats()["offers"] == consumer.stats()["fetches"] == 60


@pytest.mark.parametrize(
    "change",
    [
        {"size": 99_999},
        {"size": 100_001},
        {"size": MOST},
        {"start": MOST},
        {"start": SLAB - 1},
        {"checksum": "0" * 32},
        {"place": "/etc/passwd"},
        {"place": "127.0.0.1:1"},
        {"place": "127.0.0.1:99999"},
        {"place": "a b"},
        {"connector": "pigeon"},
    ],
    ids=str,
)
def test_an_offer_that_lies_fails(producer: Connector, consumer: Connector, change: dict[str, Any]) -> None:
    data = random_bytes(100_000)
    producer.offer("ff", [data])
    offer = producer.offer("ab", [data])
    assert offer is not None
    if producer.kind == "folder" and "start" in change:
        pytest.skip("files have no start")
    lie = replace(offer, **change)
    for connector in (consumer, producer):
        with pytest.raises(TransferFailed):
            connector.fetch(lie, 5.0)
    if change.keys() != {"checksum"}:  # a release with the right lease and place is not a lie
        consumer.release(lie)
    assert consumer.stats()["failures"] == 1
    assert consumer.fetch(offer, 5.0) == data, "the true offer is as good as before"


@given(
    size=st.integers(0, 3 * 4096) | st.integers(0, MOST),
    start=st.integers(-4096, 4096) | st.integers(-MOST, MOST),
    lease=st.integers(-3, 3),
)
@settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_random_offers_give_the_bytes_or_fail(
    producer: Connector, consumer: Connector, size: int, start: int, lease: int
) -> None:
    data = b"\1" * 4096
    offer = producer.offer("ab", [data])
    assert offer is not None
    try:
        lie = replace(offer, size=size, start=offer.start + start, lease=offer.lease + lease)
        received = consumer.fetch(lie, 5.0)
    except TransferFailed:
        received = bytearray(data)
    assert received == data
    producer.release(offer)


def test_an_offer_of_another_kind_is_refused_by_name(producer: Connector, consumer: Connector) -> None:
    offer = producer.offer("ab", [b"bytes"])
    assert offer is not None
    foreign = replace(offer, connector="folder" if producer.kind != "folder" else "shm")
    with pytest.raises(TransferFailed, match=f"an offer of {foreign.connector}, not of {consumer.kind}"):
        consumer.fetch(foreign, 1.0)
    consumer.release(foreign)
    assert consumer.stats()["failures"] == 1
    assert consumer.fetch(offer, 5.0) == b"bytes"


def test_a_fetch_without_time_fails_or_has_the_bytes(producer: Connector, consumer: Connector) -> None:
    offer = producer.offer("ab", [b"abc"])
    assert offer is not None
    for timeout_s in (0.0, -1.0, 1e-9):
        with suppress(TransferFailed):
            assert consumer.fetch(offer, timeout_s) == b"abc"
    assert consumer.fetch(offer, 5.0) == b"abc"


def test_a_closed_connector_refuses(kind: str, home: Path) -> None:
    closed, other = connector_of(kind, home), connector_of(kind, home)
    mine, offer = closed.offer("aa", [b"abc"]), other.offer("ab", [b"abc"])
    assert mine is not None
    assert offer is not None
    other.fetch(mine, 5.0)
    for _ in range(2):
        closed.close()
    assert closed.offer("aa", [b"abc"]) is None
    assert not closed.has("aa")
    for each in (mine, offer):
        with pytest.raises(TransferFailed, match="closed"):
            closed.fetch(each, 1.0)
        closed.release(each)
    if kind != "folder":
        with pytest.raises(TransferFailed, match="gone|lease"):
            other.fetch(mine, 5.0)
    other.close()


def test_closing_while_threads_work_ends_them_all(kind: str, home: Path) -> None:
    producer, consumer = connector_of(kind, home), connector_of(kind, home)
    unexpected: list[BaseException] = []
    started = threading.Barrier(5)

    def work(seed: int) -> None:
        data = random_bytes(300_000, seed)
        started.wait()
        try:
            for _ in range(1000):
                offer = producer.offer("ab", [data])
                if offer is None:
                    return
                assert consumer.fetch(offer, 5.0) == data
                producer.release(offer)
        except TransferFailed:
            pass
        except BaseException as error:  # noqa: BLE001 - the test shows it
            unexpected.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    started.wait()
    consumer.close()
    producer.close()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert not unexpected


def test_descriptors_and_threads_are_closed(kind: str, home: Path) -> None:
    if kind == "mooncake":
        pytest.skip("the engine keeps some of its own for the life of the process")
    connector_of(kind, home).close()
    before = sorted(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        producer, consumer = connector_of(kind, home), connector_of(kind, home)
        offer = producer.offer("ab", [b"abc"])
        assert offer is not None
        consumer.fetch(offer, 5.0)
        consumer.close()
        producer.close()
    assert (sorted(os.listdir("/proc/self/fd")), threading.active_count()) == before
