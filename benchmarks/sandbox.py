"""Measure the cost of decoding images in processes of their own: python benchmarks/sandbox.py

Decodes pictures of several sizes in this process ("here") and in a separate process ("jailed"), in turns, and
divides the difference by the time to the first token of fovea-tiny for a new picture. The target is at most
3%.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from collections.abc import Callable

import numpy as np
from PIL import Image as Pillow

from fovea import Engine
from fovea.core.media import Image
from fovea.media.cache import DecodedImageCache
from fovea.media.image.decode import identify
from fovea.media.image.probe import probe
from fovea.media.limits import MediaLimits
from fovea.media.load import EncodedPixels
from fovea.media.sandbox.decoder import LocalDecoder, MediaDecoder, SandboxedDecoder

SIZES = ((448, 448), (896, 896), (1344, 896), (4032, 3024))
LIMITS = MediaLimits()


def picture(width: int, height: int, seed: int, kind: str) -> bytes:
    """Smooth noise: a photo's size as a file."""
    small = np.random.default_rng(seed).integers(0, 255, (height // 16, width // 16, 3), dtype=np.uint8)
    out = io.BytesIO()
    Pillow.fromarray(small).resize((width, height), Pillow.Resampling.BICUBIC).save(out, kind)
    return out.getvalue()


def first_token_s(engine: Engine, data: bytes, decoder: MediaDecoder) -> float:
    header = probe(data, LIMITS)
    identity = identify(data, header)
    pixels = EncodedPixels(data, header, identity, decoder, DecodedImageCache())
    image = Image(identity, header.width, header.height, pixels)
    return engine.generate("What is it?", images=[image], max_tokens=1, temperature=0).timings.ttft


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15, help="pictures per size and way (default: 15)")
    repeats = parser.parse_args().repeats
    decoders = {"here": LocalDecoder(LIMITS), "jailed": SandboxedDecoder(LIMITS)}
    decoders["jailed"].warm_up()
    print(
        "medians in ms       file |    decoding here  jailed  added |  first token here  jailed | added/first"
    )
    with Engine.from_pretrained("fovea-tiny") as engine:
        for width, height in SIZES:
            for kind in ("JPEG", "PNG"):
                decoding: dict[str, list[float]] = {name: [] for name in decoders}
                first: dict[str, list[float]] = {name: [] for name in decoders}
                for number in range(repeats):
                    for turn, (name, decoder) in enumerate(decoders.items()):
                        data = picture(width, height, 2 * number + turn, kind)
                        header = probe(data, LIMITS)
                        decoding[name].append(seconds(lambda: decoder.decode_image(data, header)))  # noqa: B023
                        first[name].append(first_token_s(engine, data, decoder))
                here, jailed = (statistics.median(decoding[name]) * 1e3 for name in decoders)
                token_here, token_jailed = (statistics.median(first[name]) * 1e3 for name in decoders)
                print(
                    f"{width:5}x{height:<5}{kind:5}{len(data) // 1024:6} KiB | {here:16.2f}{jailed:8.2f}"
                    f"{jailed - here:7.2f} | {token_here:17.1f}{token_jailed:8.1f} | "
                    f"{(jailed - here) / token_here:11.1%}"
                )
    decoders["jailed"].close()


if __name__ == "__main__":
    main()
