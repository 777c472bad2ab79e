"""What stands in `image_url.url`, as one of three values: inline data, a local file, a remote URL.

Parsing is cheap and touches neither disk nor network; `read` of the inline and file sources is not cheap and
belongs in a thread. Remote sources are read by `fetch`.
"""

from __future__ import annotations

import binascii
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from fovea.core.errors import Forbidden, InvalidImage
from fovea.media.files import read_beneath
from fovea.media.limits import SCHEMES, MediaLimits

_SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*):")
_WHITESPACE = " \t\r\n\f\v"
_NOT_BASE64 = re.compile(r"[^A-Za-z0-9+/=\s]", re.ASCII)
_RAW_BASE64 = re.compile(r"\s*[A-Za-z0-9+/_-]{16}")
_ACCEPTED = "accepted: data:image/...;base64,..., https://..., http://... or file:///..."


@dataclass(frozen=True, slots=True)
class InlineSource:
    """A data: URL. declared: the media type that the client wrote; the bytes' real type wins over it."""

    declared: str
    encoded: str = field(repr=False)

    def read(self, limits: MediaLimits) -> bytes:
        """The decoded bytes. The size is computed and compared with the limit before anything is decoded."""
        length = len(self.encoded) - sum(self.encoded.count(space) for space in _WHITESPACE)
        size = length // 4 * 3 - self.encoded[-8:].count("=")
        if size > limits.max_bytes:
            raise InvalidImage(
                f"the data: URL holds {size} bytes; accepted: at most {limits.max_bytes}",
                code="image_too_large",
            )
        if not length:
            raise InvalidImage("the data: URL holds no data after its comma")
        stranger = _NOT_BASE64.search(self.encoded)
        if stranger:
            raise InvalidImage(
                f"the data: URL is not base64: {stranger.group()!r} at character {stranger.start()} of its data; "
                "accepted: A-Z a-z 0-9 + / and = at the end"
            )
        if length % 4:
            raise InvalidImage(
                f"the data: URL has wrong base64 padding or is cut off: {length} characters; "
                "accepted: a multiple of 4, filled up with ="
            )
        compact = "".join(self.encoded.split())
        try:
            if compact.endswith("==="):  # which Python's strict mode lets pass
                raise binascii.Error("Excess padding")
            return binascii.a2b_base64(compact, strict_mode=True)
        except binascii.Error as error:
            raise InvalidImage(f"the data: URL is not base64: {str(error).lower()}") from None


@dataclass(frozen=True, slots=True)
class FileSource:
    """A file:// URL. path: absolute, as written, not yet resolved."""

    path: Path

    def read(self, limits: MediaLimits) -> bytes:
        return read_beneath(self.path, limits)


@dataclass(frozen=True, slots=True)
class RemoteSource:
    """An http or https URL, not yet checked against the policy; see `fetch`."""

    url: str


Source = InlineSource | FileSource | RemoteSource


def parse_source(url: str, limits: MediaLimits) -> Source:
    """Raises InvalidImage for what is no image URL, Forbidden for what this server does not read."""
    match = _SCHEME.match(url)
    scheme = match.group(1).lower() if match else ""
    if scheme not in SCHEMES:
        raise InvalidImage(_what_else(url, scheme), code="invalid_image_url")
    if scheme not in limits.allowed_schemes:
        raise Forbidden(
            f"{scheme}: URLs are not accepted here; accepted: {', '.join(limits.allowed_schemes) or 'none'}",
            code="url_not_allowed",
        )
    if scheme == "data":
        return _inline(url.strip())
    if scheme == "file":
        return _file(url.strip(), limits)
    if not limits.allow_remote:
        raise Forbidden(
            "remote images are turned off here; send the image as a data: URL", code="url_not_allowed"
        )
    return RemoteSource(url.strip())


def _inline(url: str) -> InlineSource:
    head, comma, encoded = url[len("data:") :].partition(",")
    if not comma:
        raise InvalidImage(
            "the data: URL has no comma between its media type and its data", code="invalid_image_url"
        )
    declared, *parameters = (part.strip().lower() for part in head.split(";"))
    if not declared.startswith("image/"):
        raise InvalidImage(
            f"the data: URL declares {_short(declared) if declared else 'no media type'}; accepted: image/*",
            code="invalid_image_url",
        )
    if not parameters or parameters[-1] != "base64":
        raise InvalidImage(
            f"the data: URL is not base64; accepted: data:{declared[:40]};base64,...",
            code="invalid_image_url",
        )
    return InlineSource(declared, encoded)


def _file(url: str, limits: MediaLimits) -> FileSource:
    if limits.file_root is None:
        raise Forbidden("file:// URLs are not accepted here", code="url_not_allowed")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise InvalidImage("the file:// URL is malformed", code="invalid_image_url") from None
    if parts.netloc not in ("", "localhost"):
        raise Forbidden(
            f"the file:// URL names the host {_short(parts.netloc)}; accepted: file:///path",
            code="url_not_allowed",
        )
    if parts.query or parts.fragment:
        raise InvalidImage(
            "the file:// URL has a query or fragment; write ? as %3F and # as %23", code="invalid_image_url"
        )
    path = unquote(parts.path)
    if "\0" in path or not path.startswith("/"):
        raise InvalidImage("the file:// URL has no absolute path", code="invalid_image_url")
    return FileSource(Path(path))


def _what_else(url: str, scheme: str) -> str:
    if not url.strip():
        return f"the image URL is empty; {_ACCEPTED}"
    if scheme:
        return f"the image URL has the scheme {_short(scheme)}; {_ACCEPTED}"
    if _RAW_BASE64.match(url) and "." not in url[:64]:
        return "the image URL looks like bare base64; put data:image/png;base64, (or its real type) before it"
    return f"the image URL {_short(url)} has no scheme; {_ACCEPTED}"


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}...")
