"""What several commands share: the engine's flags, the file, the sampling flags, the way errors are shown."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fovea.cli import options
from fovea.core.image import DETAILS, PixelBudget
from fovea.engine.config import EngineConfig
from fovea.media.limits import MediaLimits
from fovea.server.settings import ServerSettings

if TYPE_CHECKING:
    from fovea.engine.engine import Engine

DEFAULT_MODEL = "fovea-tiny"
OWN_KEYS = ("model", "host", "port", "api_key", "log_level", "chat_template", "served_model_name")
ALL_KEYS = (*OWN_KEYS, *options.field_names(EngineConfig, MediaLimits, ServerSettings))


def add_engine_options(parser: argparse.ArgumentParser, *, model_flag: bool = True) -> None:
    if model_flag:
        parser.add_argument("--model", help=f"a folder, a hub id, or {DEFAULT_MODEL} (default)")
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file of settings; flags and FOVEA_* come first"
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", help="Jinja template to use instead of the checkpoint's"
    )
    options.add_options(parser, "engine", EngineConfig)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("answer")
    group.add_argument("--max-tokens", type=int, metavar="N", help="longest answer, in tokens")
    group.add_argument(
        "--temperature", type=float, metavar="X", help="0 is greedy (default: the checkpoint's)"
    )
    group.add_argument("--top-p", type=float, metavar="X")
    group.add_argument("--seed", type=int, metavar="N")
    group.add_argument("--detail", choices=DETAILS, default="auto", help="how closely to look at the images")
    group.add_argument("--max-pixels", type=int, metavar="N", help="pixels of an image that the model sees")


def sampling_values(args: argparse.Namespace) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_p", "seed")
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def pixel_budget(args: argparse.Namespace) -> PixelBudget:
    return PixelBudget(detail=args.detail, max_pixels=args.max_pixels)


def config_file(args: argparse.Namespace) -> dict[str, Any]:
    return options.read_file(args.config, ALL_KEYS)


def load_engine(args: argparse.Namespace, file: Mapping[str, Any]) -> Engine:
    """The engine that flags, environment and file ask for."""
    from pathlib import Path

    from fovea.core.errors import ConfigError
    from fovea.engine.engine import Engine

    model = options.lookup("model", args, file)
    template = options.lookup("chat_template", args, file)
    text = None
    if template is not None:
        try:
            text = Path(template[0]).expanduser().read_text()
        except OSError as error:
            raise ConfigError(f"{template[1]}: {template[0]} can not be read: {error.strerror}") from error
    config = options.settings(EngineConfig, args, file)
    return Engine.from_pretrained(
        str(model[0]) if model else DEFAULT_MODEL, config=config, chat_template=text
    )
