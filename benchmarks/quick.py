"""Compare Fovea with transformers' `generate` on one machine, in one run.

    python benchmarks/quick.py [--repeats 3] [--threads 2] [--folder PATH]

The checkpoint has random weights in the shape of a 0.5 B Qwen2.5-VL. A prompt has a 448x448 image (256 visual
tokens) and 32 text tokens, and 64 tokens are generated greedily. Both sides run bf16 with the same number of
threads and take turns, so that other processes on the machine disturb both alike. Ratios are ratios of
medians. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from checkpoint import write_checkpoint
from fovea import Engine
from fovea.core.types import AnswerBuilder, ChatPrompt, ImagePart, Message, TextPart
from fovea.engine.request.inputs import to_image

ANSWER, CONCURRENT, TEXT_TOKENS, SIDE = 64, 8, 32, 448
TARGETS = {"decode": 3.0, "throughput_8": 1.8, "ttft": 0.85, "follow_up": 0.15}


def picture(seed: int, side: int = SIDE) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8))


def question(seed: int, words: str = "", side: int = SIDE) -> ChatPrompt:
    image = ImagePart(to_image(picture(seed, side)))
    return ChatPrompt((Message("user", (image, TextPart("What is it?" + words))),))


class Transformers:
    """transformers' `generate` as its documentation shows it.

    transformers' own processor makes the pixels; the token ids of the text are Fovea's.
    side: side of the images, in pixels.
    options: further arguments of `generate`.
    """

    def __init__(self, folder: Path, device: str, side: int = SIDE, **options: Any) -> None:
        import transformers as hf
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        hf.logging.set_verbosity_error()
        model = hf.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16)
        self.model = model.to(device).eval()
        self.device = device
        self.side = side
        self.options = options
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(folder)

    @torch.inference_mode()
    def run(self, ids: list[int], seeds: list[int], tokens: int) -> float:
        """Seconds for a batch with the same text and one image each, pixels included."""
        images = [picture(seed, self.side) for seed in seeds]
        started = time.perf_counter()
        inputs = self.processor(images=images, return_tensors="pt")
        text = torch.tensor([ids] * len(seeds), device=self.device)
        self.model.generate(
            input_ids=text, attention_mask=torch.ones_like(text),
            mm_token_type_ids=(text == self.model.config.image_token_id).int(),
            pixel_values=inputs["pixel_values"].to(self.device, torch.bfloat16),
            image_grid_thw=inputs["image_grid_thw"].to(self.device),
            max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0,
            **self.options,
        )  # fmt: skip
        return time.perf_counter() - started


class Fovea:
    """An engine of Fovea, with the same interface as `Transformers`."""

    def __init__(
        self, folder: Path, threads: int, device: str, quantization: str = "none", **settings: Any
    ) -> None:
        self.engine = Engine.from_pretrained(
            str(folder),
            threads=threads,
            device=device,
            quantization=quantization,
            **{"dtype": "bfloat16", "kv_cache_mib": 512, **settings},
        )

    def ids(self, prompt: ChatPrompt) -> list[int]:
        return self.engine.parts.preparer.builder.build(prompt).ids

    def run(self, prompts: list[ChatPrompt], tokens: int) -> tuple[float, list[float], list[float]]:
        """Run requests at once.

        Returns (seconds in all, each request's time to first token, each request's decode rate in tokens per
        second).
        """

        async def one(prompt: ChatPrompt) -> tuple[float, float]:
            started = time.perf_counter()
            first = None
            answer = AnswerBuilder(1)
            async for delta in self.engine.stream(
                prompt, temperature=0.0, max_tokens=tokens, ignore_eos=True
            ):
                first = first or time.perf_counter()
                answer.add(delta)
            assert first is not None
            assert len(answer.build().token_ids[0]) == tokens
            return first - started, (tokens - 1) / (time.perf_counter() - first) if tokens > 1 else 0.0

        async def everyone() -> list[tuple[float, float]]:
            return await asyncio.gather(*(one(prompt) for prompt in prompts))

        started = time.perf_counter()
        pairs = asyncio.run(everyone())
        return time.perf_counter() - started, [p[0] for p in pairs], [p[1] for p in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/fovea-bench/qwen2.5-vl-0.5b-random"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = write_checkpoint(args.folder)
    ours = Fovea(folder, args.threads, args.device)
    theirs = Transformers(folder, args.device)
    padding = ""
    while len(ours.ids(question(0, padding))) < 256 + TEXT_TOKENS:
        padding += " the"
    ids = ours.ids(question(0, padding))
    print(
        f"{len(ids)} prompt tokens, 256 of them visual; {ANSWER} new tokens; "
        f"{args.device}, {args.threads} threads, bf16"
    )
    ours.run([question(9999, padding)], 4)
    theirs.run(ids, [9999], 2)
    rows: dict[str, list[float]] = {}

    def add(name: str, value: float) -> None:
        rows.setdefault(name, []).append(value)

    for repeat in range(args.repeats):
        base = 100 * (repeat + 1)
        gc.collect()
        first = theirs.run(ids, [base], 1)
        whole = theirs.run(ids, [base], ANSWER)
        add("transformers ttft_ms", first * 1000)
        add("transformers decode_tok_s", (ANSWER - 1) / (whole - first))
        _, ttft, rate = ours.run([question(base, padding)], ANSWER)
        add("fovea ttft_ms", ttft[0] * 1000)
        add("fovea decode_tok_s", rate[0])
        _, again, _ = ours.run([question(base, padding + " Why so?")], 1)
        add("fovea follow_up_ttft_ms", again[0] * 1000)
        seeds = [base + 1 + i for i in range(CONCURRENT)]
        seconds = theirs.run(ids, seeds, ANSWER)
        add("transformers 8x tok_s", CONCURRENT * ANSWER / seconds)
        seconds, _, _ = ours.run([question(seed, padding) for seed in seeds], ANSWER)
        add("fovea 8x tok_s", CONCURRENT * ANSWER / seconds)
    report(rows)
    ours.engine.shutdown()


def report(rows: dict[str, list[float]]) -> None:
    medians = {name: statistics.median(values) for name, values in rows.items()}
    for name, values in rows.items():
        print(f"{name:28} {medians[name]:9.1f}   ({min(values):.1f} - {max(values):.1f})")
    ratios = {
        "decode": medians["fovea decode_tok_s"] / medians["transformers decode_tok_s"],
        "throughput_8": medians["fovea 8x tok_s"] / medians["transformers 8x tok_s"],
        "ttft": medians["fovea ttft_ms"] / medians["transformers ttft_ms"],
        "follow_up": medians["fovea follow_up_ttft_ms"] / medians["fovea ttft_ms"],
    }
    for name, ratio in ratios.items():
        target = TARGETS[name]
        better = ratio >= target if target > 1 else ratio <= target
        print(
            f"{name:14} {ratio:6.2f}x   target {'>=' if target > 1 else '<='} {target}: "
            f"{'met' if better else 'MISSED'}"
        )
    print(json.dumps({"medians": medians, "ratios": ratios, "targets": TARGETS}))


if __name__ == "__main__":
    main()
