"""Records what the decoder gets for calibration prompts: input embeddings, positions, and plans of the steps.

The prompts go through an engine whose decoder has no layers. It makes the same inputs as any other, visual
tokens included, and takes the memory of the vision tower and the embedding table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from fovea.core.errors import ConfigError
from fovea.core.types import (
    ChatPrompt,
    ImagePart,
    Message,
    Prompt,
    TemplateInputs,
    TextPart,
    TokenPrompt,
)
from fovea.engine.config import EngineConfig
from fovea.engine.engine import Engine
from fovea.engine.layers.step import DecoderPlan, ImageRows
from fovea.engine.load import LoadedModel, load_model
from fovea.evaluation.datasets import Case

BLOCKS, BLOCK_SIZE = 1024, 16
"""KV blocks of the engine that records, and their tokens: the longest prompt has 16,000."""
STEP_TOKENS = BLOCKS * BLOCK_SIZE
TEXT_TOKENS = 512
"""Tokens of a piece of a calibration text."""


@dataclass
class Sample:
    """The arguments of `Decoder.forward` for T tokens of a prompt that are computed in one step.

    The samples of a prompt follow each other, and read the keys and values of those before.
    """

    x: Tensor
    positions: Tensor
    plan: DecoderPlan
    visual_rows: Tensor | None
    deepstack: tuple[Tensor, ...]
    per_layer: Tensor | None
    images: tuple[ImageRows, ...]

    def is_visual(self) -> Tensor:
        """Mask of the visual tokens, (T,)."""
        mask = torch.zeros(len(self.x), dtype=torch.bool)
        if self.visual_rows is not None:
            mask[self.visual_rows] = True
        return mask


def record(
    name: str, cases: Sequence[Case], texts: Sequence[str], most: int, advance: Callable[[], None]
) -> list[Sample]:
    """Return the decoder's inputs for questions with their right answers, and for pieces of texts.

    name: a checkpoint, see `load.resolve`.
    most: number of prompts at most.

    Raises CheckpointError, ConfigError, or InvalidRequest for an image that cannot be read.
    """
    settings = EngineConfig.of(
        dtype="float32", device="cpu", kernels="torch", quantization="dequantize",
        kv_blocks=BLOCKS, block_size=BLOCK_SIZE, max_step_tokens=STEP_TOKENS, prefix_cache=False,
    )  # fmt: skip
    loaded = load_model(name, settings, layers=False)
    samples: list[Sample] = []
    with Engine(loaded, settings) as engine, _recorded(loaded, samples):
        prompts = _prompts(engine, cases, texts, most)
        if not prompts:
            raise ConfigError("the calibration data has no prompt", param="calibrate")
        asyncio.run(_ask(engine, prompts, advance))
    return samples


@contextmanager
def _recorded(loaded: LoadedModel, samples: list[Sample]) -> Iterator[None]:
    """Replace the decoder's pass by one that records its arguments and returns its inputs."""
    decoder = loaded.model.decoder

    def forward(
        x: Tensor, positions: Tensor, memory: Any, plan: DecoderPlan, visual_rows: Tensor | None = None,
        deepstack: Sequence[Tensor] = (), read: Tensor | None = None, per_layer: Tensor | None = None,
        images: tuple[ImageRows, ...] = (), watch: Any = None,
    ) -> Tensor:  # fmt: skip
        kept = [None if part is None else part.clone() for part in (x, positions, visual_rows, per_layer)]
        features = tuple(part.clone() for part in deepstack)
        samples.append(Sample(kept[0], kept[1], plan, kept[2], features, kept[3], images))  # type: ignore[arg-type]
        return x if read is None else x[read]

    decoder.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del decoder.forward


def _prompts(engine: Engine, cases: Sequence[Case], texts: Sequence[str], most: int) -> list[Prompt]:
    """Return questions with their right answers and pieces of texts in turn, at most `most`."""
    from fovea.engine.request.inputs import to_image

    questions: list[Prompt] = []
    for case in cases[:most]:
        parts = [ImagePart(to_image(image)) for image in case.images]
        first = case.exchanges[0]
        messages = (
            Message(first.role, (*parts, TextPart(first.question))),
            Message("assistant", (TextPart(first.accepted[0]),)),
        )
        questions.append(ChatPrompt(messages, template=TemplateInputs(continues=True)))
    start, pieces = engine.tokenizer.start_ids, []
    for text in texts:
        ids = engine.tokenizer.encode_plain(text)
        size = min(TEXT_TOKENS, engine.info.max_context - 1) - len(start)
        pieces += [TokenPrompt((*start, *ids[at : at + size])) for at in range(0, len(ids), size)]
    # Of many pieces, some from everywhere in the texts are taken.
    wanted = max(most - len(questions), most // 2 if questions else most)
    some = pieces[:: max(1, -(-len(pieces) // wanted))]
    return [prompt for pair in zip_longest(questions, some) for prompt in pair if prompt is not None][:most]


async def _ask(engine: Engine, prompts: Sequence[Prompt], advance: Callable[[], None]) -> None:
    """Send the prompts one after the other, so that each is a step of its own."""
    for prompt in prompts:
        async for _ in engine.stream(prompt, max_tokens=1, temperature=0.0):
            pass
        advance()
    await engine.close()
