"""The decoders of the server: images and videos in this process or in a sandbox, PDF files in a sandbox.

Programs that decode their own files do it in this process. A server uses the sandbox. PDF files are rendered
in a worker process only; there is no way to do it in the server itself.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from fovea.core.errors import (
    FoveaError,
    InvalidImage,
    InvalidMedia,
    InvalidRequest,
    InvalidVideo,
    Unavailable,
)
from fovea.core.media import Abandoned, Rgb, Video
from fovea.media.image.decode import decode_bands
from fovea.media.image.probe import ImageHeader
from fovea.media.limits import MIB, MediaLimits
from fovea.media.pdf import UNAVAILABLE, InvalidPdf, Page, PageRange, check_magic
from fovea.media.sandbox.messages import Message
from fovea.media.sandbox.pool import WorkerPool, unavailable
from fovea.media.sandbox.process import WorkerCrashed, WorkerFailed, WorkerKilled, WorkerNotStarted
from fovea.media.video import VIDEO_UNAVAILABLE, VideoHeader, check_work, open_video, video_of
from fovea.media.video_container import MEDIA_TYPES

Answer = tuple[Message, Callable[[], Rgb]]
"""An answer of a worker, and a function that copies the memory that it shares."""
_CODE = re.compile("[a-z_]{1,40}")
_LONGEST_MESSAGE = 300
"""Characters of a worker's error message that are passed on."""


class MediaDecoder(Protocol):
    """Decodes files of clients. Thread-safe; all methods block, so call them in worker threads."""

    def decode_image(self, data: bytes, header: ImageHeader, scope: str = "") -> Rgb:
        """Return the upright RGB pixels of a file, row-major.

        header: as `probe` reads it from the file. scope: part of the caches that the request may use.
        Raises InvalidImage, or Unavailable if there is no process to decode it.
        """
        ...

    def open_video(self, data: bytes, scope: str = "") -> Video:
        """Read a video's header.

        Raises InvalidVideo, or Unavailable if PyAV is not installed or there is no process to read it.
        """
        ...

    def warm_up(self) -> None:
        """Do now what the first file would wait for."""
        ...

    def stats(self) -> dict[str, float]:
        """Return numbers by their names in `observe.table`."""
        ...

    def close(self) -> None: ...


class LocalDecoder:
    """Decodes in this process, without protection against a decoder's defects."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits

    def decode_image(self, data: bytes, header: ImageHeader, scope: str = "") -> Rgb:
        return b"".join(decode_bands(data, header, self._limits))

    def open_video(self, data: bytes, scope: str = "") -> Video:
        return open_video(data, self._limits)

    def warm_up(self) -> None:
        """Do nothing: there is no process to start."""

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Do nothing: there is no process to end."""


class SandboxedDecoder:
    """Decodes in worker processes: some for images, others for videos, so that neither waits for the other.

    limits: its `image_workers` and `video_workers` are the numbers of processes; a kind with 0 is decoded in
        this process.
    tenant_of: the tenant of a scope; tenants share no process.
    """

    def __init__(self, limits: MediaLimits, tenant_of: Callable[[str], str] = lambda _: "") -> None:
        self._limits = limits
        self._tenant_of = tenant_of
        self._local = LocalDecoder(limits)
        self.images = WorkerPool("image", limits.image_workers, limits) if limits.image_workers else None
        self.videos = WorkerPool("video", limits.video_workers, limits) if limits.video_workers else None

    def decode_image(self, data: bytes, header: ImageHeader, scope: str = "") -> Rgb:
        if self.images is None:
            return self._local.decode_image(data, header)
        room = header.width * header.height * 3
        seconds, tenant = self._limits.image_decode_s, self._tenant_of(scope)
        try:
            with closing(
                ask_worker(self.images, {"ask": "image"}, data, seconds, room=room, tenant=tenant)
            ) as answers:
                answer, pixels = next(answers)
                if "done" in answer:
                    return pixels()
        except WorkerFailed as error:
            raise InvalidImage(f"the {header.media_type} cannot be decoded: {error}") from error
        raise _error_of(answer, InvalidImage)

    def open_video(self, data: bytes, scope: str = "") -> Video:
        if self.videos is None:
            return self._local.open_video(data)
        seconds, tenant = self._limits.video_decode_s, self._tenant_of(scope)
        try:
            with closing(ask_worker(self.videos, {"ask": "video"}, data, seconds, tenant=tenant)) as answers:
                answer = next(answers)[0]
        except WorkerFailed as error:
            raise InvalidVideo(f"the video cannot be opened: {error}") from error
        if "header" not in answer:
            raise _error_of(answer, InvalidVideo)
        header = checked_header(answer["header"], self._limits)
        return video_of(data, header, SandboxedFrames(data, header, self._limits, self.videos, tenant))

    def warm_up(self) -> None:
        """Start a worker for images, and try one for videos: many servers never get a video."""
        threads = [
            threading.Thread(target=pool.warm_up, kwargs={"keep": pool is self.images})
            for pool in (self.images, self.videos)
            if pool
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def stats(self) -> dict[str, float]:
        pools = [pool for pool in (self.images, self.videos) if pool]
        return {
            "decoder_processes": sum(len(pool.processes) for pool in pools),
            "decoder_crashes": sum(pool.crashes for pool in pools),
            "decoder_ended": sum(pool.ended for pool in pools),
        }

    def close(self) -> None:
        for pool in (self.images, self.videos):
            if pool:
                pool.close()


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SandboxedFrames:
    """The frames of a video file, decoded in a worker process: a `core.media.FrameSource`."""

    data: bytes = field(repr=False)
    header: VideoHeader
    limits: MediaLimits
    pool: WorkerPool = field(repr=False)
    tenant: str = field(default="", repr=False)

    def check(self, indices: Sequence[int]) -> None:
        check_work(self.header, indices, self.limits)

    def read(self, indices: Sequence[int], abandoned: Callable[[], bool] = lambda: False) -> Iterator[Rgb]:
        self.check(indices)
        question = {"ask": "frames", "header": asdict(self.header), "indices": list(indices)}
        room = self.header.width * self.header.height * 3
        seconds = self.limits.video_decode_s
        missing = len(indices)
        try:
            answers = ask_worker(
                self.pool, question, self.data, seconds,
                room=room, each_wait=partial(_stop_if, abandoned), tenant=self.tenant,
            )  # fmt: skip
            with closing(answers):
                for answer, pixels in answers:
                    if "frame" in answer and missing:
                        missing -= 1
                        yield pixels()
                    elif "done" not in answer:
                        raise _error_of(answer, InvalidVideo)
        except WorkerFailed as error:
            raise InvalidVideo(f"the video cannot be decoded: {error}") from error
        if missing:
            raise InvalidVideo(f"the video cannot be decoded: {missing} of its frames are missing")


def _stop_if(abandoned: Callable[[], bool]) -> None:
    if abandoned():
        raise Abandoned


def ask_worker(
    pool: WorkerPool,
    question: Message,
    data: bytes,
    seconds: float,
    *,
    room: int = 0,
    each_wait: Callable[[], None] | None = None,
    tenant: str = "",
) -> Generator[Answer, None, None]:
    """Yield a worker's answers to a question about a file.

    If a worker dies before its first answer, the file is tried once more.

    tenant: owner of the file; "" if tenants are not told apart.
    Raises WorkerFailed, or Unavailable for reasons that have nothing to do with the file.
    """
    for attempt in (1, 2):
        with pool.lease(each_wait or (lambda: None), tenant) as worker:
            answered = False
            try:
                for answer in worker.ask(question, data, seconds, room=room, each_wait=each_wait):
                    answered = True
                    yield answer
            except (WorkerCrashed, WorkerNotStarted) as error:
                if not answered and attempt == 1:
                    continue
                if isinstance(error, WorkerKilled | WorkerNotStarted):
                    raise unavailable(pool.kind, error) from error
                raise
            else:
                return


def _error_of(answer: Message, kind: type[InvalidMedia]) -> FoveaError:
    """The error that a worker answered with."""
    code = str(answer.get("code"))
    message = str(answer.get("error", f"the {kind.noun} cannot be decoded"))[:_LONGEST_MESSAGE]
    if code == VIDEO_UNAVAILABLE:
        return Unavailable(message, code=code, scope="request")
    return kind(message, code=code if _CODE.fullmatch(code) else None)


def checked_header(values: Any, limits: MediaLimits) -> VideoHeader:
    """Check the header that a worker read. Raises InvalidVideo for what no honest worker answers."""
    try:
        fields: Any = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        header = VideoHeader(**fields)
        numbers = (header.width, header.height, header.rotation, *header.stamps, *header.keys)
        good = (
            header.container in MEDIA_TYPES
            and all(type(number) is int for number in numbers)
            and min(header.width, header.height) > 0
            and header.width * header.height <= limits.max_video_frame_pixels
            and header.rotation in (0, 90, 180, 270)
            and 0 < float(header.fps) < math.inf
            and 0 < len(header.stamps) <= limits.max_video_frames
            and all(a <= b for times in (header.stamps, header.keys) for a, b in pairwise(times))
        )
    except (TypeError, ValueError, AttributeError):
        good = False
    if not good:
        raise InvalidVideo("the video cannot be opened: its decoder answered with an impossible header")
    return header


ROOM = 16 * MIB
"""Most bytes of one rendered page as a JPEG file."""
MOST_BYTES = 48 * MIB
"""Most bytes of all pages of one call together."""


class DocumentPages(NamedTuple):
    """Pages of a document as pictures.

    pages: the pages that were asked for.
    total: number of all pages of the document.
    """

    pages: list[Page]
    total: int


_PARAMS = {"no_such_page": "first", "too_many_pages": "last"}
"""The wrong parameter of a request, by the code of its error."""


class DocumentRenderer:
    """Renders documents in processes that start with the first one. Thread-safe; `render` blocks.

    limits: its `pdf_workers` is the number of processes; 0: PDF files are refused.
    """

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._pool = WorkerPool("pdf", limits.pdf_workers, limits) if limits.pdf_workers else None

    def render(
        self, data: bytes, wanted: PageRange, abandoned: Callable[[], bool] = lambda: False, tenant: str = ""
    ) -> DocumentPages:
        """Render pages of a PDF file.

        tenant: owner of the file; tenants share no process.
        abandoned: whether nobody waits for the pages any more; then the process that draws them is ended.
        Raises InvalidRequest for pages that are not there or too many of them, InvalidPdf, Unavailable,
        Abandoned.
        """
        if self._pool is None:
            raise Unavailable("PDF files are not accepted here (pdf_workers is 0)", code=UNAVAILABLE)
        check_magic(data)
        pages: list[Page] = []
        left = MOST_BYTES
        question = {"ask": "pages", **asdict(wanted)}
        try:
            answers = ask_worker(
                self._pool, question, data, self._limits.pdf_render_s,
                room=ROOM, each_wait=partial(_stop_if, abandoned), tenant=tenant,
            )  # fmt: skip
            with closing(answers):
                for answer, output in answers:
                    if "frame" in answer and len(pages) < wanted.most:
                        pages.append(_page(answer, output()))
                        left -= len(pages[-1].jpeg)
                        _check_left(left, len(pages), wanted)
                    elif "done" in answer:
                        return DocumentPages(pages, int(answer["total"]))
                    else:
                        raise _pdf_error_of(answer)
        except WorkerFailed as error:
            raise InvalidPdf(f"the PDF cannot be drawn: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidPdf("the PDF cannot be drawn: its decoder answered what cannot be read") from error
        raise InvalidPdf("the PDF cannot be drawn: its decoder ended too early")

    def close(self) -> None:
        """End all processes, and cancel the calls that wait."""
        if self._pool is not None:
            self._pool.close()


def _page(answer: Message, output: Rgb) -> Page:
    size = int(answer["bytes"])
    if not 0 < size <= len(output):
        raise ValueError(size)
    return Page(int(answer["number"]), int(answer["width"]), int(answer["height"]), bytes(output[:size]))


def _check_left(left: int, drawn: int, wanted: PageRange) -> None:
    if left < 0:
        raise InvalidRequest(
            f"{drawn} pages with max_side {wanted.max_side} have more than {MOST_BYTES // MIB} MiB as "
            "pictures; accepted: fewer pages in one call, or a smaller max_side",
            param="max_side",
            code="pages_too_large",
        )


def _pdf_error_of(answer: Message) -> FoveaError:
    code, message = str(answer.get("code")), str(answer.get("error", "it cannot be drawn"))[:300]
    if code == UNAVAILABLE:
        return Unavailable(message, code=code)
    if code in _PARAMS:
        return InvalidRequest(message, param=_PARAMS[code], code=code)
    known = code if code in ("not_a_pdf", "pdf_encrypted") else None
    return InvalidPdf(message, code=known)
