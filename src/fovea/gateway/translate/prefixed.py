"""A data: URL in two parts: its beginning, and base64 that is not copied."""

from __future__ import annotations

from dataclasses import dataclass

from fovea.api.messages_request import Base64Source, image_type
from fovea.core.media import Payload


@dataclass(frozen=True, slots=True)
class Prefixed:
    """A JSON string that is a short text followed by a long one.

    Anthropic's API sends the base64 of an image without the beginning of a data: URL. The writer of a body
    writes `prefix` and then the text for which `value` stands, from its character `skip` on.

    prefix: ASCII without characters that JSON escapes, such as "data:image/png;base64,".
    value: base64, or a placeholder of it, as it stood in the request; or a Payload.
    skip: number of characters of a Payload to leave out, because it begins like a data: URL already.
    """

    prefix: str
    value: str | Payload
    skip: int = 0

    def pieces(self) -> tuple[bytes, bytes | memoryview]:
        """The text in two parts, the second one without a copy if the value is a Payload."""
        if isinstance(self.value, Payload):
            return self.prefix.encode(), memoryview(self.value.data)[self.skip :]
        return self.prefix.encode(), self.value.encode()


def prefixed(source: Base64Source) -> Prefixed:
    """The data: URL of an image that was sent as base64."""
    data = source.data
    skip = 0
    if isinstance(data, Payload) and data.startswith("data:"):
        skip = data.data.find(b",", 0, 256) + 1
    return Prefixed(f"data:{image_type(source.media_type)};base64,", data, skip)
