"""A client's wishes about the response cache, from the header Cache-Control of its request."""

from __future__ import annotations

from typing import NamedTuple


class Directives(NamedTuple):
    """The permissions of a request to use the cache.

    read: a stored answer may be returned.
    write: the answer may be stored.
    """

    read: bool = True
    write: bool = True


FULL = Directives()
REFRESH = Directives(read=False)
NONE = Directives(read=False, write=False)


def parse_directives(cache_control: str | None) -> Directives:
    """Return the directives of a request's header Cache-Control (RFC 9111, section 5.2.1).

    no-store: neither read nor write. no-cache, and max-age=0: write only. Others have no effect.
    cache_control: value of the header; several headers are joined by commas. None: there is none.
    """
    if not cache_control:
        return FULL
    words = {word.strip().lower().replace(" ", "") for word in cache_control.split(",")}
    if "no-store" in words:
        return NONE
    if words & {"no-cache", "max-age=0"}:
        return REFRESH
    return FULL
