"""On what terms an HTTP response may be used again (RFC 9111, as a shared cache), from its headers alone.

Cautious where the RFC lets a cache choose: without a lifetime of its own a response is asked about again before every
use, one that can neither be used nor asked about is not kept, and nothing is used beyond its time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime

_KEPT = ("cache-control", "expires", "date", "age", "etag", "last-modified", "vary")
_OF_ONE_ANSWER = ("age", "date")
_DIRECTIVE = re.compile(r'([^\s=,;"]+)(?:\s*=\s*("[^"]*"|[^\s,;]*))?')
_LONGEST = 2048


@dataclass(frozen=True, slots=True)
class Terms:
    """url: which answered, after all redirects. headers: those that the terms were read from.

    allowed: whether it may be kept at all. fresh_s: seconds from its answer within which it is used without asking.
    """

    url: str
    headers: tuple[tuple[str, str], ...]
    allowed: bool
    fresh_s: float

    @property
    def keep(self) -> bool:
        """Whether keeping it is allowed and of any use."""
        return self.allowed and (self.fresh_s > 0 or bool(self.validators))

    @property
    def validators(self) -> dict[str, str]:
        """Headers of a request that asks whether it still holds; empty if it can not be asked."""
        values = dict(self.headers)
        pairs = (
            ("If-None-Match", values.get("etag", "")),
            ("If-Modified-Since", values.get("last-modified", "")),
        )
        # Anything but printable ASCII could not be sent back.
        return {name: value for name, value in pairs if value and value.isascii() and value.isprintable()}

    @property
    def size(self) -> int:
        """Bytes, about."""
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)

    def within(self, fresh_s: float) -> Terms:
        """The same, but fresh for that long at most: a redirect on the way there may end sooner."""
        return replace(self, fresh_s=min(self.fresh_s, fresh_s))

    def renewed(self, headers: Mapping[str, str], now: float) -> Terms:
        """After a 304 with these headers, which go over the old ones."""
        old = {name: value for name, value in self.headers if name not in _OF_ONE_ANSWER}
        return read_terms(self.url, {**old, **_kept(headers)}, now)


def read_terms(url: str, headers: Mapping[str, str], now: float) -> Terms:
    """headers: lower-case names, or any case where the mapping does not mind. now: seconds of the epoch."""
    directives = _directives(headers.get("cache-control", ""))
    varies = any(name.strip() == "*" for name in headers.get("vary", "").split(","))
    allowed = not (varies or "no-store" in directives or "private" in directives)
    fresh_s = max(0.0, _lifetime(directives, headers, now) - _seconds(headers.get("age"), 0.0))
    return Terms(url, tuple(_kept(headers).items()), allowed, fresh_s if allowed else 0.0)


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in _KEPT if name in headers}


def _lifetime(directives: Mapping[str, str], headers: Mapping[str, str], now: float) -> float:
    """Seconds from when it was made. What can not be read is stale."""
    if "no-cache" in directives:
        return 0.0
    for name in ("s-maxage", "max-age"):
        if name in directives:
            return _seconds(directives[name], 0.0)
    if "expires" not in headers:
        return 0.0
    made = _date(headers.get("date", ""), now)
    return _date(headers["expires"], made) - made


def _directives(text: str) -> dict[str, str]:
    """By lower-case name. Of one that is there twice the smaller lifetime counts, or none if either is unreadable."""
    if len(text) > _LONGEST:
        return {"no-store": ""}
    found: dict[str, str] = {}
    for match in _DIRECTIVE.finditer(text):
        name, value = match.group(1).lower(), (match.group(2) or "").strip().strip('"')
        if name in found and _seconds(found[name], 0.0) <= _seconds(value, 0.0):
            continue
        found[name] = value
    return found


def _seconds(text: str | None, otherwise: float) -> float:
    text = (text or "").strip()
    return float(min(int(text[:12]), 1 << 31)) if text.isascii() and text.isdigit() else otherwise


def _date(text: str, otherwise: float) -> float:
    try:
        return parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return otherwise
