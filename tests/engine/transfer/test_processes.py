"""Two processes: one dies or is stopped in the middle, and nothing hangs or is left behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fovea.engine.transfer.connector import Connector, Offer, TransferFailed
from fovea.engine.transfer.shm import ShmConnector
from tests.support.thorough import is_thorough
from tests.support.transfer import connector_of, random_bytes, why_skipped, worker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the connectors need Linux")
MIB = 1 << 20


@pytest.fixture(params=["shm", "mooncake"])
def kind(request: pytest.FixtureRequest) -> str:
    """The kinds in which a consumer depends on the producer's process."""
    kind: str = request.param
    reason = why_skipped(kind)
    if reason is not None:
        pytest.skip(reason)
    return kind


def until(holds: Callable[[], bool]) -> bool:
    """Wait up to ten seconds until it holds."""
    end = time.monotonic() + 10
    while not holds() and time.monotonic() < end:
        time.sleep(0.002)
    return holds()


def mappings() -> int:
    """Number of slabs that this process has mapped, its own included."""
    return Path("/proc/self/maps").read_text().count("fovea-transfer")


def fails_in_time(connector: Connector, offer: Offer, timeout_s: float) -> str:
    """Return the reason of a failing fetch. The time is bounded widely: it may not be the 30 s of a lease."""
    begin = time.monotonic()
    with pytest.raises(TransferFailed) as failure:
        connector.fetch(offer, timeout_s)
    assert time.monotonic() - begin < timeout_s + 5
    return str(failure.value)


def fetch_until_failure(connector: Connector, offer: Offer, data: bytes, results: list[str]) -> None:
    try:
        while True:
            assert connector.fetch(offer, 5.0) == data
            results.append("equal")
    except TransferFailed as error:
        results.append(str(error))


def test_a_value_of_another_process(kind: str, consumer: Connector, home: Path) -> None:
    with worker(kind, home) as producer:
        offer = producer.offer(MIB + 1, seed=3)
        assert consumer.fetch(offer, 10.0) == random_bytes(MIB + 1, 3)
        consumer.release(offer)
        if kind == "shm":
            assert until(lambda: producer.ask(do="stats")["leases"] == 0)
        offer_back = consumer.offer("ab", [b"abc"])
        assert offer_back is not None
        assert producer.ask(do="fetch", offer=offer_back.to_json(), timeout_s=10.0) == 3


def test_the_producer_is_killed_while_threads_fetch(kind: str, consumer: Connector, home: Path) -> None:
    data = random_bytes(8 * MIB, 1)
    with worker(kind, home) as producer:
        offer = producer.offer(len(data), seed=1)
        results: list[list[str]] = [[] for _ in range(2)]
        threads = [
            threading.Thread(target=fetch_until_failure, args=(consumer, offer, data, each))
            for each in results
        ]
        for thread in threads:
            thread.start()
        assert until(lambda: all(len(each) > 1 for each in results))
        producer.signal(signal.SIGKILL)
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert all("gone" in each[-1] or "in time" in each[-1] for each in results)
        assert "gone" in fails_in_time(consumer, offer, 2.0)


def test_the_producer_is_stopped(kind: str, consumer: Connector, home: Path) -> None:
    with worker(kind, home) as producer:
        offer = producer.offer(MIB, seed=1)
        producer.stop()
        assert "in time" in fails_in_time(consumer, offer, 0.1)  # it cannot connect
        producer.signal(signal.SIGCONT)
        assert consumer.fetch(offer, 10.0) == random_bytes(MIB, 1)
        producer.stop()
        assert "in time" in fails_in_time(consumer, offer, 0.1)  # no reply comes
        consumer.release(offer)
        producer.signal(signal.SIGCONT)
        again = producer.offer(MIB, seed=2)
        assert consumer.fetch(again, 10.0) == random_bytes(MIB, 2)


def test_the_consumer_is_killed(home: Path) -> None:
    producer = connector_of("shm", home)
    assert isinstance(producer, ShmConnector)
    offer = producer.offer("ab", [random_bytes(4 * MIB)])
    assert offer is not None
    with worker("shm", home) as consumer:
        consumer.send(do="fetch for ever", offer=offer.to_json())
        assert until(lambda: any(map(producer._values.holds_pins, range(1, 9))))
        producer.release(offer)
        assert producer.stats()["leases"] == 1
        consumer.signal(signal.SIGKILL)
        assert until(lambda: producer.stats()["leases"] == 0)
        assert until(lambda: producer.stats()["connections"] == 0)
    producer.close()


def test_the_consumer_is_stopped(home: Path) -> None:
    """It keeps its pins for the time of a lease, and fails afterwards."""
    producer = connector_of("shm", home, lease_s=0.3)
    offer = producer.offer("ab", [bytes(1024)])
    assert offer is not None
    with worker("shm", home) as consumer:
        assert consumer.ask(do="fetch", offer=offer.to_json(), timeout_s=10.0) == 1024
        consumer.stop()
        assert until(lambda: producer.stats()["leases"] == 0)
        consumer.signal(signal.SIGCONT)
        assert "lease" in consumer.ask(do="fetch", offer=offer.to_json(), timeout_s=10.0)
    producer.close()


def test_the_folder_outlives_its_producer(home: Path) -> None:
    consumer = connector_of("folder", home)
    with worker("folder", home) as producer:
        offer = producer.offer(MIB, seed=1)
    assert consumer.fetch(offer, 5.0) == random_bytes(MIB, 1)
    consumer.close()


def test_many_transfers_leave_nothing(consumer: Connector, kind: str, home: Path) -> None:
    """500 of them, 10,000 in the thorough run: no file, descriptor, extent or mapping is left."""
    if kind == "mooncake":
        pytest.skip("leases of this connector end by time")
    count = 10_000 if is_thorough() else 500
    shared, mapped = sorted(os.listdir("/dev/shm")), mappings()
    with worker(kind, home) as producer:
        for seed in range(count):
            offer = producer.offer((seed * 977) % 20_000, seed=1)
            assert len(consumer.fetch(offer, 10.0)) == offer.size
            consumer.release(offer)
            if seed == 0:
                before = sorted(os.listdir("/proc/self/fd"))
        assert sorted(os.listdir("/proc/self/fd")) == before
        assert mappings() == mapped + (kind == "shm"), "the producer's slab"
        assert until(lambda: producer.ask(do="stats")["leases"] == 0)
        stats = producer.ask(do="stats")
        assert (stats["offers"], stats["expirations"]) == (count, 0)
        assert stats["free_bytes"] == stats["slab_bytes"]
    assert sorted(os.listdir("/dev/shm")) == shared
    assert until(lambda: consumer.stats()["links"] == 0), "the link went with the producer"
    assert mappings() == mapped
