"""Measure Fovea on a GPU, against hardware limits and transformers with a compiled static cache.

    python benchmarks/gpu_speed.py [STEP ...]      # all steps of gpu_page.py, or those named

The checkpoint has random bf16 weights in the shape of Qwen2.5-VL-7B. The limits of the GPU are measured by
reading numbers, and by a large product. Prefill is timed from the submission of 8 requests, whose images are
encoded already, to the first token of the last one, so the time includes everything around the products.
Each step prints a line of JSON, an Outcome of gpu_page.py. With FOVEA_GPU_REHEARSAL=1 all steps run on a CPU,
with a tiny model and the kernels in Triton's interpreter; the figures mean nothing then.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import quick
from checkpoint import write_checkpoint
from fovea.core.errors import ConfigError
from fovea.core.media import PixelBudget
from fovea.core.types import ChatPrompt
from fovea.engine.layers.linear import Linear
from fovea.engine.request.inputs import to_image
from fovea.engine.vision.calls import Member, encode_together
from fovea.engine.vision.encoding import encoder_stream
from fovea.engine.vision.graphs import BlockGraphs
from fovea.engine.vision.processor.base import ProcessedImage
from fovea.kernels import calibrate
from fovea.kernels.attention import Chunk, ChunkAttention, Heads, prefill_each
from fovea.kernels.flash import load
from fovea.kernels.torch_kernels import TorchKernels
from gpu_page import IN_MEMORY, STEPS, Outcome, Shape
from oracle_drafts import Oracle, chance_for
from quick import Fovea, Transformers

REHEARSAL = os.environ.get("FOVEA_GPU_REHEARSAL") == "1"
DEVICE = torch.device("cpu" if REHEARSAL else "cuda")
PREFILLS, SIDE, VISUAL, QUESTION_SIDE = (2, 56, 4, 56) if REHEARSAL else (8, 896, 1024, 448)
CROWD, DECODED, ANSWER, REPEATS = (2, 2, 2, 1) if REHEARSAL else (32, 256, 64, 3)
LARGE_SIDE, SMALL = (56, 2) if REHEARSAL else (1008, 16)
BATCHES = (1, 2) if REHEARSAL else (32, 256)
SETTINGS: dict[str, Any] = {
    "max_running": max(BATCHES), "max_step_tokens": 16384, "max_step_visual_tokens": 16384,
    "kv_blocks": 13_000, "pace": 0.0, "embed_cache_mib": 1024, "pixel_pool_mib": 4096, "speculate": "prompt",
}  # fmt: skip
if REHEARSAL:  # Triton's interpreter cannot multiply bfloat16
    SETTINGS |= {"kernels": "triton", "dtype": "float32", "kv_blocks": 512, "decode_graphs": "padded"}
CHECKPOINT_BYTES = 40 << 30
"""Free memory from which on the checkpoint, 17 GB, is written to memory instead of a disk."""


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def checkpoint_folder() -> Path:
    """Return the folder of the checkpoint: in memory if there is enough, because disks may be slow."""
    name = "qwen2.5-vl-tiny-random" if REHEARSAL else "qwen2.5-vl-7b-random"
    if (IN_MEMORY / name / "complete").exists():
        return IN_MEMORY / name
    memory = IN_MEMORY.parent
    if not REHEARSAL and memory.is_dir() and shutil.disk_usage(memory).free >= CHECKPOINT_BYTES:
        return IN_MEMORY / name
    return Path(tempfile.gettempdir()) / "fovea-bench" / name


def question(seed: int, side: int = QUESTION_SIDE) -> ChatPrompt:
    return quick.question(seed, side=side)


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


class Measurement:
    """The steps of the measurement. A step loads the engine or transformers' model if it is missing."""

    def __init__(self) -> None:
        self._ours: Fovea | None = None
        self._theirs: Transformers | None = None
        self._ids = checkpoint_folder() / "question_ids.json"

    def run(self, name: str) -> Outcome:
        """Run a step. An exception becomes the error of its outcome."""
        started = time.monotonic()
        outcome = Outcome(name)
        steps: dict[str, Callable[[Outcome], None]] = {
            step.name: getattr(self, f"_{step.name}") for step in STEPS
        }
        try:
            steps[name](outcome)
        except Exception:  # noqa: BLE001 - it is reported, and the next step runs
            outcome.error = traceback.format_exc()
            try:
                synchronize()
            except RuntimeError:  # a GPU refuses further calls after a failed kernel
                outcome.ended = True
        outcome.seconds = time.monotonic() - started
        return outcome

    def _limits(self, outcome: Outcome) -> None:
        machine = calibrate.calibrate(TorchKernels(), torch.bfloat16, DEVICE, (None,), 1 << 30)
        outcome.measured = {"bandwidth": machine.bandwidth, "peak": machine.peaks[calibrate.PLAIN]}

    def _checkpoint(self, outcome: Outcome) -> None:
        write_checkpoint(checkpoint_folder(), shape="tiny" if REHEARSAL else "7b", device=str(DEVICE))
        self._free()

    def _engine(self, outcome: Outcome) -> None:
        ours = self._fovea()
        outcome.shape = asdict(shape_of(ours))
        self._ids.write_text(json.dumps(ours.ids(question(0))))
        ours.run([question(1)], 2)

    def _decode(self, outcome: Outcome) -> None:
        ours, prompt = self._fovea(), question(2)
        rates = [ours.run([prompt], DECODED)[2][0] for _ in range(REPEATS)]
        outcome.measured = {"decode_tok_s": max(rates), "context": len(ours.ids(prompt)) + DECODED / 2}

    def _speculate(self, outcome: Outcome) -> None:
        """Time drafts of given acceptance, for one answer and for eight, and steps without padding to 8."""
        ours, oracle = self._fovea(), Oracle()
        runner, speculator = ours.engine.runner, ours.engine.parts.speculator
        assert speculator is not None
        before, speculator.drafters = speculator.drafters, (oracle,)
        try:
            for count in (1, CROWD // 4 or 1):
                prompts = [question(300 + number) for number in range(count)]
                ours.run(prompts, DECODED)
                for name, drafts, tokens in (("off", 0, 1.0), ("1.8", 3, 1.8), ("2.6", 3, 2.6)):
                    oracle.drafts, oracle.chance = drafts, chance_for(tokens, drafts) if drafts else 1.0
                    rates = [statistics.median(ours.run(prompts, DECODED)[2]) for _ in range(REPEATS)]
                    outcome.measured[f"speculate_{count}_at_{name}_tok_s"] = max(rates)
            oracle.drafts = 0
            if runner._padded is not None and not REHEARSAL:
                sizes = (1, 2, 4, *runner._padded.padding.sizes)
                runner.pad_decodes(replace(runner._padded.padding, sizes=sizes))
                rates = [ours.run([question(300)], DECODED)[2][0] for _ in range(REPEATS)]
                outcome.measured["decode_not_padded_tok_s"] = max(rates)
        finally:
            speculator.drafters = before

    def _crowd(self, outcome: Outcome) -> None:
        ours = self._fovea()
        ours.run([question(100 + number) for number in range(CROWD)], 2)
        prompts = [question(200 + number) for number in range(CROWD)]
        spent, first_tokens, rates = ours.run(prompts, ANSWER)
        ours.engine.clear_caches("kv")
        known = ours.run(prompts, 1)[1]
        outcome.measured = {
            "tok_s_32": CROWD * ANSWER / spent,
            "first_of_32_s": min(first_tokens),
            "last_of_32_s": max(first_tokens),
            "last_of_32_known_images_s": max(known),
            "decode_tok_s_of_32": statistics.median(rates),
        }

    def _encoder(self, outcome: Outcome) -> None:
        """Time the vision tower alone: one large image, and many small ones together."""
        ours = self._fovea()
        model, builder = ours.engine.runner.model, ours.engine.parts.preparer.builder
        stream, graphs = encoder_stream(DEVICE), BlockGraphs()

        def images(count: int, side: int) -> list[ProcessedImage]:
            plan = builder.processor.plan(side, side, PixelBudget())
            return [builder.processor.process(to_image(quick.picture(n, side)), plan) for n in range(count)]

        def encode(pictures: list[ProcessedImage]) -> tuple[float, float]:
            """Return the milliseconds until the images are encoded, and those of the launching thread."""
            synchronize()
            started, launching = time.perf_counter(), time.thread_time()
            with torch.inference_mode(), stream.activate():
                members = [Member(model.encode_slices(image)) for image in pictures]
                for _ in encode_together(members, merge=True, graphs=None if REHEARSAL else graphs):
                    pass
            launched = time.thread_time()
            synchronize()
            return 1000 * (time.perf_counter() - started), 1000 * (launched - launching)

        for name, pictures in (("one", images(1, LARGE_SIDE)), ("small", images(SMALL, QUESTION_SIDE))):
            times = [encode(pictures) for _ in range(REPEATS + 2)][2:]  # graphs are recorded the second time
            outcome.measured[f"encoder_{name}_ms"] = min(times)[0]
            outcome.measured[f"encoder_{name}_host_ms"] = min(host for _, host in times)
        (small,) = images(1, QUESTION_SIDE)
        outcome.measured["encoder_single_ms"] = min(encode([small]) for _ in range(REPEATS + 2))[0]

    def _batches(self, outcome: Outcome) -> None:
        """Time decode steps of many requests, each with an image of its own."""
        ours = self._fovea()
        for count in BATCHES:
            prompts = [question(200 + number) for number in range(count)]
            asyncio.run(self._arrivals(prompts, 1))  # encodes the images
            ours.engine.clear_caches("kv")
            times = asyncio.run(self._arrivals(prompts, ANSWER))
            all_run, one_ends = max(each[0] for each in times), min(each[-1] for each in times)
            inside = [at for at in times[-1] if all_run <= at <= one_ends]
            gaps = [later - earlier for earlier, later in zip(inside, inside[1:], strict=False)]
            if gaps:  # otherwise the first answer ended before the last one began
                outcome.measured[f"step_{count}_ms"] = 1000 * statistics.median(gaps)
            ours.engine.clear_caches("kv")

    def _arrival(self, outcome: Outcome) -> None:
        """Measure the gaps of a stream while a new image is encoded and its prompt computed."""
        self._fovea()

        async def both() -> tuple[list[float], list[float]]:
            stream = asyncio.create_task(self._arrivals([question(2)], ANSWER))
            await asyncio.sleep(0.05 if REHEARSAL else 0.2)
            new = await self._arrivals([question(900)], 1)
            return (await stream)[0], new[0]

        times, _ = asyncio.run(both())
        gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
        outcome.measured = {
            "gap_median_ms": 1000 * statistics.median(gaps),
            "gap_while_image_arrives_ms": 1000 * max(gaps),
        }

    async def _arrivals(self, prompts: list[ChatPrompt], tokens: int) -> list[list[float]]:
        """Return the times at which the tokens of each request arrive. All requests run at once."""
        engine = self._fovea().engine

        async def one(prompt: ChatPrompt) -> list[float]:
            times: list[float] = []
            async for delta in engine.stream(prompt, temperature=0.0, max_tokens=tokens, ignore_eos=True):
                times += [time.perf_counter()] * len(delta.token_ids)
            return times

        return await asyncio.gather(*(one(prompt) for prompt in prompts))

    def _prefill(self, outcome: Outcome) -> None:
        ours, prompts = self._fovea(), [question(10 + number, SIDE) for number in range(PREFILLS)]
        seconds = []
        for _ in range(REPEATS + 1):  # the first run encodes the images
            seconds.append(max(ours.run(prompts, 1)[1]))
            ours.engine.clear_caches("kv")
        outcome.measured = {
            "prefill_s": min(seconds[1:]),
            "prompts": PREFILLS,
            "prompt_tokens": len(ours.ids(prompts[0])),
            "visual_tokens": VISUAL,
        }

    def _transformers(self, outcome: Outcome) -> None:
        outcome.measured = {"transformers_tok_s": self._transformers_rate([300])}

    def _transformers_32(self, outcome: Outcome) -> None:
        seeds = list(range(400, 400 + CROWD))
        outcome.measured = {"transformers_32_tok_s": self._transformers_rate(seeds)}

    def _chunks(self, outcome: Outcome) -> None:
        """Time one layer's attention of PREFILLS chunks of VISUAL tokens, each after VISUAL cached ones.

        Two ways are measured: over gathered keys, and by FlashInfer if it is installed.
        """
        heads = Heads(28, 4, 128)
        ways: dict[str, ChunkAttention] = {"chunks_gathered_ms": prefill_each}
        try:
            ways["chunks_flashinfer_ms"] = load(heads, DEVICE, torch.bfloat16)
        except ConfigError as error:
            print(error, flush=True)
        blocks = -(-2 * VISUAL // 16)
        tables = torch.randperm(PREFILLS * blocks, device=DEVICE).view(PREFILLS, blocks)
        draw = partial(torch.randn, dtype=torch.bfloat16, device=DEVICE)
        kv = draw(PREFILLS * blocks, 16, 2, heads.kv, heads.dim)
        query = draw(PREFILLS * VISUAL, heads.query, heads.dim)
        chunks = tuple(Chunk(number * VISUAL, VISUAL, VISUAL, table) for number, table in enumerate(tables))
        out = torch.empty_like(query)
        for name, way in ways.items():
            seconds = []
            for _ in range(REPEATS + 1):  # the first run warms up and plans
                synchronize()
                started = time.perf_counter()
                way(query, kv, chunks, heads.dim**-0.5, out)
                synchronize()
                seconds.append(time.perf_counter() - started)
            outcome.measured[name] = 1000 * min(seconds[1:])

    def _fovea(self) -> Fovea:
        if self._ours is None:
            self._theirs = None
            self._free()
            self._ours = Fovea(checkpoint_folder(), 8, str(DEVICE), **SETTINGS)
        return self._ours

    def _transformers_rate(self, seeds: list[int]) -> float:
        """Tokens per second of transformers. It runs once before, to compile."""
        if self._theirs is None:
            if self._ours is not None:
                self._ours.engine.shutdown()
            self._ours = None
            self._free()
            self._theirs = Transformers(
                checkpoint_folder(), str(DEVICE), QUESTION_SIDE, cache_implementation="static"
            )
        ids = json.loads(self._ids.read_text())
        self._theirs.run(ids, seeds, ANSWER)
        return len(seeds) * ANSWER / self._theirs.run(ids, seeds, ANSWER)

    def _free(self) -> None:
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()


def main() -> int:
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        print("benchmarks/gpu_speed.py: torch sees no CUDA device; nothing was measured", file=sys.stderr)
        return 2
    measurement = Measurement()
    for name in sys.argv[1:] or [step.name for step in STEPS]:
        outcome = measurement.run(name)
        print(json.dumps(asdict(outcome)), flush=True)
        if outcome.ended:
            return 1
    if not sys.argv[1:]:  # otherwise gpu.py removes it
        shutil.rmtree(IN_MEMORY, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
