"""fovea serve [MODEL]: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import logging
import os
import socket
from collections.abc import Mapping
from typing import Any

from fovea.cli import options
from fovea.cli.common import add_engine_options, config_file, load_engine
from fovea.core.errors import ConfigError
from fovea.media.limits import MediaLimits
from fovea.server.settings import ServerSettings

log = logging.getLogger("fovea.serve")


def register(commands: Any) -> None:
    parser = commands.add_parser("serve", help="start the OpenAI-compatible server", description=__doc__)
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a folder, a hub id, or fovea-tiny (default)"
    )
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default: 8000)")
    parser.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="open /v1 only to this key; may be given several times",
    )
    parser.add_argument("--served-model-name", metavar="NAME", help="the name that clients use")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"))
    add_engine_options(parser, model_flag=False)
    options.add_options(parser, "server", ServerSettings, skip=("media", "api_keys"))
    options.add_options(parser, "images", MediaLimits)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from fovea.server.app import create_app
    from fovea.server.run import serve

    file = config_file(args)
    media = options.settings(MediaLimits, args, file)
    settings = options.settings(ServerSettings, args, file, media=media, api_keys=_api_keys(args, file))
    host, port = _address(args, file)
    _check_free(host, port)
    engine = load_engine(args, file)
    name = options.lookup("served_model_name", args, file)
    if name is not None:
        engine.rename(str(name[0]))
    info = engine.info
    log.info(
        "%s (%s, %.1f M parameters, %s on %s), context %d",
        info.name, info.architecture, info.parameters / 1e6, info.dtype, info.device, info.max_context,
    )  # fmt: skip
    log.info("http://%s:%d/v1  keys: %s", host, port, len(settings.api_keys) or "none, open to all")
    serve(create_app(engine, settings), host, port)
    return 0


def _api_keys(args: argparse.Namespace, file: Mapping[str, Any]) -> tuple[str, ...]:
    """--api-key, else FOVEA_API_KEY (several separated by commas), else api_key in the file."""
    if args.api_key:
        return tuple(args.api_key)
    value = os.environ.get("FOVEA_API_KEY") or file.get("api_key") or ()
    if isinstance(value, str):
        return tuple(key.strip() for key in value.split(",") if key.strip())
    return tuple(str(key) for key in value)


def _address(args: argparse.Namespace, file: Mapping[str, Any]) -> tuple[str, int]:
    host = options.lookup("host", args, file)
    port = options.lookup("port", args, file)
    try:
        number = int(port[0]) if port else 8000
    except ValueError as error:
        raise ConfigError(
            f"the port is {port[0] if port else ''!r}; accepted: 0 to 65535", param="port"
        ) from error
    if not 0 <= number <= 65535:
        raise ConfigError(f"the port is {number}; accepted: 0 to 65535", param="port")
    return (str(host[0]) if host else "127.0.0.1"), number


def _check_free(host: str, port: int) -> None:
    """A taken port is told before the model is loaded, not after."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{host}:{port} can not be listened on: {error.strerror}", param="port"
            ) from error
