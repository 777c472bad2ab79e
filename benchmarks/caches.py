"""Measure the time that a cached image saves, and whether the caches stay below their ceilings.

    python benchmarks/caches.py [--threads 2] [--repeats 5] [--zipf 2000] [--folder PATH]

It uses the checkpoint of quick.py, except for the Zipf stream, which uses the bundled model. Figures are
ratios within one run. The parts, in order:

  follow-up     time to first token of a question about a known image with a cached prefix, divided by that
                of the same text without an image, at 256 and at 1,024 visual tokens
  encoded       the same question after a new system prompt: the encoder output is cached, the KV is not
  pixels        time to process an image's pixels, divided by the time to encode it: the most that cached
                pixels save
  together      8 simultaneous questions about one new image, against one question: images encoded, tokens
                computed
  restart       a known image after a restart with the disk tier: images encoded, time to first token against
                the first time
  zipf          requests over 300 images, popularity ~ 1/rank^1.1, with room for a third of the encoder
                outputs and for half of the KV: hit rates, bytes against ceilings, growth of resident memory
                over the last half

The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image

from checkpoint import write_checkpoint
from fovea import Engine
from fovea.core.types import ChatPrompt, ImagePart, Message, TextPart
from fovea.engine.request.inputs import to_image

QUESTION = "What is it, and where?"
IMAGES, EXPONENT = 300, 1.1


def part(seed: int, side: int) -> ImagePart:
    pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
    return ImagePart(to_image(Image.fromarray(pixels)))


def prompt(*parts: ImagePart, question: str = QUESTION, system: str = "") -> ChatPrompt:
    head = (Message("system", (TextPart(system),)),) if system else ()
    return ChatPrompt((*head, Message("user", (*parts, TextPart(question)))))


def ttft(engine: Engine, chat: ChatPrompt) -> float:
    """Seconds to the first token."""
    started = time.perf_counter()
    engine.generate(chat, temperature=0.0, max_tokens=1, ignore_eos=True)
    return time.perf_counter() - started


def follow_up(engine: Engine, repeats: int) -> dict[str, float]:
    results: dict[str, float] = {}
    for side, tokens in ((448, 256), (896, 1024)):
        with_image, without, encoded, cold = [], [], [], []
        for repeat in range(repeats):
            image = part(1000 * side + repeat, side)
            cold.append(ttft(engine, prompt(image, question="First of all, what is it?")))
            with_image.append(ttft(engine, prompt(image, question=f"{side}.{repeat} {QUESTION}")))
            without.append(ttft(engine, prompt(question=f"{side}.{repeat} {QUESTION}")))
            encoded.append(
                ttft(engine, prompt(image, question=QUESTION, system=f"Be number {side}.{repeat}."))
            )
        median = statistics.median
        results |= {
            f"follow-up {tokens}": median(with_image) / median(without),
            f"follow-up {tokens} ms": median(with_image) * 1e3,
            f"text alone {tokens} ms": median(without) * 1e3,
            f"encoded, new prefix {tokens}": median(encoded) / median(cold),
            f"cold {tokens} ms": median(cold) * 1e3,
        }
    return results


def pixels(engine: Engine, repeats: int) -> dict[str, float]:
    results: dict[str, float] = {}
    for side, tokens in ((448, 256), (896, 1024)):
        shares = []
        for repeat in range(repeats):
            chat = prompt(part(2000 * side + repeat, side))
            spent = engine.generate(chat, temperature=0.0, max_tokens=1, ignore_eos=True).timings
            shares.append(spent.preprocess / spent.encode)
        results[f"pixels {tokens}: making them, against encoding"] = statistics.median(shares)
    return results


def together(engine: Engine) -> dict[str, float]:
    async def ask(seed: int, count: int) -> None:
        image = part(seed, 448)
        questions = [prompt(image, question=f"{i}?") for i in range(count)]

        async def one(chat: ChatPrompt) -> None:
            async for _ in engine.stream(chat, temperature=0.0, max_tokens=1, ignore_eos=True):
                pass

        await asyncio.gather(*map(one, questions))

    def cost(seed: int, count: int) -> tuple[float, float, float]:
        before = engine.stats()
        started = time.perf_counter()
        asyncio.run(ask(seed, count))
        after = engine.stats()
        spent = time.perf_counter() - started
        return spent, *(after[n] - before[n] for n in ("images_encoded", "computed_tokens"))

    alone, eight = cost(71, 1), cost(72, 8)
    return {
        "together: images encoded": eight[1],
        "together: tokens computed, against one": eight[2] / alone[2],
        "together: seconds, against one": eight[0] / alone[0],
    }


def restart(folder: Path, settings: dict[str, Any]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as disk:
        seconds = []
        for _ in range(2):
            with Engine.from_pretrained(str(folder), embed_disk_dir=disk, **settings) as engine:
                ttft(engine, prompt(question="Hello."))
                seconds.append(ttft(engine, prompt(part(81, 448))))
                encoded = engine.stats()["images_encoded"]
                engine.parts.slower.flush(30)
    return {
        "restart: images encoded": encoded,
        "restart: first token, against the first time": seconds[1] / seconds[0],
    }


def resident() -> float:
    """Resident memory of the process in MiB, without free memory that glibc's allocator holds in reserve."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def zipf(requests: int, threads: int) -> dict[str, float]:
    rng = Random(5)
    weights = list(accumulate(1 / (rank + 1) ** EXPONENT for rank in range(IMAGES)))
    sides = [rng.choice((128, 160, 224, 256, 320)) for _ in range(IMAGES)]
    with Engine.from_pretrained("fovea-tiny", device="cpu", threads=threads, kv_cache_mib=64) as probe:
        token_bytes = probe.runner.model.visual_token_bytes
        block_bytes = probe.runner.block_bytes
    visual = sum((side // 32) ** 2 for side in sides)
    embed_mib = max(1, round(visual * token_bytes / 3 / 2**20))
    blocks = int(visual / 16 / 2) + 64
    settings = {"kv_blocks": blocks, "embed_cache_mib": embed_mib, "pixel_pool_mib": 64, "max_queue": 0}
    with Engine.from_pretrained("fovea-tiny", device="cpu", threads=threads, **settings) as engine:
        limits = {"embed": embed_mib * 2**20, "pixels": 64 * 2**20}
        highest = {"embed": 0.0, "pixels": 0.0}
        memory = []

        def one(number: int) -> None:
            image = rng.choices(range(IMAGES), cum_weights=weights)[0]
            engine.generate(
                prompt(part(image, sides[image]), question=f"What is in the image? {number}"),
                temperature=0.0, max_tokens=4, ignore_eos=True,
            )  # fmt: skip
            stats = engine.stats()
            highest["embed"] = max(highest["embed"], stats["embed_cache_bytes"])
            highest["pixels"] = max(highest["pixels"], stats["pixel_bytes"] + stats["pixel_cache_bytes"])
            if number % 50 == 0:
                memory.append(resident())

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, range(requests)))
        engine.check_integrity()
        stats = engine.stats()
    half = memory[len(memory) // 2 :]
    return {
        "zipf: requests": requests,
        "zipf: images encoded": stats["images_encoded"],
        "zipf: prefix hit rate": stats["prefix_hit_tokens"] / stats["prefix_query_tokens"],
        "zipf: most bytes of outputs, of the ceiling": highest["embed"] / limits["embed"],
        "zipf: most bytes of pixels, of the ceiling": highest["pixels"] / limits["pixels"],
        "zipf: KV MiB": blocks * block_bytes / 2**20,
        "zipf: growth of memory over the last half, MiB": half[-1] - half[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--zipf", type=int, default=2000)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/fovea-bench/qwen2.5-vl-0.5b-random"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = write_checkpoint(args.folder)
    settings = {"dtype": "bfloat16", "threads": args.threads, "device": "cpu", "kv_cache_mib": 256}
    with Engine.from_pretrained(str(folder), **settings) as engine:
        ttft(engine, prompt(part(1, 448)))
        results = follow_up(engine, args.repeats) | pixels(engine, args.repeats) | together(engine)
    results |= restart(folder, settings) | zipf(args.zipf, args.threads)
    for name, value in results.items():
        print(f"{name:50} {value:10.2f}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
