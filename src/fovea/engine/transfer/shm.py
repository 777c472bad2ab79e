"""The connector for processes of one host: the consumer maps the producer's memory and copies out of it.

A fetch asks the producer to pin the value, copies it, and compares the checksum of the copy. While it is
pinned, the producer does not reuse the memory, however old the lease is. Pins end with `release`, with the
consumer's connection (so a consumer that dies keeps nothing), and after the time of a lease (so a consumer
that stalls keeps nothing either; its checksum then differs).

Both sides check that the other belongs to this user. An offer's path comes from a peer, so only sockets in
the connector's own folder are accepted.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from fovea.core.errors import ConfigError
from fovea.engine.transfer.connector import Buffer, Offer, TransferFailed, copy_checked, transfer_counts
from fovea.engine.transfer.offered import OWNER, OfferedValues
from fovea.engine.transfer.shm_server import (
    FULL,
    HELLO,
    OK,
    PIN,
    RELEASE,
    REPLY,
    REQUEST,
    SOCKET_NAME,
    VERSION,
    SharedSlab,
    SlabServer,
    open_folder,
    peer_of,
    remove_stale_sockets,
)

_RETRY_S = 0.005


class ShmConnector:
    """Values in shared memory of one host."""

    kind = "shm"

    def __init__(
        self,
        folder: Path,
        slab_bytes: int,
        *,
        lease_s: float = 30.0,
        idle_s: float = 60.0,
        most_connections: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the slab and listen. Raises ConfigError.

        folder: of the sockets; all processes that exchange values have the same.
        slab_bytes: size of the slab. Its memory is used once values have been there.
        lease_s: seconds after which an offer ends.
        idle_s: a connection to a producer is closed after so many seconds without use.
        most_connections: most consumers at a time.
        """
        if not hasattr(os, "memfd_create"):
            raise ConfigError("connectors of kind 'shm' need Linux; accepted here: 'folder'")
        self._folder = open_folder(folder)
        remove_stale_sockets(self._folder)
        self._counts = transfer_counts()
        self._idle_s = idle_s
        self._links: dict[str, Link] = {}
        self._links_lock = threading.Lock()
        self._is_closed = False
        try:
            self._slab = SharedSlab(slab_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(f"there is no shared memory of {slab_bytes} bytes: {error}") from error
        self._values = OfferedValues(self._slab.view, lease_s=lease_s, clock=clock)
        try:
            self._server = SlabServer(
                self._folder,
                self._slab,
                self._values,
                most_connections=most_connections,
                each_tick=self._tick,
            )
        except OSError as error:
            self._slab.close()
            raise ConfigError(f"no transfer socket can listen in {self._folder}: {error}") from error

    @property
    def place(self) -> str:
        """The path of this connector's socket."""
        return self._server.place

    def has(self, name: str) -> bool:
        return self._values.has(name)

    def offer(self, name: str, pieces: Sequence[Buffer]) -> Offer | None:
        value = self._values.put(name, pieces)
        if value is None:
            self._counts.add(refusals=1)
            return None
        self._counts.add(offers=1, offered_bytes=value.size)
        return Offer(self.kind, self.place, name, value.size, value.checksum, value.start, value.lease)

    def fetch(self, offer: Offer, timeout_s: float) -> bytearray:
        deadline = time.monotonic() + timeout_s
        return self._counts.count_fetch(lambda: copy_checked(self._pin(offer, deadline), offer.checksum))

    def release(self, offer: Offer) -> None:
        """End an offer. It waits for no answer: if the producer does not read it, the lease ends by time."""
        self._counts.add(releases=1)
        if self._is_closed or offer.connector != self.kind:
            return
        if offer.place == self.place:
            self._values.end(offer.lease, offer.start, offer.size, OWNER)
            return
        with suppress(TransferFailed):
            self._link(offer.place).release(offer)

    def close(self) -> None:
        with self._links_lock:
            if self._is_closed:
                return
            self._is_closed = True
            links = list(self._links.values())
            self._links.clear()
        for link in links:
            link.close()
        self._values.close()
        self._server.close()
        self._slab.close()

    def stats(self) -> dict[str, float]:
        """`transfer_counts`, the slab's use, `connections` of consumers and `links` to producers."""
        with self._links_lock:
            links = sum(link.is_open for link in self._links.values())
        more = {"connections": float(self._server.connections), "links": float(links)}
        return self._counts.values() | self._values.stats() | more

    def _pin(self, offer: Offer, deadline: float) -> memoryview:
        """Pin a value and return its bytes in the producer's memory. Raises TransferFailed."""
        if self._is_closed:
            raise TransferFailed("the connector is closed")
        if offer.connector != self.kind:
            raise TransferFailed(f"it is an offer of {offer.connector}, not of {self.kind}")
        if offer.place == self.place:
            value = self._values.pin(offer.lease, offer.start, offer.size, OWNER)
            if value is None:
                raise TransferFailed("the lease has ended, or belongs to another value")
            return value
        return self._link(offer.place).pin(offer, deadline)

    def _link(self, place: str) -> Link:
        """The link to a producer. Raises TransferFailed unless the path is one of a socket of the folder."""
        name = place.rpartition("/")[2]
        if place != f"{self._folder}/{name}" or not SOCKET_NAME.fullmatch(name):
            raise TransferFailed("the offer's place is not a socket in the folder of transfer sockets")
        with self._links_lock:
            if self._is_closed:
                raise TransferFailed("the connector is closed")
            link = self._links.get(place)
            if link is None:
                _check_socket(place)
                link = self._links[place] = Link(place)
            link.touch()  # so that it is not idle, and stays in the table, until it is used
            return link

    def _tick(self) -> None:
        """Expire leases. Close links that are idle, and those whose producer ended: they keep its memory."""
        self._values.expire()
        with self._links_lock:
            for place, link in list(self._links.items()):
                if link.close_if_unused(self._idle_s):
                    del self._links[place]


class Link:
    """A connection to a producer, with its memory mapped. It opens when it is used first. Thread-safe.

    Threads take turns for requests, and copy without waiting for each other.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._used_at = time.monotonic()
        self._is_ended = False
        self._connection: socket.socket | None = None
        self._view = memoryview(b"")

    def pin(self, offer: Offer, deadline: float) -> memoryview:
        """Have a value pinned, and return its bytes in the producer's memory. Raises TransferFailed."""
        if not self._lock.acquire(timeout=max(deadline - time.monotonic(), 0)):
            raise TransferFailed("the producer does not answer in time")
        try:
            self._used_at = time.monotonic()
            request = REQUEST.pack(VERSION, PIN, offer.lease, offer.start, offer.size)
            was_open = self._connection is not None
            try:
                reply = self._ask(request, deadline)
            except _Closed:
                if not was_open:
                    raise
                reply = self._ask(request, deadline)  # it was closed because it was idle, or to make room
            return self._pinned(offer, reply)
        finally:
            self._used_at = time.monotonic()
            self._lock.release()

    def release(self, offer: Offer) -> None:
        """Send a release, if that is possible at once. Raises TransferFailed."""
        deadline = time.monotonic() + 1.0
        if not self._lock.acquire(timeout=1.0):
            return
        try:
            self._used_at = time.monotonic()
            connection = self._connection or self._connect(deadline)
            connection.settimeout(0)
            connection.send(REQUEST.pack(VERSION, RELEASE, offer.lease, offer.start, offer.size))
        except (OSError, TransferFailed):
            self._close()
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close the link for ever. A thread that waits for a reply fails at once."""
        self._is_ended = True
        connection = self._connection
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._close()

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    def touch(self) -> None:
        """Mark the link as used now."""
        self._used_at = time.monotonic()

    def close_if_unused(self, idle_s: float) -> bool:
        """Close the connection if the link is idle or the producer has ended. Returns whether it is idle."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            is_idle = time.monotonic() - self._used_at >= idle_s
            if is_idle or self._has_ended():
                self._close()
            return is_idle
        finally:
            self._lock.release()

    def _has_ended(self) -> bool:
        if self._connection is None:
            return False
        try:
            self._connection.settimeout(0)
            return not self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _ask(self, request: bytes, deadline: float) -> bytes:
        """Send a request and return the reply. Raises TransferFailed, and closes the connection then.

        A reply that comes later would otherwise be taken for that of another request.
        """
        connection = self._connection or self._connect(deadline)
        try:
            connection.settimeout(_left(deadline))
            connection.send(request)
            connection.settimeout(_left(deadline))
            reply = connection.recv(REPLY.size + 1)
        except TimeoutError as error:
            self._close()
            raise TransferFailed("the producer does not answer in time") from error
        except OSError as error:
            self._close()
            raise _Closed(f"the producer is gone: {error.strerror}") from error
        if not reply:
            self._close()
            raise _Closed("the producer is gone: it closed the connection")
        return reply

    def _pinned(self, offer: Offer, reply: bytes) -> memoryview:
        version, status, lease = REPLY.unpack(reply) if len(reply) == REPLY.size else (0, 0, 0)
        if version != VERSION or lease != offer.lease:
            self._close()
            raise TransferFailed("the producer's reply is not one to this request")
        if status != OK:
            raise TransferFailed("the lease has ended, or belongs to another value")
        if offer.start + offer.size > len(self._view):
            raise TransferFailed("the value is not inside the producer's memory")
        return self._view[offer.start : offer.start + offer.size]

    def _connect(self, deadline: float) -> socket.socket:
        """Connect and map the producer's memory. Raises TransferFailed."""
        if self._is_ended:
            raise TransferFailed("the connector is closed")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            _reach(connection, self._place, deadline)
            if peer_of(connection)[1] != os.geteuid():
                raise TransferFailed("the producer belongs to another user")
            connection.settimeout(_left(deadline))
            self._view = _receive_memory(connection)
        except TimeoutError as error:
            connection.close()
            raise TransferFailed("the producer does not answer in time") from error
        except OSError as error:
            connection.close()
            raise TransferFailed(f"the producer is gone: {error.strerror}") from error
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _close(self) -> None:
        """Close the connection. The mapping goes when no thread copies from it any more."""
        if self._connection is not None:
            self._connection.close()
        self._connection, self._view = None, memoryview(b"")


class _Closed(TransferFailed):
    """The producer has closed the connection."""


def _check_socket(place: str) -> None:
    """Raise TransferFailed unless the path is a socket of this user, and not a link to one."""
    try:
        status = os.lstat(place)
    except OSError as error:
        raise TransferFailed(f"the producer is gone: {error.strerror}") from error
    if not stat.S_ISSOCK(status.st_mode):
        raise TransferFailed("the offer's place is not a socket")
    if status.st_uid != os.geteuid():
        raise TransferFailed("the offer's place belongs to another user")


def _left(deadline: float) -> float:
    """Return the seconds that are left. Raises TimeoutError if there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _reach(connection: socket.socket, place: str, deadline: float) -> None:
    """Connect, and try again while the producer's queue is full. Raises OSError, TimeoutError."""
    while True:
        connection.settimeout(_left(deadline))
        try:
            connection.connect(place)
            return
        except BlockingIOError:  # not a TimeoutError: with a timeout, sockets do not wait for a full queue
            time.sleep(_RETRY_S)


def _receive_memory(connection: socket.socket) -> memoryview:
    """Receive the producer's slab and map it to read. Raises TransferFailed, OSError."""
    hello, descriptors, _, _ = socket.recv_fds(connection, HELLO.size + 1, 1)
    try:
        if not hello:
            raise TransferFailed("the producer closed the connection")
        version, status, size = HELLO.unpack(hello)
        if version != VERSION:
            raise TransferFailed(f"the producer speaks version {version} of the protocol, not {VERSION}")
        if status == FULL:
            raise TransferFailed("the producer has no free connection")
        if status != OK or len(descriptors) != 1:
            raise TransferFailed("the producer sent no memory")
        # Without the seal, a producer could cut its memory short, and reading it would kill this process.
        seals = fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK or os.fstat(descriptors[0]).st_size < size:
            raise TransferFailed("the producer's memory is shorter than it said, or could become so")
        return memoryview(mmap.mmap(descriptors[0], size, prot=mmap.PROT_READ))
    except (struct.error, ValueError, OverflowError) as error:
        raise TransferFailed("the producer's greeting cannot be parsed") from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
