"""Records what the decoder gets for calibration prompts: input embeddings, positions, and plans of the steps.

The prompts go through an engine whose decoder has no layers. It makes the same inputs as any other, visual
tokens included, and takes the memory of the vision tower and the embedding table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

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
from fovea.engine.layers.linear import Linear, PatchLinear
from fovea.engine.layers.step import DecoderPlan, ImageRows, Taps
from fovea.engine.load import LoadedModel, load_model
from fovea.engine.quantize.search import Moments
from fovea.evaluation.datasets import Case

BLOCKS, BLOCK_SIZE = 1024, 16
"""KV blocks of the engine that records, and their tokens: the longest prompt has 16,000.

A step has half of them: layers with a sliding window need blocks for the window beside those of the step.
"""
STEP_TOKENS = BLOCKS * BLOCK_SIZE // 2
TEXT_TOKENS = 512
"""Tokens of a piece of a calibration text."""


@dataclass
class Sample:
    """The arguments of `Decoder.forward` for T tokens of a prompt that are computed in one step.

    The samples of a prompt follow each other, and read the keys and values of those before.

    ids: (T,). prompt: number of the prompt.
    targets: (T,), the token after each row whose prediction counts in the loss; -1: the row's does not count.
        Of a question only the tokens of the answer count.
    """

    x: Tensor
    positions: Tensor
    plan: DecoderPlan
    visual_rows: Tensor | None
    deepstack: tuple[Tensor, ...]
    per_layer: Tensor | None
    images: tuple[ImageRows, ...]
    ids: Tensor
    prompt: int = 0
    targets: Tensor = torch.empty(0, dtype=torch.long)

    def is_visual(self) -> Tensor:
        """Mask of the visual tokens, (T,)."""
        mask = torch.zeros(len(self.x), dtype=torch.bool)
        if self.visual_rows is not None:
            mask[self.visual_rows] = True
        return mask


def record(
    name: str,
    cases: Sequence[Case],
    texts: Sequence[str],
    most: int,
    advance: Callable[[], None],
    encoder: Callable[[str], bool] | None = None,
) -> tuple[list[Sample], dict[str, Moments]]:
    """Return the decoder's inputs for questions with their right answers, and for pieces of texts.

    Beside them, returns the statistics of the inputs of maps of tower and projector, by their paths.

    name: a checkpoint, see `load.resolve`.
    most: number of prompts at most.
    encoder: tells for each path of a map whether its statistics are wanted; None: they are not.

    Raises CheckpointError, ConfigError, or InvalidRequest for an image that cannot be read.
    """
    settings = EngineConfig.of(
        dtype="float32", device="cpu", kernels="torch", quantization="dequantize",
        kv_blocks=BLOCKS, block_size=BLOCK_SIZE, max_step_tokens=STEP_TOKENS, prefix_cache=False,
        speculate="off",
    )  # fmt: skip
    loaded = load_model(name, settings, layers=False)
    samples: list[Sample] = []
    moments = _observe(loaded, encoder) if encoder is not None else {}
    with Engine(loaded, settings) as engine, _recorded(loaded, samples):
        prompts = _prompts(engine, cases, texts, most)
        if not prompts:
            raise ConfigError("the calibration data has no prompt", param="calibrate")
        ends = asyncio.run(_ask(engine, [prompt for prompt, _ in prompts], samples, advance))
    found: list[Sample] = []
    for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        found += _with_targets(samples[start:end], number, prompts[number][1])
    return found, {path: each for path, each in moments.items() if each.weight}


def _observe(loaded: LoadedModel, wanted: Callable[[str], bool]) -> dict[str, Moments]:
    """Add up statistics of the inputs of maps of tower and projector from now on, by their paths."""
    found: dict[str, Moments] = {}

    def watch(path: str, layer: Linear) -> None:
        moments = found[path] = Moments.empty(layer.in_features)

        def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            rows = inputs[0].reshape(-1, layer.in_features)
            moments.add(rows, torch.ones(len(rows)))

        layer.register_forward_pre_hook(note)

    for path, layer in loaded.model.named_modules():
        outside = not path.startswith(("decoder.", "head."))
        if outside and isinstance(layer, Linear) and not isinstance(layer, PatchLinear) and wanted(path):
            watch(path, layer)
    return found


def _with_targets(samples: list[Sample], prompt: int, answer: int | None) -> list[Sample]:
    """Return the samples of one prompt with their targets.

    answer: tokens at the end that count in the loss; None: all do.
    """
    ids = torch.cat([sample.ids for sample in samples])
    targets = torch.cat((ids[1:], torch.tensor([-1])))
    if answer is not None:
        targets[: max(0, len(ids) - 1 - answer)] = -1
    parts = torch.split(targets, [len(sample.x) for sample in samples])
    return [replace(sample, prompt=prompt, targets=part) for sample, part in zip(samples, parts, strict=True)]


@contextmanager
def _recorded(loaded: LoadedModel, samples: list[Sample]) -> Iterator[None]:
    """Replace the decoder's pass by one that records its arguments and returns its inputs."""
    decoder = loaded.model.decoder
    embed, last = decoder.embed, [torch.empty(0)]

    def note(ids: Tensor) -> Tensor:
        last[0] = ids
        return embed(ids)

    def forward(
        x: Tensor, positions: Tensor, memory: Any, plan: DecoderPlan, visual_rows: Tensor | None = None,
        deepstack: Sequence[Tensor] = (), read: Tensor | None = None, per_layer: Tensor | None = None,
        images: tuple[ImageRows, ...] = (), watch: Any = None, taps: Taps | None = None,
    ) -> Tensor:  # fmt: skip
        with torch.inference_mode(False):
            parts = (x, positions, plan, visual_rows, tuple(deepstack), per_layer, images, last[0])
            samples.append(Sample(*_copied(parts)))
        return x if read is None else x[read]

    decoder.embed, decoder.forward = note, forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del decoder.forward, decoder.embed


def _copied(value: Any) -> Any:
    """Copy all tensors in a value. Copies of tensors of the inference mode can have gradients."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, tuple):
        parts = [_copied(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: _copied(getattr(value, each.name)) for each in fields(value)})
    return value


def _prompts(
    engine: Engine, cases: Sequence[Case], texts: Sequence[str], most: int
) -> list[tuple[Prompt, int | None]]:
    """Return questions with their right answers and pieces of texts in turn, at most `most`.

    Beside each question stands the number of the answer's tokens.
    """
    from fovea.engine.request.inputs import to_image

    questions: list[tuple[Prompt, int | None]] = []
    for case in cases[:most]:
        parts = [ImagePart(to_image(image)) for image in case.images]
        first = case.exchanges[0]
        messages = (
            Message(first.role, (*parts, TextPart(first.question))),
            Message("assistant", (TextPart(first.accepted[0]),)),
        )
        prompt = ChatPrompt(messages, template=TemplateInputs(continues=True))
        questions.append((prompt, len(engine.tokenizer.encode_plain(first.accepted[0]))))
    start = engine.tokenizer.start_ids
    pieces: list[tuple[Prompt, int | None]] = []
    for text in texts:
        ids = engine.tokenizer.encode_plain(text)
        size = min(TEXT_TOKENS, engine.info.max_context - 1) - len(start)
        pieces += [(TokenPrompt((*start, *ids[at : at + size])), None) for at in range(0, len(ids), size)]
    # Of many pieces, some from everywhere in the texts are taken.
    wanted = max(1, most - len(questions), most // 2 if questions else most)
    some = pieces[:: max(1, -(-len(pieces) // wanted))]
    return [prompt for pair in zip_longest(questions, some) for prompt in pair if prompt is not None][:most]


async def _ask(
    engine: Engine, prompts: Sequence[Prompt], samples: list[Sample], advance: Callable[[], None]
) -> list[int]:
    """Send the prompts one after the other, so that each is a step of its own.

    Returns the number of samples after each.
    """
    ends: list[int] = []
    for prompt in prompts:
        async for _ in engine.stream(prompt, max_tokens=1, temperature=0.0):
            pass
        ends.append(len(samples))
        advance()
    await engine.close()
    return ends
