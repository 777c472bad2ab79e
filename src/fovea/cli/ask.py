"""fovea ask IMAGE|VIDEO... "question": one answer, streamed."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fovea.cli.common import (
    SINGLE_USER,
    add_engine_options,
    add_reduction_options,
    add_sampling_options,
    add_video_options,
    check_writable,
    config_file,
    load_engine,
    pixel_budget,
    sampling_values,
    utf8,
    video_budget,
    visual_tokens,
)
from fovea.core.errors import InvalidRequest
from fovea.core.types import AnswerBuilder, Completion
from fovea.engine.request.inputs import is_video, to_prompt

# A terminal executes control characters, so text in a picture could make the model control the user's
# terminal.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
STAGES = ("fetch", "media_decode", "preprocess", "queue", "encode", "prefill", "decode")


def write_text(text: str) -> None:
    """Print a part of an answer at once. A terminal gets it without control characters, a pipe as it is."""
    sys.stdout.write(_CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def stats_table(answer: Completion) -> None:
    """Print the times and tokens of one answer to stderr, so that stdout has the answer alone."""
    timings, usage = answer.timings, answer.usage
    cells = [f"{name} {getattr(timings, name) * 1000:.1f}" for name in STAGES if getattr(timings, name) > 0]
    print(f"  ms: {'  '.join(cells)}  (first token after {timings.ttft * 1000:.1f})", file=sys.stderr)
    rate = f", {(usage.completion - 1) / timings.decode:.0f} tokens/s" if timings.decode > 0 else ""
    print(
        f"  tokens: prompt {usage.prompt} (visual {usage.image}, cached {usage.cached}), "
        f"answer {usage.completion}{rate}",
        file=sys.stderr,
    )
    if usage.drafts:
        per_step = usage.completion / (usage.completion - usage.accepted_drafts)
        print(
            f"  tokens per step {per_step:.1f} (accepted {usage.accepted_drafts} of {usage.drafts} drafts)",
            file=sys.stderr,
        )


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "ask", description=__doc__, usage='fovea ask [OPTIONS] [IMAGE|VIDEO ...] "QUESTION"'
    )
    parser.add_argument(
        "words",
        nargs="+",
        metavar="FILE ... QUESTION",
        help="image and video files, in the order of the question, and the question last",
    )
    parser.add_argument(
        "--show",
        type=Path,
        metavar="FILE",
        help="draw which regions of the first image got how many tokens, as PNG or JPEG",
    )
    parser.add_argument(
        "--stats", action="store_true", help="print milliseconds per stage and tokens after the answer"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the answer, usage and timings as one JSON object"
    )
    add_sampling_options(parser)
    add_reduction_options(parser)
    add_video_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    file, params = config_file(args), sampling_values(args)
    *files, question = args.words
    question = _question(question)
    if args.show is not None:
        check_drawable(args, files)
    budget = pixel_budget(args, visual_tokens(args, explain=args.show is not None))
    prompt = to_prompt(messages_of(question, files), budget=budget, video_budget=video_budget(args))
    with load_engine(args, file, **SINGLE_USER) as engine:
        for path in files:
            engine.info.check_media("video" if is_video(path) else "image", path, f"{path}: ")
        request = engine.request(prompt, **params)
        answer = AnswerBuilder(1)
        for delta in engine.iterate(request):
            answer.add(delta)
            if not args.json:
                write_text(delta.text)
        done = answer.build()
    if args.show is not None:
        draw_regions(args.show, next(name for name in files if not is_video(name)), done)
    if args.json:
        from fovea.api.convert import extension_body, usage_body

        print(
            json.dumps(
                {
                    "text": done.text,
                    "finish_reason": done.finish_reasons[0],
                    "usage": usage_body(done.usage).model_dump(),
                    **extension_body(done.timings, done.images),
                },
                ensure_ascii=False,
            )
        )
        return 0
    print()
    if args.stats:
        stats_table(done)
    return 0


def check_drawable(args: argparse.Namespace, files: Sequence[str]) -> None:
    """Check the flags for --show before a model is loaded. Raises InvalidRequest or ConfigError."""
    if args.show.suffix.lower() not in (".png", ".jpg", ".jpeg"):
        raise InvalidRequest(f"--show {args.show}: accepted are names that end in .png or .jpg", param="show")
    if all(map(is_video, files)):
        raise InvalidRequest("--show draws an image, and there is none", param="show")
    if (args.method or "relevance") != "relevance":
        raise InvalidRequest(f"--show is for the method relevance, not {args.method}", param="show")
    check_writable(args.show)


def draw_regions(path: Path, name: str, done: Completion) -> None:
    """Draw the regions of the first image and their tokens. Prints a note if there is nothing to draw."""
    import PIL.Image
    import PIL.ImageOps

    from fovea.relevance.showing import show

    use = done.images[0]
    if use.relevance is None:
        reason = f"all of {name}'s tokens were kept"
        if use.method is not None:
            reason = f"the tokens of {name} came from a cache that does not store their regions"
        print(f"fovea: {reason}, so there is nothing to draw", file=sys.stderr)
        return
    with PIL.Image.open(name) as image:
        show(PIL.ImageOps.exif_transpose(image), use.relevance).save(path)


def messages_of(question: str, files: Sequence[str]) -> list[dict[str, Any]]:
    """Return one user message: the files, each an image or a video by its first bytes, then the question."""
    parts: list[dict[str, Any]] = []
    for name in files:
        kind = "video" if is_video(name) else "image"
        parts.append({"type": kind, kind: name})
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


def _question(text: str) -> str:
    """Return the question. Raises InvalidRequest if it is a file, because then the question was forgotten."""
    if len(text) < 256 and Path(text).is_file():
        raise InvalidRequest(f"the question comes last, but {text} is a file", param="question")
    return utf8(text)
