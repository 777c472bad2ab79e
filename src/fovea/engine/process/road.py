"""How pixels and frames reach the engine's process: through shared memory, not through the connection.

Otherwise the event loops of both processes would copy megabytes, and everything else would wait for it.
"""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

from fovea.core.errors import ConfigError, EngineError
from fovea.engine.transfer.connect import own_folder
from fovea.engine.transfer.connector import Offer, TransferFailed
from fovea.engine.transfer.shm import ShmConnector

SLAB_BYTES = 256 << 20
"""Memory for what waits to be fetched. The rest goes through the connection."""
SMALL = 64 << 10
"""Bytes up to which the connection is as good."""
FETCH_S = 30.0
log = logging.getLogger("fovea.engine")


class Road:
    """One end of it."""

    def __init__(self, folder: Path | None = None, *, sends: bool) -> None:
        """folder: of the other end; None: of this user.

        sends: whether this end sends. Without shared memory everything goes through the connection.
        """
        self.folder = folder or own_folder()
        self._connector: ShmConnector | None = None
        try:
            self._connector = ShmConnector(self.folder, SLAB_BYTES if sends else SMALL)
        except ConfigError as error:
            log.warning("pixels reach the engine through its connection, which is slower: %s", error.message)
        self._names = itertools.count()

    def send(self, data: bytes | memoryview) -> bytes | Offer:
        """Return what is sent in place of data. For a worker thread."""
        if len(data) <= SMALL or self._connector is None:
            return bytes(data)
        offer = self._connector.offer(f"{next(self._names):x}", [data])
        return bytes(data) if offer is None else offer

    def receive(self, sent: bytes | Offer) -> bytes | bytearray:
        """Return the data that `send` was given. For a worker thread. Raises EngineError if it is gone."""
        if not isinstance(sent, Offer):
            return sent
        if self._connector is None:
            raise EngineError("pixels came through shared memory, which this process cannot open")
        try:
            return self._connector.fetch(sent, FETCH_S)
        except TransferFailed as error:
            raise EngineError(f"pixels were lost on their way to the engine: {error}") from error
        finally:
            self._connector.release(sent)

    def close(self) -> None:
        if self._connector is not None:
            self._connector.close()
