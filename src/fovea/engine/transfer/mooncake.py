"""The connector between hosts: Mooncake's transfer engine, over TCP or RDMA.

The engine has no authentication and no encryption: who reaches its ports can read and overwrite all memory
that is registered with it, which is the slab of offered values and the buffer that fetched values arrive in.
It listens on all network interfaces, whichever address it is given. It belongs into a private network of
trusted hosts, with a firewall around it. The checksum of an offer comes over the authenticated
connection, so bytes that somebody replaced on the way, or in memory, are an error and never taken for the
value.

A fetch reads from the producer's memory without the producer's processor (RDMA) or interpreter (TCP). So the
producer does not know that a value was fetched: the consumer's `release` calls `tell`, which the owner sets
to send the release over HTTP. Without that, leases end by time.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from fovea.core.errors import ConfigError
from fovea.core.names import install_command
from fovea.engine.transfer.connector import Buffer, Offer, TransferFailed, copy_checked, transfer_counts
from fovea.engine.transfer.offered import OWNER, OfferedValues
from fovea.engine.transfer.slab import Extent, Slab

PROTOCOLS = ("tcp", "rdma")
MOST_READS = 32
"""Most reads at a time, those included whose fetch gave up: the engine cannot stop a read that has begun."""
_TOLD = 1024
_PLACE = re.compile(r"([A-Za-z0-9.-]{1,253}|\[[0-9a-fA-F:.]{2,45}\]):([0-9]{1,5})")


class MooncakeConnector:
    """Values in memory that is registered with a transfer engine."""

    kind = "mooncake"

    def __init__(
        self,
        host: str,
        slab_bytes: int,
        landing_bytes: int,
        *,
        protocol: str = "tcp",
        device: str = "",
        lease_s: float = 30.0,
        tell: Callable[[Offer], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start an engine and register memory with it. Raises ConfigError.

        host: address of this host under which consumers reach it.
        slab_bytes: memory for offered values.
        landing_bytes: memory that fetched values arrive in: at least the largest value, better several.
        protocol: "tcp" or "rdma".
        device: network devices of RDMA, separated by commas; "": the engine chooses.
        lease_s: seconds after which an offer ends.
        tell: sends the release of a consumer to the producer.
        """
        if protocol not in PROTOCOLS:
            raise ConfigError(f"the protocol of Mooncake is {protocol!r}; accepted: {', '.join(PROTOCOLS)}")
        self.tell = tell
        engine = _import_engine()()
        if engine.initialize(host, "P2PHANDSHAKE", protocol, device):
            raise ConfigError(f"Mooncake's transfer engine does not start with {protocol} on {host!r}")
        self._place = f"{host}:{engine.get_rpc_port()}"
        if not _PLACE.fullmatch(self._place):
            raise ConfigError(
                f"the host of Mooncake is {host!r}; accepted: a name or an address, without port"
            )
        self._slab = RegisteredMemory(engine, slab_bytes)
        self._landing = Landing(engine, landing_bytes)
        self._values = OfferedValues(self._slab.view, lease_s=lease_s, clock=clock)
        self._counts = transfer_counts()
        self._told: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._told_lock = threading.Lock()
        self._is_closed = False

    @property
    def place(self) -> str:
        """Host and port of this connector's engine."""
        return self._place

    def has(self, name: str) -> bool:
        return self._values.has(name)

    def offer(self, name: str, pieces: Sequence[Buffer]) -> Offer | None:
        value = self._values.put(name, pieces)
        if value is None:
            self._counts.add(refusals=1)
            return None
        self._counts.add(offers=1, offered_bytes=value.size)
        address = self._slab.address + value.start
        return Offer(self.kind, self._place, name, value.size, value.checksum, address, value.lease)

    def fetch(self, offer: Offer, timeout_s: float) -> bytearray:
        """Return the bytes of an offer. Raises TransferFailed.

        An offer does not say whether its lease lasts. If it ended, the checksum differs once the memory was
        used again.
        """
        return self._counts.count_fetch(lambda: self._fetch(offer, timeout_s))

    def release(self, offer: Offer) -> None:
        """End an offer of this process, or tell its producer, once."""
        self._counts.add(releases=1)
        if self._is_closed or offer.connector != self.kind:
            return
        if offer.place == self._place:
            self._values.end(offer.lease, offer.start - self._slab.address, offer.size, OWNER)
        elif self.tell is not None and self._is_first_release(offer):
            self.tell(offer)

    def close(self) -> None:
        """End all offers. The engine goes with the last read that has begun."""
        if self._is_closed:
            return
        self._is_closed = True
        self._values.close()
        self._slab.close()
        self._landing.close()

    def stats(self) -> dict[str, float]:
        """`transfer_counts`, the slab's use, and `reads`: those that the engine has not ended."""
        return self._counts.values() | self._values.stats() | {"reads": float(self._landing.reads)}

    def _fetch(self, offer: Offer, timeout_s: float) -> bytearray:
        if self._is_closed:
            raise TransferFailed("the connector is closed")
        if offer.connector != self.kind:
            raise TransferFailed(f"it is an offer of {offer.connector}, not of {self.kind}")
        if offer.place == self._place:
            value = self._values.pin(offer.lease, offer.start - self._slab.address, offer.size, OWNER)
            if value is None:
                raise TransferFailed("the lease has ended, or belongs to another value")
            return copy_checked(value, offer.checksum)
        place = _PLACE.fullmatch(offer.place)
        if place is None or int(place[2]) > 65535:
            raise TransferFailed("the offer's place is not a host and a port")
        return self._landing.read(offer, timeout_s)

    def _is_first_release(self, offer: Offer) -> bool:
        """Tell whether the offer is not among the latest that were released."""
        key = (offer.place, offer.lease)
        with self._told_lock:
            if key in self._told:
                return False
            self._told[key] = None
            if len(self._told) > _TOLD:
                self._told.popitem(last=False)
            return True


class RegisteredMemory:
    """Anonymous memory that the engine may read and write for others. view: it; address: its first byte."""

    def __init__(self, engine: Any, size: int) -> None:
        """Raises ConfigError."""
        try:
            memory = mmap.mmap(-1, size)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(f"there is no memory of {size} bytes for transfers: {error}") from error
        self.engine = engine
        self.view = memoryview(memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if engine.register_memory(self.address, size):
            raise ConfigError(f"Mooncake's transfer engine cannot register {size} bytes of memory")

    def close(self) -> None:
        """Withdraw the memory from the engine. It stays mapped while a thread copies from it."""
        self.engine.unregister_memory(self.address)
        self.view = memoryview(b"")


class Landing:
    """The buffer that reads write to. A read has its own extent until the engine has ended the read.

    The engine gives up after 30 seconds without progress, and cannot be told to give up sooner. So a read
    runs in a thread of its own, and a fetch that does not want to wait any longer leaves it alone. Its
    thread then waits for the next read: starting one for each read takes longer.
    """

    def __init__(self, engine: Any, size: int) -> None:
        """Raises ConfigError."""
        self._memory = RegisteredMemory(engine, size)
        self._slab = Slab(size, lease_s=math.inf)
        self._changed = threading.Condition()
        self._jobs: SimpleQueue[tuple[Read, Offer] | None] = SimpleQueue()
        self._idle_threads = 0
        self._is_closed = False

    @property
    def reads(self) -> int:
        return self._slab.leases

    def read(self, offer: Offer, timeout_s: float) -> bytearray:
        """Read a value and check it. Raises TransferFailed."""
        deadline = time.monotonic() + timeout_s
        read = Read(self._take(offer.size, deadline))
        self._start(read, offer)
        if not read.has_ended.wait(max(deadline - time.monotonic(), 0)):
            with self._changed:
                if not read.has_ended.is_set():
                    read.is_abandoned = True
                    raise TransferFailed("the producer does not answer in time")
        try:
            if read.status:
                raise TransferFailed("the producer is gone, or does not have this memory")
            start = read.extent.start
            return copy_checked(self._memory.view[start : start + offer.size], offer.checksum)
        finally:
            self._give_back(read)

    def close(self) -> None:
        """Withdraw the buffer, or leave that to the last read."""
        with self._changed:
            self._is_closed = True
            for _ in range(self._idle_threads):
                self._jobs.put(None)
            self._idle_threads = 0
            self._close_if_unused()
            self._changed.notify_all()

    def _take(self, size: int, deadline: float) -> Extent:
        """Take an extent as soon as one is free. Raises TransferFailed."""
        if size > self._slab.size:
            raise TransferFailed(f"the value has {size} bytes, and the buffer for arrivals {self._slab.size}")
        with self._changed:
            while True:
                if self._is_closed:
                    raise TransferFailed("the connector is closed")
                extent = self._slab.take(size, 0.0) if self._slab.leases < MOST_READS else None
                if extent is not None:
                    return extent
                if not self._changed.wait(max(deadline - time.monotonic(), 0)):
                    raise TransferFailed("the buffer for arrivals had no room in time")

    def _start(self, read: Read, offer: Offer) -> None:
        """Give a read to an idle thread, or to a new one. Raises TransferFailed if none can start."""
        with self._changed:
            is_idle = self._idle_threads > 0
            self._idle_threads -= is_idle
        if is_idle:
            self._jobs.put((read, offer))
            return
        try:
            threading.Thread(target=self._work, args=(read, offer), name="fovea-read", daemon=True).start()
        except RuntimeError as error:
            self._give_back(read)
            raise TransferFailed(f"no thread can start: {error}") from error

    def _work(self, read: Read, offer: Offer) -> None:
        """Run reads in this thread, until the connector is closed."""
        job: tuple[Read, Offer] | None = (read, offer)
        while job is not None:
            self._run(*job)
            with self._changed:
                if self._is_closed:
                    return
                self._idle_threads += 1
            job = self._jobs.get()

    def _run(self, read: Read, offer: Offer) -> None:
        """Carry out a read. The engine releases the interpreter's lock meanwhile."""
        try:
            if offer.size:
                read.status = self._memory.engine.transfer_sync_read(
                    offer.place, self._memory.address + read.extent.start, offer.start, offer.size
                )
            else:
                read.status = 0
        finally:
            with self._changed:
                read.has_ended.set()
            if read.is_abandoned:
                self._give_back(read)

    def _give_back(self, read: Read) -> None:
        with self._changed:
            self._slab.end(read.extent.lease)
            self._close_if_unused()
            self._changed.notify_all()

    def _close_if_unused(self) -> None:
        if self._is_closed and not self._slab.leases:
            self._memory.close()


class Read:
    """A read of the engine.

    extent: part of the landing buffer. status: of the engine, 0 if it succeeded. has_ended: set at its end.
    is_abandoned: nobody waits for it.
    """

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        self.status = -1
        self.has_ended = threading.Event()
        self.is_abandoned = False


def _import_engine() -> Any:
    """Import the engine, which logs errors only (it reads the variable then). Raises ConfigError."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise ConfigError(
            f"Mooncake's transfer engine cannot be imported ({error}); install it with "
            f"`{install_command('mooncake')}`; on Debian it needs libibverbs1, librdmacm1 and libnuma1, too"
        ) from error
    return TransferEngine
