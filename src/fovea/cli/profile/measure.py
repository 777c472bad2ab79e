"""Asks a server in this process while its parts say what they do."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from fovea.bench.client import Client
from fovea.bench.content import picture
from fovea.bench.sample import BenchRequest, Sample
from fovea.bench.settings import Target
from fovea.core.errors import EngineError, InvalidImage
from fovea.core.stage import Recorder, Span, recording
from fovea.core.types import ModelInfo
from fovea.engine.profile.roofline import Demand, Floor, ModelFloor
from fovea.engine.request.inputs import to_prompt
from fovea.kernels.calibrate import Machine, calibrate
from fovea.media.image.probe import probe
from fovea.media.limits import MediaLimits
from fovea.observe.chrome import chrome_trace
from fovea.observe.event_loop import watched_loop
from fovea.observe.profile import WAITING, StageTime, stage_times
from fovea.server.app import create_app
from fovea.server.background import serving

if TYPE_CHECKING:
    from fovea.cli.profile.settings import ProfileSettings
    from fovea.engine.engine import Engine

SIDE = 448
ON_DEVICE = ("encoder", "projector", "prefill", "mixed step", "decode step", "head", "sampling")
"""Stages that on CUDA are only launched."""


@dataclass(frozen=True, slots=True)
class Stage:
    """floor: None where neither memory nor arithmetic asks for anything. ratio: of the busy time to it."""

    time: StageTime
    floor: Floor | None

    @property
    def ratio(self) -> float | None:
        return self.time.busy_s / self.floor.seconds if self.floor and self.floor.seconds else None


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of time, `wall_s` seconds, with `requests` requests in it. tokens: that were answered.

    ttft_s: the median; None where no answer had text.
    """

    title: str
    requests: int
    concurrency: int
    wall_s: float
    ttft_s: float | None
    tokens: int
    stages: tuple[Stage, ...]

    @property
    def attributed(self) -> float:
        """The share of the time at which some stage was at work."""
        idle = sum(stage.time.path_s for stage in self.stages if stage.time.stage == WAITING)
        return 1 - idle / self.wall_s

    @property
    def floor_s(self) -> float:
        return sum(stage.floor.seconds for stage in self.stages if stage.floor)


@dataclass(frozen=True, slots=True)
class Profile:
    """prompt_tokens, visual_tokens: of every request. weight_bytes: that answering one reads, all parts of the model."""

    info: ModelInfo
    machine: Machine
    requests: ProfileSettings
    image: tuple[int, int] | None
    prompt_tokens: int
    visual_tokens: int
    weight_bytes: int
    parts: tuple[Part, ...]
    samples: tuple[tuple[Sample, ...], ...]


class Profiler:
    def __init__(self, requests: ProfileSettings) -> None:
        """Raises InvalidImage when the file cannot be read, or is no image."""
        self._requests = requests
        self._file = _picture(requests)
        self._type = probe(self._file, MediaLimits()).media_type if self._file else ""
        self._recorder = Recorder()

    def run(self, engine: Engine) -> Profile:
        """The engine ends with it."""
        try:
            return self._run(engine)
        finally:
            engine.shutdown()

    def _run(self, engine: Engine) -> Profile:
        runs = engine.runner.model
        if runs.device.type == "cuda":
            self._recorder.ending = _settle(runs.device)
        outline = engine.outline(to_prompt(self._requests.text, [self._file] if self._file else []))
        model = ModelFloor(runs)

        def measured() -> Machine:
            with torch.inference_mode():
                return calibrate(runs.kernels, runs.dtype, runs.device, model.formats, model.weight_bytes)

        before = measured()
        with serving(create_app(engine), watched_loop("server")) as url:
            alone, load = self._ask(url)
        # Before and after: a neighbour that takes the memory's bandwidth for a second would raise no floor, but lower it.
        machine = before.best(measured())
        size, demands = None, dict[str, Demand]()
        if outline.images:
            planned = outline.images[0]
            size = planned.image.width, planned.image.height
            demands = model.image(planned.plan, len(self._file))
        floors = {stage: demand.floor(machine) for stage, demand in demands.items()}
        middle = sorted(alone, key=lambda sample: sample.end_to_end)[len(alone) // 2]
        parts = [self._part("one request", [middle], model, machine, floors)]
        if load:
            parts.append(self._part("steady load", load, model, machine, floors))
        return Profile(
            info=engine.info,
            machine=machine,
            requests=self._requests,
            image=size,
            prompt_tokens=len(outline.ids),
            visual_tokens=outline.image_tokens,
            weight_bytes=model.weight_bytes,
            parts=tuple(parts),
            samples=(tuple(alone), tuple(load)),
        )

    def trace(self, found: Profile) -> dict[str, Any]:
        requests = [
            (f"{part} {number}", sample.sent_at, sample.ended_at)
            for part, samples in zip(("alone", "load"), found.samples, strict=True)
            for number, sample in enumerate(sorted(samples, key=lambda sample: sample.sent_at))
        ]
        about = {"model": found.info.name, "kernels": found.machine.kernels, "threads": found.machine.threads}
        return chrome_trace(self._recorder, requests, about)

    def _ask(self, url: str) -> tuple[list[Sample], list[Sample]]:
        with asyncio.Runner(loop_factory=watched_loop("client")) as runner:
            return runner.run(self._play(url))

    async def _play(self, url: str) -> tuple[list[Sample], list[Sample]]:
        """The first question is not recorded: shapes that are new to the engine cost it once."""
        async with Client(Target(url)) as client:
            await client.connect()
            await self._one(client)
            with recording(self._recorder):
                alone = [await self._one(client) for _ in range(self._requests.repeats)]
                left = iter(range(self._requests.requests))
                load: list[Sample] = []

                async def worker() -> None:
                    for _ in left:
                        load.append(await self._one(client))

                await asyncio.gather(*(worker() for _ in range(self._requests.concurrency)))
        return alone, load

    async def _one(self, client: Client) -> Sample:
        """A salt of its own keeps every cache from knowing it."""
        content: list[dict[str, Any]] = [{"type": "text", "text": self._requests.text}]
        if self._file:
            url = f"data:{self._type};base64,{base64.b64encode(self._file).decode()}"
            content.insert(0, {"type": "image_url", "image_url": {"url": url}})
        request = BenchRequest(
            ({"role": "user", "content": content},), self._requests.tokens, salt=uuid4().hex
        )
        sample = await client.send(request)
        # A model of random weights may say nothing that is text; it takes its time all the same.
        if sample.failure is not None and sample.failure.kind != "empty answer":
            raise EngineError(f"a request failed: {sample.failure.kind}: {sample.failure.text}")
        return sample

    def _part(
        self,
        title: str,
        samples: Sequence[Sample],
        model: ModelFloor,
        machine: Machine,
        image: dict[str, Floor],
    ) -> Part:
        start, end = min(s.sent_at for s in samples), max(s.ended_at for s in samples)
        spans: list[Span] = [span for span in self._recorder.spans if start <= span.start < end]
        times = stage_times(self._recorder.spans, start, end)
        floors = {name: _times(floor, len(samples)) for name, floor in image.items()}
        floors |= model.floors(spans, machine)
        ttfts = sorted(sample.ttft for sample in samples if sample.events)
        return Part(
            title=title,
            requests=len(samples),
            concurrency=min(self._requests.concurrency, len(samples)),
            wall_s=end - start,
            ttft_s=ttfts[len(ttfts) // 2] if ttfts else None,
            tokens=sum(sample.output_tokens for sample in samples),
            stages=tuple(Stage(time, floors.get(name)) for name, time in times.items()),
        )


def _times(floor: Floor, count: int) -> Floor:
    return Floor(floor.memory_s * count, floor.arithmetic_s * count, floor.seconds * count)


def _picture(requests: ProfileSettings) -> bytes:
    """The image's file, generated or read; none: b""."""
    if requests.image is None:
        side = SIDE if requests.side is None else requests.side
        return picture("fovea profile", 1, side) if side else b""
    try:
        return requests.image.read_bytes()
    except OSError as error:
        raise InvalidImage(f"{requests.image} cannot be read: {error.strerror}") from error


def _settle(device: torch.device) -> Callable[[str], None]:
    def ending(name: str) -> None:
        if name in ON_DEVICE:
            torch.cuda.synchronize(device)

    return ending
