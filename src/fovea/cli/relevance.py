"""fovea relevance calibrate MODEL: choose the heads that look for what a question is about."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from fovea.cli.common import DEFAULT_MODEL, count
from fovea.cli.questions import progress
from fovea.core.errors import ConfigError, InvalidMedia, InvalidRequest
from fovea.core.markdown import markdown_table

if TYPE_CHECKING:
    from fovea.engine.reduce.choose_heads import Subject

SEED = 78
"""Seed of the generated scenes. Those of `fovea eval` and of `fovea quantize` have others."""
PICTURES = 24
SIZES = (1344, 896), (896, 1344), (1024, 1024)
QUESTIONS = (
    "What does the text say?",
    "What is in the top left corner?",
    "What is in the bottom right corner?",
    "What is in the center?",
    "What color is the largest object?",
    "Where is the smallest object?",
)
"""Questions about parts that any picture may have."""
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
SHOWN = 10


def register(commands: Any) -> None:
    help_text = "choose the heads with which a model looks for what a question is about"
    parser = commands.add_parser(
        "relevance", help=help_text, description="The method relevance and its model."
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    calibrate = actions.add_parser(
        "calibrate",
        help="choose the heads with which a model looks",
        description=f"{__doc__} They are written beside the checkpoint, as fovea/look.json. No labels are "
        "needed: a good head attends to another place if another part of a picture is asked about. Without "
        "this file, all heads of the middle layers are used. See docs/relevance.md.",
    )
    calibrate.add_argument("model", metavar="MODEL", help=f"a folder, a hub id, or {DEFAULT_MODEL}")
    calibrate.add_argument(
        "--images", type=Path, metavar="DIR", help="pictures to choose by (default: generated scenes)"
    )
    calibrate.add_argument(
        "--pictures", type=count, default=PICTURES, metavar="N",
        help=f"most pictures that are used (default: {PICTURES})",
    )  # fmt: skip
    calibrate.add_argument("--dry-run", action="store_true", help="write nothing")
    calibrate.add_argument("--json", action="store_true", help="print JSON instead of a table")
    calibrate.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from fovea.engine.assemble import prompt_builder
    from fovea.engine.config import EngineConfig
    from fovea.engine.load import load_model, resolve
    from fovea.engine.models.gguf.checkpoint import find_gguf
    from fovea.engine.models.look_heads import write_heads
    from fovea.engine.reduce.choose_heads import best_heads, score_heads

    subjects = _scenes(args.pictures) if args.images is None else _pictures(args.images, args.pictures)
    loaded = load_model(args.model, EngineConfig())
    with progress("looking", args.pictures) as advance:
        scores = score_heads(loaded.model, prompt_builder(loaded), _noting(subjects, advance))
    heads = best_heads(scores)
    path = None
    if not args.dry_run:
        folder = resolve(args.model)
        gguf = find_gguf(folder)
        try:
            path = write_heads(folder if gguf is None else gguf.path, heads)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be written: {error.strerror}; use --dry-run") from error
    ranked = sorted(scores, key=lambda head: -scores[head])[: max(SHOWN, len(heads))]
    if args.json:
        ranking = [{"layer": layer, "head": head, "score": scores[layer, head]} for layer, head in ranked]
        chosen = [list(head) for head in heads]
        print(json.dumps({"model": loaded.info.name, "heads": chosen, "ranking": ranking}))
        return 0
    rows = [
        [str(layer), str(head), f"{scores[layer, head]:.3f}", "yes" if (layer, head) in heads else ""]
        for layer, head in ranked
    ]
    print(markdown_table(["layer", "head", "score", "chosen"], rows, aligned=True))
    print("nothing was written" if path is None else f"written: {path}", file=sys.stderr)
    return 0


def _noting(subjects: Iterator[Subject], advance: Any) -> Iterator[Subject]:
    for subject in subjects:
        yield subject
        advance()


def _scenes(number: int) -> Iterator[Subject]:
    """Generated scenes with a code, small things and a large one, and a question about each."""
    from fovea.engine.reduce.choose_heads import Subject
    from fovea.engine.request.inputs import to_image
    from fovea.evaluation.scenes import questions
    from fovea.evaluation.scenes.draw import draw
    from fovea.evaluation.scenes.small import compose_small

    rng = Random(SEED)
    while number:
        scene = compose_small(rng, *rng.choice(SIZES), labels=1, small=rng.choice((1, 2, 3)), large=1)
        asked = [questions.reading(rng, scene), questions.colour(rng, scene), questions.shape(rng, scene)]
        found = {turn.focus: turn.question for turn in asked if turn is not None}
        if len(found) < 2:
            continue
        yield Subject(to_image(draw(scene)), tuple(found.values()))
        number -= 1


def _pictures(folder: Path, number: int) -> Iterator[Subject]:
    """The first pictures of a folder, by name, with the same questions about each.

    Raises InvalidRequest if there is none. Files that are no pictures are left out with a message.
    """
    from fovea.engine.reduce.choose_heads import Subject
    from fovea.engine.request.inputs import to_image

    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    except OSError as error:
        raise InvalidRequest(f"{folder} cannot be read: {error.strerror}", param="images") from error
    if not paths:
        raise InvalidRequest(
            f"{folder} holds no pictures; accepted: files that end in {', '.join(SUFFIXES)}", param="images"
        )
    for path in paths[:number]:
        try:
            image = to_image(path)
        except InvalidMedia as error:
            print(f"fovea: {path.name} is left out: {error.reason}", file=sys.stderr)
            continue
        yield Subject(image, QUESTIONS)
