"""URLs of images that no longer hold a signature, and what was learned about the images behind them.

Stores sign their URLs anew for every request: the path stays, the query changes. So a URL is known by its
scheme, host and path, and by those fields of its query that belong to no known kind of signature. When an
engine's answer tells the identity of an image, it is kept under that name, and the next request finds the
backend that knows the picture, whatever its URL looks like then.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from urllib.parse import unquote_plus, urlsplit

_SIGNATURE = re.compile(
    r"x-amz-.*|x-goog-.*|x-oss-.*|x-cos-.*|q-.*|awsaccesskeyid|googleaccessid|ossaccesskeyid|signature|"
    r"expires|policy|key-pair-id|sig|se|st|sp|sv|sr|spr|skoid|sktid|skt|ske|sks|skv|token|access_token|hdnts|"
    r"hmac|hash|auth_key|ts|timestamp|nonce|exp",
    re.IGNORECASE,
)
"""Fields of a query that sign it or limit its life: those of S3, Google, Azure, Alibaba, Tencent, CloudFront,
Akamai, and common names of home-made ones."""


def unsigned(url: str) -> str:
    """Return a URL without the fields that sign it, and without its fragment. Any text is accepted."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url
    # Fields stay as they are written, so that no two values become one. Those of one name keep their order.
    kept = sorted((field for field in parts.query.split("&") if not _signs(field)), key=_name)
    query = f"?{'&'.join(kept)}" if kept else ""
    return f"{parts.scheme.lower()}://{parts.netloc.lower()}{parts.path}{query}"


def _name(field: str) -> str:
    return field.partition("=")[0]


def _signs(field: str) -> bool:
    """Whether a field of a query belongs to a signature, or is empty."""
    return not field or _SIGNATURE.fullmatch(unquote_plus(_name(field))) is not None


class KnownImages:
    """Identities of images by URL, as engines have told them. The least recently used are forgotten.

    The first URL of a picture stays the name by which it is routed: the engine that told the identity has the
    picture in its caches, and was chosen by this name. The picture's other URLs, and the picture itself as a
    data: URL, then follow it there.

    capacity: most URLs.
    """

    def __init__(self, capacity: int = 100_000) -> None:
        self._capacity = capacity
        self._identities: OrderedDict[bytes, str] = OrderedDict()
        self._first: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._identities)

    def find(self, name: bytes) -> str | None:
        """Return the identity of the image behind a URL; None: it is not known. name: of `name_of`."""
        identity = self._identities.get(name)
        if identity is not None:
            self._identities.move_to_end(name)
        return identity

    def first_name(self, identity: str) -> bytes:
        """Return the name of the URL by which a picture was first known; b"": it is known by none."""
        return self._first.get(identity, b"")

    def learn(self, name: bytes, identity: str) -> None:
        """Keep the identity of the image behind a URL."""
        before = self._identities.get(name, identity)
        if before != identity:  # another picture is behind the URL now
            self._forget_first(name, before)
        self._identities[name] = identity
        self._identities.move_to_end(name)
        self._first.setdefault(identity, name)
        if len(self._identities) > self._capacity:
            self._forget_first(*self._identities.popitem(last=False))

    def _forget_first(self, name: bytes, identity: str) -> None:
        if self._first.get(identity) == name:
            del self._first[identity]


def name_of(url: str) -> bytes:
    """Return the 16 bytes under which the image behind a URL is known."""
    return hashlib.blake2b(unsigned(url).encode("utf-8", "surrogatepass"), digest_size=16).digest()
