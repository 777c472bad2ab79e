"""Parses `image_url.url` or `video_url.url`, and reads inline data and local files.

A URL is one of three sources: inline data (base64), a file inside an allowed folder, or a remote URL, which
`fetch` downloads. Parsing is cheap and uses neither disk nor network. Reading is not cheap: call `read` in a
thread. Base64 is decoded a piece at a time. Files are opened safely against symbolic links, and against races
that add them.
"""

from __future__ import annotations

import binascii
import io
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from fovea.core.errors import Forbidden
from fovea.core.media import Payload
from fovea.media.limits import IMAGE, SCHEMES, Kind, MediaLimits, quote

if TYPE_CHECKING:  # its import takes a tenth of a second, which a command that reads files does not need
    from pydantic import TypeAdapter

PIECE = 1024 * 1024
"""Bytes of text that are decoded in one call, about a millisecond each. A multiple of 4."""
_WHITESPACE = b" \t\r\n\f\v"
_NOT_BASE64 = re.compile(rb"[^A-Za-z0-9+/=\s]")
_PAD = ord("=")
_STEP = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
# O_NONBLOCK: opening a FIFO must not wait for a writer.
_LEAF = _STEP | os.O_NONBLOCK
_PART = 1 << 20
_SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*):")
_HEAD = 256
"""Longest beginning of a data: URL up to its comma, in bytes."""
_RAW_BASE64 = re.compile(r"\s*[A-Za-z0-9+/_-]{16}")
_ACCEPTED = "accepted: data:{noun}/...;base64,..., https://..., http://... or file:///..."


@dataclass(frozen=True, slots=True)
class InlineSource:
    """A data: URL.

    declared: the media type in the URL, "" if there is none; the type found in the bytes takes precedence.
    encoded: the URL. It is not copied, and may be large.
    start: position of its base64 text, after the comma.
    """

    declared: str
    encoded: bytes | bytearray = field(repr=False)
    start: int = 0
    kind: Kind = IMAGE

    def read(self, limits: MediaLimits) -> bytes:
        """Decode the bytes. Raises InvalidMedia for wrong base64 and, before decoding, for too much data."""
        return decode_base64(memoryview(self.encoded)[self.start :], self.kind, self.kind.max_bytes(limits))


@dataclass(frozen=True, slots=True)
class FileSource:
    """A file:// URL. path: absolute, as in the URL; links are not resolved yet."""

    path: Path
    kind: Kind = IMAGE

    def read(self, limits: MediaLimits) -> bytes:
        return read_inside(self.path, limits, self.kind)


@dataclass(frozen=True, slots=True)
class RemoteSource:
    """An http or https URL. `fetch` checks it against the limits and downloads it."""

    url: str


Source = InlineSource | FileSource | RemoteSource


def parse_source(url: str | Payload, limits: MediaLimits, kind: Kind = IMAGE) -> Source:
    """Parse a URL.

    url: a text, or the bytes of a data: URL; only the first bytes are looked at.
    Raises InvalidMedia of the kind for a malformed URL, Forbidden for one that the limits exclude.
    """
    text = url if isinstance(url, str) else bytes(url.data[:_HEAD]).decode("utf-8", "replace")
    match = _SCHEME.match(text)
    scheme = match.group(1).lower() if match else ""
    if scheme not in SCHEMES:
        raise kind.invalid(_explain_scheme(text, scheme, kind), "invalid_{noun}_url")
    if scheme not in limits.allowed_schemes:
        raise Forbidden(
            f"{scheme}: URLs are not accepted here; accepted: {', '.join(limits.allowed_schemes) or 'none'}",
            code="url_not_allowed",
        )
    if scheme == "data":
        return _inline(url.data if isinstance(url, Payload) else url.encode("utf-8", "surrogatepass"), kind)
    if scheme == "file":
        return _file(text.strip(), limits, kind)
    if not limits.allow_remote:
        raise Forbidden(
            f"remote {kind.noun}s are turned off here; send the {kind.noun} as a data: URL",
            code="url_not_allowed",
        )
    return RemoteSource(text.strip())


def _inline(url: bytes | bytearray, kind: Kind) -> InlineSource:
    comma = url.find(b",", 0, _HEAD)
    if comma < 0:
        raise kind.invalid(
            f"the data: URL has no comma between its media type and its data in its first {_HEAD} bytes",
            "invalid_{noun}_url",
        )
    head = bytes(url[:comma]).decode("utf-8", "replace").partition(":")[2]
    declared, *parameters = (part.strip().lower() for part in head.split(";"))
    if declared and not declared.startswith(f"{kind.noun}/"):
        raise kind.invalid(
            f"the data: URL declares {_short(declared)}; accepted: {kind.noun}/*, or no media type",
            "invalid_{noun}_url",
        )
    if not parameters or parameters[-1] != "base64":
        raise kind.invalid(
            f"the data: URL is not base64; accepted: data:{declared[:40]};base64,...", "invalid_{noun}_url"
        )
    return InlineSource(declared, url, comma + 1, kind)


def _file(url: str, limits: MediaLimits, kind: Kind) -> FileSource:
    if limits.file_root is None:
        raise Forbidden("file:// URLs are not accepted here", code="url_not_allowed")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise kind.invalid("the file:// URL is malformed", "invalid_{noun}_url") from None
    if parts.netloc not in ("", "localhost"):
        raise Forbidden(
            f"the file:// URL names the host {_short(parts.netloc)}; accepted: file:///path",
            code="url_not_allowed",
        )
    if parts.query or parts.fragment:
        raise kind.invalid(
            "the file:// URL has a query or fragment; write ? as %3F and # as %23", "invalid_{noun}_url"
        )
    path = unquote(parts.path)
    if "\0" in path or not path.startswith("/"):
        raise kind.invalid("the file:// URL has no absolute path", "invalid_{noun}_url")
    return FileSource(Path(path), kind)


def _explain_scheme(url: str, scheme: str, kind: Kind) -> str:
    noun, accepted = kind.noun, _ACCEPTED.format(noun=kind.noun)
    if not url.strip():
        return f"the {noun} URL is empty; {accepted}"
    if scheme:
        return f"the {noun} URL has the scheme {_short(scheme)}; {accepted}"
    if _RAW_BASE64.match(url) and "." not in url[:64]:
        return f"the {noun} URL looks like bare base64; put {kind.example} (or its real type) before it"
    return f"the {noun} URL {_short(url)} has no scheme; {accepted}"


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


def decode_base64(text: memoryview, kind: Kind, most: int, piece: int = PIECE) -> bytes:
    """Decode a text, in which whitespace is ignored.

    most: accepted bytes; more are refused before anything is decoded. Raises InvalidMedia.
    """
    if len(text) % 4 == 0 and 0 < len(text) // 4 * 3 <= most:
        data = _decode_plain(text, piece)
        if data is not None:
            return data
    length = _check_base64(text, kind, most, piece)
    compact = bytearray()
    for part in _pieces(text, piece):
        compact += part.translate(None, _WHITESPACE)
    assert len(compact) == length
    data = _decode_plain(memoryview(compact), piece)
    if data is None:
        raise kind.invalid(f"the data: URL is not base64: {_padding_error(compact)}")
    return data


def _decode_plain(text: memoryview, piece: int) -> bytes | None:
    """Decode a text of a multiple of 4 characters. None if it is not plain base64, padded at its end only."""
    if len(text) <= piece:
        return _decode_part(text)
    data = io.BytesIO()  # unlike a join, it ends without a copy of the whole
    for at in range(0, len(text), piece):
        part = text[at : at + piece]
        if part[-1] == _PAD and at + piece < len(text):
            return None
        decoded = _decode_part(part)
        if decoded is None:
            return None
        data.write(decoded)
    return data.getvalue()


@cache
def _decoder() -> TypeAdapter[bytes]:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(bytes, config=ConfigDict(val_json_bytes="base64"))


def _decode_part(text: memoryview) -> bytes | None:
    """Decode a text of a multiple of 4 characters. None if it is not plain base64.

    The decoder of pydantic takes a quarter of the time, but it also reads base64 for URLs and JSON's escapes,
    and refuses unused bits that are not 0. Texts for which that matters are left to `decode_exactly`.
    """
    quoted = b"".join((b'"', text, b'"'))
    if not any(character in quoted for character in (b"-", b"_", b"\\")):
        try:
            data: bytes = _decoder().validate_json(quoted)
            return data
        except ValueError:
            pass
    return decode_exactly(text)


def decode_exactly(text: memoryview) -> bytes | None:
    """Decode a text of a multiple of 4 characters, as `_decode_part` does, by Python's own decoder."""
    if bytes(text[-3:]) == b"===":
        return None
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except binascii.Error:
        return None


def _check_base64(text: memoryview, kind: Kind, most: int, piece: int) -> int:
    """Return the number of characters that are not whitespace. Raises InvalidMedia."""
    length = sum(len(part.translate(None, _WHITESPACE)) for part in _pieces(text, piece))
    size = length // 4 * 3 - bytes(text[-8:]).count(b"=")
    if size > most:
        raise kind.invalid(f"the data: URL holds {size} bytes; accepted: at most {most}", "{noun}_too_large")
    if not length:
        raise kind.invalid("the data: URL holds no data after its comma")
    at = 0
    for part in _pieces(text, piece):
        if wrong := _NOT_BASE64.search(part):
            position = at + wrong.start()
            character = bytes(text[position : position + 4]).decode("utf-8", "replace")[0]
            raise kind.invalid(
                f"the data: URL is not base64: {character!r} at character {position} of its data; "
                "accepted: A-Z a-z 0-9 + / and = at the end"
            )
        at += len(part)
    if length % 4:
        raise kind.invalid(
            f"the data: URL has wrong base64 padding or is cut off: {length} characters; "
            "accepted: a multiple of 4, filled up with ="
        )
    return length


def _padding_error(text: bytearray) -> str:
    """Describe what is wrong with the padding. Every other fault is known already.

    The parser's verdict depends on the characters around the first = only, so it gets no more of them.
    """
    if text.endswith(b"==="):  # Python's strict mode accepts this
        return "excess padding"
    first = text.find(b"=")
    run = bytes(text[first : first + 65536])
    rest = run.lstrip(b"=")[:4] or b"A"
    try:
        binascii.a2b_base64(text[max(0, first - first % 4 - 4) : first] + run[:2] + rest, strict_mode=True)
    except binascii.Error as error:
        return str(error).lower()
    return "wrong padding"


def _pieces(text: memoryview, piece: int) -> Iterator[bytes]:
    return (bytes(text[at : at + piece]) for at in range(0, len(text), piece))


def read_inside(path: Path, limits: MediaLimits, kind: Kind = IMAGE) -> bytes:
    """Read a file that lies inside limits.file_root after its links are resolved.

    Raises Forbidden for a path outside, whether or not it exists, so that the answer does not reveal which.
    Raises InvalidMedia of the kind if the file cannot be read or is too large.
    """
    if limits.file_root is None:
        raise Forbidden("file:// URLs are not accepted here", code="url_not_allowed")
    outside = Forbidden(
        f"the file:// URL leaves the folder that {kind.noun}s are read from", code="url_not_allowed"
    )
    try:
        root = limits.file_root.resolve(strict=True)
        inner = path.resolve().relative_to(root)
    except (OSError, RuntimeError, ValueError):  # a loop of links, a name too long, or not inside the root
        raise outside from None
    name = quote(str(inner))
    try:
        leaf = _open_inside(root, inner.parts)
        try:
            return _read(leaf, name, limits, kind)
        finally:
            os.close(leaf)
    except OSError as error:
        raise kind.invalid(
            f"the file {name} cannot be read: {error.strerror}", "{noun}_fetch_failed"
        ) from None


def _open_inside(root: Path, parts: tuple[str, ...]) -> int:
    """Open the path part by part without following links. A link created after `resolve` fails here."""
    at = os.open(root, _STEP | os.O_DIRECTORY)
    for depth, part in enumerate(parts, 1):
        try:
            inner = os.open(part, _LEAF if depth == len(parts) else _STEP | os.O_DIRECTORY, dir_fd=at)
        finally:
            os.close(at)
        at = inner
    return at


def _read(leaf: int, name: str, limits: MediaLimits, kind: Kind) -> bytes:
    most = kind.max_bytes(limits)
    status = os.fstat(leaf)
    if not stat.S_ISREG(status.st_mode):
        raise Forbidden(f"the file {name} is not a regular file", code="url_not_allowed")
    data = bytearray()
    size = status.st_size
    # The file may grow after fstat, and files of the system (/proc) state no size.
    while size <= most and (part := os.read(leaf, _PART)):
        data += part
        size = max(size, len(data))
    if size > most:
        raise kind.invalid(
            f"the file {name} holds {size} bytes; accepted: at most {most}", "{noun}_too_large"
        )
    return bytes(data)
