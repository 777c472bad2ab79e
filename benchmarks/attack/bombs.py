"""Files that are small and take long to decode: pictures and a video."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CACHE = Path("out/attack")
VIDEO_SIDE, VIDEO_FRAMES, VIDEO_RATE = 2944, 36_000, 60


def data_url(data: bytes, media_type: str) -> str:
    return f"data:{media_type};base64," + base64.b64encode(data).decode()


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@cache
def _zeros(width: int, height: int) -> bytes:
    """The compressed rows of a black RGB picture."""
    packer = zlib.compressobj(9)
    row = bytes(1 + 3 * width)
    return b"".join([*(packer.compress(row) for _ in range(height)), packer.flush()])


def black_png(number: int, width: int = 7071, height: int = 7071) -> bytes:
    """A black RGB picture of 50 megapixels in 0.15 MB. The number makes its bytes differ from all others."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [
        (b"IHDR", header),
        (b"tEXt", b"n\0%d" % number),
        (b"IDAT", _zeros(width, height)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(kind, data) for kind, data in chunks)


def filled_jpeg(number: int, size: int) -> bytes:
    """A JPEG with fill bytes (0xFF) before a marker, `size` bytes in all."""
    buffer = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), number % 256, np.uint8)).save(buffer, "JPEG")
    plain = buffer.getvalue()
    comment = b"\xff\xfe" + struct.pack(">H", 10) + b"%08d" % number
    return plain[:2] + comment + b"\xff" * (size - len(plain) - len(comment)) + plain[2:]


def many_scans(number: int, side: int = 4000, scans: int = 99) -> bytes:
    """A progressive grey JPEG whose scans are nearly empty, but each visits every block of the picture.

    A run of blocks without coefficients is one code of a few bits, up to 32,767 blocks long.
    """

    def segment(marker: int, data: bytes) -> bytes:
        return struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data

    blocks = ((side + 7) // 8) ** 2
    parts = [
        b"\xff\xd8",
        segment(0xFE, b"%08d" % number),
        segment(0xDB, b"\0" + b"\1" * 64),
        segment(0xC2, struct.pack(">BHHB", 8, side, side, 1) + b"\1\x11\0"),
        # One code of one bit each: "no difference" for DC, and "32,767 empty blocks" (0xE0) for AC.
        segment(0xC4, b"\0" + b"\1" + bytes(15) + b"\0"),
        segment(0xC4, b"\x10" + b"\1" + bytes(15) + b"\xe0"),
        segment(0xDA, b"\1\1\0\0\0\1") + bytes(-(-blocks // 8)),
    ]
    run = "0" + "1" * 14
    bits = run * (-(-blocks // 32767))
    bits += "1" * (-len(bits) % 8)
    empty = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    parts += [segment(0xDA, b"\1\1\0\x01\x3f\1") + empty]
    parts += [segment(0xDA, b"\1\1\0\x01\x3f\x10") + empty] * (scans - 2)
    return b"".join([*parts, b"\xff\xd9"])


def video() -> bytes:
    """A WebM of 3 MiB with 36,000 frames and one key frame. All frames repeat it. Cached in a file."""
    file = CACHE / f"bomb-{VIDEO_SIDE}-{VIDEO_FRAMES}.webm"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        data = _remuxed(*_first_packets())
        file.with_suffix(".part").write_bytes(data)
        file.with_suffix(".part").rename(file)
    return file.read_bytes()


def _first_packets() -> tuple[bytes, bytes]:
    """A key frame and the frame that repeats it, as VP9: nothing to read, but every pixel is copied."""
    import av

    context: Any = av.CodecContext.create("libvpx-vp9", "w")
    context.width = context.height = VIDEO_SIDE
    context.pix_fmt, context.framerate, context.time_base = (
        "yuv420p",
        Fraction(VIDEO_RATE),
        Fraction(1, VIDEO_RATE),
    )
    context.options = {
        "deadline": "realtime", "cpu-used": "8", "g": "100000", "lag-in-frames": "0", "auto-alt-ref": "0",
        "error-resilient": "1",
    }  # fmt: skip
    frame = av.VideoFrame(VIDEO_SIDE, VIDEO_SIDE, "yuv420p")
    for plane in frame.planes:
        plane.update(bytes([128]) * plane.buffer_size)
    packets: list[bytes] = []
    for number in range(6):
        frame.pts = number
        packets += [bytes(packet) for packet in context.encode(frame)]
    packets += [bytes(packet) for packet in context.encode(None)]
    return packets[0], packets[-1]


def _remuxed(first: bytes, repeat: bytes) -> bytes:
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="webm") as file:
        stream: Any = file.add_stream("libvpx-vp9", rate=Fraction(VIDEO_RATE))
        stream.width = stream.height = VIDEO_SIDE
        stream.pix_fmt = "yuv420p"
        file.start_encoding()
        for number in range(VIDEO_FRAMES):
            packet = av.Packet(repeat if number else first)
            packet.stream = stream
            packet.time_base = Fraction(1, VIDEO_RATE)
            packet.pts = packet.dts = number
            packet.is_keyframe = number == 0
            file.mux(packet)
    return buffer.getvalue()


def mutants(count: int, seed: int = 7) -> Iterator[tuple[bytes, str]]:
    """Truncated and mutated pictures of all formats, with their media types."""
    rng = np.random.default_rng(seed)
    picture = Image.fromarray(rng.integers(0, 255, (90, 120, 3), dtype=np.uint8))
    grey = picture.convert("P")
    options: list[tuple[Image.Image, str, dict[str, Any]]] = [
        (picture, "PNG", {}), (picture, "JPEG", {}), (picture, "JPEG", {"progressive": True}),
        (picture, "WEBP", {}), (picture, "WEBP", {"lossless": True}), (grey, "GIF", {}), (picture, "BMP", {}),
        (picture.convert("CMYK"), "JPEG", {}), (grey, "PNG", {}),
    ]  # fmt: skip
    seeds = []
    for image, kind, extra in options:
        buffer = io.BytesIO()
        image.save(buffer, kind, **extra)
        seeds.append((buffer.getvalue(), f"image/{kind.lower()}"))
    for number in range(count):
        data, media_type = seeds[number % len(seeds)]
        yield _mutant(data, rng), media_type


def video_mutants(count: int, seed: int = 7) -> Iterator[tuple[bytes, str]]:
    """Truncated and mutated videos of several codecs, with their media types."""
    import av

    rng = np.random.default_rng(seed)
    seeds = []
    for codec, container in (
        ("libx264", "mp4"),
        ("mpeg4", "mp4"),
        ("libvpx", "webm"),
        ("libvpx-vp9", "webm"),
    ):
        buffer = io.BytesIO()
        with av.open(buffer, "w", format=container) as file:
            stream: Any = file.add_stream(codec, rate=12)
            stream.width = stream.height = 96
            stream.pix_fmt = "yuv420p"
            for _ in range(12):
                pixels = rng.integers(0, 255, (96, 96, 3), dtype=np.uint8)
                file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            file.mux(stream.encode())
        seeds.append((buffer.getvalue(), f"video/{container}"))
    for number in range(count):
        data, media_type = seeds[number % len(seeds)]
        yield _mutant(data, rng), media_type


def _mutant(data: bytes, rng: np.random.Generator) -> bytes:
    broken = bytearray(data)
    for _ in range(int(rng.integers(1, 20))):
        # Half of the changes hit the header, in which sizes and offsets are.
        end = len(broken) if rng.random() < 0.5 else min(64, len(broken))
        broken[int(rng.integers(0, end))] = int(rng.integers(0, 256))
    if rng.random() < 0.3:
        del broken[int(rng.integers(1, len(broken))) :]
    return bytes(broken)
