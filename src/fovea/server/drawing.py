"""Draws PDF files for clients: in threads of its own, and one file of a client at a time.

A file may keep its process busy for as long as `pdf_render_s`. Files of other clients wait for the process,
but for no more than one file of each client. Nothing else waits: the threads do no other work.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from fovea.media.limits import MediaLimits
from fovea.media.pdf import PageRange
from fovea.media.sandbox.decoder import DocumentPages, DocumentRenderer


class Drawing:
    """The PDF files that clients want to have drawn. Not thread-safe: for the event loop's thread.

    limits: its `pdf_workers` is the number of files that are drawn at a time.
    """

    def __init__(self, limits: MediaLimits) -> None:
        self._renderer = DocumentRenderer(limits)
        self._threads = ThreadPoolExecutor(max(1, limits.pdf_workers), "fovea-pdf")
        self._turns: dict[str, tuple[asyncio.Lock, int]] = {}

    async def render(self, client: str, data: bytes, wanted: PageRange, tenant: str = "") -> DocumentPages:
        """Render pages of a PDF file. If this is cancelled, the process that draws the file is ended.

        client: name of the client.
        tenant: owner of the caches that the client uses; tenants share no process. "": all share everything.
        Raises what `DocumentRenderer.render` raises.
        """
        left = threading.Event()
        async with self._turn(client):
            try:
                return await asyncio.get_running_loop().run_in_executor(
                    self._threads, self._renderer.render, data, wanted, left.is_set, tenant
                )
            finally:
                left.set()

    def close(self) -> None:
        """End all processes and threads. It may wait for a thread."""
        self._renderer.close()
        self._threads.shutdown(cancel_futures=True)

    @asynccontextmanager
    async def _turn(self, client: str) -> AsyncIterator[None]:
        """Wait until no other file of the client is drawn. The lock is kept while somebody uses it."""
        lock, users = self._turns.get(client, (asyncio.Lock(), 0))
        self._turns[client] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            users = self._turns[client][1] - 1
            if users:
                self._turns[client] = lock, users
            else:
                del self._turns[client]
