"""Computes from the headers of an HTTP response how a cache may reuse it (RFC 9111, shared cache).

Where the RFC lets a cache choose, this one is cautious: a response without an explicit lifetime is
revalidated before every use, a response that can neither be reused nor revalidated is not stored, and a stale
response is never used without revalidation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime

_STORED_HEADERS = ("cache-control", "expires", "date", "age", "etag", "last-modified", "vary")
_PER_RESPONSE = ("age", "date")
_DIRECTIVE = re.compile(r'([^\s=,;"]+)(?:\s*=\s*("[^"]*"|[^\s,;]*))?')
_MAX_LENGTH = 2048


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms on which a cache may reuse a response.

    url: the URL that answered, after all redirects.
    headers: the headers from which the terms were read.
    allowed: whether a cache may store the response.
    fresh_s: seconds from the response during which it is reused without revalidation.
    """

    url: str
    headers: tuple[tuple[str, str], ...]
    allowed: bool
    fresh_s: float

    @property
    def storable(self) -> bool:
        """Whether storing the response is allowed and useful."""
        return self.allowed and (self.fresh_s > 0 or bool(self.validators))

    @property
    def validators(self) -> dict[str, str]:
        """Headers of a request that revalidates the response; empty if it cannot be revalidated."""
        values = dict(self.headers)
        pairs = (
            ("If-None-Match", values.get("etag", "")),
            ("If-Modified-Since", values.get("last-modified", "")),
        )
        # Only printable ASCII can be sent back.
        return {name: value for name, value in pairs if value and value.isascii() and value.isprintable()}

    @property
    def size(self) -> int:
        """Estimated bytes of these terms in memory."""
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)

    def limit(self, fresh_s: float) -> Terms:
        """Return these terms, fresh for at most `fresh_s` seconds: a redirect may expire earlier."""
        return replace(self, fresh_s=min(self.fresh_s, fresh_s))

    def renew(self, headers: Mapping[str, str], now: float) -> Terms:
        """Return the terms after a 304 response with these headers, which replace the old ones."""
        old = {name: value for name, value in self.headers if name not in _PER_RESPONSE}
        return read_terms(self.url, {**old, **_stored_headers(headers)}, now)


def read_terms(url: str, headers: Mapping[str, str], now: float) -> Terms:
    """Read the terms of a response from its headers.

    headers: names in lower case, or in any case if the mapping ignores case.
    now: seconds of the epoch.
    """
    directives = _directives(headers.get("cache-control", ""))
    varies = any(name.strip() == "*" for name in headers.get("vary", "").split(","))
    allowed = not (varies or "no-store" in directives or "private" in directives)
    fresh_s = max(0.0, _lifetime(directives, headers, now) - _seconds(headers.get("age"), 0.0))
    return Terms(url, tuple(_stored_headers(headers).items()), allowed, fresh_s if allowed else 0.0)


def _stored_headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in _STORED_HEADERS if name in headers}


def _lifetime(directives: Mapping[str, str], headers: Mapping[str, str], now: float) -> float:
    """Return the seconds from the response's creation to its expiry; 0 if they are unknown or unreadable."""
    if "no-cache" in directives:
        return 0.0
    for name in ("s-maxage", "max-age"):
        if name in directives:
            return _seconds(directives[name], 0.0)
    if "expires" not in headers:
        return 0.0
    created_at = _date(headers.get("date", ""), now)
    return _date(headers["expires"], created_at) - created_at


def _directives(text: str) -> dict[str, str]:
    """Return the values of Cache-Control directives by lower-case name.

    If a directive occurs twice, the smaller lifetime counts; an unreadable one counts as 0.
    """
    if len(text) > _MAX_LENGTH:
        return {"no-store": ""}
    values: dict[str, str] = {}
    for match in _DIRECTIVE.finditer(text):
        name, value = match.group(1).lower(), (match.group(2) or "").strip().strip('"')
        if name in values and _seconds(values[name], 0.0) <= _seconds(value, 0.0):
            continue
        values[name] = value
    return values


def _seconds(text: str | None, default: float) -> float:
    text = (text or "").strip()
    return float(min(int(text[:12]), 1 << 31)) if text.isascii() and text.isdigit() else default


def _date(text: str, default: float) -> float:
    try:
        return parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return default
