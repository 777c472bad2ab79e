"""Sends requests to a server in this process, and records the stages of their time."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from fovea.bench.client import Client
from fovea.bench.context import picture
from fovea.bench.measure import BenchRequest, Sample
from fovea.bench.settings import Target
from fovea.core.errors import EngineError, InvalidImage
from fovea.core.measure import Recorder, Span, recording
from fovea.core.types import ModelInfo
from fovea.engine.profile import Demand, LowerBound, ModelRoofline
from fovea.engine.request.inputs import to_prompt
from fovea.kernels.calibrate import Machine, calibrate
from fovea.media.image.probe import probe
from fovea.media.limits import MediaLimits
from fovea.observe.profile import WAITING, StageTime, chrome_trace, stage_times, watched_loop
from fovea.server.app import create_app
from fovea.server.run import serving

if TYPE_CHECKING:
    from fovea.cli.profile import ProfileSettings
    from fovea.engine.engine import Engine

SIDE = 448
ON_DEVICE = ("encoder", "projector", "prefill", "mixed step", "decode step", "head", "sampling")
"""Stages that only launch their work on CUDA. Their end is recorded when the device is done."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The measured time of a stage, and its lower bound.

    time: measured times.
    bound: lower bound; None if neither memory nor arithmetic limits the stage.
    """

    time: StageTime
    bound: LowerBound | None

    @property
    def ratio(self) -> float | None:
        """Busy time over lower bound; None without a bound."""
        return self.time.busy_s / self.bound.seconds if self.bound and self.bound.seconds else None


@dataclass(frozen=True, slots=True)
class Part:
    """One interval of the measurement.

    title: what was measured.
    requests: number of requests in the interval.
    concurrency: most simultaneous requests.
    wall_s: length of the interval in seconds.
    ttft_s: median time to the first token; None if no answer has text.
    tokens: number of generated tokens.
    stages: times of the stages.
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
        """Share of the time in which at least one stage was at work."""
        idle = sum(stage.time.path_s for stage in self.stages if stage.time.stage == WAITING)
        return 1 - idle / self.wall_s

    @property
    def bound_s(self) -> float:
        """Sum of the stages' lower bounds."""
        return sum(stage.bound.seconds for stage in self.stages if stage.bound)


@dataclass(frozen=True, slots=True)
class Profile:
    """The result of a measurement.

    info: the model.
    machine: bandwidth and peaks of the machine.
    requests: settings of the requests.
    image: width and height of the image; None: no image.
    prompt_tokens, visual_tokens: tokens of every prompt, and how many of them are visual.
    weight_bytes: size of the weights that one answer reads, all parts of the model together.
    parts: one request alone, and the steady load.
    samples: measurements of the client, for the requests one after another and for the load.
    """

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
    """Measures an engine behind a server in this process."""

    def __init__(self, requests: ProfileSettings) -> None:
        """Read or generate the image. Raises InvalidImage if the file cannot be read, or is not an image."""
        self._requests = requests
        self._file = _picture(requests)
        self._type = probe(self._file, MediaLimits()).media_type if self._file else ""
        self._recorder = Recorder()

    def run(self, engine: Engine) -> Profile:
        """Measure an engine. The engine is shut down at the end."""
        try:
            return self._run(engine)
        finally:
            engine.shutdown()

    def _run(self, engine: Engine) -> Profile:
        model = engine.runner.model
        if model.device.type == "cuda":
            self._recorder.before_end = _synchronize_stages(model.device)
        generated = self._requests.image is None and self._requests.side is None
        if generated and "image" not in engine.info.input_modalities:
            self._file = b""
        outline = engine.outline(to_prompt(self._requests.text, [self._file] if self._file else []))
        runner = engine.runner
        roofline = ModelRoofline(model, runner.block_bytes // runner.block_size)

        def calibrate_machine() -> Machine:
            with torch.inference_mode():
                return calibrate(
                    model.kernels, model.dtype, model.device, roofline.formats, roofline.weight_bytes
                )

        before = calibrate_machine()
        with serving(create_app(engine), watched_loop("server")) as url:
            alone, load = self._run_client(url)
        # Calibrated before and after: other work on the machine during one calibration makes the bounds too
        # high.
        machine = before.best(calibrate_machine())
        size, demands = None, dict[str, Demand]()
        if outline.images:
            planned = outline.images[0]
            size = planned.image.width, planned.image.height
            demands = roofline.image(planned.plan, len(self._file))
        bounds = {stage: demand.lower_bound(machine) for stage, demand in demands.items()}
        middle = sorted(alone, key=lambda sample: sample.end_to_end)[len(alone) // 2]
        parts = [self._part("one request", [middle], roofline, machine, bounds)]
        if load:
            parts.append(self._part("steady load", load, roofline, machine, bounds))
        return Profile(
            info=engine.info,
            machine=machine,
            requests=self._requests,
            image=size,
            prompt_tokens=len(outline.ids),
            visual_tokens=outline.image_tokens,
            weight_bytes=roofline.weight_bytes,
            parts=tuple(parts),
            samples=(tuple(alone), tuple(load)),
        )

    def trace(self, profile: Profile) -> dict[str, Any]:
        """Return all spans and requests in the format of Chrome traces."""
        requests = [
            (f"{part} {number}", sample.sent_at, sample.ended_at)
            for part, samples in zip(("alone", "load"), profile.samples, strict=True)
            for number, sample in enumerate(sorted(samples, key=lambda sample: sample.sent_at))
        ]
        about = {
            "model": profile.info.name,
            "kernels": profile.machine.kernels,
            "threads": profile.machine.threads,
        }
        return chrome_trace(self._recorder, requests, about)

    def _run_client(self, url: str) -> tuple[list[Sample], list[Sample]]:
        with asyncio.Runner(loop_factory=watched_loop("client")) as runner:
            return runner.run(self._play(url))

    async def _play(self, url: str) -> tuple[list[Sample], list[Sample]]:
        """Send all requests. The first one is not recorded, because new shapes cost the engine time once."""
        async with Client(Target(url)) as client:
            await client.connect()
            await self._send(client)
            with recording(self._recorder):
                alone = [await self._send(client) for _ in range(self._requests.repeats)]
                left = iter(range(self._requests.requests))
                load: list[Sample] = []

                async def worker() -> None:
                    for _ in left:
                        load.append(await self._send(client))

                await asyncio.gather(*(worker() for _ in range(self._requests.concurrency)))
        return alone, load

    async def _send(self, client: Client) -> Sample:
        """Send one request. It has a salt of its own, so that no cache helps it."""
        content: list[dict[str, Any]] = [{"type": "text", "text": self._requests.text}]
        if self._file:
            url = f"data:{self._type};base64,{base64.b64encode(self._file).decode()}"
            content.insert(0, {"type": "image_url", "image_url": {"url": url}})
        request = BenchRequest(
            ({"role": "user", "content": content},), self._requests.tokens, salt=uuid4().hex
        )
        sample = await client.send(request)
        # The answer of a model with random weights may have no text. Its time counts all the same.
        if sample.failure is not None and sample.failure.kind != "empty answer":
            raise EngineError(f"a request failed: {sample.failure.kind}: {sample.failure.text}")
        return sample

    def _part(
        self,
        title: str,
        samples: Sequence[Sample],
        roofline: ModelRoofline,
        machine: Machine,
        image: dict[str, LowerBound],
    ) -> Part:
        start, end = min(s.sent_at for s in samples), max(s.ended_at for s in samples)
        spans: list[Span] = [span for span in self._recorder.spans if start <= span.start < end]
        times = stage_times(self._recorder.spans, start, end)
        bounds = {name: _times(bound, len(samples)) for name, bound in image.items()}
        bounds |= roofline.lower_bounds(spans, machine)
        ttfts = sorted(sample.ttft for sample in samples if sample.events)
        return Part(
            title=title,
            requests=len(samples),
            concurrency=min(self._requests.concurrency, len(samples)),
            wall_s=end - start,
            ttft_s=ttfts[len(ttfts) // 2] if ttfts else None,
            tokens=sum(sample.output_tokens for sample in samples),
            stages=tuple(Stage(time, bounds.get(name)) for name, time in times.items()),
        )


def _times(bound: LowerBound, count: int) -> LowerBound:
    return LowerBound(bound.memory_s * count, bound.arithmetic_s * count, bound.seconds * count)


def _picture(requests: ProfileSettings) -> bytes:
    """Return the bytes of the image's file, read or generated; empty without an image."""
    if requests.image is None:
        side = SIDE if requests.side is None else requests.side
        return picture("fovea profile", 1, side) if side else b""
    try:
        return requests.image.read_bytes()
    except OSError as error:
        raise InvalidImage(f"{requests.image} cannot be read: {error.strerror}") from error


def _synchronize_stages(device: torch.device) -> Callable[[str], None]:
    def before_end(name: str) -> None:
        if name in ON_DEVICE:
            torch.cuda.synchronize(device)

    return before_end
