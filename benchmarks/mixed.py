"""A text chat beside arriving images, on the real engine: the gaps of the one, the throughput of both.

    python benchmarks/mixed.py [--seconds 40] [--load 0.5] [--threads 2] [--folder PATH]

The checkpoint of quick.py. One client chats in text, answer after answer of 64 tokens; requests with a new 448x448 image
and 16 tokens of answer arrive at random (Poisson) at `load` times the rate at which the engine can serve them alone, which
is measured first. Each engine meets the same arrivals: as it is by default, and first come first served without a
pace. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from random import Random

import numpy as np
import torch
from PIL import Image

from checkpoint import write_checkpoint
from fovea import Engine
from fovea.core.types import ChatPrompt, ImagePart, Message, TextPart
from fovea.engine.inputs import to_image

SETTINGS = {"default": {}, "fcfs, no pace": {"policy": "fcfs", "pace": 0.0}}
CHAT_TOKENS, IMAGE_TOKENS = 64, 16


def image_prompt(seed: int) -> ChatPrompt:
    pixels = np.random.default_rng(seed).integers(0, 255, (448, 448, 3), dtype=np.uint8)
    part = ImagePart(to_image(Image.fromarray(pixels)))
    return ChatPrompt((Message("user", (part, TextPart("What is it?"))),))


async def answer(engine: Engine, prompt: ChatPrompt, tokens: int) -> list[float]:
    """When each token came."""
    times = []
    async for delta in engine.stream(prompt, temperature=0.0, max_tokens=tokens, ignore_eos=True):
        if delta.token_ids:
            times.append(time.perf_counter())
    return times


async def mixed(engine: Engine, arrivals: list[float], seconds: float, base: int) -> dict[str, float]:
    started = time.perf_counter()
    gaps: list[float] = []
    firsts: list[float] = []
    tokens = 0

    async def chat() -> None:
        nonlocal tokens
        number = 0
        while time.perf_counter() - started < seconds:
            number += 1
            prompt = ChatPrompt((Message("user", (TextPart(f"{number}: go on."),)),))
            times = await answer(engine, prompt, CHAT_TOKENS)
            gaps.extend(b - a for a, b in zip(times, times[1:], strict=False))
            tokens += len(times)

    async def image(number: int, at: float) -> None:
        nonlocal tokens
        await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
        arrived = time.perf_counter()
        times = await answer(engine, image_prompt(base + number), IMAGE_TOKENS)
        firsts.append(times[0] - arrived)
        tokens += len(times)

    await asyncio.gather(chat(), *(image(number, at) for number, at in enumerate(arrivals)))
    spent = time.perf_counter() - started
    return {
        "text gap p50 ms": 1e3 * float(np.percentile(gaps, 50)),
        "text gap p99 ms": 1e3 * float(np.percentile(gaps, 99)),
        "text gap longest ms": 1e3 * max(gaps),
        "image first token p50 ms": 1e3 * float(np.percentile(firsts, 50)),
        "tokens/s": tokens / spent,
        "images/s": len(arrivals) / spent,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--load", type=float, default=0.5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/fovea-bench/qwen2.5-vl-0.5b-random"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = write_checkpoint(args.folder)
    engines = {
        name: Engine.from_pretrained(
            str(folder), dtype="bfloat16", threads=args.threads, device="cpu", kv_cache_mib=256, **settings
        )
        for name, settings in SETTINGS.items()
    }
    alone = []
    for number, engine in enumerate(engines.values()):
        for repeat in range(4):
            started = time.perf_counter()
            asyncio.run(answer(engine, image_prompt(10_000 + 10 * number + repeat), IMAGE_TOKENS))
            if repeat:
                alone.append(time.perf_counter() - started)
    rate = args.load / float(np.median(alone))
    rng, at, arrivals = Random(7), 0.0, []
    while (at := at + rng.expovariate(rate)) < args.seconds:
        arrivals.append(at)
    print(
        f"an image request alone takes {np.median(alone):.2f} s; {len(arrivals)} arrive in {args.seconds:g} s"
    )
    found = {}
    for number, (name, engine) in enumerate(engines.items()):
        found[name] = asyncio.run(mixed(engine, arrivals, args.seconds, 1000 * (number + 1)))
        print(name, *(f"{key} {value:.1f}" for key, value in found[name].items()), sep="  ")
    ours, plain = found.values()
    print(f"text gap p99: {plain['text gap p99 ms'] / ours['text gap p99 ms']:.1f}x better")
    print(f"throughput: {ours['tokens/s'] / plain['tokens/s']:.2f}x")
    print(json.dumps(found))
    for engine in engines.values():
        engine.shutdown()


if __name__ == "__main__":
    main()
