"""Images on their way through the vision tower, a slice at a time, for the seconds that a step has for them.

Slices are launched on the encoder's stream (`vision.stream`). On CUDA they run beside the step's tokens: a lot of slices
is launched whose seconds, by those measured before, the step has, and no other before it is done. An image is handed
on when its last slice is done, so a step never reads, nor waits for, what is not there. A step without tokens has nothing
else to do than to wait for its slices. On a CPU a slice is done when it was launched, and all of this is one loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from fovea.core.stage import stage
from fovea.engine.schedule.plan import EncodeJob
from fovea.engine.vision.features import VisualFeatures
from fovea.engine.vision.processor.base import ProcessedImage
from fovea.engine.vision.slices import Ahead, Slices
from fovea.engine.vision.stream import EncoderStream, Mark


@dataclass(slots=True)
class _Encoding:
    """What is left of an image, who waits for it, slices that are not done, seconds of those that are."""

    slices: Slices[VisualFeatures]
    holders: tuple[str, ...]
    pending: int = 0
    seconds: float = 0.0
    features: VisualFeatures | None = None


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """seconds: of the encoder while it was this image's turn; what others took along is theirs. holders: sequences that wait for it."""

    features: VisualFeatures
    holders: set[str]
    seconds: float


@dataclass(slots=True)
class Encoded:
    """images: by key. failures: by the key of an image that could not be encoded. seconds: of the calling thread."""

    images: dict[str, EncodedImage] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)
    seconds: float = 0.0


class Encoder:
    """encode: slices of an image, with others that could be encoded along with it. pixels: what to encode for a job.
    alive: whether a sequence still is there to wait."""

    def __init__(
        self,
        encode: Callable[[ProcessedImage, Ahead], Slices[VisualFeatures]],
        stream: EncoderStream,
        *,
        pixels: Callable[[EncodeJob], ProcessedImage],
        alive: Callable[[str], bool],
    ) -> None:
        self._encode = encode
        self._stream = stream
        self._pixels = pixels
        self._alive = alive
        self._jobs: Sequence[EncodeJob] = ()
        self._encodings: dict[str, _Encoding] = {}
        self._launched: deque[tuple[Mark, Mark, _Encoding]] = deque()
        self._slice_s = 0.0

    @property
    def working(self) -> bool:
        """Whether an image is encoded in part."""
        return bool(self._encodings)

    def step(self, jobs: Sequence[EncodeJob], seconds: float, *, alone: bool) -> Encoded:
        """About `seconds` of these images, at least one slice if the encoder is free. alone: the step has no tokens."""
        started, made = time.perf_counter(), Encoded()
        self._jobs = jobs
        self.drop(job.span.key for job in jobs)
        for job in jobs:
            if job.span.key in self._encodings:
                self._encodings[job.span.key].holders = tuple(job.holders)
        self._collect()
        if alone or not self._launched:
            self._launch(jobs, started + seconds, made)
        if alone and self._launched:
            self._launched[-1][1].wait()
        self._collect()
        self._hand_on(made)
        made.seconds = time.perf_counter() - started if jobs else 0.0
        return made

    def drop(self, wanted: Iterable[str] = ()) -> None:
        """Give up what nobody waits for any more."""
        keep = set(wanted)
        for key, encoding in list(self._encodings.items()):
            if key not in keep and not any(map(self._alive, encoding.holders)):
                self._encodings.pop(key).slices.close()

    def _launch(self, jobs: Sequence[EncodeJob], until: float, made: Encoded) -> None:
        """Go on with what has begun, then with what is wanted, until the next slice would take too long."""
        first = True
        for job in sorted(jobs, key=lambda job: job.span.key not in self._encodings):
            while not self._complete(job, made):
                ahead = (len(self._launched) + 1) * self._slice_s
                if not first and time.perf_counter() + ahead > until:
                    return
                self._slice(job, made)
                self._collect()
                first = False

    def _complete(self, job: EncodeJob, made: Encoded) -> bool:
        encoding = self._encodings.get(job.span.key)
        return job.span.key in made.failures or (encoding is not None and encoding.features is not None)

    def _slice(self, job: EncodeJob, made: Encoded) -> None:
        key = job.span.key
        with self._stream.beside(), stage("encoder"):
            begun = self._stream.mark()
            try:
                encoding = self._encodings.get(key)
                if encoding is None:
                    encoding = _Encoding(self._encode(self._pixels(job), self._ahead), tuple(job.holders))
                    self._encodings[key] = encoding
                self._advance(encoding, job.span.tokens)
            except Exception as raised:  # noqa: BLE001 - whatever it is, it is this image's; the step goes on
                self._encodings.pop(key, None)
                made.failures[key] = raised
                return
            self._launched.append((begun, self._stream.mark(), encoding))
        encoding.pending += 1

    def _ahead(self) -> Iterator[ProcessedImage]:
        """Images of the step of which not all tokens are wanted, and that were not begun."""
        for job in self._jobs:
            if job.span.full and job.span.key not in self._encodings:
                with suppress(Exception):  # whatever it is, the image's own turn will tell
                    yield self._pixels(job)

    def _collect(self) -> None:
        """Take note of what is done, in the order in which it was launched."""
        while self._launched and self._launched[0][1].done:
            begun, ended, encoding = self._launched.popleft()
            took = ended.since(begun)
            # Slices differ; the slowest of late is what the next one may take.
            self._slice_s = max(took, 0.95 * self._slice_s)
            encoding.seconds += took
            encoding.pending -= 1

    def _hand_on(self, made: Encoded) -> None:
        for key, encoding in list(self._encodings.items()):
            if encoding.features is None or encoding.pending:
                continue
            del self._encodings[key]
            self._stream.hand_over(encoding.features)
            holders = {holder for holder in encoding.holders if self._alive(holder)}
            made.images[key] = EncodedImage(encoding.features, holders, encoding.seconds)

    @staticmethod
    def _advance(encoding: _Encoding, planned: int) -> None:
        """Raises RuntimeError when the image has become another number of visual tokens than planned."""
        try:
            next(encoding.slices)
        except StopIteration as stop:
            encoding.features = stop.value
        if encoding.features is not None and encoding.features.embeds.shape[0] != planned:
            raise RuntimeError(f"{encoding.features.embeds.shape[0]} visual tokens made, {planned} planned")
