"""What several commands share: the engine's flags, the file, the sampling flags, the way errors are shown."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fovea.cli import options
from fovea.core.errors import ConfigError, InvalidRequest
from fovea.core.image import DETAILS, PixelBudget, VisualTokens
from fovea.core.sampling import SamplingParams
from fovea.core.video import VideoBudget
from fovea.engine.config import EngineConfig, EngineOptions
from fovea.engine.visual_budget.methods import METHODS, method
from fovea.server.settings import ServerSettings

if TYPE_CHECKING:
    from fovea.engine.engine import Engine

T = TypeVar("T")
DEFAULT_MODEL = "fovea-tiny"
OWN_KEYS = (
    "model", "host", "port", "api_key", "admin_key", "log_level", "chat_template", "served_model_name", "simulate", "cost",
)  # fmt: skip
ALL_KEYS = (*OWN_KEYS, *options.setting_names(EngineConfig, ServerSettings))
LOG_LEVELS = ("debug", "info", "warning", "error")
SINGLE_USER: EngineOptions = {"max_queue": 0}
"""Engine settings of every command but `serve`: a single user needs no bound on the queue."""


def count(text: str) -> int:
    """The type of flags that take a number from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def names(text: str) -> tuple[str, ...]:
    """Those of A,B, each once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",")))


def utf8(text: str) -> str:
    """The text, unless it came in bytes that are none. Raises InvalidRequest."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("the question is not UTF-8 text", param="question") from error
    return text


def add_engine_options(
    parser: argparse.ArgumentParser, *, model_flag: bool = True, serving: bool = False
) -> None:
    if model_flag:
        parser.add_argument("--model", help=f"a folder, a hub id, or {DEFAULT_MODEL} (default)")
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file of settings; flags and FOVEA_* come first"
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", help="Jinja template to use instead of the checkpoint's"
    )
    options.add_options(parser, "engine:", EngineConfig, skip=() if serving else tuple(SINGLE_USER))


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("answer")
    group.add_argument("--max-tokens", type=count, metavar="N", help="longest answer, in tokens")
    group.add_argument(
        "--temperature", type=float, metavar="X", help="0 is greedy (default: the checkpoint's)"
    )
    group.add_argument(
        "--top-p", type=float, metavar="X", help="choose among the likeliest tokens of this share together"
    )
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    add_image_options(group)


def add_image_options(group: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    group.add_argument("--detail", choices=DETAILS, default="auto", help="how closely to look at the images")
    group.add_argument("--max-pixels", type=count, metavar="N", help="pixels of an image that the model sees")


def add_reduction_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("visual tokens")
    group.add_argument(
        "--budget",
        type=_share_or_count,
        metavar="X",
        help="how many of each image's visual tokens are kept (views: of all images' together): a share up to 1, or a number",
    )
    group.add_argument(
        "--method", metavar="NAME", help=f"what chooses them: {', '.join(METHODS)} (default: relevance)"
    )


def visual_tokens(args: argparse.Namespace, *, explain: bool = False) -> VisualTokens | None:
    """What the flags say. Raises InvalidRequest; None: nothing."""
    if args.budget is None and args.method is None and not explain:
        return None
    keep = args.budget if isinstance(args.budget, float) else None
    budget = args.budget if isinstance(args.budget, int) else None
    return VisualTokens(method(args.method or "relevance").name, keep, budget, explain)


def _share_or_count(text: str) -> float | int:
    """1 is all of them; larger whole numbers are tokens."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if value > 1 and value.is_integer():
        return int(value)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is neither a share up to 1 nor a whole number of tokens")
    return value


def add_video_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("videos")
    group.add_argument(
        "--fps", type=float, metavar="X", help="frames looked at per second (default: the model's)"
    )
    group.add_argument("--max-frames", type=count, metavar="N", help="frames looked at, at most")
    group.add_argument(
        "--video-pruning-rate",
        type=float,
        default=0.0,
        metavar="X",
        help="share of visual tokens left out where little moves, 0 to 0.95 (default: 0)",
    )


def video_budget(args: argparse.Namespace) -> VideoBudget:
    return VideoBudget(fps=args.fps, max_frames=args.max_frames, pruning_rate=args.video_pruning_rate)


def sampling_values(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags say, checked: before a model is loaded is the time to hear of a mistake."""
    names = ("max_tokens", "temperature", "top_p", "seed")
    values = {name: value for name in names if (value := getattr(args, name)) is not None}
    SamplingParams(**values)
    return values


def pixel_budget(args: argparse.Namespace, visual: VisualTokens | None = None) -> PixelBudget:
    return PixelBudget(detail=args.detail, max_pixels=args.max_pixels, visual=visual)


def config_file(args: argparse.Namespace) -> dict[str, Any]:
    """The file's settings. The log level, which any source may set, holds from here on."""
    file = options.read_file(args.config, ALL_KEYS)
    for line in options.misspelt_variables(ALL_KEYS):
        print(f"fovea: {line}", file=sys.stderr)
    level, source = options.lookup("log_level", args, file) or ("info", "")
    if str(level).lower() not in LOG_LEVELS:
        raise ConfigError(f"{source} is {level!r}; accepted: {', '.join(LOG_LEVELS)}", param="log_level")
    logging.getLogger("fovea").setLevel(str(level).upper())
    return file


def load_engine(args: argparse.Namespace, file: Mapping[str, Any], **fixed: Any) -> Engine:
    """The engine that flags, environment and file ask for; `fixed` are settings that nobody may set."""
    return engine_loader(args, file, **fixed)()


def engine_loader(args: argparse.Namespace, file: Mapping[str, Any], **fixed: Any) -> Callable[[], Engine]:
    """What loads that engine. The settings are read now: a wrong one is told before anything else is begun."""
    model = options.lookup("model", args, file)
    template = _template(args, file)
    config = options.settings(EngineConfig, args, file, **fixed)
    from fovea.engine.engine import Engine

    name = str(model[0]) if model else DEFAULT_MODEL
    return lambda: Engine.from_pretrained(name, config=config, chat_template=template)


def check_writable(path: Path) -> None:
    """Before an hour of measuring, and without leaving anything behind. Raises ConfigError."""
    try:
        target = path.resolve()  # a link that leads nowhere yet stays one
        there = target.exists()
        target.open("ab").close()
        if not there:
            target.unlink()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


async def closing(engine: Engine, work: Coroutine[Any, Any, T]) -> T:
    """The work's result. However it ends, the engine ends before the event loop that its answers go to."""
    try:
        return await work
    finally:
        await engine.close()


def _template(args: argparse.Namespace, file: Mapping[str, Any]) -> str | None:
    found = options.lookup("chat_template", args, file)
    if found is None:
        return None
    try:
        return Path(str(found[0])).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{found[1]}: {found[0]} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{found[1]}: {found[0]} is not UTF-8 text") from error
