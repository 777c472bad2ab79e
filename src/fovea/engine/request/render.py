"""Renders a request: the prompt that the engine would compute for it now, from headers alone.

A router that asks for it finds the engine whose caches know most of the prompt. So token ids, spans and keys
have to be those of the sequence that the engine would make.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from fovea.core.media import UNREAD, UnreadPixels, needs_pixels
from fovea.core.types import (
    ChatPrompt,
    GenerationRequest,
    ImagePart,
    Part,
    PlannedPrompt,
    Prompt,
    Rendered,
    RenderedSpan,
    TextPrompt,
)
from fovea.engine.kv.hashing import mm_hash
from fovea.engine.request.admission import FirstTokenGate
from fovea.engine.request.prepare import to_sequence
from fovea.engine.request.prompt_plan import PreparedPrompt

LayOut = Callable[[GenerationRequest, int], tuple[PreparedPrompt, int]]
"""Returns the prompt and the longest answer, in tokens, of a request. No video is decoded.

The number says by how many detail levels its images are lowered."""


def render(request: GenerationRequest, lay_out: LayOut, gate: FirstTokenGate) -> Rendered:
    """Return the prompt of a request. For a worker thread.

    gate: decides by the load of now whether images get less detail. The request is not queued.
    Raises the errors of `lay_out`, and InvalidRequest if the result follows from pixels.
    """
    request = replace(request, prompt=without_pixels(request.prompt))
    for steps_down in gate.attempts:
        prompt, max_tokens = lay_out(request, steps_down)
        if len(gate.attempts) == 1 or not prompt.images:
            break
        seq = to_sequence(request, prompt, max_tokens, time.monotonic())
        if not gate.late(seq, gate.expect(seq)):
            break
    if prompt.unsettled_videos:
        raise needs_pixels(
            "the frames of a video decide which of its tokens are left out", "video_pruning_rate"
        )
    return Rendered(prompt.ids, _spans(prompt), max_tokens)


def without_pixels(prompt: Prompt) -> Prompt:
    """Return the prompt with images whose pixels cannot be read."""
    if isinstance(prompt, ChatPrompt):
        messages = (
            replace(message, parts=tuple(map(_unread, message.parts))) if message.parts else message
            for message in prompt.messages
        )
        return replace(prompt, messages=tuple(messages))
    if isinstance(prompt, TextPrompt):
        return replace(prompt, images=tuple(map(_unread, prompt.images)))
    if isinstance(prompt, PlannedPrompt):
        images = (replace(part, image=replace(part.image, pixels=UNREAD)) for part in prompt.images)
        return replace(prompt, images=tuple(images))
    return prompt


P = TypeVar("P", bound=Part)


def _unread(part: P) -> P:
    if not isinstance(part, ImagePart) or isinstance(part.image.pixels, UnreadPixels):
        return part
    return replace(part, image=replace(part.image, pixels=UNREAD))


def _spans(prompt: PreparedPrompt) -> tuple[RenderedSpan, ...]:
    groups = {group.key for video in prompt.videos for group in video.groups}
    return tuple(
        RenderedSpan("video" if span.key in groups else "image", mm_hash(span.key), span.start, span.length)
        for span in prompt.spans
    )
