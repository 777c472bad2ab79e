"""A data: URL as bytes. Images and videos inside a request stay bytes from the network to the decoder."""

from __future__ import annotations

from collections.abc import Callable


class Payload:
    """A data: URL of a request, as the UTF-8 bytes that arrived.

    A string of it would take as many bytes again, and the copying would stop all other clients meanwhile.

    data: the whole URL. Empty once it is dropped.
    on_drop: called once with the number of bytes that were given back.
    """

    __slots__ = ("data", "on_drop")

    def __init__(self, data: bytes | bytearray, on_drop: Callable[[int], None] | None = None) -> None:
        self.data = data
        self.on_drop = on_drop

    def __len__(self) -> int:
        return len(self.data)

    def __deepcopy__(self, memo: dict[int, object]) -> Payload:
        """Return a copy of its own, which nobody else's memory counts."""
        return Payload(bytes(self.data))

    def __repr__(self) -> str:
        return f"<data: URL of {len(self.data)} bytes>"

    def startswith(self, prefix: str) -> bool:
        """Tell whether the URL begins with a text, like str.startswith."""
        return self.data.startswith(prefix.encode())

    def drop(self) -> None:
        """Give the memory back. To be called in the event loop's thread, once the image or video was read."""
        size, self.data = len(self.data), b""
        if size and self.on_drop is not None:
            self.on_drop(size)
