"""A body in pieces is written whole, and as often as it is asked for."""

from __future__ import annotations

import pytest

from fovea.gateway.generate.upstream import Pieces


class Writer:
    """Collects what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    async def write(self, data: bytes) -> None:
        self.written.append(bytes(data))


@pytest.mark.parametrize("pieces", [[], [b"ab"], [b'{"a":"', bytearray(b"x" * 10), b'"}'], (b"", b"c")])
async def test_it_can_be_written_twice(pieces: list[bytes | bytearray]) -> None:
    whole = b"".join(pieces)
    body = Pieces(pieces, len(whole))
    assert body.size == len(whole)
    for _ in range(2):
        writer = Writer()
        await body.write(writer)  # type: ignore[arg-type]
        assert b"".join(writer.written) == whole
    writer = Writer()
    await body.write_with_length(writer, len(whole))  # type: ignore[arg-type]
    assert b"".join(writer.written) == whole
    assert body.decode() == whole.decode()


async def test_long_pieces_are_not_joined() -> None:
    writer = Writer()
    await Pieces([b"a", bytearray(b"b" * 99)], 100).write(writer)  # type: ignore[arg-type]
    assert [len(piece) for piece in writer.written] == [1, 99]
