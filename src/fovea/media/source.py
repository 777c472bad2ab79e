"""Parses `image_url.url` or `video_url.url` to one of three sources: inline data, a file, or a remote URL.

Parsing is cheap and uses neither disk nor network. `read` of inline and file sources is not cheap: call it in
a thread. `fetch` downloads remote sources.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from fovea.core.errors import Forbidden
from fovea.core.payload import Payload
from fovea.media.base64 import decode_base64
from fovea.media.files import read_beneath
from fovea.media.kind import IMAGE, Kind
from fovea.media.limits import SCHEMES, MediaLimits

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
        return read_beneath(self.path, limits, self.kind)


@dataclass(frozen=True, slots=True)
class RemoteSource:
    """An http or https URL. `fetch` checks it against the limits and downloads it."""

    url: str


Source = InlineSource | FileSource | RemoteSource


def parse_source(url: str | Payload, limits: MediaLimits, kind: Kind = IMAGE) -> Source:
    """Parse a URL.

    url: a text, or the bytes of a data: URL, of which only the first are looked at.
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
            f"the data: URL is not base64; accepted: data:{declared[:40]};base64,...",
            "invalid_{noun}_url",
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
