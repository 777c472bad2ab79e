"""Fit a cost model of this machine from a real engine, for `fovea simulate --cost FILE`.

    python benchmarks/fit_cost.py OUT.json [--model fovea-tiny] [--threads 1] [--rounds 3] [--largest 16000]

An engine in this process serves batches of 1 to 32 sequences with prompts of 16 to 2,000 tokens, with and
without images of 64 to 1,024 visual tokens. The composition and duration of every step are recorded. Three
quarters of the steps are used for the fit, and the error is measured on the last quarter. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fovea import Engine
from fovea.core.hardware import available_memory
from fovea.core.types import ChatPrompt, ImagePart, Message, TextPart
from fovea.engine.request.inputs import to_image
from fovea.engine.simulate.executor import recorded_steps
from fovea.planner.cost import CostModel
from fovea.planner.fit import (
    Error,
    StepSample,
    fit_images,
    fit_steps,
    image_error,
    step_error,
)

PROMPTS = (16, 64, 200, 500, 1000, 2000)
BATCHES = (1, 2, 4, 8, 16, 32)
SIDES = (256, 384, 512, 768, 1024)
TOKENS = 40


async def ask(engine: Engine, text: str, side: int, seed: int, tokens: int = TOKENS) -> None:
    parts: list[Any] = [TextPart(text)]
    if side:
        pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
        parts.insert(0, ImagePart(to_image(Image.fromarray(pixels))))
    prompt = ChatPrompt((Message("user", tuple(parts)),))
    async for _ in engine.stream(prompt, temperature=0.0, max_tokens=tokens, ignore_eos=True):
        pass


async def drive(engine: Engine, rounds: int, largest: int) -> None:
    """Send workloads of every shape; prompts of one batch have at most `largest` tokens together.

    Each text begins with another number, so that no two requests share a prefix.
    """
    seed = 0
    for _ in range(rounds):
        for size in PROMPTS:
            for batch in BATCHES:
                if batch * size > largest:
                    continue
                tasks = []
                for _ in range(batch):
                    seed += 1
                    tasks.append(ask(engine, f"{seed} " + "a b c d " * (size // 8), 0, seed))
                await asyncio.gather(*tasks)
        for side in SIDES:
            for batch in (1, 3):
                seed += batch
                tasks = [ask(engine, f"{seed} {n} what?", side, seed * 10 + n) for n in range(batch)]
                await asyncio.gather(ask(engine, f"{seed} tell me", 0, seed, 4 * TOKENS), *tasks)


def repeat_error(steps: list[StepSample]) -> Error:
    """A lower bound for the error of any model: the differences of steps from the median of similar steps."""
    alike: dict[tuple[int, ...], list[float]] = {}
    for s in steps:
        m = s.made_of
        about = m.decodes, m.decode_context // 128, m.prompt_tokens // 16, m.chunks, m.pairs // 4096
        alike.setdefault(about, []).append(s.seconds)
    groups = [group for group in alike.values() if len(group) >= 8]
    own = [statistics.median(group) for group in groups for _ in group]
    return Error.of(own, [seconds for group in groups for seconds in group])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--model", default="fovea-tiny")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--largest", type=int, default=16_000, help="most prompt tokens of a batch; fewer for large models"
    )
    args = parser.parse_args()
    settings = {"threads": args.threads, "max_queue": 0, "embed_cache_mib": 64}
    with Engine.from_pretrained(
        args.model, kv_cache_mib=min(512, available_memory() >> 21), **settings
    ) as engine:
        asyncio.run(drive(engine, 1, args.largest))  # warm-up
        engine.clear_caches()  # the next run must not hit prefixes and images of this one
        with recorded_steps(engine.loop, engine.runner.model) as observer:
            asyncio.run(drive(engine, args.rounds, args.largest))
        model, info = engine.runner.model, engine.info
        kv_bytes = engine.runner.block_bytes // engine.runner.block_size
    steps = [s for n, s in enumerate(observer.steps) if n % 4]
    images = [s for n, s in enumerate(observer.images) if n % 4]
    seconds = {**fit_steps(steps), **fit_images(images), "between_s": statistics.median(observer.between)}
    cost = CostModel(
        **{name: float(f"{value:.3g}") for name, value in seconds.items()},
        kv_token_bytes=kv_bytes,
        visual_token_bytes=model.visual_token_bytes,
        max_context=info.max_context,
        made_from=f"{info.name}, {info.dtype} on {info.device}, {args.threads} threads: "
        f"{len(steps)} steps and {len(images)} images",
    )
    cost.save(args.out)
    errors = step_error(cost, observer.steps[::4]), image_error(cost, observer.images[::4])
    for what, error in zip(("steps", "images"), errors, strict=True):
        print(
            f"{what:7} {error.count:6} not fitted: median error {error.median:.1%}, "
            f"90% within {error.p90:.1%}"
        )
    kinds = {
        "decodes alone": lambda m: m.decodes and not m.chunks,
        "prompts alone": lambda m: m.chunks and not m.decodes,
        "both": lambda m: m.chunks and m.decodes,
    }
    for kind, member in kinds.items():
        some = [s for s in observer.steps[::4] if member(s.made_of)]
        if some:
            error = step_error(cost, some)
            print(f"  {kind:14} {error.count:6}: median error {error.median:.1%}, 90% within {error.p90:.1%}")
    predicted, measured = (
        sum(cost.step(s.made_of) for s in observer.steps[::4]),
        sum(s.seconds for s in observer.steps[::4]),
    )
    print(f"all of those steps together: {predicted:.2f} s predicted, {measured:.2f} s measured")
    noise = repeat_error(observer.steps)
    print(
        f"steps of equal composition differ from their median by {noise.median:.1%}, "
        f"90% within {noise.p90:.1%}"
    )
    print(json.dumps({"cost": asdict(cost), "steps": asdict(errors[0]), "images": asdict(errors[1])}))


if __name__ == "__main__":
    main()
