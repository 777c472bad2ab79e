"""Encodes images slice by slice, for the seconds that a step has for them.

Slices are launched on the encoder's stream (`EncoderStream`). On CUDA they run beside the step's tokens. A
step launches as many slices as its seconds allow, judged by the durations of earlier slices, and launches no
others before these are done. An image is handed over when its last slice is done, so a step never reads
features that are still being computed, and never waits for them. A step without tokens waits for its slices,
because it has nothing else to do. On a CPU a slice is done as soon as it is launched, and all of this is one
loop.

On CUDA the images of a step are encoded together, as many as fit into a batch (`EncoderStream.batch_rows`): a
small image alone would take longer to launch than to compute. If a batch fails as a whole, its images are
encoded one by one, so that only the guilty one fails.

An image that does not fit into the device's memory is encoded again from its beginning, alone: after the
other work of a step, when no other image is partly encoded (`EncodeQueue.encode_alone`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from fovea.core.errors import OutOfMemory
from fovea.core.measure import stage
from fovea.engine.execute.device_memory import is_out_of_memory
from fovea.engine.schedule.plan import EncodeJob
from fovea.engine.step.executor import SliceQueue
from fovea.engine.vision.calls import Member, encode_together
from fovea.engine.vision.encoding import (
    EncoderStream,
    Mark,
    ProjectorCall,
    ProjectorTimer,
    Slices,
    UpcomingImages,
    VisualFeatures,
)
from fovea.engine.vision.graphs import BlockGraphs
from fovea.engine.vision.processor.base import ProcessedImage

log = logging.getLogger("fovea.engine")


@dataclass(slots=True, eq=False)
class _Encoding:
    """The state of an image that is partly encoded.

    job: the instruction to encode it.
    member: the image in its batch.
    batch: its batch.
    holders: ids of the sequences that wait for it.
    pending: slices that were launched and are not done.
    seconds: its part of the duration of the slices that are done.
    projected: its part of these in the projector; None: it was not called.
    features: the output, from the launch of the last slice on.
    """

    job: EncodeJob
    member: Member[VisualFeatures]
    batch: _Batch
    holders: tuple[str, ...]
    pending: int = 0
    seconds: float = 0.0
    projected: float | None = None
    features: VisualFeatures | None = None


@dataclass(slots=True)
class _Batch:
    """Images that are encoded together, without those that are gone.

    slices: computes one more slice of all of them.
    """

    encodings: list[_Encoding] = field(default_factory=list)
    slices: Iterator[None] = field(default_factory=lambda: iter(()))


class _Launched(NamedTuple):
    """A slice that was launched: the marks around it, its images, and the calls of the projector in it."""

    begin: Mark
    end: Mark
    encodings: tuple[_Encoding, ...]
    calls: tuple[ProjectorCall, ...]


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """A finished image.

    holders: ids of the sequences that wait for it.
    seconds: encoder time of the image's slices, regions of other images in them included. Images that are
        encoded together share it by their rows.
    projected: seconds of these in the projector; None: the encoder has no projector of its own.
    """

    features: VisualFeatures
    holders: set[str]
    seconds: float
    projected: float | None = None


@dataclass(slots=True)
class EncodeResult:
    """The outcome of one step's encoding.

    images: finished images, by key.
    failures: errors, by the key of the image.
    seconds: time that the calling thread spent.
    """

    images: dict[str, EncodedImage] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)
    seconds: float = 0.0


class EncodeQueue:
    """Encodes images in slices: between steps on a CPU, concurrently with them on CUDA.

    encode: returns the slices of an image; it may encode regions of upcoming images along with it.
    pixels: returns the pixels of a job's image.
    alive: tells whether the sequence with an id still exists.
    graphs: CUDA graphs of blocks; None: nothing is recorded.
    memory_retries: images that were encoded again alone, for lack of memory.
    """

    def __init__(
        self,
        encode: Callable[[ProcessedImage, UpcomingImages], Slices[VisualFeatures]],
        stream: EncoderStream,
        *,
        pixels: Callable[[EncodeJob], ProcessedImage],
        alive: Callable[[str], bool],
        graphs: BlockGraphs | None = None,
    ) -> None:
        self._graphs = graphs
        self._encode = encode
        self._stream = stream
        self._pixels = pixels
        self._alive = alive
        self._jobs: Sequence[EncodeJob] = ()
        self._queue: SliceQueue[_Encoding] = SliceQueue(alive)
        self._launched: deque[_Launched] = deque()
        self._one_by_one: set[str] = set()  # keys of images whose batch failed
        self._timer = ProjectorTimer(stream)
        self._slice_s = 0.0
        self._alone: set[str] = set()  # keys of the images that did not fit into memory beside other work
        self.memory_retries = 0

    @property
    def working(self) -> bool:
        """Whether an image is partly encoded."""
        return bool(self._queue.states)

    @property
    def slice_s(self) -> float:
        """Seconds of the slowest recent slice; 0 before the first one."""
        return self._slice_s

    def step(self, jobs: Sequence[EncodeJob], seconds: float, *, alone: bool) -> EncodeResult:
        """Encode for about `seconds`, at least one slice if the encoder is free; none if they are below 0.

        alone: whether the step has no tokens.
        """
        started, result = time.perf_counter(), EncodeResult()
        self._jobs = jobs
        self._update(jobs)
        self._collect()
        if seconds >= 0 and (alone or not self._launched):
            self._launch(jobs, started + seconds, result)
        if alone and self._launched:
            self._launched[-1].end.wait()
        self._collect()
        self._hand_over(result)
        result.seconds = time.perf_counter() - started if jobs else 0.0
        return result

    def encode_alone(self, free: Callable[[], None]) -> EncodeResult:
        """If no image is partly encoded, encode one that did not fit into memory, to its end.

        Call it after all other work of a step. If the image does not fit now either, it fails: OutOfMemory.

        free: frees all memory of the device that is not in use.
        """
        result = EncodeResult()
        job = next((job for job in self._jobs if job.span.key in self._alone), None)
        if job is None or self._queue.states or self._launched:
            return result
        started = time.perf_counter()
        self.memory_retries += 1
        free()
        state = None
        while job.span.key not in result.failures and (state is None or state.features is None):
            self._slice(job, result)
            state = self._queue.states.get(job.span.key)
        self._alone.discard(job.span.key)
        if self._launched:
            self._launched[-1].end.wait()
        self._collect()
        self._hand_over(result)
        result.seconds = time.perf_counter() - started
        return result

    def restart(self) -> None:
        """Free the memory of all partly encoded images. Their encoding begins again."""
        for encoding in self._queue.states.values():
            self._leave(encoding)
        self._queue.states.clear()

    def drop(self) -> None:
        """Give up all images whose sequences are gone."""
        self._update(())

    def _update(self, jobs: Sequence[EncodeJob]) -> None:
        for encoding in self._queue.update(jobs):
            self._leave(encoding)

        self._alone.intersection_update(job.span.key for job in jobs)

    @staticmethod
    def _leave(encoding: _Encoding) -> None:
        """Take an image out of its batch."""
        encoding.member.close()
        encoding.batch.encodings.remove(encoding)

    def _launch(self, jobs: Sequence[EncodeJob], deadline: float, result: EncodeResult) -> None:
        def complete(job: EncodeJob) -> bool:
            key, encoding = job.span.key, self._queue.states.get(job.span.key)
            if key in result.failures or key in self._alone:
                return True
            if encoding is None:  # no other image begins before those that are encoded alone
                return bool(self._alone)
            return encoding.features is not None

        def advance(job: EncodeJob) -> None:
            self._slice(job, result)
            self._collect()

        self._queue.run(
            jobs,
            complete=complete,
            advance=advance,
            fits=lambda: time.perf_counter() + (len(self._launched) + 1) * self._slice_s <= deadline,
        )

    def _slice(self, job: EncodeJob, result: EncodeResult) -> None:
        """Compute one slice of an image, and of the images that are encoded with it."""
        states = self._queue.states
        with self._stream.activate(), stage("encoder"), self._timer.current():
            begin = self._stream.mark()
            encoding = states.get(job.span.key)
            batch = self._begin(job, result) if encoding is None else encoding.batch
            failure = None
            try:
                next(batch.slices, None)
            except Exception as error:  # noqa: BLE001 - any error fails these images alone; the step goes on
                failure = error
            encodings = tuple(batch.encodings)
            if failure is not None and len(encodings) > 1:
                log.warning(
                    "%d images failed together and are encoded one by one: %s", len(encodings), failure
                )
            for each in encodings:
                self._take(each, failure or each.member.error, result, among=len(encodings))
            encodings = tuple(batch.encodings)
            calls = self._timer.take()
            if encodings:
                self._launched.append(_Launched(begin, self._stream.mark(), encodings, calls))
        for each in encodings:
            each.pending += 1

    def _begin(self, first: EncodeJob, result: EncodeResult) -> _Batch:
        """Begin to encode an image, with others of this step if they fit into a batch."""
        states, room, batch = self._queue.states, self._stream.batch_rows, _Batch()
        waiting = (job for job in self._jobs if job is not first and job.span.key not in states)
        for job in (first, *waiting):
            key, rows = job.span.key, job.span.encoder_rows
            apart = bool(job.span.full_tokens) or key in self._one_by_one | self._alone
            if job is not first and (apart or rows > room or key in result.failures):
                continue
            try:
                member = Member(self._encode(self._pixels(job), self._upcoming))
            except Exception as error:  # noqa: BLE001 - any error fails this image alone
                self._note_failure(job, error, result)
                continue
            states[key] = _Encoding(job, member, batch, tuple(job.holders))
            batch.encodings.append(states[key])
            room -= rows
            if apart or room <= 0:
                break
        members = [encoding.member for encoding in batch.encodings]
        batch.slices = encode_together(members, merge=self._stream.batch_rows > 0, graphs=self._graphs)
        return batch

    def _take(
        self, encoding: _Encoding, error: Exception | None, result: EncodeResult, *, among: int
    ) -> None:
        """Take the result of an image, if it is there, or its error.

        among: number of images in the batch. If a batch of several failed, they are tried again one by one.
        """
        key, planned = encoding.job.span.key, encoding.job.span.rows
        features = encoding.member.result
        if error is None and features is not None and features.embeds.shape[0] != planned:
            error = RuntimeError(f"{features.embeds.shape[0]} rows encoded, {planned} planned")
        if error is None:
            encoding.features = features if features is None else features.compact()
            return
        del self._queue.states[key]
        self._leave(encoding)
        if encoding.member.error is None and among > 1 and features is None:
            self._one_by_one.add(key)
        else:
            self._one_by_one.discard(key)
            self._note_failure(encoding.job, error, result)

    def _note_failure(self, job: EncodeJob, error: Exception, result: EncodeResult) -> None:
        """Note why an image cannot be encoded, or that it must be encoded alone.

        An error about memory is not kept itself, because it holds the tensors of the failed slice.
        """
        if not is_out_of_memory(error):
            result.failures[job.span.key] = error
        elif job.span.key not in self._alone:
            log.warning("an image of %d visual tokens does not fit into memory: %s", job.span.rows, error)
            self._alone.add(job.span.key)
        else:
            result.failures[job.span.key] = OutOfMemory(
                f"its encoder does not fit into the device's memory ({job.span.encoder_rows} visual tokens), "
                "even alone; accepted: a smaller image, or fewer pixels for it"
            )

    def _upcoming(self) -> Iterator[ProcessedImage]:
        """Yield the images of this step that will lose tokens and have not begun."""
        for job in self._jobs:
            if job.span.full_tokens and job.span.key not in self._queue.states:
                with suppress(Exception):  # the error is raised again at the image's own turn
                    yield self._pixels(job)

    def _collect(self) -> None:
        """Account for the slices that are done, in the order of their launch."""
        while self._launched and self._launched[0].end.done:
            begin, end, encodings, calls = self._launched.popleft()
            seconds, projected = end.since(begin), sum(call.seconds for call in calls)
            # Slices differ in length; the next one may take as long as the slowest recent one.
            self._slice_s = max(seconds, 0.95 * self._slice_s)
            rows = sum(encoding.job.span.encoder_rows for encoding in encodings)
            for encoding in encodings:
                share = encoding.job.span.encoder_rows / rows
                encoding.seconds += share * seconds
                encoding.pending -= 1
                if calls:
                    encoding.projected = (encoding.projected or 0.0) + share * projected

    def _hand_over(self, result: EncodeResult) -> None:
        """Move finished images out of the queue."""
        for key, encoding in list(self._queue.states.items()):
            if encoding.features is None or encoding.pending:
                continue
            del self._queue.states[key]
            self._leave(encoding)
            self._one_by_one.discard(key)
            self._stream.hand_over(encoding.features)
            holders = {holder for holder in encoding.holders if self._alive(holder)}
            result.images[key] = EncodedImage(
                encoding.features, holders, encoding.seconds, encoding.projected
            )
