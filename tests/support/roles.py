"""Engines with roles in one process. Instead of HTTP, the work of a peer is a call of its engine."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import PIL.Image
import pytest

from fovea import Engine
from fovea.api.peers import PeerWork
from fovea.core.errors import FoveaError
from fovea.core.media import Image
from fovea.core.sampling import SamplingParams
from fovea.core.types import Delta, GenerationRequest, Offering, PlannedPart, PlannedPrompt
from fovea.engine.config import EngineConfig
from fovea.engine.load import LoadedModel
from fovea.engine.peers.choose import Peer
from fovea.engine.peers.client import Peers
from fovea.media.limits import MediaLimits
from fovea.media.load import MediaLoader
from tests.support.engines import assert_idle, picture

ANSWERS = ("all", "decode", "prefill-decode")
TEAMS: dict[str, tuple[str, ...]] = {
    "encode": ("encode", "prefill-decode"),
    "prefill": ("prefill", "decode"),
    "encode, prefill": ("encode", "prefill", "decode"),
}
"""Roles of the engines of a team. The last of them answers."""


_loader = cache(lambda: MediaLoader(MediaLimits()))


def loaded(*urls: str) -> tuple[Image, ...]:
    """Return images as a server loads them: they have their files, which are decoded later."""
    return asyncio.run(_loader().load_all(urls))


@cache
def drawn(seed: int = 0, width: int = 96, height: int = 64) -> Image:
    """Return `engines.picture` as a file: only images that have a file can be sent to peers."""
    rgb = picture(seed, width, height).rgb
    file = io.BytesIO()
    PIL.Image.frombytes("RGB", (width, height), bytes(rgb)).save(file, "png")
    return loaded(f"data:;base64,{base64.b64encode(file.getvalue()).decode()}")[0]


def asked_of(content: bytes) -> GenerationRequest:
    """Return the request that the route /peer/work makes of a body."""
    body = PeerWork.model_validate(json.loads(content))
    images = loaded(*(str(image.url) for image in body.images))
    parts = zip(images, (image.plan for image in body.images), strict=True)
    prefills = body.kind == "prefill"
    return GenerationRequest(
        id=uuid.uuid4().hex,
        prompt=PlannedPrompt(tuple(body.ids), tuple(PlannedPart(*part) for part in parts)),
        sampling=SamplingParams(temperature=0, max_tokens=1),
        cache_salt=body.salt,
        speculate=False,
        timeout=body.timeout,
        encode_only=not prefills,
        priority=body.priority,
        client=body.client,
        offering=Offering(body.layout, body.road, body.first if prefills else None, tuple(body.outputs)),
    )


class Answer:
    """The answer of a peer, as `Peers` reads it from httpx."""

    def __init__(self, lines: Callable[[], Iterator[bytes]], status: int = 200, text: str = "") -> None:
        self.status_code, self.text = status, text
        self._lines = lines()

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *exc: object) -> None:
        close = getattr(self._lines, "close", None)
        if close is not None:
            close()

    def read(self) -> bytes:
        return self.text.encode()

    def iter_bytes(self) -> Iterator[bytes]:
        return self._lines

    iter_raw = iter_bytes


def line(**fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def worked(engine: Engine, content: bytes) -> Answer:
    """Let an engine do the work of a body."""
    deltas = engine.iterate(asked_of(content))
    try:
        first: Delta | None = next(deltas, None)
    except FoveaError as error:
        return Answer(lambda: iter(()), error.status, json.dumps(error.message))

    def lines() -> Iterator[bytes]:
        delta, cached = first, 0
        try:
            while delta is not None:
                cached = delta.cached_tokens
                if delta.offers:
                    yield line(offers=list(delta.offers))
                delta = next(deltas, None)
            yield line(done=True, cached=cached)
        except FoveaError as error:
            yield line(error=error.message)
        finally:
            with suppress(FoveaError):
                deltas.close()  # type: ignore[attr-defined]

    return Answer(lines)


@dataclass
class Team:
    """Engines that work together. engines: by role. asked: bodies that were sent, by role."""

    engines: dict[str, Engine]
    asked: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def front(self) -> Engine:
        """The engine that answers."""
        return next(engine for role, engine in self.engines.items() if role in ANSWERS)

    def open(self, peers: Peers, peer: Peer, content: bytes) -> Answer:
        role = peer.url.removeprefix("http://")
        self.asked.setdefault(role, []).append(json.loads(content))
        return worked(self.engines[role], content)

    def stats(self) -> Mapping[str, float]:
        return self.front.stats()

    def check(self) -> None:
        """Assert that nothing is left of the requests: blocks, offers, or work that counts."""
        for engine in self.engines.values():
            assert_idle(engine)
            handover = engine.parts.peering.handover
            assert handover is not None
            slab = handover.connector.stats()
            assert slab["leases"] == 0
            assert slab["free_bytes"] == slab["slab_bytes"]
            peers = engine.parts.peering.peers
            tables = [] if peers is None else peers._tables.values()
            assert not any(peer.pending for table in tables for peer in table.peers)


@contextmanager
def team(name: str, model: LoadedModel, base: Mapping[str, Any], **front: Any) -> Iterator[Team]:
    """Start the engines of a team. base: settings of all. front: those of the one that answers, too."""
    roles = TEAMS[name]
    with (
        tempfile.TemporaryDirectory(prefix="fovea-") as home,
        ExitStack() as stack,
        pytest.MonkeyPatch.context() as patch,
    ):
        members = Team({})
        patch.setattr(Peers, "_open", lambda self, peer, path, content, **more: members.open(self, peer, content))
        for role in roles:
            more: dict[str, Any] = dict(front) if role == roles[-1] else {}
            if "encode" in roles and role != "encode":
                more["encode_peers"] = "http://encode"
            if role == "decode":
                more["prefill_peers"] = "http://prefill"
            config = EngineConfig.of(**{
                **base, "role": role, "peer_key": "secret", "transfer_dir": home, "transfer_mib": 64,
                "remote_prefill_tokens": 1, **more,
            })  # fmt: skip
            members.engines[role] = stack.enter_context(Engine(model, config))
        yield members
