"""Notes which blocks are cached, on the device and in host memory, so that they can be announced to routers.

Only full blocks of keys and values of all tokens are announced. Partial blocks, the rows that `kv_keep`
leaves and blocks of layers with a window are not: no router can compute their names. For a model with
states, a prefix can be used only where a state was saved, too, so a router may expect more hits than there
are.
"""

from __future__ import annotations

from functools import partial

from fovea.engine.changes import DEVICE, HOST, BlockChanges, StoredBlock
from fovea.engine.kv.blocks import BlockPool, HostBlocks
from fovea.engine.kv.hashing import mm_hash
from fovea.engine.sequence import Sequence


class Announcer:
    """Notes changes of a pool and of its slots in host memory. Used by the engine's thread only."""

    def __init__(self, changes: BlockChanges, pool: BlockPool, host: HostBlocks, block_size: int) -> None:
        self._changes, self._pool, self._host, self._size = changes, pool, host, block_size
        self._blocks: dict[bytes, StoredBlock] = {}  # those that are cached anywhere
        pool.on_loss, host.on_loss = partial(self._lost, DEVICE), partial(self._lost, HOST)

    def computed(self, seq: Sequence, first: int, last: int) -> None:
        """Note that blocks [first, last) of a sequence are cached."""
        size, names = self._size, seq.block_hashes
        start, stored = first * size, []
        ids = seq.tokens(start, last * size)
        spans = [(span, mm_hash(span.key)) for span in seq.spans_between(start, last * size)]
        for index in range(first, last):
            name, at = names[index], index * size
            block = self._blocks.get(name)
            if block is None:
                keys = tuple(
                    (hashed, span.start - at)
                    for span, hashed in spans
                    if span.start < at + size and span.end > at
                )
                tokens = tuple(ids[at - start : at - start + size])
                block = StoredBlock(names[index - 1] if index else None, tokens, keys)
                if not index and seq.salt:
                    block = block._replace(keys=(*keys, seq.salt))
                self._blocks[name] = block
            stored.append(((DEVICE, name), block))
        self._changes.store(stored)

    def copied(self, medium: str, name: bytes) -> None:
        """Note that a block was copied from the device to host memory, or back. medium: that of the copy."""
        block = self._blocks.get(name)
        if block is not None:
            self._changes.store([((medium, name), block)])

    def cleared(self) -> None:
        """Note that nothing is cached any more, which is one event instead of one for each block."""
        self._changes.clear()

    def _lost(self, medium: str, name: bytes) -> None:
        self._changes.remove((medium, name))
        if self._pool.find(name) is None and self._host.find(name) is None:
            self._blocks.pop(name, None)
