"""Asks peers for work, and takes in what they offer. In threads of its own, because it waits.

A peer answers with a stream of lines of JSON. A line has offers of values that are ready; an empty object
tells that the peer is still there; the last line says that it is done. Each value is fetched and checked as
soon as it is offered. Whatever fails, the work of this peer ends there, and this engine computes what is
missing.
"""

from __future__ import annotations

import base64
import json
import logging
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from fovea.core.media import Rgb
from fovea.core.types import GenerationRequest
from fovea.engine.config.others import PeerSettings, peer_urls
from fovea.engine.kv.manager import KVManager
from fovea.engine.peers.choose import Peer, PeerTable
from fovea.engine.peers.layout import Layouts
from fovea.engine.peers.values import Value, needed_outputs, output_value, prefix_values
from fovea.engine.request.plans import plan_fields, whole_plan
from fovea.engine.request.prompt_plan import PlannedImage, PreparedPrompt
from fovea.engine.sequence import Sequence as TokenSequence
from fovea.engine.transfer.connector import Connector, Offer, TransferFailed

if TYPE_CHECKING:
    import httpx

    from fovea.engine.vision.encoding import VisualFeatures

log = logging.getLogger("fovea.engine")
THREADS = 32
"""Pieces of work that peers do for this engine at a time."""
LONGEST_LINE = 1 << 20
"""Most bytes of a line of a peer's answer."""
LONGEST_ERROR = 4096
"""Bytes of a peer's error that are read."""
PATIENCE = 6
"""How many times `peer_timeout_s` a peer is waited for that says that it is there, but has nothing ready.

The help of that setting says so, too.
"""
KINDS = ("encode", "prefill")
LONGEST_S = 86_400.0
"""Longest timeout of a piece of work."""


class Receiver(Protocol):
    """The memory that takes values in (`execute.handover.Handover`)."""

    layouts: Layouts
    kv: KVManager

    def most_bytes(self, value: Value) -> int: ...

    def check(self, value: Value, data: bytearray) -> VisualFeatures | None: ...

    def adopt(self, seq: TokenSequence, received: Sequence[tuple[Value, bytearray]]) -> None: ...


class PeerFailed(Exception):
    """A peer did not do its work. The message says why."""


class Releases(threading.local):
    """The offers that the current thread has fetched by a connector whose producer does not notice it."""

    def __init__(self) -> None:
        self.offers: list[Offer] = []

    def note(self, offer: Offer) -> None:
        self.offers.append(offer)

    def take(self) -> list[Offer]:
        offers, self.offers = self.offers, []
        return offers


class PeerRefused(PeerFailed):
    """A peer cannot do its work because of the request itself, such as a damaged image. It need not rest."""


class Wait:
    """Tells a thread that nobody waits for its work any more."""

    def __init__(self) -> None:
        self.over = False


@dataclass(slots=True)
class Fetched:
    """The results of peers for one request.

    received: tokens of its prompt in the whole blocks that a peer has sent.
    computed: those of them that the peer has computed for it.
    covered: keys of its images, if its prompt was computed elsewhere: they need no pixels here.
    features: encoder outputs, by key.
    """

    received: int = 0
    computed: int = 0
    covered: frozenset[str] = frozenset()
    features: dict[str, VisualFeatures] = field(default_factory=dict)

    @property
    def keys(self) -> frozenset[str]:
        """Keys of the images that need no pixels."""
        return self.covered | self.features.keys()


@dataclass(frozen=True, slots=True)
class _Work:
    """A piece of work for one peer.

    key: names what it is about. tokens: its size.
    body: what the peer is sent, without the images.
    wanted: the values that it may offer, by name.
    """

    kind: str
    key: str
    tokens: int
    body: Mapping[str, Any]
    images: Sequence[PlannedImage]
    wanted: Mapping[str, Value]


class _Encoding:
    """The images of one request that peers encode. done: holds what they did, after the last of them."""

    def __init__(
        self,
        works: int,
        keys: set[str],
        receiver: Receiver,
        call: Callable[[Callable[[], None]], None],
        keep: Keep,
    ) -> None:
        """keys: outputs that the request itself reads. Others go to `keep`, in the engine's thread."""
        self.done: Future[Fetched] = Future()
        self._fetched = Fetched()
        self._left, self._keys = works, keys
        self._receiver, self._call, self._keep = receiver, call, keep
        self._lock = threading.Lock()

    def take(self, received: Sequence[tuple[Value, bytearray]]) -> None:
        for value, data in received:
            features = self._receiver.check(value, data)
            assert features is not None
            if value.key in self._keys:
                self._fetched.features[value.key] = features
            else:
                self._call(partial(self._keep, value.key, features))

    def end_cancelled(self, task: Future[None]) -> None:
        if task.cancelled():
            self.end_one()

    def end_one(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self.done.set_result(self._fetched)


class Peers:
    """The peers of one engine."""

    def __init__(
        self,
        settings: PeerSettings,
        receiver: Receiver,
        connector: Connector,
        releases: Releases,
        call: Callable[[Callable[[], None]], None],
        *,
        lasting_images: bool = False,
    ) -> None:
        """connector: fetches what peers offer. releases: what it notes there, peers are told.

        call: runs something in the engine's thread, between two steps (`EngineLoop.call`).
        lasting_images: every token of an answer reads the images' outputs.
        """
        self._settings = settings
        self._receiver = receiver
        self._connector = connector
        self._releases = releases
        self._call = call
        self._lasting = lasting_images
        self._tables = {
            "encode": PeerTable(peer_urls(settings.encode_peers)),
            "prefill": PeerTable(peer_urls(settings.prefill_peers)),
        }
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._threads = ThreadPoolExecutor(THREADS, "fovea-peers")
        self._client: httpx.Client | None = None

    def prefill(
        self, request: GenerationRequest, prompt: PreparedPrompt, seq: TokenSequence, wait: Wait
    ) -> Future[Fetched] | None:
        """Have a prompt computed elsewhere, and take in its keys and values. None: it is computed here.

        seq: a sequence with this prompt, which only names the prefixes.
        """
        kv, last = self._receiver.kv, len(prompt.ids) - 1
        cached = kv.cached_prefix(seq)
        if (
            not self._tables["prefill"].peers
            or not kv.share_prefixes
            or last - cached < self._settings.remote_prefill_tokens
            or seq.keep is not None
            or request.sampling.prompt_logprobs is not None
            or prompt.videos
            or not _have_files(prompt.images)
        ):
            return None
        outputs = {span.key for span in needed_outputs(kv, seq, prompt.spans, lasting=self._lasting)}
        first = {image.key: number for number, image in reversed(list(enumerate(prompt.images)))}
        numbers = sorted(first[key] for key in outputs)
        images = [prompt.images[number] for number in numbers]
        values = [
            output_value(self._receiver.layouts.encoder, image.key, image.plan.rows) for image in images
        ]
        values += prefix_values(self._receiver.layouts.decoder, kv, seq, cached)
        body = self._body("prefill", request) | {"ids": prompt.ids, "first": cached, "outputs": numbers}
        name = seq.block_hashes[0].hex() if seq.block_hashes else request.id
        key = prompt.images[0].image.identity if prompt.images else name
        wanted = {value.name: value for value in values}
        whole = last // kv.block_size * kv.block_size
        work = _Work("prefill", key, last - cached, body, prompt.images, wanted)

        def run() -> Fetched:
            fetched = Fetched()
            try:
                known = self._ask(work, wait, lambda received: self._adopt(seq, received, fetched))
                fetched.computed = max(0, fetched.received - max(0, known - cached))
                if fetched.received >= whole - cached:
                    fetched.covered = frozenset(span.key for span in prompt.spans)
            except PeerFailed:
                pass
            return fetched

        return self._submit(run)

    def needed_keys(self, prompt: PreparedPrompt, seq: TokenSequence) -> set[str]:
        """Return the keys of the images whose outputs are needed here: those not before a cached prefix."""
        cached = 0 if self._lasting else self._receiver.kv.cached_prefix(seq)
        return {span.key for span in prompt.spans if span.end > cached}

    def encode(
        self, request: GenerationRequest, images: Iterable[PlannedImage], keep: Keep, wait: Wait
    ) -> Future[Fetched] | None:
        """Have images encoded elsewhere, each by the peer that may know it. None: all are encoded here.

        keep: is called in the engine's thread with outputs from which tokens are left out here.
        """
        if not self._tables["encode"].peers:
            return None
        works: dict[str, _Work] = {}
        for image in images:
            whole = whole_plan(image)
            if whole is None or not _have_files([image]):
                continue
            value = output_value(self._receiver.layouts.encoder, whole.key, whole.plan.rows)
            body = self._body("encode", request) | {"outputs": [0]}
            works[whole.key] = _Work(
                "encode", image.image.identity, image.plan.rows, body, [whole], {value.name: value}
            )
        if not works:
            return None
        encoding = _Encoding(len(works), {image.key for image in images}, self._receiver, self._call, keep)
        for work in works.values():
            task = self._submit(partial(self._encode, work, wait, encoding))
            if task is None:
                encoding.end_one()
            else:  # one that waits for a thread is cancelled when the engine stops, and never begins
                task.add_done_callback(encoding.end_cancelled)
        return encoding.done

    def _encode(self, work: _Work, wait: Wait, encoding: _Encoding) -> None:
        try:
            self._ask(work, wait, encoding.take)
        except PeerFailed:
            pass  # it is logged; the image is encoded here
        finally:
            encoding.end_one()

    def stats(self) -> dict[str, float]:
        """Return figures by the names of `observe.table`."""
        now = time.monotonic()
        with self._lock:
            counts = dict(self._counts)
            awake = {f"peers_{kind}_ready": float(table.awake(now)) for kind, table in self._tables.items()}
        return {**dict.fromkeys(COUNTS, 0.0), **counts, **awake}

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._client is not None:
            self._client.close()

    def _submit(self, work: Callable[[], Any]) -> Future[Any] | None:
        try:
            return self._threads.submit(work)
        except RuntimeError:  # the engine stops
            return None

    def _body(self, kind: str, request: GenerationRequest) -> dict[str, Any]:
        return {
            "kind": kind,
            "layout": self._receiver.layouts.of(kind),
            "road": self._receiver.layouts.road,
            "id": request.id,
            "salt": request.cache_salt,
            "timeout": None if request.timeout is None else min(max(request.timeout, 0.001), LONGEST_S),
            "priority": request.priority,
            "client": list(request.client),
        }

    def _adopt(
        self, seq: TokenSequence, received: Sequence[tuple[Value, bytearray]], fetched: Fetched
    ) -> None:
        of_prompt = []
        for value, data in received:
            features = self._receiver.check(value, data)
            if features is None:
                of_prompt.append((value, data))
                size = self._receiver.kv.block_size
                fetched.received += size if value.kind == "block" and not value.position % size else 0
            else:
                fetched.features[value.key] = features
        if of_prompt:
            self._call(lambda: self._receiver.adopt(seq, of_prompt))

    def _ask(self, work: _Work, wait: Wait, take: Take) -> int:
        """Give work to a peer, and take in what it offers until it is done.

        Returns how many tokens of the prompt the peer had cached. Raises PeerFailed.
        """
        if wait.over:
            raise PeerFailed("the request has ended")
        started = time.monotonic()
        with self._lock:
            peer = self._tables[work.kind].choose(work.key, work.tokens, started)
        if peer is None:
            self._count(f"peer_{work.kind}_refused")
            raise PeerFailed("all peers rest after failures")
        failed: str | None = "it was given up"
        refused: PeerFailed | None = None
        try:
            cached = self._receive(peer, work, wait, take)
            failed = None
            return cached
        except PeerFailed as error:
            failed, refused = str(error), error
            raise
        except Exception as error:
            failed = str(error) or type(error).__name__
            raise PeerFailed(failed) from error
        finally:
            ended = time.monotonic()
            harmless = failed is None or wait.over or isinstance(refused, PeerRefused)
            with self._lock:
                self._tables[work.kind].end(peer, work.tokens, ended, failed=not harmless)
            self._count(f"peer_{work.kind}_{'done' if failed is None else 'failed'}")
            self._count(f"peer_{work.kind}_seconds", ended - started)
            if releases := self._releases.take():
                self._submit(partial(self._tell, peer, releases))
            if isinstance(refused, PeerRefused):
                log.info("the peer %s refused %s: %s", peer.url, work.body["id"], failed)
            elif not harmless:
                log.warning("the peer %s did not %s for %s: %s", peer.url, work.kind, work.body["id"], failed)

    def _tell(self, peer: Peer, releases: Sequence[Offer]) -> None:
        """Tell a peer which of its offers were fetched."""
        try:
            content = json.dumps({"offers": [offer.to_json() for offer in releases]}).encode()
            with self._open(peer, "/peer/release", content) as response:
                response.read()
        except Exception as error:  # noqa: BLE001 - the offers end by time
            log.warning("the peer %s was not told what was fetched: %s", peer.url, error)

    def _receive(self, peer: Peer, work: _Work, wait: Wait, take: Take) -> int:
        left = dict(work.wanted)
        images = [_image(image) for image in work.images]
        content = json.dumps({**work.body, "images": images}).encode()
        with self._open(peer, "/peer/work", content, **{"x-request-id": work.body["id"]}) as response:
            latest = time.monotonic()

            def chunks() -> Iterator[bytes]:
                # As they arrived: a peer compresses nothing, and a small body could become a large one.
                for chunk in response.iter_raw():
                    yield chunk
                    if wait.over:
                        raise PeerFailed("the request has ended")
                    waited = time.monotonic() - latest
                    if waited > PATIENCE * self._settings.peer_timeout_s:
                        raise PeerFailed(f"nothing was ready for {waited:.0f} s")

            if response.status_code != 200:
                raise _refusal(response.status_code, _beginning(chunks()))
            answer = chunks()
            for line in _lines(answer):
                values = self._fetch(line, left)
                if values:
                    take(values)
                    latest = time.monotonic()
                if line.get("done") is True:
                    with suppress(Exception):  # the work is done, whatever follows
                        next(answer, None)  # after the end of its answer, a connection can be used again
                    return max(0, int(line.get("cached", 0)))
        raise PeerFailed("its answer broke off")

    def _fetch(self, line: Mapping[str, Any], left: dict[str, Value]) -> list[tuple[Value, bytearray]]:
        """Fetch the values of a line that are wanted."""
        if "error" in line:
            raise (PeerRefused if line.get("refused") is True else PeerFailed)(str(line["error"])[:300])
        found = []
        offers = line.get("offers", [])
        for fields in offers if isinstance(offers, list) else ():
            try:
                offer = Offer.from_json(fields)
                value = left.pop(offer.name, None)
                if value is None:
                    raise TransferFailed("it offers what nobody asked for")
                if offer.size > self._receiver.most_bytes(value):
                    raise TransferFailed(f"a value of {offer.size} bytes is offered, which is too large")
                begin = time.monotonic()
                try:
                    data = self._connector.fetch(offer, self._settings.peer_timeout_s)
                finally:
                    self._connector.release(offer)
            except TransferFailed as error:
                # What follows would be of no use without it, and may fail as slowly.
                self._count("transfers_failed")
                raise PeerFailed(f"a value could not be fetched: {error}") from error
            self._count("transfers")
            self._count("transfer_bytes", len(data))
            self._count("transfer_seconds", time.monotonic() - begin)
            found.append((value, data))
        return found

    def _open(self, peer: Peer, path: str, content: bytes, **more: str) -> Any:
        import httpx

        with self._lock:
            if self._client is None:
                limits = httpx.Limits(max_connections=None, max_keepalive_connections=THREADS)
                timeout = httpx.Timeout(self._settings.peer_timeout_s, pool=None)
                trusted = ssl.create_default_context()  # certificates of the system, or of SSL_CERT_FILE
                self._client = httpx.Client(limits=limits, timeout=timeout, trust_env=False, verify=trusted)
            client = self._client
        headers = {
            "authorization": f"Bearer {self._settings.peer_key}",
            "content-type": "application/json",
            "accept": "application/x-ndjson",
            "accept-encoding": "identity",
        }
        return client.stream("POST", f"{peer.url}{path}", content=content, headers={**headers, **more})

    def _count(self, name: str, amount: float = 1) -> None:
        with self._lock:
            self._counts[name] += amount  # type: ignore[assignment]


Keep = Callable[[str, "VisualFeatures"], None]
Take = Callable[[Sequence[tuple[Value, bytearray]]], None]
COUNTS = (
    *(f"peer_{kind}_{what}" for kind in KINDS for what in ("done", "failed", "refused", "seconds")),
    "transfers",
    "transfers_failed",
    "transfer_bytes",
    "transfer_seconds",
)


def _have_files(images: Iterable[PlannedImage]) -> bool:
    return not any(isinstance(image.image.pixels, Rgb) for image in images)


def _image(planned: PlannedImage) -> dict[str, Any]:
    pixels = planned.image.pixels
    assert not isinstance(pixels, Rgb)
    file = base64.b64encode(pixels.file()).decode("ascii")
    return {"url": f"data:;base64,{file}", "plan": plan_fields(planned.plan)}


def _beginning(chunks: Iterable[bytes]) -> str:
    """Return the beginning of an error's body."""
    text = b""
    for chunk in chunks:
        text += chunk[:LONGEST_ERROR]
        if len(text) >= LONGEST_ERROR:
            break
    return text[:LONGEST_ERROR].decode(errors="replace")


def _refusal(status: int, text: str) -> PeerFailed:
    """Return the error for an answer with a status other than 200. A peer of another layout fails always."""
    message = f"status {status}: {text[:300]}"
    if status not in (400, 413):
        return PeerFailed(message)
    try:
        error = json.loads(text)["error"]
        known = isinstance(error["message"], str) and error["param"] not in ("layout", "kind")
    except (ValueError, RecursionError, LookupError, TypeError):
        return PeerFailed(message)
    return PeerRefused(message) if known else PeerFailed(message)


def _lines(chunks: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the objects of an answer's lines. Raises PeerFailed for anything else."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > LONGEST_LINE:
            raise PeerFailed(f"a line of its answer has more than {LONGEST_LINE} bytes")
        for line in lines:
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise PeerFailed("a line of its answer is no JSON") from error
            if not isinstance(value, dict):
                raise PeerFailed("a line of its answer is no object")
            yield value
