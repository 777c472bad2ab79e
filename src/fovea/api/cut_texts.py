"""Turns the strings that were cut out of a body into texts and payloads, a piece at a time.

A string arrives as UTF-8 with JSON's escapes. One call for a string of 64 MiB would stop all other clients.
So every string is divided into pieces that end neither within an escape nor within a character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fovea.api.cutter import Cut
from fovea.api.wire import MAX_TEXT
from fovea.core.errors import InvalidRequest
from fovea.core.media import Payload

PIECE = 256 * 1024
_NODES = frozenset((str, list, dict))
_MEDIA = ("url", "image_url")
"""Fields of messages, of items, and of the body of /v1/images, whose data: URLs become payloads."""
_MEDIA_PATH = re.compile(
    r"url|(messages|input)\[\d+\]\.(content|output)\[\d+\](\.content\[\d+\])?"
    r"\.(source\.url|image_url(\.url)?|video_url(\.url)?)"
)
_SOURCE_PATH = re.compile(r"messages\[\d+\]\.content\[\d+\](\.content\[\d+\])?\.source\.data")
"""Path of an image in Anthropic's form: base64 without the beginning of a data: URL."""
_WHOLE = re.compile(rb"(?:[^\\]++|\\u.{4}|\\[^u])*+", re.DOTALL)
_IS_DATA = re.compile(rb"(?:\s|\\[tnrf])*data:", re.IGNORECASE)


@contextmanager
def json_errors() -> Iterator[None]:
    """Turn errors of parsing and decoding a body into InvalidRequest, for the server and the gateway."""
    try:
        yield
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error.msg}", code="invalid_json") from None
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not JSON: it is not UTF-8", code="invalid_json") from None
    except ValueError:  # a number that Python does not convert
        raise InvalidRequest("the body holds a number that cannot be read", code="invalid_json") from None


def restore(cut: Cut, on_drop: Callable[[int], None] | None = None) -> Any:
    """Parse the skeleton of a body and put its long strings back: data: URLs as Payload, others as str.

    on_drop: called with the number of bytes whenever a Payload was read and dropped.
    Raises InvalidRequest if the texts are too long together, and the errors of `json.loads` and of decoding.
    """
    body = json.loads(cut.skeleton.decode("utf-8-sig"))
    return _Restorer(cut.strings, on_drop).put(body, "") if cut.strings else body


class _Restorer:
    """Replaces placeholders by the strings for which they stand.

    room: characters that the texts of the body may still have.
    """

    def __init__(self, strings: dict[str, bytearray], on_drop: Callable[[int], None] | None) -> None:
        self.room = MAX_TEXT
        self._strings = strings
        self._on_drop = on_drop

    def put(self, node: Any, path: str, key: str = "") -> Any:
        """Return the node with its strings. path: its JSON path; key: its key if it is in an object."""
        if isinstance(node, str):
            return self._string(self._strings[node], path, key) if node in self._strings else node
        if isinstance(node, list):
            for index, entry in enumerate(node):
                if type(entry) in _NODES:
                    node[index] = self.put(entry, f"{path}[{index}]")
        elif isinstance(node, dict):
            return {self._name(name, path): self._entry(value, path, name) for name, value in node.items()}
        return node

    def _entry(self, value: Any, path: str, name: str) -> Any:
        if type(value) not in _NODES:
            return value
        return self.put(value, f"{path}.{name}" if path else name, name)

    def _name(self, name: str, path: str) -> str:
        return self._text(self._strings[name], path) if name in self._strings else name

    def _string(self, raw: bytearray, path: str, key: str) -> str | Payload:
        if key == "data" and _SOURCE_PATH.fullmatch(path) and b"\\" not in raw:
            raw[0:0] = b"data:image/any;base64,"
            return Payload(raw, self._on_drop)
        if key in _MEDIA and _MEDIA_PATH.fullmatch(path) and _IS_DATA.match(raw):
            data = unescape(raw)
            if data is not None:
                return Payload(data, self._on_drop)
        return self._text(raw, path)

    def _text(self, raw: bytearray, path: str) -> str:
        text = decode(raw, self.room)
        if text is None:
            raise InvalidRequest(
                f"{path or 'the body'}: the texts of the body have more than {MAX_TEXT} characters together; "
                "only data: URLs may be longer",
                param=path or None,
            )
        self.room -= len(text)
        return text


def decode(raw: bytes | bytearray, limit: int, size: int = PIECE) -> str | None:
    """Decode the inside of a JSON string. None if it has more than `limit` characters.

    size: bytes of a piece. Raises JSONDecodeError for a wrong escape, UnicodeDecodeError for wrong UTF-8.
    """
    parts: list[str] = []
    length = 0
    for piece in _pieces(raw, size):
        part = _decode(piece)
        if parts and _is_pair(parts[-1][-1:], part[:1]):
            part = _join(parts[-1][-1], part[0]) + part[1:]
            parts[-1] = parts[-1][:-1]
            length -= 1
        parts.append(part)
        length += len(part)
        if length > limit:
            return None
    return "".join(parts)


def unescape(raw: bytearray, size: int = PIECE) -> bytearray | None:
    """Resolve the escapes of the inside of a JSON string. None if the result is not valid Unicode.

    Raises the errors of `decode`.
    """
    if b"\\" not in raw and raw.isascii():
        return raw
    data = bytearray()
    for piece in _pieces(raw, size):
        plain = piece.replace(b"\\/", b"/")  # PHP writes every slash so
        if b"\\" not in plain and plain.isascii():
            data += plain
            continue
        try:
            data += _decode(piece).encode()
        except UnicodeEncodeError:
            return None
    return data


def _decode(piece: bytes) -> str:
    text = piece.decode()
    if "\\" in text:
        text = json.loads(f'"{text}"')
    return text


def _pieces(raw: bytes | bytearray, size: int) -> Iterator[bytes]:
    at = 0
    while at < len(raw):
        end = at + size
        if end < len(raw):
            whole = _WHOLE.match(raw, at, end)
            assert whole is not None  # it matches the empty text
            end = whole.end()
            for _ in range(3):  # back to the first byte of a character, which has at most four
                if raw[end] & 0xC0 == 0x80:
                    end -= 1
        yield bytes(raw[at:end])
        at = end


def _is_pair(high: str, low: str) -> bool:
    return "\ud800" <= high <= "\udbff" and "\udc00" <= low <= "\udfff"


def _join(high: str, low: str) -> str:
    return (high + low).encode("utf-16", "surrogatepass").decode("utf-16")
