"""fovea quantize MODEL: write a quantized copy of a checkpoint, calibrated on images and texts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fovea.cli.common import DEFAULT_MODEL, count
from fovea.cli.questions import progress
from fovea.core.errors import ConfigError, InvalidRequest
from fovea.core.markdown import markdown_table
from fovea.evaluation.datasets import Case, read_jsonl, scene_cases

if TYPE_CHECKING:
    from fovea.engine.quantize.record import Sample
    from fovea.engine.quantize.run import Line, Wish
    from fovea.engine.quantize.schemes import Scheme
    from fovea.engine.quantize.search import Moments

SCENES = "scenes"
SCENE_SEED = 77
"""Seed of the scenes for calibration. Those of `fovea eval` have others."""
PROMPTS = 64
AUTO = "auto"
UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9}


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "quantize",
        description=f"{__doc__} The copy is in the format compressed-tensors, which transformers and vLLM "
        "load, too. Without --calibrate every weight is rounded to the nearest. A run that was stopped "
        "continues where it was. See docs/quantization.md.",
    )
    parser.add_argument(
        "model", metavar="MODEL", help=f"a folder of a plain checkpoint, a hub id, or {DEFAULT_MODEL}"
    )
    parser.add_argument(
        "--to", required=True, metavar="SCHEME",
        help="int8, int4 (groups of 32), int4:64, int4:128, int4-a8, int8-a16 or fp8 for the decoder; or "
        "schemes of parts, such as decoder=int4,tower=int8,projector=none,head=int8",
    )  # fmt: skip
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--calibrate", action="append", default=[], metavar="DATA",
        help="questions about images with right answers (FILE.jsonl, as for fovea eval --data), a text (any "
        "other file), or scenes for generated ones; several times: all of them, in turn",
    )  # fmt: skip
    parser.add_argument(
        "--prompts",
        type=count,
        default=PROMPTS,
        metavar="N",
        help=f"prompts of the calibration (default: {PROMPTS})",
    )
    parser.add_argument(
        "--except", action="append", default=[], dest="exceptions", metavar="NAME=SCHEME",
        help="another scheme for maps whose names contain NAME, such as layers.0.=int8 or down_proj=none",
    )  # fmt: skip
    parser.add_argument(
        "--visual-weight", default=AUTO, metavar="X",
        help="how much a row of an image counts beside a row of text in the calibration; auto: as much as "
        "the loss depends on it, measured for each layer (default: auto)",
    )  # fmt: skip
    parser.add_argument(
        "--size", metavar="SIZE",
        help="give the maps that lose most more bits, as long as the copy takes at most this size: a share "
        "of the plain one such as 0.35, or such as 120MB or 5GB; needs --calibrate",
    )  # fmt: skip
    parser.add_argument("--report", action="store_true", help="print a line for each part and scheme")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from fovea.engine.quantize.layers import Checkpoint
    from fovea.engine.quantize.measure import measure
    from fovea.engine.quantize.record import record
    from fovea.engine.quantize.run import Quantizer

    wish = parse_wish(args.to, args.exceptions, args.visual_weight, args.size)
    cases, texts = read_data(args.calibrate, args.prompts)
    if wish.size is not None and not cases and not texts:
        raise ConfigError("--size needs calibration data; accepted: --calibrate DATA", param="size")
    source = Checkpoint(args.model)
    count = len(source.model.decoder.layers)
    samples: list[Sample] = []
    encoder: dict[str, Moments] = {}
    measured = None
    if cases or texts:
        source.expect_calibration()
        parts = [part for part in ("tower", "projector") if wish.schemes.get(part)]
        with progress("reading calibration data", args.prompts) as advance:
            wanted = (lambda path: True) if parts else None
            samples, encoder = record(args.model, cases, texts, args.prompts, advance, wanted)
        has_images = any(bool(sample.is_visual().any()) for sample in samples)
        if wish.size is not None or (wish.visual_weight is None and has_images):
            with progress("measuring layers", 2 * count) as advance:
                schemes = measured_schemes(wish)
                measured = measure(source, samples, schemes, args.out, advance)
    with progress("quantizing layers", count + 1) as advance:
        quantizer = Quantizer(source, args.out, wish, samples, advance, encoder, measured)
        lines = quantizer.run()
    if args.report:
        print(report(lines))
        if measured is not None and has_images:
            shown = ", ".join(f"{each:.2f}" for each in measured.visual)
            print(f"\nweight of rows of images, by layer: {shown}")
        if wish.size is not None:
            print(f"\n{exceptions_of(lines, wish)}")
    if not lines:
        print("fovea: no map was quantized", file=sys.stderr)
    print(args.out)
    return 0


def parse_wish(to: str, exceptions: list[str], visual_weight: str, size: str | None) -> Wish:
    """Return what the flags ask for. Raises ConfigError, naming the flag and what is accepted."""
    from fovea.engine.quantize.run import PARTS, Wish
    from fovea.engine.quantize.schemes import parse_scheme

    weight = None if visual_weight == AUTO else _number(visual_weight)
    if weight is not None and not 0 < weight < float("inf"):
        raise ConfigError(
            f"--visual-weight is {visual_weight!r}; accepted: auto, and numbers above 0",
            param="visual_weight",
        )
    pairs = _pairs([part for part in to.split(",") if part], "to") if "=" in to else {"decoder": to}
    for part in pairs:
        if part not in PARTS:
            raise ConfigError(f"--to names {part!r}; accepted parts: {', '.join(PARTS)}", param="to")
    schemes = {part: parse_scheme(text, "to") for part, text in pairs.items()}
    others = {name: parse_scheme(text, "except") for name, text in _pairs(exceptions, "except").items()}
    return Wish(schemes, others, weight, None if size is None else parse_size(size))


def parse_size(text: str) -> float:
    """Return bytes, or a share up to 1 of the plain size. Raises ConfigError."""
    unit = next((unit for unit in UNITS if text.upper().endswith(unit)), "")
    number = _number(text[: len(text) - len(unit)]) * UNITS.get(unit, 1)
    if not 0 < number < float("inf") or (not unit and number > 1):
        raise ConfigError(
            f"--size is {text!r}; accepted: a share of the plain size such as 0.35, or {' or '.join(UNITS)} "
            "such as 120MB",
            param="size",
        )
    return number


def _number(text: str) -> float:
    """Return the number that a text shows; NaN: it shows none."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def measured_schemes(wish: Wish) -> list[Scheme]:
    """Return the schemes whose costs the choice for a size compares."""
    from fovea.engine.quantize.budget import ladder

    wanted = [wish.schemes.get("decoder"), *wish.exceptions.values()]
    if wish.size is None:
        return []
    found = {each: None for scheme in wanted if scheme for each in ladder(scheme) if each}
    return list(found)


def exceptions_of(lines: list[Line], wish: Wish) -> str:
    """Return the maps of the decoder that have another scheme than most were to have, in the form of
    --except.
    """
    asked = str(wish.schemes.get("decoder"))
    others = [line for line in lines if line.part == "decoder" and line.scheme != asked]
    shown = [f"{line.name.removesuffix('.weight')}={line.scheme}" for line in others]
    return "\n".join(shown) or f"all quantized maps of the decoder are {asked}"


def read_data(names: list[str], most: int) -> tuple[list[Case], list[str]]:
    """Return the questions and the texts of the flag --calibrate. Raises InvalidRequest."""
    cases: list[Case] = []
    texts: list[str] = []
    for name in names:
        if name == SCENES:
            cases += scene_cases(max(1, most // 10), seed=SCENE_SEED)
        elif name.endswith(".jsonl"):
            cases += read_jsonl(Path(name))
        else:
            try:
                texts.append(Path(name).read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "it is not UTF-8"
                raise InvalidRequest(
                    f"--calibrate: {name} cannot be read: {reason}", param="calibrate"
                ) from error
    return cases, texts


def report(lines: list[Line]) -> str:
    """Return a table of parts and schemes: maps, numbers, size, and the mean and largest error of outputs."""
    rows: list[list[str]] = []
    for key in sorted({(line.part, line.scheme) for line in lines}):
        mine = [line for line in lines if (line.part, line.scheme) == key]
        errors = [line.error for line in mine if line.error is not None]
        shown = (
            [f"{100 * sum(errors) / len(errors):.2f}%", f"{100 * max(errors):.2f}%"] if errors else ["-", "-"]
        )
        numbers = sum(line.numbers for line in mine)
        rows.append(
            [
                *key,
                str(len(mine)),
                f"{numbers:,}",
                f"{sum(line.nbytes for line in mine) / 1e6:.1f} MB",
                *shown,
            ]
        )
    return markdown_table(("part", "scheme", "maps", "numbers", "size", "mean error", "largest error"), rows)


def _pairs(texts: list[str], flag: str) -> Mapping[str, str]:
    """Split texts of the form NAME=SCHEME. Raises ConfigError."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, scheme = text.rpartition("=")
        if not equals or not name:
            raise ConfigError(f"--{flag} has {text!r}; accepted: NAME=SCHEME", param=flag)
        pairs[name] = scheme
    return pairs
