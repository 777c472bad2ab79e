"""Identifies and checks the images of a request by their headers, before anything is forwarded.

A data: URL is decoded from base64, its header is read and its bytes are hashed; no pixel is decoded. A remote
URL is checked as text, and the addresses of its host are resolved, so that no backend is sent to a private
network. Every error names the image by its index and its JSON path, and the limit.

Stores sign their URLs again for every request: the path stays, the query changes. So a URL is known by its
scheme, host and path, and by those fields of its query that belong to no known kind of signature. When an
engine's answer tells the identity of an image, it is kept under that name, and the next request finds the
backend that knows the picture, whatever its URL looks like then.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import unquote_plus, urlsplit

from fovea.core.errors import Forbidden, InvalidMedia, InvalidRequest
from fovea.core.media import Payload, content_identity
from fovea.gateway.inspect.body import Body
from fovea.gateway.inspect.fields import MediaPart
from fovea.media.fetch.url import host_of, is_public, parse_remote
from fovea.media.image.probe import check_still, probe
from fovea.media.limits import IMAGE, VIDEO, Kind, MediaLimits
from fovea.media.source import InlineSource, RemoteSource, parse_source

IDENTITIES = "x-fovea-images"
"""Header of an engine's answer with the identities of the request's images, separated by commas."""
_IDENTITY = re.compile("[0-9a-f]{64}")
_SIGNATURE = re.compile(
    r"x-amz-.*|x-goog-.*|x-oss-.*|x-cos-.*|q-.*|awsaccesskeyid|googleaccessid|ossaccesskeyid|signature|"
    r"expires|policy|key-pair-id|sig|se|st|sp|sv|sr|spr|skoid|sktid|skt|ske|sks|skv|token|access_token|hdnts|"
    r"hmac|hash|auth_key|ts|timestamp|nonce|exp",
    re.IGNORECASE,
)
"""Fields of a query that sign it or limit its life: those of S3, Google, Azure, Alibaba, Tencent, CloudFront,
Akamai, and common names of home-made ones."""
THREAD_BYTES = 512 * 1024
"""Longer data: URLs are decoded and hashed in a thread, so that other requests go on meanwhile."""
HOST_S = 30.0
"""Seconds for which a host that was public is not resolved again."""
MOST_HOSTS = 10_000
Fetch = Callable[[str], Awaitable[bytes]]
"""Downloads the bytes behind a URL; `media.fetch.cache.FetchCache.fetch` is one."""
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host as text; `media.fetch.resolve.Resolver.resolve` is one."""


@dataclass(slots=True)
class RequestImage:
    """The facts about one image or video of a request.

    identity: 64 hex digits, as in the engine's caches; "": not known yet, because only the engine reads it.
    name: the name of the image behind a URL (`remote.name_of`); b"" for a data: URL.
    width, height: pixels; 0: not known.
    is_video: whether it is a video.
    part: where it is in the body.
    size: bytes of the encoded file; 0: not known.
    first_name: the name of the URL by which the picture was first known; b"": it is known by none.
    """

    identity: str
    name: bytes
    width: int
    height: int
    is_video: bool
    part: MediaPart
    size: int = 0
    first_name: bytes = b""

    @property
    def key(self) -> str:
        """The key by which the image is routed: the name of its first URL, or its identity if it had none."""
        name = self.first_name or (b"" if self.identity else self.name)
        return f"url:{name.hex()}" if name else self.identity


@dataclass(eq=False)
class ImageInspector:
    """Checks the images of requests within `limits`.

    limits: those of `fovea.media`; max_images, sizes, pixels, schemes and hosts apply.
    remote: "resolve": URLs are forwarded if no address of their hosts is private; "fetch": images are
        downloaded here and forwarded as data: URLs; "refuse": only data: URLs are accepted.
    known: what was learned about URLs.
    resolve, fetch: the ways to the network.
    """

    limits: MediaLimits
    remote: str
    known: KnownImages
    resolve: Resolve
    fetch: Fetch
    clock: Callable[[], float] = time.monotonic
    _public: dict[str, float] = field(default_factory=dict, init=False)
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2, "fovea-images"), init=False
    )

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    async def inspect(self, body: Body, parts: Sequence[MediaPart]) -> list[RequestImage]:
        """Return the facts about the images and videos of a body, in order.

        Images that are fetched here become data: URLs of the body. Raises InvalidRequest, InvalidImage,
        InvalidVideo and Forbidden.
        """
        self._check_counts(parts)
        images, numbers = [], [0, 0]
        for part in parts:
            index = numbers[part.is_video]
            numbers[part.is_video] += 1
            try:
                images.append(await self._inspect(body, part))
            except InvalidMedia as error:
                raise error.at(index, part.param) from None
            except (Forbidden, InvalidRequest) as error:
                kind = Forbidden if isinstance(error, Forbidden) else InvalidRequest
                noun = "video" if part.is_video else "image"
                raise kind(f"{noun} {index}: {error.message}", param=part.param, code=error.code) from None
        pixels = sum(image.width * image.height for image in images)
        if pixels > self.limits.max_request_pixels:
            raise InvalidRequest(
                f"the request's {len(images)} images have {pixels} pixels together; "
                f"accepted: at most {self.limits.max_request_pixels}",
                code="image_too_large",
            )
        return images

    def _check_counts(self, parts: Sequence[MediaPart]) -> None:
        videos = [part for part in parts if part.is_video]
        pictures = [part for part in parts if not part.is_video]
        for noun, given, most in (
            ("image", pictures, self.limits.max_images),
            ("video", videos, self.limits.max_videos),
        ):
            if len(given) > most:
                raise InvalidRequest(
                    f"the request has {len(given)} {noun}s; accepted: at most {most}",
                    param=given[most].param,
                    code=f"too_many_{noun}s",
                )

    async def _inspect(self, body: Body, part: MediaPart) -> RequestImage:
        kind = VIDEO if part.is_video else IMAGE
        source = parse_source(self._url(body, part), self.limits, kind)
        if isinstance(source, InlineSource):
            facts = await self._in_turn(source)
            return self._inline(facts, part)
        if not isinstance(source, RemoteSource):
            raise Forbidden(
                f"file: URLs are not forwarded; accepted: data:, http: and https: URLs of {kind.noun}s",
                code="url_not_allowed",
            )
        return await self._inspect_remote(body, part, source.url, kind)

    def _url(self, body: Body, part: MediaPart) -> str | Payload:
        if not part.bare:
            return body.payload(part.url)
        return Payload(b"data:image/any;base64," + body.unescaped(part.url))

    async def _in_turn(self, source: InlineSource) -> _Facts:
        """Read an inline source: here if it is small, in a thread if not."""
        if len(source.encoded) <= THREAD_BYTES:
            return _read(source, self.limits)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, _read, source, self.limits)

    async def _inspect_remote(self, body: Body, part: MediaPart, url: str, kind: Kind) -> RequestImage:
        if self.remote == "refuse":
            raise Forbidden(
                f"remote {kind.noun}s are turned off here; send the {kind.noun} as a data: URL",
                code="url_not_allowed",
            )
        parsed = parse_remote(url, self.limits, kind)
        if self.remote == "fetch" and not part.is_video:
            return await self._fetch(body, part, url)
        host = host_of(parsed)
        if not self.limits.allow_private_hosts:
            await self._check_host(host, parsed.port or 0, kind)
        name = name_of(url)
        identity = self.known.find(name) or ""
        first = self.known.first_name(identity)
        return RequestImage(identity, name, 0, 0, part.is_video, part, first_name=first)

    async def _fetch(self, body: Body, part: MediaPart, url: str) -> RequestImage:
        """Download an image, and put it into the body in place of its URL."""
        data = await self.fetch(url)
        loop = asyncio.get_running_loop()
        facts, text = await loop.run_in_executor(self._threads, _read_file, data, self.limits)
        part.owner[part.key] = body.put(text)
        return self._inline(facts, part)

    def _inline(self, facts: _Facts, part: MediaPart) -> RequestImage:
        """Return an image whose bytes were read."""
        first = self.known.first_name(facts.identity)
        return RequestImage(
            facts.identity, b"", facts.width, facts.height, part.is_video, part, facts.size, first
        )

    async def _check_host(self, host: str, port: int, kind: Kind) -> None:
        """Raise Forbidden for a host with a private address, InvalidMedia for one that does not exist.

        The backend resolves the name again and might get another answer, so backends that download images
        need a network without private hosts, or `remote_images = "fetch"`.
        """
        if self._public.get(host, 0.0) > self.clock():
            return
        try:
            addresses = await self.resolve(host, port)
        except TimeoutError:
            raise kind.invalid(
                f"the host of the {kind.noun} URL was not found in time", "{noun}_fetch_failed"
            ) from None
        except OSError:
            raise kind.invalid(
                f"the host of the {kind.noun} URL was not found", "{noun}_fetch_failed"
            ) from None
        if not addresses or not all(is_public(address) for address in addresses):
            raise Forbidden(
                f"the {kind.noun} URL leads to an address that is not public; accepted: public hosts",
                code="url_not_allowed",
            )
        if len(self._public) >= MOST_HOSTS:
            self._public.clear()
        self._public[host] = self.clock() + HOST_S


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

    def learn_from(self, headers: Sequence[tuple[str, str]], images: Sequence[RequestImage]) -> None:
        """Learn the identities of images behind URLs from the headers of an engine's answer."""
        if not any(image.name for image in images):
            return
        told = next((value for name, value in headers if name == IDENTITIES), "").split(",")
        pictures = [image for image in images if not image.is_video]
        for image, identity in zip(pictures, told, strict=False):
            if image.name and _IDENTITY.fullmatch(identity):
                self.learn(image.name, identity)

    def _forget_first(self, name: bytes, identity: str) -> None:
        if self._first.get(identity) == name:
            del self._first[identity]


def name_of(url: str) -> bytes:
    """Return the 16 bytes under which the image behind a URL is known."""
    return hashlib.blake2b(unsigned(url).encode("utf-8", "surrogatepass"), digest_size=16).digest()


class _Facts(NamedTuple):
    identity: str
    width: int
    height: int
    size: int


def _read(source: InlineSource, limits: MediaLimits) -> _Facts:
    data = source.read(limits)
    if source.kind is VIDEO:
        return _Facts(content_identity(source.declared, 0, 0, data), 0, 0, len(data))
    return _facts(data, limits)


def _facts(data: bytes, limits: MediaLimits) -> _Facts:
    header = probe(data, limits)
    check_still(header, limits)
    identity = content_identity(header.media_type, header.width, header.height, data)
    return _Facts(identity, header.width, header.height, len(data))


def _read_file(data: bytes, limits: MediaLimits) -> tuple[_Facts, bytes]:
    """Return the facts about a downloaded image, and the image as a data: URL."""
    facts, kind = _facts(data, limits), probe(data, limits).media_type
    return facts, b"data:%b;base64,%b" % (kind.encode(), base64.b64encode(data))
