"""The caller of one HTTP request: its client, its request id, and the tokens that it has used."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field

from fovea.server.access.client import Client

_SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
ANYONE = "-"
"""Name of the client of a request without a key."""


@dataclass(slots=True)
class Caller:
    """The caller of one HTTP request.

    client: the client to whom the key belongs; without keys, a client without limits.
    tenant: the part of the caches that belongs to it; "" if all clients share the caches.
    holder: a name of the client that stays the same when the server starts again, for what is kept on disk;
        "" without keys.
    request_id: names the request in logs and in the header x-request-id.
    fingerprint: the first 8 hex digits of the hash of the key that was sent; "-" if there was none.
    prompt_tokens, completion_tokens: tokens that the request has used so far.
    """

    client: Client = field(default_factory=lambda: Client(ANYONE))
    tenant: str = ""
    request_id: str = ""
    fingerprint: str = "-"
    holder: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def owner(self) -> str:
        """The client's name, to count what it holds; "" without keys, where clients are not told apart."""
        return "" if self.client.name == ANYONE else self.client.name


def request_id(header: bytes) -> str:
    """Return the id that a client sent in x-request-id, or a new one if it sent none that is harmless.

    Accepted are 1 to 64 letters, digits, dots, hyphens and underscores. Any other id could forge lines of a
    log.
    """
    return header.decode("ascii") if _SANE_ID.fullmatch(header) else uuid.uuid4().hex
