"""Compare the simulator with a real engine under the same workload.

    python benchmarks/simulator.py [--requests 150] [--rate 6] [--threads 1] [--cost FILE] [--pace 3]

A real engine with the bundled model in this process gets text questions and questions about new and known
images at random times. Then the simulator gets the same arrival times and numbers of tokens, with costs that
were fitted separately. The output shows gaps and times to first token of both, side by side. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
from PIL import Image

from fovea import Engine
from fovea.core.trace import TraceRequest, Workload, generate
from fovea.core.types import ChatPrompt, ImagePart, Message, TextPart
from fovea.engine.config import EngineConfig
from fovea.engine.request.inputs import to_image
from fovea.engine.simulate.report import Record, Spread
from fovea.engine.simulate.run import simulate
from fovea.planner.cost import CostModel

SIDES = {64: 256, 256: 512, 1024: 1024}
"""Visual tokens of a square image to its side in pixels, for the bundled model."""


async def replay(
    engine: Engine, load: Workload, preparation: list[float]
) -> tuple[list[TraceRequest], list[Record]]:
    """Replay a workload on the engine.

    Returns the requests with the token counts of the engine, and their records.

    Images are decoded beforehand.
    preparation: gets the seconds that each request spent on template, tokens and pixels, which are not
        simulated.
    """
    requests, started = generate(load), time.perf_counter()
    pictures = {}
    for key, tokens in {image for request in requests for image in request.images}:
        seed = int(key.removeprefix("image-"))
        pixels = np.random.default_rng(seed).integers(
            0, 255, (SIDES[tokens], SIDES[tokens], 3), dtype=np.uint8
        )
        pictures[key] = to_image(Image.fromarray(pixels))

    async def ask(number: int, request: TraceRequest) -> tuple[TraceRequest, Record]:
        await asyncio.sleep(max(0.0, request.at - (time.perf_counter() - started)))
        parts = [
            *(ImagePart(pictures[key]) for key, _ in request.images),
            TextPart(f"{number} " + "a b " * request.text),
        ]
        record, usage = Record(time.perf_counter() - started, reason="length"), None
        prompt = ChatPrompt((Message("user", tuple(parts)),))
        async for delta in engine.stream(prompt, temperature=0.0, max_tokens=request.output, ignore_eos=True):
            record.tokens.append(time.perf_counter() - started)
            usage = delta.usage or usage
            if delta.timings is not None:
                preparation.append(delta.timings.preprocess)
        assert usage is not None
        record.kind = "images" if request.images else "text"
        counted = TraceRequest(record.arrival, usage.prompt - usage.image, request.output, request.images)
        return counted, record

    started = time.perf_counter()
    pairs = await asyncio.gather(*(ask(number, request) for number, request in enumerate(requests)))
    pairs.sort(key=lambda pair: pair[0].at)
    return [request for request, _ in pairs], [record for _, record in pairs]


def spreads(records: list[Record]) -> dict[str, Spread]:
    return {
        "TTFT, text": Spread.of(r.tokens[0] - r.arrival for r in records if r.kind == "text"),
        "TTFT, all": Spread.of(r.tokens[0] - r.arrival for r in records),
        "gap": Spread.of(gap for r in records for gap in r.gaps),
        "longest gap of each": Spread.of(max(r.gaps) for r in records if len(r.tokens) > 1),
        "end to end": Spread.of(r.tokens[-1] - r.arrival for r in records),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--rate", type=float, default=6.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cost", type=Path, metavar="FILE")
    parser.add_argument("--pace", type=float, default=3.0)
    args = parser.parse_args()
    load = Workload(requests=args.requests, rate=args.rate, images=40, prompt_tokens=40, output_tokens=64)
    config = EngineConfig.of(threads=args.threads, pace=args.pace, max_queue=0, kv_cache_mib=512)
    with Engine.from_pretrained("fovea-tiny", config=config) as engine:
        asyncio.run(replay(engine, Workload(requests=30, rate=20, images=5, seed=99), []))  # warm-up
        engine.clear_caches()
        preparation: list[float] = []
        trace, records = asyncio.run(replay(engine, load, preparation))
    report = simulate(tuple(trace), config, CostModel.load(args.cost) if args.cost else CostModel())
    every, text = report.classes["all"], report.classes["text"]
    real = spreads(records)
    paper = {
        "TTFT, text": text.ttft,
        "TTFT, all": every.ttft,
        "gap": every.itl,
        "longest gap of each": every.worst_gap,
        "end to end": every.end_to_end,
    }
    print(f"{'ms, p50 / p90 / p99 / longest':30} {'real':>34} {'simulated':>34}")
    for name in real:
        cells = (" / ".join(f"{value:.1f}" for value in asdict(of[name]).values()) for of in (real, paper))
        print(f"{name:30} " + " ".join(f"{cell:>34}" for cell in cells))
    spread = Spread.of(preparation)
    print(
        f"preparation, not simulated: {spread.p50:.1f} / {spread.p90:.1f} / "
        f"{spread.p99:.1f} / {spread.longest:.1f}"
    )
    print(json.dumps({name: {"real": asdict(real[name]), "simulated": asdict(paper[name])} for name in real}))


if __name__ == "__main__":
    main()
