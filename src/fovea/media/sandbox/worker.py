"""The process that decodes: `python -m fovea.media.sandbox.worker FD KIND`, started by `process`.

It answers one question at a time on its socket, FD, and ends when the socket is closed. KIND is "image",
"video" or "pdf". Nothing that it holds is secret: it gets no environment, and files only as anonymous memory.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from PIL import Image as Pillow

from fovea.core.errors import FoveaError, InvalidImage
from fovea.media import pdf
from fovea.media.image.decode import decode_bands
from fovea.media.image.probe import probe
from fovea.media.limits import MediaLimits
from fovea.media.sandbox import jail
from fovea.media.sandbox.messages import Channel, Message, WorkerGone
from fovea.media.video import EncodedFrames, VideoHeader, probe_video, warm_up_decoders

_SPARE_S = 5.0
"""Seconds after its time limit at which a worker ends itself, in case the server is gone."""

_NO_MEMORY = {"error": "not enough memory for its pixels", "code": None}


def main() -> None:
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    setup, _ = channel.receive()
    limits = MediaLimits(**{name: _value(value) for name, value in setup["limits"].items()})
    _warm_up(sys.argv[2])
    channel.send({"ready": jail.enter(setup["memory_bytes"])})
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    memory: mmap.mmap | None = None
    with contextlib.suppress(WorkerGone):
        while True:
            message, fds = channel.receive()
            if fds:
                if memory is not None:
                    memory.close()
                    memory = None
                try:
                    memory = mmap.mmap(fds[0], message["memory"])
                except OSError:
                    channel.send(_NO_MEMORY)  # after an error, the server sends new memory
                    continue
                finally:
                    os.close(fds[0])
            assert memory is not None  # the first question brings it
            signal.setitimer(signal.ITIMER_REAL, message["seconds"] + _SPARE_S)
            try:
                _ANSWERS[message["ask"]](channel, message, memory, limits)
            except FoveaError as error:
                channel.send({"error": error.message, "code": error.code})
            except MemoryError:
                channel.send(_NO_MEMORY)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)


def _value(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _warm_up(kind: str) -> None:
    """Use every decoder once, so that everything that it imports or opens is there before the jail."""
    if kind == "video":
        with contextlib.suppress(FoveaError):  # PyAV is not installed: each video will say so
            warm_up_decoders(MediaLimits())
        return
    if kind == "pdf":
        with contextlib.suppress(FoveaError):  # pypdfium2 is not installed: each file will say so
            pdf.warm_up()
        return
    for name in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        out = io.BytesIO()
        Pillow.new("RGB", (16, 16)).save(out, name)
        data = out.getvalue()
        for _ in decode_bands(data, probe(data, MediaLimits()), MediaLimits()):
            pass


def _image(channel: Channel, message: Message, memory: mmap.mmap, limits: MediaLimits) -> None:
    at = message["size"]
    end = at + message["room"]
    data = memory[:at]
    for band in decode_bands(data, probe(data, limits), limits):
        if at + len(band) > end:
            raise InvalidImage("its decoder returned more pixels than its header says")
        memory[at : at + len(band)] = band
        at += len(band)
    channel.send({"done": True})


def _video(channel: Channel, message: Message, memory: mmap.mmap, limits: MediaLimits) -> None:
    channel.send({"header": asdict(probe_video(memory[: message["size"]], limits))})


def _frames(channel: Channel, message: Message, memory: mmap.mmap, limits: MediaLimits) -> None:
    """Decode frames one by one; each waits in the shared memory until the server has taken it."""
    values, size = message["header"], message["size"]
    header = VideoHeader(**{name: _value(value) for name, value in values.items()})
    source = EncodedFrames(memory[:size], header, limits)
    previous: bytes | None = None
    for rgb in source.read(message["indices"]):
        if rgb is not previous:
            memory[size : size + len(rgb)] = rgb
            previous = rgb
        channel.send({"frame": True})
        channel.receive()
    channel.send({"done": True})


def _pages(channel: Channel, message: Message, memory: mmap.mmap, limits: MediaLimits) -> None:
    """Draw pages one by one; each waits in the shared memory until the server has taken it."""
    size = message["size"]
    wanted = pdf.PageRange(message["first"], message["last"], message["max_side"], message["most"])
    with pdf.Document(memory[:size]) as document:
        for page in document.render(wanted):
            if len(page.jpeg) > message["room"]:
                raise pdf.InvalidPdf(f"page {page.number} of the PDF is too large as a picture")
            memory[size : size + len(page.jpeg)] = page.jpeg
            card = {"number": page.number, "width": page.width, "height": page.height}
            channel.send({"frame": True, **card, "bytes": len(page.jpeg)})
            channel.receive()
        channel.send({"done": True, "total": document.pages})


_ANSWERS: dict[str, Callable[[Channel, Message, mmap.mmap, MediaLimits], None]] = {
    "image": _image,
    "video": _video,
    "frames": _frames,
    "pages": _pages,
}

if __name__ == "__main__":
    main()
