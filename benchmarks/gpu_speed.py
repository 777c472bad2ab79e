"""Measure Fovea on a GPU, against hardware limits and transformers with a compiled static cache.

    python benchmarks/gpu_speed.py [--small] [--without-transformers] [--folder PATH]

The checkpoint has random bf16 weights in the shape of Qwen2.5-VL-7B (--small: the 0.5 B shape of quick.py).
The limits of the GPU are measured first: by reading weights, and by a large product. Prefill is timed from
the submission of 8 requests, whose images are encoded already, to the first token of the last one, so the
time includes everything around the products. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from checkpoint import write_checkpoint
from fovea.core.errors import ConfigError
from fovea.core.types import ChatPrompt, ImagePart, Message, TextPart
from fovea.engine.layers.linear import Linear
from fovea.engine.request.inputs import to_image
from fovea.kernels.attention import Chunk, ChunkAttention, Heads, prefill_each
from fovea.kernels.calibrate import PLAIN, calibrate
from fovea.kernels.flash.attention import load
from gpu_page import Shape
from quick import ANSWER, Fovea, Transformers, question

PREFILLS, SIDE, VISUAL = 8, 896, 1024
CROWD, DECODED, REPEATS = 32, 256, 3
SETTINGS = {
    "max_running": CROWD, "max_step_tokens": 16384, "max_step_visual_tokens": 16384, "kv_cache_mib": 8192,
    "pace": 0.0, "embed_cache_mib": 1024, "pixel_pool_mib": 4096,
}  # fmt: skip


def large_picture(seed: int) -> ChatPrompt:
    pixels = np.random.default_rng(seed).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
    return ChatPrompt(
        (Message("user", (ImagePart(to_image(Image.fromarray(pixels))), TextPart("What is it?"))),)
    )


def shape_of(ours: Fovea) -> Shape:
    model = ours.engine.runner.model
    config = model.decoder.config
    linear = sum(
        layer.in_features * layer.out_features
        for layer in model.decoder.modules()
        if isinstance(layer, Linear)
    )
    return Shape(
        len(config.layers),
        config.attention_heads.query,
        config.attention_heads.kv,
        config.attention_heads.dim,
        linear,
        config.hidden * config.vocab_size,
    )


def measure_chunks(heads: Heads, device: torch.device) -> dict[str, float]:
    """Milliseconds of one layer's attention: PREFILLS chunks of VISUAL tokens, each after VISUAL cached ones.

    Two ways are measured: over gathered keys, and by FlashInfer if it is installed.
    """
    ways: dict[str, ChunkAttention] = {"chunks_gathered_ms": prefill_each}
    try:
        ways["chunks_flashinfer_ms"] = load(heads, device, torch.bfloat16)
    except ConfigError as error:
        print(error)
    blocks = 2 * VISUAL // 16
    tables = torch.randperm(PREFILLS * blocks, device=device).view(PREFILLS, blocks)
    kv, query = (
        torch.randn(*shape, heads.dim, dtype=torch.bfloat16, device=device)
        for shape in ((PREFILLS * blocks, 16, 2, heads.kv), (PREFILLS * VISUAL, heads.query))
    )
    chunks = tuple(Chunk(number * VISUAL, VISUAL, VISUAL, table) for number, table in enumerate(tables))
    out, results = torch.empty_like(query), {}
    for name, way in ways.items():
        seconds = []
        for _ in range(REPEATS + 1):  # the first run warms up and plans
            torch.cuda.synchronize()
            started = time.perf_counter()
            way(query, kv, chunks, heads.dim**-0.5, out)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        results[name] = 1000 * min(seconds[1:])
    return results


def measure(ours: Fovea) -> dict[str, float]:
    model = ours.engine.runner.model
    machine = calibrate(model.kernels, torch.bfloat16, model.device, (None,), 1 << 30)
    results = {"bandwidth": machine.bandwidth, "peak": machine.peaks[PLAIN]}
    results |= measure_chunks(model.decoder.config.attention_heads, model.device)
    ours.run([question(1)], 8)
    prompt = question(2)
    rates = [ours.run([prompt], DECODED)[2][0] for _ in range(REPEATS)]
    results |= {"decode_tok_s": max(rates), "context": len(ours.ids(prompt)) + DECODED / 2}
    crowd = [large_picture(10 + number) for number in range(PREFILLS)]
    seconds = []
    for _ in range(REPEATS + 1):  # the first run encodes the images
        seconds.append(max(ours.run(crowd, 1)[1]))
        ours.engine.clear_caches("kv")
    tokens = len(ours.ids(crowd[0]))
    results |= {
        "prefill_s": min(seconds[1:]),
        "prompts": PREFILLS,
        "prompt_tokens": tokens,
        "visual_tokens": VISUAL,
    }
    ours.run([question(100 + number) for number in range(CROWD)], 8)
    spent = ours.run([question(200 + number) for number in range(CROWD)], ANSWER)[0]
    return results | {"tok_s_32": CROWD * ANSWER / spent}


def measure_transformers(folder: Path, ids: list[int]) -> dict[str, float]:
    """Tokens per second of transformers, for one request and for a batch.

    Each runs once before, to compile.
    """
    theirs = Transformers(folder, "cuda", cache_implementation="static")
    results = {}
    for name, seeds in (
        ("transformers_tok_s", [300]),
        ("transformers_32_tok_s", list(range(400, 400 + CROWD))),
    ):
        theirs.run(ids, seeds, ANSWER)
        results[name] = len(seeds) * ANSWER / theirs.run(ids, seeds, ANSWER)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--without-transformers", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "fovea-bench")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/gpu_speed.py: torch sees no CUDA device; nothing was measured", file=sys.stderr)
        return 2
    started = time.monotonic()
    name = "qwen2.5-vl-0.5b-random" if args.small else "qwen2.5-vl-7b-random"
    folder = write_checkpoint(args.folder / name, large=not args.small, device="cuda")
    torch.cuda.empty_cache()
    ours = Fovea(folder, 8, "cuda", **SETTINGS)
    shape, ids = shape_of(ours), ours.ids(question(0))
    measured = measure(ours)
    result = {"shape": asdict(shape), "measured": measured}
    print(json.dumps(result), flush=True)  # gpu.py uses this line if the rest takes too long
    ours.engine.shutdown()
    del ours
    gc.collect()
    torch.cuda.empty_cache()
    if not args.without_transformers:
        measured |= measure_transformers(folder, ids)
    print(f"{time.monotonic() - started:.0f} s")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
