"""Parses `image_url.url` or `video_url.url` to one of three sources: inline data, a file, or a remote URL.

Parsing is cheap and uses neither disk nor network. `read` of inline and file sources is not cheap: call it in
a thread. `fetch` downloads remote sources.
"""

from __future__ import annotations

import binascii
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from fovea.core.errors import Forbidden
from fovea.media.files import read_beneath
from fovea.media.kind import IMAGE, Kind
from fovea.media.limits import SCHEMES, MediaLimits

_SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*):")
_WHITESPACE = " \t\r\n\f\v"
_NOT_BASE64 = re.compile(r"[^A-Za-z0-9+/=\s]", re.ASCII)
_RAW_BASE64 = re.compile(r"\s*[A-Za-z0-9+/_-]{16}")
_ACCEPTED = "accepted: data:{noun}/...;base64,..., https://..., http://... or file:///..."


@dataclass(frozen=True, slots=True)
class InlineSource:
    """A data: URL.

    declared: the media type in the URL; the type found in the bytes takes precedence.
    encoded: the base64 text after the comma.
    """

    declared: str
    encoded: str = field(repr=False)
    kind: Kind = IMAGE

    def read(self, limits: MediaLimits) -> bytes:
        """Decode the bytes. Raises InvalidMedia for wrong base64 and, before decoding, for too much data."""
        length = len(self.encoded) - sum(self.encoded.count(space) for space in _WHITESPACE)
        size = length // 4 * 3 - self.encoded[-8:].count("=")
        most = self.kind.max_bytes(limits)
        if size > most:
            raise self.kind.invalid(
                f"the data: URL holds {size} bytes; accepted: at most {most}", "{noun}_too_large"
            )
        if not length:
            raise self.kind.invalid("the data: URL holds no data after its comma")
        wrong = _NOT_BASE64.search(self.encoded)
        if wrong:
            raise self.kind.invalid(
                f"the data: URL is not base64: {wrong.group()!r} at character {wrong.start()} of its data; "
                "accepted: A-Z a-z 0-9 + / and = at the end"
            )
        if length % 4:
            raise self.kind.invalid(
                f"the data: URL has wrong base64 padding or is cut off: {length} characters; "
                "accepted: a multiple of 4, filled up with ="
            )
        compact = "".join(self.encoded.split())
        try:
            if compact.endswith("==="):  # Python's strict mode accepts this
                raise binascii.Error("Excess padding")
            return binascii.a2b_base64(compact, strict_mode=True)
        except binascii.Error as error:
            raise self.kind.invalid(f"the data: URL is not base64: {str(error).lower()}") from None


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


def parse_source(url: str, limits: MediaLimits, kind: Kind = IMAGE) -> Source:
    """Parse a URL.

    Raises InvalidMedia of the kind for a malformed URL, Forbidden for one that the limits exclude.
    """
    match = _SCHEME.match(url)
    scheme = match.group(1).lower() if match else ""
    if scheme not in SCHEMES:
        raise kind.invalid(_explain_scheme(url, scheme, kind), "invalid_{noun}_url")
    if scheme not in limits.allowed_schemes:
        raise Forbidden(
            f"{scheme}: URLs are not accepted here; accepted: {', '.join(limits.allowed_schemes) or 'none'}",
            code="url_not_allowed",
        )
    if scheme == "data":
        return _inline(url.strip(), kind)
    if scheme == "file":
        return _file(url.strip(), limits, kind)
    if not limits.allow_remote:
        raise Forbidden(
            f"remote {kind.noun}s are turned off here; send the {kind.noun} as a data: URL",
            code="url_not_allowed",
        )
    return RemoteSource(url.strip())


def _inline(url: str, kind: Kind) -> InlineSource:
    head, comma, encoded = url[len("data:") :].partition(",")
    if not comma:
        raise kind.invalid(
            "the data: URL has no comma between its media type and its data", "invalid_{noun}_url"
        )
    declared, *parameters = (part.strip().lower() for part in head.split(";"))
    if not declared.startswith(f"{kind.noun}/"):
        media_type = _short(declared) if declared else "no media type"
        raise kind.invalid(
            f"the data: URL declares {media_type}; accepted: {kind.noun}/*",
            "invalid_{noun}_url",
        )
    if not parameters or parameters[-1] != "base64":
        raise kind.invalid(
            f"the data: URL is not base64; accepted: data:{declared[:40]};base64,...",
            "invalid_{noun}_url",
        )
    return InlineSource(declared, encoded, kind)


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
