"""Shared code of the scheduler's benchmarks: arguments, engines, prompts, token times."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from checkpoint import write_checkpoint
from fovea import Engine
from fovea.core.types import ChatPrompt, ImagePart, Message, TextPart
from fovea.engine.request.inputs import to_image


def parser(description: str | None) -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--folder", type=Path, default=Path("/tmp/fovea-bench/qwen2.5-vl-0.5b-random"))
    return arguments


def start(args: argparse.Namespace, settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Engine]:
    """Start an engine for each of the named settings, with the checkpoint of quick.py."""
    torch.set_num_threads(args.threads)
    folder = str(write_checkpoint(args.folder))
    fixed = {"dtype": "bfloat16", "threads": args.threads, "device": "cpu", "kv_cache_mib": 256}
    return {name: Engine.from_pretrained(folder, **fixed, **own) for name, own in settings.items()}


def image_prompt(seed: int, side: int) -> ChatPrompt:
    pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
    part = ImagePart(to_image(Image.fromarray(pixels)))
    return ChatPrompt((Message("user", (part, TextPart("What is it?"))),))


def text_prompt(text: str) -> ChatPrompt:
    return ChatPrompt((Message("user", (TextPart(text),)),))


async def token_times(engine: Engine, prompt: ChatPrompt, tokens: int) -> list[float]:
    """Generate an answer, and return the times at which its tokens arrived."""
    times = []
    async for delta in engine.stream(prompt, temperature=0.0, max_tokens=tokens, ignore_eos=True):
        if delta.token_ids:
            times.append(time.perf_counter())
    return times
