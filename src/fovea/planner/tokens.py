"""The tokens of requests: of their prompts, images and answers, and which of them are computed anew."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fovea.planner.reduction import BEFORE_ENCODER
from fovea.planner.workload import Kind, TokenCount, Workload


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one request of a kind, in the mean over a conversation.

    images: rows of the encoder's output for each image, without reduction.
    encoder_rows: rows that the encoder computes for each image. They are fewer than `images` with a method
        of `reduction.BEFORE_ENCODER`.
    visual: visual tokens in the prompt, after reduction.
    encoded: share of these images that the encoder has to compute, by request.
    prompt: tokens of the whole prompt.
    computed: how many of these have no cached KV.
    answer: tokens of the answer.
    chosen: how many of these are sampled one by one; the others are forced by the answer's form.
    last: tokens at the end of the conversation, the last answer included.
    """

    images: tuple[int, ...]
    encoder_rows: tuple[int, ...]
    visual: int
    encoded: float
    prompt: float
    computed: float
    answer: float
    chosen: float
    last: float

    @property
    def context(self) -> float:
        """Tokens that a decode attends to, in the mean over the answer."""
        return self.prompt + self.answer / 2

    @property
    def longest(self) -> float:
        """Tokens of KV at the end of the answer."""
        return self.prompt + self.answer


PAIRED_FRAMES = (
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v",
)  # fmt: skip
"""Families whose towers see two frames of a video as one patch in time."""


def frame_group(family: str) -> int:
    """Return how many frames of a video become one set of visual tokens in models of a family."""
    return 2 if family in PAIRED_FRAMES else 1


def tokens_of(kind: Kind, workload: Workload, count: TokenCount, frame_group: int = 2) -> Tokens:
    """Return the tokens of a kind's requests.

    Follow-ups find the prompt and the answer before them in the prefix cache, so they compute their text
    alone. The first request of a conversation finds the system prompt there.

    count: visual tokens of an image in this model.
    frame_group: frames of a video that become one set of visual tokens (`frame_group`).
    """
    images = [count(width, height) for width, height in kind.images]
    if kind.video is not None:
        groups = math.ceil(kind.video.frames / frame_group)
        images += [count(kind.video.width, kind.video.height)] * groups
    visual = sum(math.ceil(image.prompt * workload.keep) for image in images)
    before = workload.keep if workload.method in BEFORE_ENCODER else 1.0
    turns = 1 + kind.follow_ups
    first = workload.system + visual + kind.text
    # The prompt of the n-th follow-up has n questions and answers more than the first one's.
    longer = kind.follow_ups / 2 * (kind.text + kind.answer)
    return Tokens(
        images=tuple(image.rows for image in images),
        encoder_rows=tuple(math.ceil(image.rows * before) for image in images),
        visual=visual,
        encoded=(1 - kind.seen) / turns if images else 0.0,
        prompt=first + longer,
        computed=visual / turns + kind.text,
        answer=kind.answer,
        chosen=kind.answer * (1 - kind.json * kind.forced),
        last=first + kind.answer + kind.follow_ups * (kind.text + kind.answer),
    )


def variants(kind: Kind, workload: Workload, tokens: Tokens) -> list[tuple[float, Tokens]]:
    """Return the different requests of a kind with their shares, which add up to 1.

    A conversation's first request has images that are new, or known from other requests. Its follow-ups have
    neither images nor text before their own to compute. The mean of the variants is `tokens`.

    tokens: result of `tokens_of` for this kind.
    """
    turns = 1 + kind.follow_ups
    prompt = workload.system + tokens.visual + kind.text
    first = replace(tokens, encoded=1.0, prompt=prompt, computed=tokens.visual + kind.text)
    parts = [
        ((1 - kind.seen) / turns if tokens.images else 0.0, first),
        (kind.seen / turns if tokens.images else 1 / turns, replace(first, encoded=0.0)),
    ]
    if kind.follow_ups:
        longer = (kind.follow_ups + 1) / 2 * (kind.text + kind.answer)
        later = replace(tokens, encoded=0.0, prompt=prompt + longer, computed=float(kind.text))
        parts.append((kind.follow_ups / turns, later))
    return [part for part in parts if part[0]]
