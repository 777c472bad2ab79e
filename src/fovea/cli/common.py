"""Parts that several commands share.

Flags of the engine, of sampling and of the form of an answer; the configuration file; starting an engine;
requests to a running server.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from fovea.cli import options
from fovea.cli.loading import loading_shown
from fovea.core.constraints import AnswerFormat
from fovea.core.errors import ConfigError, InvalidRequest
from fovea.core.findings import Findings
from fovea.core.media import AUTO, DETAILS, PixelBudget, VideoBudget, VisualTokens
from fovea.core.sampling import SamplingParams
from fovea.engine.config import EngineConfig, EngineOptions
from fovea.engine.visual_budget.methods import METHODS, find_method
from fovea.observe.logs import formatter
from fovea.server.settings import ServerSettings

if TYPE_CHECKING:
    from fovea.engine.engine import Engine


TIMEOUT_S = 70.0
"""Seconds without any data after which a request is given up."""


def call_server(url: str, path: str, *, method: str = "GET", key: str = "") -> tuple[int, bytes]:
    """Return the status and the body of the answer, whatever the status is.

    url: of the server. path: of the route.
    key: sent as a bearer token; "": none is sent.
    Raises ConfigError, with the reason, if there is no answer.
    """
    from http.client import HTTPException

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        return _send(method, url.rstrip("/") + path, headers)
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(f"no server answers at {url}: {reason}", param="url") from error


def _send(method: str, url: str, headers: dict[str, str]) -> tuple[int, bytes]:
    """Send a request. Redirections are not followed: the key is for this server alone."""
    from urllib import request

    opener = request.OpenerDirector()
    for handler in (request.ProxyHandler, request.HTTPHandler, request.HTTPSHandler, request.UnknownHandler):
        opener.add_handler(handler())
    with opener.open(request.Request(url, method=method, headers=headers), timeout=TIMEOUT_S) as answer:
        return answer.status, answer.read()


def add_format_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags. At most one of them can be given."""
    group = parser.add_argument_group("form of the answer").add_mutually_exclusive_group()
    group.add_argument(
        "--schema",
        type=Path,
        metavar="FILE",
        help="the answer is JSON that is valid against this JSON Schema",
    )
    group.add_argument("--choice", metavar="A,B,...", help="the answer is one of these texts")
    group.add_argument("--regex", metavar="PATTERN", help="the whole answer matches this regular expression")
    group.add_argument(
        "--grammar",
        type=Path,
        metavar="FILE",
        help="the answer follows this grammar, in Lark's notation or GBNF",
    )


def answer_format(args: argparse.Namespace) -> AnswerFormat | None:
    """Return the form that the flags set; None: any text. Raises InvalidRequest."""
    if args.schema is not None:
        return AnswerFormat.json_schema(_read(args.schema, "--schema"), param="--schema")
    if args.choice is not None:
        choices = [text.strip() for text in args.choice.split(",")]
        return AnswerFormat.choice(choices, param="--choice")
    if args.regex is not None:
        return AnswerFormat.regex(args.regex, param="--regex")
    if args.grammar is not None:
        return AnswerFormat.grammar(_read(args.grammar, "--grammar"), param="--grammar")
    return None


def _read(path: Path, flag: str) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{flag}: {path} cannot be read: {error.strerror}", param=flag) from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{flag}: {path} is not UTF-8 text", param=flag) from error


T = TypeVar("T")
DEFAULT_MODEL = "fovea-tiny"
OWN_KEYS = (
    "model", "host", "port", "api_key", "admin_key", "metrics_key", "log_level", "chat_template",
    "served_model_name", "simulate", "cost",
)  # fmt: skip
ALL_KEYS = (*OWN_KEYS, *options.setting_names(EngineConfig, ServerSettings))
LOG_LEVELS = ("debug", "info", "warning", "error")
SINGLE_USER: EngineOptions = {"max_queue": 0}
"""Engine settings of every command except `serve`: a single user needs no limit of the queue."""


ENGINE_FIRST = (
    "dtype", "quantization", "device", "threads", "kernels", "revision", "mmproj", "kv_cache_mib",
    "max_context", "speculate",
)  # fmt: skip
"""Engine settings of every command except `serve` that --help shows; --help-all shows all."""


def count(text: str) -> int:
    """Parse the value of a flag that takes a whole number from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def names(text: str) -> tuple[str, ...]:
    """Split A,B into names, each once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",")))


def utf8(text: str) -> str:
    """Return the text. Raises InvalidRequest if its bytes were not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("the question is not UTF-8 text", param="question") from error
    return text


def add_engine_options(
    parser: argparse.ArgumentParser, *, model_flag: bool = True, serving: bool = False
) -> None:
    """Add the flags of the engine.

    model_flag: whether the model is a flag; otherwise it is an argument of the command.
    serving: whether the command is `serve`, which has the settings of SINGLE_USER, too.
    """
    if model_flag:
        parser.add_argument("--model", help=f"a folder, a hub id, or {DEFAULT_MODEL} (default)")
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file of settings; flags and FOVEA_* override it"
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", help="Jinja template to use instead of the checkpoint's"
    )
    options.add_options(parser, "engine:", EngineConfig, skip=() if serving else tuple(SINGLE_USER))
    if not serving:
        options.hide(parser, set(options.setting_names(EngineConfig)).difference(ENGINE_FIRST))


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of an answer and of its images."""
    group = parser.add_argument_group("answer")
    group.add_argument("--max-tokens", type=count, metavar="N", help="longest answer, in tokens")
    group.add_argument(
        "--temperature", type=float, metavar="X", help="0 is greedy (default: the checkpoint's)"
    )
    group.add_argument(
        "--top-p",
        type=float,
        metavar="X",
        help="sample from the likeliest tokens that have this probability together",
    )
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    add_image_options(group)
    add_format_options(parser)


def add_image_options(group: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """Add the flags of images: detail level and pixels."""
    group.add_argument(
        "--detail", choices=DETAILS, default="auto", help="detail level of the images (default: auto)"
    )
    group.add_argument("--max-pixels", type=count, metavar="N", help="pixels of an image that the model sees")


def add_reduction_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of visual-token reduction."""
    group = parser.add_argument_group("visual tokens")
    group.add_argument(
        "--budget",
        type=_share_or_count,
        metavar="X",
        help="how many of each image's visual tokens are kept (method views: of all images' together): "
        "a share up to 1, a number, or auto: as many as the question needs (method relevance)",
    )
    method = group.add_argument(
        "--method",
        metavar="NAME",
        help=f"method that chooses them: {', '.join(METHODS)} (default: relevance)",
    )
    options.accepts(method, METHODS)


def visual_tokens(args: argparse.Namespace, *, explain: bool = False) -> VisualTokens | None:
    """Return the wish of the flags for visual tokens; None: the flags have none. Raises InvalidRequest.

    explain: whether the answer has to explain which regions were kept. Then half of the tokens are kept if no
        flag says how many: all tokens need no explanation.
    """
    if args.budget is None and args.method is None and not explain:
        return None
    keep = None if isinstance(args.budget, int) else args.budget
    if args.budget is None and explain:
        keep = 0.5
    budget = args.budget if isinstance(args.budget, int) else None
    return VisualTokens(find_method(args.method or "relevance").name, keep, budget, explain)


def _share_or_count(text: str) -> float | int | Literal["auto"]:
    """Parse --budget: a number up to 1 is a share, a larger whole number is a number of tokens."""
    if text == AUTO:
        return AUTO
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, and not {AUTO}") from None
    if value > 1 and value.is_integer():
        return int(value)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is neither a share up to 1 nor a whole number of tokens")
    return value


def add_video_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of videos."""
    group = parser.add_argument_group("videos")
    group.add_argument(
        "--fps", type=float, metavar="X", help="frames that are used per second (default: the model's)"
    )
    group.add_argument("--max-frames", type=count, metavar="N", help="most frames that are used")
    group.add_argument(
        "--video-pruning-rate",
        type=float,
        default=0.0,
        metavar="X",
        help="share of visual tokens that is left out where little moves, 0 to 0.95 (default: 0)",
    )


def video_budget(args: argparse.Namespace) -> VideoBudget:
    """Return the video budget of the flags. Raises InvalidRequest."""
    return VideoBudget(fps=args.fps, max_frames=args.max_frames, pruning_rate=args.video_pruning_rate)


def sampling_values(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters of the flags. They are checked here, before a model is loaded.

    Raises InvalidRequest.
    """
    names = ("max_tokens", "temperature", "top_p", "seed")
    values = {name: value for name in names if (value := getattr(args, name)) is not None}
    form = answer_format(args)
    if form is not None:
        values["format"] = form
    SamplingParams(**values)
    return values


def pixel_budget(args: argparse.Namespace, visual: VisualTokens | None = None) -> PixelBudget:
    """Return the image budget of the flags."""
    return PixelBudget(detail=args.detail, max_pixels=args.max_pixels, visual=visual)


def config_file(args: argparse.Namespace, findings: Findings | None = None) -> Mapping[str, Any]:
    """Read the configuration file, and set the log level that flags, environment or file give.

    findings: collects errors; None: they are raised as ConfigError.
    Misspelt environment variables are printed to stderr.
    """
    found = findings or Findings()
    file = options.read_file(args.config, ALL_KEYS, found)
    for line in options.misspelt_variables(ALL_KEYS):
        print(f"fovea: {line}", file=sys.stderr)
    with found.part():
        set_log_level(args, file)
    if findings is None:
        found.check()
    return file


def set_log_level(args: argparse.Namespace, file: Mapping[str, Any]) -> None:
    """Set the log level that flags, environment or file give. Raises ConfigError."""
    level, source = options.lookup("log_level", args, file) or ("info", "")
    if str(level).lower() not in LOG_LEVELS:
        raise ConfigError(f"{source} is {level!r}; accepted: {', '.join(LOG_LEVELS)}", param="log_level")
    logging.getLogger("fovea").setLevel(str(level).upper())


def use_log_format(form: str) -> None:
    """Write the log in a form: "text" or "json"."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(formatter(form))


def keys_of(name: str, args: argparse.Namespace, file: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of a flag, else of its environment variable, else of the configuration file.

    The variable separates several keys by commas; the file has one key or a list. An empty key is an error,
    so that a server that should be closed never starts open.

    name: "api_key", "admin_key" or "metrics_key".
    """
    value, source = options.lookup(name, args, file) or ((), "")
    keys = value.split(",") if isinstance(value, str) else value
    good = isinstance(keys, list | tuple) and all(isinstance(key, str) and key.strip() for key in keys)
    if not good or (source and not keys):
        raise ConfigError(
            f"{source} holds an empty key or none; accepted: keys of at least one character", param=f"{name}s"
        )
    return tuple(key.strip() for key in keys)


def load_engine(args: argparse.Namespace, file: Mapping[str, Any], **fixed: Any) -> Engine:
    """Load the engine that flags, environment and file configure.

    fixed: settings that the command sets itself.
    """
    # Imports and the model are 250,000 objects that stay, and to look for garbage among them takes long.
    gc.disable()
    try:
        with loading_shown():
            return engine_loader(args, file, **fixed)()
    finally:
        gc.freeze()
        gc.enable()


def engine_loader(args: argparse.Namespace, file: Mapping[str, Any], **fixed: Any) -> Callable[[], Engine]:
    """Return a function that loads the engine. The settings are read and checked now.

    fixed: settings that the command sets itself.
    Raises ConfigError.
    """
    name, config, template = engine_arguments(args, file, **fixed)
    from fovea.engine.engine import Engine

    return lambda: Engine.from_pretrained(name, config=config, chat_template=template)


def engine_arguments(
    args: argparse.Namespace, file: Mapping[str, Any], **fixed: Any
) -> tuple[str, EngineConfig, str | None]:
    """Return the model, the settings and the chat template of an engine; None: the model's own template.

    fixed: settings that the command sets itself.
    Raises ConfigError.
    """
    findings = Findings()
    with findings.part():
        template = _read_template(args, file)
    with findings.part():
        config = options.settings(EngineConfig, args, file, **fixed)
    findings.check()
    return model_of(args, file), config, template


def model_of(args: argparse.Namespace, file: Mapping[str, Any]) -> str:
    """Return the name of the model that flags, environment or file give."""
    model = options.lookup("model", args, file)
    return str(model[0]) if model else DEFAULT_MODEL


def check_writable(path: Path) -> None:
    """Check that a file can be written, before long work. Nothing is left behind. Raises ConfigError."""
    try:
        target = path.resolve()  # so that a link without a target is not removed
        exists = target.exists()
        target.open("ab").close()
        if not exists:
            target.unlink()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


async def run_and_close(engine: Engine, work: Coroutine[Any, Any, T]) -> T:
    """Return the work's result.

    The engine is closed in any case, before the event loop that gets its answers.
    """
    try:
        return await work
    finally:
        await engine.close()


def _read_template(args: argparse.Namespace, file: Mapping[str, Any]) -> str | None:
    entry = options.lookup("chat_template", args, file)
    if entry is None:
        return None
    path, source = entry
    try:
        return Path(str(path)).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{source}: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: {path} is not UTF-8 text") from error


def add_bounds(parser: argparse.ArgumentParser, ttft_ms: float) -> None:
    """Add the flags that say which answers of a simulation are good. ttft_ms: default of the first token."""
    for name, default, text in (
        ("--ttft-ms", ttft_ms, "a good answer has its first token within this time"),
        ("--itl-ms", 50.0, "and then this mean time per token"),
    ):
        parser.add_argument(
            name, type=float, default=default, metavar="X", help=f"{text} (default: {default:g})"
        )
