"""The audit log: a line of JSON per request, which says who used what, and never what was in it.

A line holds numbers, names that the operator chose, and digests. It holds no text, address, query string or
byte of a request or answer, and no key. Two fields come from the client: the name of the model and the
request id. They are written only if they look like names; otherwise a mark stands there. Images are named by
the first 16 hex digits of the digest of their bytes, so that the same image can be found again in the log,
but not be seen.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from fovea.access.log import AccessLog
from fovea.gateway.amounts import Consumption
from fovea.gateway.usage.prices import Price

MOST_IMAGES = 64
"""Most images of a request that a line describes. It always has their number."""
IDENTITY_DIGITS = 16
NO_NAME = "(not a name)"
"""Stands for a text of the client that does not look like a name."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")
_FINGERPRINT = re.compile(r"[0-9a-f]{8}")
_DIGEST = re.compile(r"[0-9a-f]{16,}")


class AuditedImage(NamedTuple):
    """An image of a request.

    width, height: pixels as the client sent it; 0: unknown.
    identity: hex digits of the digest of its bytes, at least 16; empty: unknown.
    """

    width: int
    height: int
    identity: str


class AuditRecord(NamedTuple):
    """One request, when it has ended.

    at_s: time of its end, seconds of the epoch.
    request_id: as in the answer's header.
    tenant: name of the client. fingerprint: the first 8 hex digits of its key's hash; empty: no key.
    asked, used: the model in the request, and the one that answered.
    backend: name of the backend that answered; empty: none.
    route: the reason why it was chosen, such as "image, next". The gateway has made this text.
    status: HTTP status of the answer.
    images: the request's images, in order.
    cache: result of the response cache, as "hit" or "miss"; empty: it was not asked.
    fallbacks: backends that failed before the one that answered.
    seconds: from arrival to end.
    """

    at_s: float
    request_id: str
    tenant: str
    fingerprint: str
    asked: str
    used: str
    backend: str
    route: str
    status: int
    consumption: Consumption
    price: Price
    images: Sequence[AuditedImage]
    cache: str
    fallbacks: int
    seconds: float


class AuditLog:
    """Writes the lines with a thread, so that a slow disk delays no request (`access.log.AccessLog`).

    If the disk is slower than the requests, lines are left out, and a later line says how many.

    target: path of the file; "true": the logger `fovea.access`; "false": nowhere.

    Raises ConfigError if the file cannot be opened.
    """

    def __init__(self, target: str) -> None:
        self._log = AccessLog(target)

    @property
    def on(self) -> bool:
        return self._log.on

    def write(self, record: AuditRecord) -> None:
        """Write the line of a request."""
        if self._log.on:
            self._log.write(line_of(record))

    def close(self) -> None:
        """Write the waiting lines and close the file."""
        self._log.close()


def line_of(record: AuditRecord) -> dict[str, Any]:
    """Return the fields of a line, in the order in which they are written."""
    used, price = record.consumption, record.price
    at = datetime.datetime.fromtimestamp(record.at_s, datetime.UTC)
    return {
        "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "id": name_of(record.request_id),
        "tenant": name_of(record.tenant),
        "key": record.fingerprint if _FINGERPRINT.fullmatch(record.fingerprint) else "-",
        "model_asked": name_of(record.asked),
        "model_used": name_of(record.used),
        "backend": name_of(record.backend),
        "route": record.route,
        "status": record.status,
        "prompt_tokens": used.prompt_tokens,
        "visual_tokens": used.visual_tokens,
        "cached_tokens": used.cached_tokens,
        "completion_tokens": used.completion_tokens,
        "estimated": used.estimated,
        "images": used.images,
        "image_list": [_image(image) for image in record.images[:MOST_IMAGES]],
        "cost": price.cost,
        "credit": price.credit,
        "cache": name_of(record.cache),
        "fallbacks": record.fallbacks,
        "seconds": round(record.seconds, 6),
    }


def name_of(text: str) -> str:
    """Return a text if it looks like a name, and otherwise a mark. An empty text stays empty.

    A name has at most 128 letters, digits and ._:/@+- and is no address.
    """
    return text if not text or (_NAME.fullmatch(text) and "://" not in text) else NO_NAME


def _image(image: AuditedImage) -> list[Any]:
    identity = image.identity[:IDENTITY_DIGITS] if _DIGEST.fullmatch(image.identity) else ""
    return [image.width, image.height, identity]
