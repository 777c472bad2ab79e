"""Shared memory: leases and pins, damage, foreign users, sockets, and connections."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fovea.core.errors import ConfigError
from fovea.engine.transfer import offered as offered_module
from fovea.engine.transfer import shm, shm_server
from fovea.engine.transfer.connector import Offer, TransferFailed
from fovea.engine.transfer.shm import ShmConnector

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the connectors need Linux")
SLAB = 1 << 20
DATA = bytes(range(256)) * 256


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


Open = Callable[..., ShmConnector]


@pytest.fixture
def connector(home: Path, clock: Clock) -> Iterator[Open]:
    """Open connectors of one folder."""
    opened = []

    def open_one(**settings: Any) -> ShmConnector:
        opened.append(ShmConnector(home / "transfer", SLAB, **({"clock": clock} | settings)))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


@pytest.fixture
def producer(connector: Open) -> ShmConnector:
    return connector()


@pytest.fixture
def consumer(connector: Open) -> ShmConnector:
    return connector()


def offered(producer: ShmConnector, data: bytes = DATA, name: str = "ab") -> Offer:
    offer = producer.offer(name, [data])
    assert offer is not None
    return offer


def until(holds: Callable[[], bool]) -> bool:
    """Wait up to ten seconds until it holds."""
    end = time.monotonic() + 10
    while not holds() and time.monotonic() < end:
        time.sleep(0.002)
    return holds()


def raw_link(producer: ShmConnector) -> tuple[socket.socket, memoryview]:
    """A connection as a consumer has it, and the memory."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.settimeout(10)
    link.connect(producer.place)
    return link, shm._receive_memory(link)


def pin(link: socket.socket, offer: Offer) -> int:
    link.send(shm.REQUEST.pack(shm.VERSION, shm.PIN, offer.lease, offer.start, offer.size))
    status: int = shm.REPLY.unpack(link.recv(100))[1]
    return status


def test_an_offer_ends_by_time(producer: ShmConnector, consumer: ShmConnector, clock: Clock) -> None:
    offer = offered(producer)
    clock.now += 29.9
    assert producer.has("ab")
    clock.now += 0.1
    assert not producer.has("ab")
    with pytest.raises(TransferFailed, match="lease has ended"):
        consumer.fetch(offer, 5.0)
    stats = producer.stats()
    assert (stats["leases"], stats["expirations"], stats["free_bytes"]) == (0, 1, SLAB)


def test_a_fetch_extends_the_lease(producer: ShmConnector, consumer: ShmConnector, clock: Clock) -> None:
    offer = offered(producer)
    for _ in range(5):
        clock.now += 20
        assert consumer.fetch(offer, 5.0) == DATA


def test_a_name_is_offered_until_its_last_lease_ends(producer: ShmConnector, consumer: ShmConnector) -> None:
    first, second = offered(producer), offered(producer)
    assert first.lease != second.lease
    consumer.release(first)
    assert until(lambda: producer.stats()["leases"] == 1)
    assert producer.has("ab")
    assert consumer.fetch(second, 5.0) == DATA
    producer.release(second)
    assert not producer.has("ab")


def test_a_pinned_value_stays_after_its_lease(producer: ShmConnector, clock: Clock) -> None:
    """A consumer is in the middle of the copy while another ends the lease, and the memory is wanted."""
    offer = offered(producer)
    link, memory = raw_link(producer)
    assert pin(link, offer) == shm.OK
    producer.release(offer)
    assert not producer.has("ab")
    while producer.offer("ff", [b"\1" * 4096]):
        pass
    assert memory[offer.start : offer.start + offer.size] == DATA
    assert pin(link, offer) != shm.OK
    link.send(shm.REQUEST.pack(shm.VERSION, shm.RELEASE, offer.lease, offer.start, offer.size))
    assert until(lambda: producer.stats()["free_bytes"] >= len(DATA))
    link.close()


def test_pins_of_a_stalled_consumer_end(producer: ShmConnector, clock: Clock) -> None:
    """Then its memory is used again, and the checksum tells it that it came too late."""
    offer = offered(producer)
    link, memory = raw_link(producer)
    assert pin(link, offer) == shm.OK
    clock.now += 30
    assert producer.stats()["free_bytes"] == SLAB
    offered(producer, b"\1" * len(DATA))
    with pytest.raises(TransferFailed, match="checksum"):
        shm.copy_checked(memory[offer.start : offer.start + offer.size], offer.checksum)
    link.close()


def test_pins_end_with_the_connection(producer: ShmConnector) -> None:
    offer = offered(producer)
    link, _ = raw_link(producer)
    assert pin(link, offer) == shm.OK
    producer.release(offer)
    assert producer.stats()["leases"] == 1
    link.close()
    assert until(lambda: producer.stats()["leases"] == 0)


def test_a_lease_that_ended_leaves_other_pins_alone(producer: ShmConnector, consumer: ShmConnector) -> None:
    """Its refusal once closed the connection, and with it the pins of all threads."""
    first, second = offered(producer), offered(producer)
    consumer.fetch(first, 5.0)
    producer.release(second)
    with pytest.raises(TransferFailed, match="lease has ended"):
        consumer.fetch(second, 5.0)
    producer.release(first)
    assert producer.stats()["leases"] == 1, "the consumer still pins it"
    consumer.release(first)
    assert until(lambda: producer.stats()["leases"] == 0)


def test_damaged_memory_fails(producer: ShmConnector, consumer: ShmConnector) -> None:
    offer = offered(producer)
    for at in (0, len(DATA) // 2, len(DATA) - 1):
        producer._slab.view[offer.start + at] ^= 1
        for each in (consumer, producer):
            with pytest.raises(TransferFailed, match="checksum differs"):
                each.fetch(offer, 5.0)
        producer._slab.view[offer.start + at] ^= 1
    assert consumer.fetch(offer, 5.0) == DATA


def test_a_consumer_cannot_write_or_resize(producer: ShmConnector) -> None:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(producer.place)
    _, (fd,), _, _ = socket.recv_fds(link, 100, 1)
    with pytest.raises(OSError, match="Bad file"):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(OSError, match="Invalid"):
        os.ftruncate(fd, 1)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, SLAB)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)  # as this user may; the seals hold all the same
    with pytest.raises(PermissionError):
        os.pwrite(again, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(again, SLAB)
    with pytest.raises(PermissionError):
        os.ftruncate(again, 1)
    os.close(again)
    os.close(fd)
    link.close()


def test_a_process_of_another_user_gets_nothing(
    producer: ShmConnector, consumer: ShmConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = offered(producer)
    with monkeypatch.context() as patch:
        patch.setattr(shm_server, "peer_of", lambda _: (1, os.geteuid() + 1))
        with pytest.raises(TransferFailed, match="closed the connection|gone"):
            consumer.fetch(offer, 5.0)
    with monkeypatch.context() as patch:
        patch.setattr(shm, "peer_of", lambda _: (1, os.geteuid() + 1))
        with pytest.raises(TransferFailed, match="another user"):
            consumer.fetch(offer, 5.0)
    assert consumer.fetch(offer, 5.0) == DATA
    assert producer.stats()["connections"] == 1


def test_only_sockets_of_the_folder_are_accepted(
    producer: ShmConnector, consumer: ShmConnector, home: Path
) -> None:
    offer = offered(producer)
    folder, name = os.path.split(offer.place)
    other = home / "other"
    other.mkdir()
    link = Path(folder) / "fovea-1-01234567.sock"
    link.symlink_to(offer.place)
    file = Path(folder) / "fovea-1-76543210.sock"
    file.write_text("")
    (other / name).symlink_to(offer.place)
    for place in (
        f"{folder}/../transfer/{name}",
        f"{folder}//{name}",
        f"{folder}/./{name}",
        str(other / name),
        name,
        str(link),
        str(file),
        f"{folder}/fovea-2-01234567.sock",
        f"{folder}/.sock",
        folder,
    ):
        with pytest.raises(TransferFailed, match="place|gone"):
            consumer.fetch(replace(offer, place=place), 1.0)
        consumer.release(replace(offer, place=place))
    assert consumer.stats()["links"] == 0
    assert consumer.fetch(offer, 5.0) == DATA


@pytest.mark.parametrize("message", [b"x", b"x" * 32, b"x" * 33, b"", struct.pack("<BB6xQQQ", 1, 3, 1, 1, 1)])
def test_a_connection_with_other_messages_is_closed(producer: ShmConnector, message: bytes) -> None:
    link, _ = raw_link(producer)
    link.send(message)
    assert link.recv(100) == b""
    link.close()
    assert until(lambda: producer.stats()["connections"] == 0)


def test_a_consumer_that_reads_no_replies_is_dropped(producer: ShmConnector) -> None:
    offer = offered(producer)
    link, _ = raw_link(producer)
    link.setblocking(False)
    request = shm.REQUEST.pack(shm.VERSION, shm.PIN, offer.lease, offer.start, offer.size)

    def flood() -> bool:
        try:
            while True:
                link.send(request)
        except BlockingIOError:
            return producer.stats()["connections"] == 0
        except OSError:
            return True

    assert until(flood)
    link.close()


def test_connections_are_bounded(connector: Open) -> None:
    producer, offer = (first := connector(most_connections=2)), offered(first)
    links = [raw_link(producer)[0] for _ in range(2)]
    assert pin(links[1], offer) == shm.OK
    newer, _ = raw_link(producer)
    assert links[0].recv(100) == b"", "the idle connection made room"
    assert pin(newer, offer) == shm.OK
    consumer = connector()
    with pytest.raises(TransferFailed, match="no free connection"):
        consumer.fetch(offer, 5.0)
    newer.close()
    assert until(lambda: producer.stats()["connections"] == 1)
    assert consumer.fetch(offer, 5.0) == DATA
    for link in links:
        link.close()


def test_a_link_that_made_room_connects_again(connector: Open) -> None:
    producer, offer = (first := connector(most_connections=1)), offered(first)
    one, two = connector(), connector()
    for _ in range(3):
        for consumer in (one, two):
            assert consumer.fetch(offer, 5.0) == DATA
            producer._values.unpin(producer._server._next_holder - 1)


def test_links_to_dead_producers_and_idle_links_are_closed(connector: Open) -> None:
    """A link keeps the memory of its producer: that of a dead one was never given back."""
    producer, other = connector(), connector()
    consumer = connector(idle_s=1e9)
    consumer.fetch(offered(producer), 5.0)
    consumer.fetch(offered(other), 5.0)
    producer.close()
    consumer._tick()
    assert consumer.stats()["links"] == 1
    consumer._idle_s = 0.0
    consumer._tick()
    assert consumer.stats()["links"] == 0
    assert consumer.fetch(offered(other), 5.0) == DATA


def test_memory_that_could_shrink_is_not_mapped(consumer: ShmConnector) -> None:
    """A producer that cut its memory short would kill every consumer with SIGBUS."""
    place = str(consumer._folder / "fovea-1-00000000.sock")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(place)
    listener.listen(8)
    offer = Offer("shm", place, "ab", 10, "0" * 32)
    plain = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
    os.ftruncate(plain, 4096)
    for hello, fds in (
        (shm.HELLO.pack(shm.VERSION, shm.OK, 4096), [plain]),
        (shm.HELLO.pack(shm.VERSION, shm.OK, 4096), []),
        (shm.HELLO.pack(9, shm.OK, 4096), [plain]),
        (b"hello", [plain]),
        (b"x" * 500, [plain, plain]),
    ):
        # The greeting waits for the consumer in a connection that the listener accepts before.
        before = sorted(os.listdir("/proc/self/fd"))
        accepted = []

        def greet(
            connection: socket.socket,
            path: str,
            deadline: float,
            hello: bytes = hello,
            fds: list[int] = fds,
            accepted: list[socket.socket] = accepted,
        ) -> None:
            connection.connect(path)
            accepted.append(listener.accept()[0])
            socket.send_fds(accepted[0], [hello], fds)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shm, "_reach", greet)
            with pytest.raises(TransferFailed, match="memory|version|greeting"):
                consumer.fetch(offer, 5.0)
        accepted[0].close()
        assert sorted(os.listdir("/proc/self/fd")) == before
    os.close(plain)
    listener.close()


def test_a_producer_that_says_nothing_fails_in_time(consumer: ShmConnector) -> None:
    place = str(consumer._folder / "fovea-1-00000000.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(place)
        listener.listen(0)
        waiting = []
        for _ in range(3):  # the third finds a full queue
            with pytest.raises(TransferFailed, match="in time"):
                consumer.fetch(Offer("shm", place, "ab", 10, "0" * 32), 0.05)
            waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(place)
        for each in waiting:
            each.close()


def test_stale_sockets_are_removed_and_others_stay(home: Path, connector: Open) -> None:
    running = connector()
    folder = Path(running.place).parent
    child = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True
    )
    dead = int(child.stdout)
    sockets = {
        "dead": folder / f"fovea-{dead}-00000000.sock",
        "number used again": folder / f"fovea-{os.getpid()}-00000001.sock",
        "starting": folder / f"fovea-{os.getpid()}-00000002.sock",
        "foreign": folder / "other.sock",
    }
    for path in sockets.values():
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as each:
            each.bind(str(path))
    os.utime(sockets["number used again"], (1, 1))
    file = folder / f"fovea-{dead}-00000003.sock"
    file.write_text("not a socket")
    connector()
    left = {name for name, path in sockets.items() if path.exists()}
    assert left == {"starting", "foreign"}
    assert file.exists()
    assert Path(running.place).exists()


def test_the_folder_is_private(home: Path, clock: Clock) -> None:
    folder = home / "transfer"
    folder.mkdir(mode=0o755)
    ShmConnector(folder, SLAB).close()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.iterdir()) == []
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write"):
        ShmConnector(folder, SLAB)
    with pytest.raises(ConfigError, match="too long"):
        ShmConnector(home / ("x" * 100), SLAB)
    with pytest.raises(ConfigError, match="no shared memory"):
        ShmConnector(home / "other", 1 << 62)


def test_a_stopped_producer_does_not_end_its_own_copies(producer: ShmConnector, clock: Clock) -> None:
    """If the lease ends during the copy, because the process slept, the value is not offered."""
    copy = offered_module.copy_pieces

    def slow_copy(pieces: list[memoryview], target: memoryview) -> str:
        clock.now += 31
        assert producer.offer("ff", [bytes(SLAB)]) is None, "the extent must not be used meanwhile"
        return copy(pieces, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offered_module, "copy_pieces", slow_copy)
        assert producer.offer("ab", [DATA]) is None
    assert producer.stats()["free_bytes"] == SLAB
    assert not producer.has("ab")
    offered(producer)
