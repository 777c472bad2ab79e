"""Mooncake's transfer engine: installation, releases, arrivals, and reads that are given up."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from fovea.core.errors import ConfigError
from fovea.engine.transfer import mooncake
from fovea.engine.transfer.connector import Offer, TransferFailed
from fovea.engine.transfer.mooncake import MooncakeConnector

DATA = bytes(range(256)) * 256
SIZE = 1 << 20


class FakeEngine:
    """An engine without a network, which reads memory of this process. read: replaces its reads."""

    ports = iter(range(12000, 13000))

    def __init__(self) -> None:
        self.port = next(self.ports)
        self.memory: dict[int, int] = {}
        self.read: Callable[[], int] | None = None

    def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
        return 0 if host else -1

    def get_rpc_port(self) -> int:
        return self.port

    def register_memory(self, address: int, size: int) -> int:
        self.memory[address] = size
        return 0

    def unregister_memory(self, address: int) -> int:
        del self.memory[address]
        return 0

    def transfer_sync_read(self, place: str, target: int, source: int, size: int) -> int:
        assert any(start <= target and target + size <= start + all_ for start, all_ in self.memory.items())
        if self.read is not None:
            return self.read()
        ctypes.memmove(target, source, size)
        return 0


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "_import_engine", lambda: FakeEngine)


def connector(landing: int = SIZE, **settings: Any) -> MooncakeConnector:
    return MooncakeConnector("host", SIZE, landing, **settings)


def engine_of(one: MooncakeConnector) -> FakeEngine:
    engine: FakeEngine = one._slab.engine
    return engine


def offered(producer: MooncakeConnector, data: bytes = DATA) -> Offer:
    offer = producer.offer("ab", [data])
    assert offer is not None
    return offer


def until(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + 10
    while not holds() and time.monotonic() < end:
        time.sleep(0.002)
    return holds()


def test_without_the_engine_an_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(ConfigError, match=r"fovea-vlm\[mooncake\].*libibverbs1, librdmacm1 and libnuma1"):
        connector()


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize(("host", "protocol"), [("", "tcp"), ("a b", "tcp"), ("host", "pigeon")])
def test_wrong_settings_are_refused(host: str, protocol: str) -> None:
    with pytest.raises(ConfigError):
        MooncakeConnector(host, SIZE, SIZE, protocol=protocol)
    with pytest.raises(ConfigError, match="no memory"):
        MooncakeConnector("host", 1 << 62, SIZE)


@pytest.mark.usefixtures("engines")
def test_a_release_is_told_once_and_ends_the_lease_of_the_producer() -> None:
    producer = connector()
    told: list[Offer] = []
    consumer = connector(tell=told.append)
    offer = offered(producer)
    assert consumer.fetch(offer, 5.0) == DATA
    for _ in range(3):
        consumer.release(offer)
    assert told == [offer]
    assert producer.has("ab")
    producer.release(told[0])
    assert not producer.has("ab")
    assert producer.stats()["free_bytes"] == SIZE
    producer.release(told[0])
    connector().release(offer)  # nobody is told
    for each in (producer, consumer):
        each.close()
        assert engine_of(each).memory == {}


@pytest.mark.usefixtures("engines")
def test_leases_end_by_time_and_a_late_reader_fails() -> None:
    now = [0.0]
    producer, consumer = connector(clock=lambda: now[0]), connector()
    offer = offered(producer)
    now[0] = 30.0
    assert not producer.has("ab")
    offered(producer, b"\1" * len(DATA))
    with pytest.raises(TransferFailed, match="checksum"):
        consumer.fetch(offer, 5.0)
    with pytest.raises(TransferFailed, match="lease has ended"):
        producer.fetch(offer, 5.0)


@pytest.mark.usefixtures("engines")
def test_a_read_that_hangs_keeps_its_arrival_memory_until_it_ends() -> None:
    """The engine may still write there, so the memory cannot be given to another read."""
    producer, consumer = connector(), connector(2 * len(DATA))
    offer = offered(producer)
    go_on = threading.Event()
    engine_of(consumer).read = lambda: -1 if go_on.wait(10) else 0
    for _ in range(2):
        with pytest.raises(TransferFailed, match="does not answer in time"):
            consumer.fetch(offer, 0.02)
    assert consumer.stats()["reads"] == 2
    with pytest.raises(TransferFailed, match="no room in time"):
        consumer.fetch(offer, 0.02)
    consumer.close()
    assert len(engine_of(consumer).memory) == 1, "reads that hang still write to it"
    go_on.set()
    assert until(lambda: engine_of(consumer).memory == {})
    assert consumer.stats()["reads"] == 0
    producer.close()


@pytest.mark.usefixtures("engines")
def test_a_read_that_fails() -> None:
    producer, consumer = connector(), connector()
    offer = offered(producer)
    engine_of(consumer).read = lambda: -1
    with pytest.raises(TransferFailed, match="gone"):
        consumer.fetch(offer, 5.0)
    engine_of(consumer).read = None
    assert consumer.fetch(offer, 5.0) == DATA
    assert consumer.stats()["reads"] == 0


@pytest.mark.usefixtures("engines")
def test_a_value_above_the_arrival_memory_fails() -> None:
    producer, consumer = connector(), connector(len(DATA) // 2)
    with pytest.raises(TransferFailed, match="buffer for arrivals"):
        consumer.fetch(offered(producer), 5.0)


@pytest.mark.usefixtures("engines")
def test_fetches_wait_for_arrival_memory() -> None:
    producer, consumer = connector(), connector(len(DATA))
    offer = offered(producer)
    results: list[bytearray] = []
    threads = [threading.Thread(target=lambda: results.append(consumer.fetch(offer, 10.0))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == [DATA] * 8


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize("place", ["host", "host:", ":1", "host:70000", "ho st:1", "http://host:1", "h:1:2"])
def test_a_place_is_a_host_and_a_port(place: str) -> None:
    with pytest.raises(TransferFailed, match="place"):
        connector().fetch(Offer("mooncake", place, "ab", 1, "0" * 32), 1.0)
