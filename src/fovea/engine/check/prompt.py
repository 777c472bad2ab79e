"""Checks that a checkpoint makes a prompt of a message with images: tokenizer, template, image processor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fovea.core.errors import CheckpointError
from fovea.core.media import Image, PixelBudget
from fovea.core.types import ChatPrompt, ImagePart, Message, TextPart
from fovea.engine.check.report import Report
from fovea.engine.load import build_processors
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.tokenizer import load_tokenizer
from fovea.engine.request.prompt import PromptBuilder
from fovea.engine.request.tokenizer import ChatTokenizer
from fovea.engine.vision.processor.base import ImageProcessor
from fovea.engine.vision.processor.video import QwenVideos

T = TypeVar("T")
WIDTH, HEIGHT = 1024, 768
"""Pixels of the image that is planned."""
SECONDS = 60.0
"""Longest time for the tokenizer and the template, which are programs of the checkpoint's author."""


Processors = tuple[ImageProcessor, QwenVideos | None]
"""The processor of images, and the planner of videos if the model takes videos."""


def check_processors(folder: Path, config: Any, report: Report) -> Processors | None:
    """Build the processors of images and videos, and plan an image."""
    built = report.attempt("images", lambda: build_processors(folder, config))
    if built is None:
        return None
    processor, videos = built
    plan = report.attempt("images", lambda: processor.plan(WIDTH, HEIGHT, PixelBudget()))
    if plan is not None:
        report.facts["image_tokens"] = plan.tokens
    report.facts["videos"] = videos is not None
    return built if plan is not None else None


def check_prompt(
    folder: Path,
    config: Any,
    model: VisionLanguageModel | None,
    processors: Processors | None,
    report: Report,
) -> None:
    """Load the tokenizer, and make prompts with one image and with two.

    model, processors: None: there is none, because its part of the checkpoint is faulty.
    """

    def work() -> None:
        tokenizer = load_tokenizer(folder, config)
        if model is None:
            return
        _check_ids(folder, tokenizer, model, report)
        if processors is not None:
            _check_template(_builder(tokenizer, model, *processors), tokenizer, report)

    report.attempt("prompt", lambda: run_within(SECONDS, work))
    if model is None or processors is None:
        report.skip("prompt", "the chat template: the model or the image processor has errors")


def run_within(seconds: float, work: Callable[[], T]) -> T:
    """Return the result of `work`, or raise its exception. Raises CheckpointError if it takes longer."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - it is raised in the caller's thread
            errors.append(error)

    # Nothing can stop a template. A daemon thread does not keep the process alive.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise CheckpointError(f"the tokenizer or the chat template did not end within {seconds:g} seconds")
    if errors:
        raise errors[0]
    return results[0]


def _builder(
    tokenizer: ChatTokenizer, model: VisionLanguageModel, images: ImageProcessor, videos: QwenVideos | None
) -> PromptBuilder:
    support = None
    if videos is not None and model.video_token_id is not None:
        support = videos, model.video_token_id
    return PromptBuilder(tokenizer, images, model.image_token_id, support)


def _check_template(builder: PromptBuilder, tokenizer: ChatTokenizer, report: Report) -> None:
    if not tokenizer.has_template:
        report.add_warning(
            "prompt", "there is no chat template: only text prompts work, or --chat-template FILE"
        )
        return
    image = Image("0" * 64, WIDTH, HEIGHT, bytes(WIDTH * HEIGHT * 3))
    for count in (1, 2):
        images = (ImagePart(image),) * count
        builder.build(ChatPrompt((Message("user", (*images, TextPart("What is in the picture?"))),)))


def _check_ids(folder: Path, tokenizer: ChatTokenizer, model: VisionLanguageModel, report: Report) -> None:
    """Check that the ids of tokens are rows of the embedding table."""
    config = model.decoder.config
    choices, rows = config.vocab_size, config.vocab_size + config.extra_embeddings
    for name in ("image_token_id", "video_token_id"):
        token: int | None = getattr(model, name)
        if token is not None and token >= rows:
            report.add_error(
                "prompt", f"{folder}/config.json: {name} is {token}; accepted: 0 to {rows - 1} (vocab_size)"
            )
    if tokenizer.vocab_size > rows:
        report.add_warning(
            "prompt",
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model {rows}: prompts with the tokens "
            f"from {rows} on are refused",
        )
    ends = sorted(tokenizer.eos_ids)
    if not any(end < choices for end in ends):
        report.add_warning(
            "prompt",
            f"no token ends an answer: eos_token_id is {ends[:5]}, and the model has {choices} tokens; "
            "answers end at max_tokens",
        )
