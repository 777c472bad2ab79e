"""Garbage collections that are short, and that come soon.

Everything that a server needs for its whole life is left out of them, so they are short. They come every few
seconds, because a request that failed is often garbage in a circle: its error refers to the functions that
raised it, and these to the request with its images.
"""

from __future__ import annotations

import asyncio
import gc

EVERY_S = 2.0
"""Seconds between two collections of a running server."""


def keep_for_life() -> None:
    """Collect garbage now, and leave all objects that remain out of later collections.

    A full collection visits every container object while no other thread runs. Imported modules and the model
    are 250,000 of them and take a quarter of a second. Any request that creates some thousand objects, such
    as a conversation of 4096 messages, would set off such a collection. Call it when the server is ready.
    """
    gc.collect()
    gc.freeze()


async def collect_regularly() -> None:
    """Collect garbage every EVERY_S seconds until cancelled, if anything was created since the last time."""
    while True:
        await asyncio.sleep(EVERY_S)
        if gc.get_freeze_count() and sum(gc.get_count()):
            gc.collect()
