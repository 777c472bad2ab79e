"""Ports for peers: fixed addresses on this machine that lead to engines which come and go.

An engine knows its peers by a list of addresses that it gets at its start (docs/roles.md). Here each of them
is a port of the replica, as many as there can be replicas of the role. A port leads to one engine as long as
this engine lives, so that images find the peer that knows them. A port without an engine closes connections
at once, and the engine lets such a peer rest.

This module does not import ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from urllib.parse import urlsplit

PIECE = 1 << 16
HOST = "127.0.0.1"


def assign(names: Sequence[str], addresses: Mapping[str, str]) -> list[str]:
    """Return which engine each port leads to, by name; "": to none.

    names: as it was. addresses: of the engines that live, by name.
    Engines keep their ports; new ones get free ports, in the order of their names.
    """
    kept = [name if name in addresses else "" for name in names]
    new = iter(sorted(set(addresses) - set(kept)))
    return [name or next(new, "") for name in kept]


class PeerPorts:
    """The ports that lead to the engines of one role."""

    def __init__(self, count: int) -> None:
        self._names = [""] * count
        self._addresses: dict[str, str] = {}
        self._servers: list[asyncio.Server] = []

    async def start(self) -> str:
        """Open all ports. Return their URLs, separated by commas."""
        for number in range(len(self._names)):
            self._servers.append(await asyncio.start_server(partial(self._serve, number), HOST, 0))
        ports = [server.sockets[0].getsockname()[1] for server in self._servers]
        return ",".join(f"http://{HOST}:{port}" for port in ports)

    def update(self, addresses: Mapping[str, str]) -> None:
        """Take the URLs of the engines that live, by name."""
        self._names = assign(self._names, addresses)
        self._addresses = dict(addresses)

    def close(self) -> None:
        """Close all ports."""
        for server in self._servers:
            server.close()

    async def _serve(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = urlsplit(self._addresses.get(self._names[number], ""))
        other: asyncio.StreamWriter | None = None
        try:
            if address.hostname:
                answers, other = await asyncio.open_connection(address.hostname, address.port)
                ways = [
                    asyncio.ensure_future(_copy(reader, other)),
                    asyncio.ensure_future(_copy(answers, writer)),
                ]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in ways:
                    way.cancel()
        except OSError:
            return
        finally:
            for end in (writer, other):
                if end is not None:
                    end.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(PIECE):
            writer.write(piece)
            await writer.drain()
