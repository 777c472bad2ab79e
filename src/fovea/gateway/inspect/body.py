"""The JSON body of a request: parsed without its long strings, changed, and written again.

The gateway never forwards the bytes that arrived. It writes the parsed body again, so a backend reads what
was checked here: of two fields with one name, for example, only the last one is left. Long strings (images
above all) are neither parsed nor copied again; they are put back as they arrived.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fovea.api.cut_texts import decode, json_errors, unescape
from fovea.api.cutter import Cutter
from fovea.api.messages_request import Base64Source, image_type
from fovea.api.unknown import HEAD_BYTES
from fovea.core.errors import InvalidRequest
from fovea.core.media import Payload

_PLACEHOLDER = re.compile(rb'"((?:data:[^";,]{1,100};base64,)?)([0-9a-f]{32}:[0-9]+)"')
_LONG_NAME = re.compile(rb'"[0-9a-f]{32}:[0-9]+"\s*:')
_IS_DATA = re.compile(rb"\s*data:", re.IGNORECASE)


class Body:
    """The body of one request.

    value: the parsed body, in which a string of more than 256 bytes is a placeholder.
    size: bytes that arrived.
    """

    __slots__ = ("_strings", "size", "value")

    def __init__(self, value: dict[str, Any], strings: dict[str, bytearray], size: int) -> None:
        self.value = value
        self.size = size
        self._strings = strings

    @classmethod
    def parse(cls, cutter: Cutter) -> Body:
        """Parse a body that has arrived completely. Raises InvalidRequest if it is not a JSON object."""
        cut = cutter.finish()
        with json_errors():
            # Named here, because `json.loads` would guess UTF-16, in which the cutter's limits do not hold.
            value = _READER.decode(cut.skeleton.decode("utf-8-sig"))
        if not isinstance(value, dict):
            raise InvalidRequest("the body must be a JSON object", code="invalid_json")
        body = cls(value, cut.strings, cutter.size)
        if cut.strings and _LONG_NAME.search(cut.skeleton):
            body.value = body._without_repeated_names(value)
        return body

    def length(self, text: str) -> int:
        """The bytes of a string of the body, placeholder or not."""
        raw = self._strings.get(text)
        if raw is not None:
            return len(raw)
        return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))

    def is_long(self, text: str) -> bool:
        """Whether a string is a placeholder."""
        return text in self._strings

    def raw(self, text: str) -> bytes | bytearray:
        """The bytes of a string as they arrived, with JSON's escapes if it is a placeholder."""
        raw = self._strings.get(text)
        return text.encode("utf-8", "surrogatepass") if raw is None else raw

    def head(self, text: str) -> bytes:
        """The beginning of a string as it arrived."""
        return bytes(self.raw(text)[:HEAD_BYTES])

    def payload(self, text: str) -> str | Payload:
        """Return a URL with its escapes resolved: bytes if it is a long data: URL, text otherwise.

        Raises InvalidRequest if it is not valid Unicode.
        """
        if text not in self._strings:
            return text
        data = self.unescaped(text)
        return Payload(data) if _IS_DATA.match(data) else data.decode()

    def unescaped(self, text: str) -> bytes | bytearray:
        """Return the UTF-8 bytes of a string with its escapes resolved.

        Raises InvalidRequest if it is not valid Unicode.
        """
        raw = self._strings.get(text)
        if raw is None:
            return text.encode("utf-8", "replace")
        try:
            data = unescape(raw)
        except ValueError:
            data = None
        if data is None:
            raise InvalidRequest("a URL of the body is not valid Unicode", code="invalid_json")
        return data

    def text(self, text: str) -> str:
        """Return a string of the body with its escapes resolved. Raises InvalidRequest if it is not text."""
        raw = self._strings.get(text)
        if raw is None:
            return text
        try:
            decoded = decode(raw, len(raw))
        except ValueError:
            decoded = None
        if decoded is None:
            raise InvalidRequest("a text of the body is not valid Unicode", code="invalid_json")
        return decoded

    def resolved(self, markers: Mapping[str, str]) -> dict[str, Any]:
        """Return the parsed body with its real texts.

        markers: strings of the body, such as placeholders of images, and what each becomes.
        """
        value: dict[str, Any] = self._resolve(self.value, markers)
        return value

    def _resolve(self, node: Any, markers: Mapping[str, str]) -> Any:
        if isinstance(node, str):
            return markers[node] if node in markers else self.text(node)
        if isinstance(node, list):
            return [self._resolve(entry, markers) for entry in node]
        if isinstance(node, dict):
            return {self.text(name): self._resolve(entry, markers) for name, entry in node.items()}
        if isinstance(node, Prefixed):
            return self._resolve(node.value, markers)
        return node

    def _without_repeated_names(self, node: Any) -> Any:
        """Keep the last one of fields with one long name. Each has a placeholder of its own."""
        if isinstance(node, list):
            return [self._without_repeated_names(entry) for entry in node]
        if not isinstance(node, dict):
            return node
        last = {self.text(name): name for name in node}
        return {name: self._without_repeated_names(node[name]) for name in last.values()}

    def put(self, data: bytes | bytearray) -> str:
        """Add a long ASCII string without quotes and backslashes, and return its placeholder."""
        nonce = next(iter(self._strings), secrets.token_hex(16)).partition(":")[0]
        name = f"{nonce}:{len(self._strings)}"
        self._strings[name] = data if isinstance(data, bytearray) else bytearray(data)
        return name

    def drop(self) -> None:
        """Forget the long strings, and with them nearly all of the body's memory."""
        self._strings.clear()

    def with_value(self, value: dict[str, Any]) -> Body:
        """Return a body of another value with the same long strings."""
        return Body(value, self._strings, self.size)

    def pieces(self) -> Iterator[bytes | bytearray]:
        """Yield the bytes of the body, written again, a long string at a time."""
        text = json.dumps(self.value, separators=(",", ":"), default=_written).encode()
        if not self._strings:
            yield text
            return
        at = 0
        for match in _PLACEHOLDER.finditer(text):
            raw = self._strings.get(match.group(2).decode())
            if raw is None:
                continue
            yield text[at : match.start()] + b'"' + match.group(1)
            yield raw
            at = match.end() - 1
        yield text[at:]

    def encoded(self) -> bytes:
        """The bytes of the body, written again."""
        return b"".join(self.pieces())


@dataclass(frozen=True, slots=True)
class Prefixed:
    """A JSON string that is a short text followed by a long one.

    Anthropic's API sends the base64 of an image without the beginning of a data: URL. The writer of a body
    writes `prefix` and then the text that `value` replaces.

    prefix: ASCII without characters that JSON escapes, such as "data:image/png;base64,".
    value: base64, or a placeholder of it, as it was in the request.
    """

    prefix: str
    value: str


def prefixed(source: Base64Source) -> Prefixed:
    """The data: URL of an image that was sent as base64."""
    return Prefixed(f"data:{image_type(source.media_type)};base64,", str(source.data))


def _no_constant(name: str) -> Any:
    raise InvalidRequest(f"the body is not JSON: {name} is not a number", code="invalid_json")


def _finite(text: str) -> float:
    """Return a number of the body. One that is too large would be written as Infinity, which is not JSON."""
    number = float(text)
    if math.isinf(number):
        raise InvalidRequest("the body holds a number that is too large", code="invalid_json")
    return number


_READER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)


def _written(value: Any) -> str:
    """Return the text of a value that is not JSON: an image whose data: URL has two parts."""
    if isinstance(value, Prefixed):
        return value.prefix + value.value
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
