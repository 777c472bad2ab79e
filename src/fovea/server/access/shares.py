"""Shares of clients in the caches of the server: downloads, decoded images, and images sent ahead."""

from __future__ import annotations

from fovea.server.state import ServerState, tenant_of_salt


def divide_caches(state: ServerState) -> None:
    """Bound the entries of every client by its `cache_share`, if the caches are separated by keys.

    Without separation no entry belongs to one client.
    """
    if state.settings.cache_scope != "key":
        return
    share = state.access.share_of
    state.fetch_cache.cache.divide(lambda key, _: tenant_of_salt(key[0]), share)
    state.decoded_cache.cache.divide(lambda key, _: tenant_of_salt(key[0]), share)
    state.image_store.cache.divide(lambda _, stored: stored.tenant, share)
