"""The caller of one HTTP request: its client, its request id, and the tokens that it has used."""

from __future__ import annotations

from dataclasses import dataclass, field

from fovea.server.access.client import Client

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
    speaks_for: the tenant for whom a gateway sends the request, from the header x-fovea-client; "": none.
    prompt_tokens, completion_tokens: tokens that the request has used so far.
    """

    client: Client = field(default_factory=lambda: Client(ANYONE))
    tenant: str = ""
    request_id: str = ""
    fingerprint: str = "-"
    holder: str = ""
    speaks_for: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def owner(self) -> str:
        """The client's name, to count what it holds; "" without keys, where clients are not told apart."""
        return "" if self.client.name == ANYONE else self.client.name

    @property
    def party(self) -> tuple[str, str]:
        """The client that takes turns with others: the key, and the tenant for whom a gateway uses it."""
        return self.owner, self.speaks_for
