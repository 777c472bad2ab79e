"""Short garbage collections: everything that a server needs for its whole life is left out of them."""

from __future__ import annotations

import gc


def keep_for_life() -> None:
    """Collect garbage now, and leave all objects that remain out of later collections.

    A full collection visits every container object while no other thread runs. Imported modules and the model
    are 250,000 of them and take a quarter of a second. Any request that creates some thousand objects, such
    as a conversation of 4096 messages, would set off such a collection. Call it when the server is ready.
    """
    gc.collect()
    gc.freeze()
