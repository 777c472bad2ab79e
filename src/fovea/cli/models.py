"""fovea models: list the supported architectures, check a checkpoint, or count visual tokens."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fovea.cli.text import list_line, wrapped
from fovea.core.errors import ConfigError, InvalidRequest
from fovea.core.markdown import markdown_table
from fovea.core.protocols import VisualTokenRule
from fovea.engine.vision.token_rules import all_settings, known_models, rule_for

if TYPE_CHECKING:
    from fovea.engine.check import Finding, Report


WIDTH = 80
LABEL = 28
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def _count_in_words(value: str | int) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else value


def _size_in_words(value: str | int) -> str:
    """Bytes in the largest unit that fits into them once."""
    if not isinstance(value, int):
        return value
    power = min(max(value.bit_length() - 1, 0) // 10, len(UNITS) - 1)
    return f"{value:,} bytes" if not power else f"{value / (1 << 10 * power):,.1f} {UNITS[power]}"


FACTS: Mapping[str, tuple[str, Callable[[str | int], str]]] = {
    "architecture": ("architecture", _count_in_words),
    "model_type": ("model_type", _count_in_words),
    "parameters": ("parameters", _count_in_words),
    "dtype": ("type of the weights", _count_in_words),
    "weight_bytes": ("weights", _size_in_words),
    "quantization": ("quantized by", _count_in_words),
    "quantized_weights": ("quantized weights", _count_in_words),
    "kept_weights": ("weights that keep their codes", _count_in_words),
    "files": ("weight files", _count_in_words),
    "tensors": ("tensors", _count_in_words),
    "unused_tensors": ("tensors that are not used", _count_in_words),
    "layers": ("layers of the decoder", _count_in_words),
    "experts": ("experts of a layer", _count_in_words),
    "vocabulary": ("vocabulary", _count_in_words),
    "context": ("context in tokens", _count_in_words),
    "kv_bytes_per_token": ("KV of a token", _size_in_words),
    "state_bytes_per_sequence": ("states of a sequence", _size_in_words),
    "images": ("images", _count_in_words),
    "image_tokens": ("tokens of a 1024x768 image", _count_in_words),
    "videos": ("videos", _count_in_words),
}
"""The label of each fact, and how its value is written."""


def check_table(report: Report) -> str:
    """Return the report as lines of at most 80 columns."""
    return "\n".join(_check_lines(report))


def _check_lines(report: Report) -> Iterator[str]:
    yield from wrapped(report.name, WIDTH)
    for name, (label, write) in FACTS.items():
        value = report.facts.get(name)
        if value is not None and (value or name != "state_bytes_per_sequence"):
            yield from wrapped(write(value), WIDTH, f"  {label:{LABEL}}")
    for word, findings in (
        ("error", report.errors),
        ("warning", report.warnings),
        ("not checked", report.unchecked),
    ):
        for finding in findings:
            yield from _finding(word, finding)
    yield ""
    yield from wrapped(verdict(report), WIDTH)


def verdict(report: Report) -> str:
    """Say in one sentence whether the checkpoint loads."""
    if not report.loads:
        count = len(report.errors)
        return f"This checkpoint does not load: {count} error{'s' * (count > 1)}."
    if report.unchecked:
        return "No error was found, but not everything was checked."
    return "This checkpoint would load."


def _finding(word: str, finding: Finding) -> Iterator[str]:
    yield from wrapped(finding.message, WIDTH, f"{word}, {finding.part}: ", "    ")


_IMAGE_SIZE = re.compile(r"([1-9]\d{0,6})x([1-9]\d{0,6})")

ImageSize = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One line of the table.

    model: the name as the caller wrote it.
    rule: name of the rule that counted; "": no rule is known.
    tokens: visual tokens for each size; None: the model refuses images of this size.
    problem: the first refusal, or why there is no rule; "": none.
    """

    model: str
    rule: str
    tokens: tuple[int | None, ...]
    problem: str = ""


def parse_sizes(text: str) -> tuple[ImageSize, ...]:
    """Read sizes as "1024x768,1920x1080", in pixels. Raises ConfigError."""
    found = [_IMAGE_SIZE.fullmatch(part.strip()) for part in text.split(",")]
    if not all(found):
        raise ConfigError(
            f"--tokens is {text!r}; accepted: WIDTHxHEIGHT in pixels, or several, as 1024x768,1920x1080",
            param="tokens",
        )
    return tuple((int(match[1]), int(match[2])) for match in found if match)


def token_rows(models: Sequence[str], sizes: Sequence[ImageSize]) -> list[TokenRow]:
    """Count for each model, or for all known ones if none is named.

    Raises ModelError for a folder that cannot be used.
    """
    return [_token_row(model, sizes) for model in models or known_models()]


def _token_row(model: str, sizes: Sequence[ImageSize]) -> TokenRow:
    rule = rule_for(model)
    if rule is None:
        return TokenRow(model, "", (None,) * len(sizes), "no known model has this name")
    counts = [_image_tokens(rule, width, height) for width, height in sizes]
    problem = next((count for count in counts if isinstance(count, str)), "")
    return TokenRow(
        model, rule.name, tuple(count if isinstance(count, int) else None for count in counts), problem
    )


def _image_tokens(rule: VisualTokenRule, width: int, height: int) -> int | str:
    """The tokens of an image, or the message with which the model refuses it."""
    try:
        return rule.tokens(width, height)
    except InvalidRequest as error:
        return error.message


def token_table(found: Sequence[TokenRow], sizes: Sequence[ImageSize]) -> str:
    """Return one line per model: the tokens for each size, the model, and what was wrong."""
    titles = [f"{width}x{height}" for width, height in sizes]
    lines = [f"{'  '.join(f'{title:>9}' for title in titles)}  model"]
    for row in found:
        counts = "  ".join(f"{'-' if count is None else count:>9}" for count in row.tokens)
        lines.append(f"{counts}  {row.model}" + (f"  ({row.problem})" if row.problem else ""))
    return list_line("\n".join(lines))


def token_json(found: Sequence[TokenRow], sizes: Sequence[ImageSize]) -> str:
    """Return a JSON list with an object per model and size."""
    return json.dumps(
        [
            {
                "model": row.model,
                "rule": row.rule or None,
                "width": width,
                "height": height,
                "tokens": tokens,
                "problem": row.problem if tokens is None else None,
            }
            for row in found
            for (width, height), tokens in zip(sizes, row.tokens, strict=True)
        ]
    )


def token_markdown(sizes: Sequence[ImageSize]) -> str:
    """Return a table with one line for all known models of equal settings, as in docs/models.md."""
    rows = []
    for entry in all_settings():
        counts = _token_row(entry.models[0], sizes).tokens
        rows.append([", ".join(entry.models), *("-" if count is None else str(count) for count in counts)])
    return markdown_table(["models", *(f"{width} x {height}" for width, height in sizes)], rows)


COLUMNS = ("model_type", "name", "vision", "text", "example")


def register(commands: Any) -> None:
    parser = commands.add_parser("models", description=__doc__)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="JSON instead of a table")
    form.add_argument("--markdown", action="store_true", help="the table as in docs/models.md")
    parser.add_argument(
        "--check",
        metavar="MODEL",
        help="say whether a folder, a GGUF file, or a hub id in the local cache would load, and what is "
        "missing; no weight is read and nothing is downloaded; exit code 1: it would not load",
    )
    parser.add_argument(
        "--tokens",
        metavar="WIDTHxHEIGHT",
        help="print the visual tokens of an image of this size in pixels (or of several sizes: A,B) for the "
        "models named, or for all known ones; exit code 1: a model is not known, or refuses the size",
    )
    parser.add_argument(
        "model",
        nargs="*",
        metavar="MODEL",
        help="with --tokens: known hub ids, or folders with the settings of a checkpoint",
    )
    parser.add_argument(
        "--revision", default="", metavar="NAME", help="with --check: branch, tag or commit of a hub id"
    )
    parser.add_argument(
        "--mmproj", default="", metavar="FILE", help="with --check: the vision tower of a GGUF file"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.check is not None and args.tokens is not None:
        raise ConfigError("--check and --tokens print different tables; give one of them", param="tokens")
    if args.model and args.tokens is None:
        raise ConfigError(f"{args.model[0]!r} needs --tokens or --check before it", param="model")
    if args.check is not None:
        return check(args)
    for name in ("revision", "mmproj"):
        if getattr(args, name):
            raise ConfigError(f"--{name} is for --check", param=name)
    if args.tokens is not None:
        return tokens(args)
    from fovea.engine.models.registry import ARCHITECTURES

    if args.json:
        import json

        print(json.dumps([{name: getattr(entry, name) for name in COLUMNS} for entry in ARCHITECTURES]))
    elif args.markdown:
        print(markdown())
    else:
        print(listing())
    return 0


def tokens(args: argparse.Namespace) -> int:
    """Print the visual tokens of known models. Returns 0 if all were counted, else 1."""

    sizes = parse_sizes(args.tokens)
    if args.markdown:
        if args.model:
            raise ConfigError(
                "--markdown prints all known models; accepted: --markdown without MODEL", param="model"
            )
        print(token_markdown(sizes))
        return 0
    found = token_rows(args.model, sizes)
    print(token_json(found, sizes) if args.json else token_table(found, sizes))
    return 1 if any(row.problem for row in found) else 0


def check(args: argparse.Namespace) -> int:
    """Print the report of a checkpoint. Returns 0 if it would load, else 1."""
    if args.markdown:
        raise ConfigError("--markdown is for the list of models; --check prints a table or --json")
    from fovea.engine.check import check_checkpoint

    report = check_checkpoint(args.check, args.revision, args.mmproj)
    if args.json:
        import json

        print(json.dumps(report.as_json()))
    else:
        print(check_table(report))
    return 0 if report.loads else 1


def listing() -> str:
    """Return two lines per architecture, none wider than 80 columns."""
    from fovea.engine.models.registry import ARCHITECTURES

    width = max(len(text) for entry in ARCHITECTURES for text in (entry.name, entry.model_type)) + 2
    lines = []
    for entry in ARCHITECTURES:
        lines.append(f"{entry.name:{width}}{entry.example}")
        lines.append(f"{entry.model_type:{width}}{entry.vision}; {entry.text}")
    lines.append("")
    lines.append("A model is a folder, a hub id of one of these, or fovea-tiny (installed).")
    return "\n".join(lines)


def markdown() -> str:
    """Return the table of docs/models.md. A test keeps the two equal."""
    from fovea.engine.models.registry import ARCHITECTURES

    return markdown_table(
        ("model_type", "name", "vision", "text", "for example"),
        ((f"`{each.model_type}`", each.name, each.vision, each.text, each.example) for each in ARCHITECTURES),
    )
