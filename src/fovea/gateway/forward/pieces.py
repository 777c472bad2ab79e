"""A request body for aiohttp that is written a piece at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiohttp.payload import Payload

if TYPE_CHECKING:
    from aiohttp.abc import AbstractStreamWriter


class Pieces(Payload):
    """The pieces of a body. It can be written several times."""

    _autoclose = True

    def __init__(self, pieces: Sequence[bytes | bytearray], size: int) -> None:
        super().__init__(pieces)
        self._size = size

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return b"".join(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        for piece in self._value:
            await writer.write(piece)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        await self.write(writer)
