"""One copy of the weights in memory for several processes.

The processes inherit a file that has no name and lies in memory (memfd): the pool. Each of them loads the
model, and hands its tensors to `keep`. The first process that has a tensor copies it into the pool. The
others find it there by a hash of its bytes, compare all bytes, and drop their own copy. So the order of
loading does not matter, and nothing has to be known about the model. When the last process has ended, the
kernel frees the pool.

The file begins with a head: a magic number, and where the last complete entry ends. Entries follow:

    digest of the bytes (16), number of bytes (8), padding up to 64, the bytes, padding up to a multiple of 64

An entry counts from the moment at which the head says that it ends further on, which is one write of eight
bytes. A process that is killed before has written where the next entry will be written.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import xxhash
from torch import Tensor, nn

LEAST_BYTES = 16 << 10
"""Smaller tensors stay in the memory of their process."""
ALIGN = 64
"""Entries begin at multiples of this, like torch's own memory."""
HEAD = struct.Struct("<8sQ")
MAGIC = b"fovea\x01\x00\x00"
ENTRY = struct.Struct("<16sQ")
WRITE_BYTES = 1 << 30
"""Most bytes of one write: the system takes less than 2 GiB."""
log = logging.getLogger("fovea.kernels")
Digest = Callable[[memoryview], bytes]


def _digest(data: memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)


class WeightPool:
    """The tensors of a pool, as one of its processes sees them. Thread-safe.

    descriptor: of a memfd, which may be empty.
    capacity: most bytes of the pool; None: the memory of the machine.
    digest: returns 16 bytes.

    Raises OSError if the file cannot be mapped, ValueError if it is no pool.
    """

    def __init__(self, descriptor: int, *, capacity: int | None = None, digest: Digest = _digest) -> None:
        self._file = descriptor
        self._digest = digest
        self._capacity = capacity or os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
        self._full = False
        self._lock = threading.Lock()
        self._known: dict[bytes, list[tuple[int, int]]] = {}
        self._seen = HEAD.size
        self._start = _map(descriptor, self._capacity)
        with self._locked():
            if os.fstat(descriptor).st_size == 0:
                _write(descriptor, HEAD.pack(MAGIC, ALIGN), 0)
            magic, _ = self._head()
        if magic != MAGIC:
            raise ValueError("the file is no pool of weights")
        self._seen = ALIGN

    def keep(self, tensor: Tensor) -> Tensor:
        """Return an equal tensor in the pool, which nobody may change. Tensors that cannot be there stay.

        Those are tensors that are small, not on the CPU or not contiguous, and those that are in the pool.
        """
        size = tensor.nbytes
        if size < LEAST_BYTES or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return tensor
        if self._start <= tensor.data_ptr() < self._start + self._capacity:
            return tensor
        data = _bytes_of(tensor)
        digest = self._digest(data)
        place = self._find(digest, tensor)
        return tensor if place is None else self._tensor(place, size).view(tensor.dtype).view(tensor.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool."""
        with self._locked():
            return self._head()[1]

    def _find(self, digest: bytes, tensor: Tensor) -> int | None:
        """Return where the bytes of a tensor are in the pool; None: it has no room for them."""
        flat, checked = tensor.view(-1).view(torch.uint8), 0
        while True:
            with self._locked():
                self._read_new()
                same = self._known.get(digest, [])
                if checked == len(same):
                    return self._add(digest, flat)
            # Entries never change, so others need not wait while bytes are compared.
            for place, size in same[checked:]:
                checked += 1
                if size == len(flat) and torch.equal(self._tensor(place, size), flat):
                    return place

    def _add(self, digest: bytes, flat: Tensor) -> int | None:
        """Write an entry, under the lock."""
        begin = self._head()[1]
        place = begin + ALIGN
        end = place + -(-len(flat) // ALIGN) * ALIGN
        if self._full or end > self._capacity:
            return None
        try:
            os.ftruncate(self._file, end)
            _write(self._file, ENTRY.pack(digest, len(flat)), begin)
            _write(self._file, _bytes_of(flat), place)
            _write(self._file, end.to_bytes(8, "little"), HEAD.size - 8)
        except OSError as error:
            log.warning("weights are not shared with other processes any more: %s", error)
            self._full = True
            return None
        self._read_new()
        return place

    def _read_new(self) -> None:
        """Take note of the entries since the last call, under the lock."""
        _, end = self._head()
        while self._seen < end:
            digest, size = ENTRY.unpack(os.pread(self._file, ENTRY.size, self._seen))
            place = self._seen + ALIGN
            self._known.setdefault(digest, []).append((place, size))
            self._seen = place + -(-size // ALIGN) * ALIGN

    def _head(self) -> tuple[bytes, int]:
        magic, end = HEAD.unpack(os.pread(self._file, HEAD.size, 0))
        return magic, end

    def _tensor(self, place: int, size: int) -> Tensor:
        """Return the bytes of an entry. torch takes them for writable; a write into them ends the process."""
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(self._start + place), dtype=torch.uint8)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other threads and processes from the index. A killed process leaves no lock behind."""
        with self._lock:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)


def _map(descriptor: int, size: int) -> int:
    """Map a file for reading, for the life of the process, and return the address.

    The mapping may be longer than the file, which grows. It takes only addresses.
    """
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = library.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "the pool of weights cannot be mapped")
    return int(address)


def _write(file: int, data: bytes | memoryview, place: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view[:WRITE_BYTES], place)
        view, place = view[written:], place + written


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor without a copy. They are valid as long as the tensor lives."""
    return memoryview((ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


_pool: WeightPool | None = None


def use_pool(pool: WeightPool | None) -> None:
    """Let `keep` use a pool; None: no pool."""
    global _pool
    _pool = pool


def keep(tensor: Tensor) -> Tensor:
    """Return an equal tensor in the pool of this process; without a pool, or for small ones, the tensor."""
    return tensor if _pool is None else _pool.keep(tensor)


def keep_parameters(modules: Iterable[nn.Module]) -> None:
    """Keep plain parameters of modules in the pool. From then on nothing may change them."""
    if _pool is None:
        return
    for module in modules:
        for parameter in module.parameters():
            parameter.data = _pool.keep(parameter.data)
