"""fovea gateway: route requests to OpenAI-compatible engines."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fovea.cli import options
from fovea.cli.common import LOG_LEVELS, keys_of, set_log_level, use_log_format
from fovea.core.errors import ConfigError
from fovea.core.settings import check_settings, setting
from fovea.gateway.config import TABLES, BackendConfig, Tables, read_tables
from fovea.gateway.experiments.config import read_experiments
from fovea.gateway.settings import GatewaySettings
from fovea.http.browsers import with_own_name

if TYPE_CHECKING:
    from fovea.gateway.build import Setup

log = logging.getLogger("fovea.gateway")
NOT_DECODED = (
    "decode_threads", "image_workers", "video_workers", "image_decode_s", "video_decode_s",
    "decode_memory_mib", "pdf_workers", "pdf_render_s", "max_pdf_pages",
    "max_video_s", "max_video_frames", "max_video_frame_pixels",
    "max_video_decode_mpx", "max_media_mib", "file_root",
)  # fmt: skip
"""Settings of images and videos that have no effect here: the gateway decodes nothing and opens no files."""


@dataclass(frozen=True, slots=True)
class ListenSettings:
    """Address of the gateway."""

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8080, "Port to listen on. 0: any free port.", low=0, high=65535)

    def __post_init__(self) -> None:
        check_settings(self)


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "gateway",
        description=f"{__doc__} Every flag is also an environment variable and a key of the --config file, "
        "which holds backends, models and experiments, too (docs/gateway.md).",
    )
    parser.add_argument(
        "--backend",
        action="append",
        metavar="URL",
        help="an engine, such as http://10.0.0.7:8000; may be given several times",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings and tables (or FOVEA_CONFIG)")
    for role, what in (("api", "/v1"), ("admin", "/admin and /metrics")):
        parser.add_argument(
            f"--{role}-key",
            action="append",
            metavar="KEY",
            help=f"open {what} only to this key; may be given several times (or FOVEA_{role.upper()}_KEY)",
        )
    parser.add_argument(
        "--log-level", choices=LOG_LEVELS, help="least severity that is logged (default: info)"
    )
    options.add_options(parser, "address", ListenSettings)
    options.add_options(parser, "gateway", GatewaySettings, skip=NOT_DECODED)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from fovea.gateway.run import serve

    path = options.file_path(args.config)
    set_log_level(args, _read_file(path))
    for line in options.misspelt_variables([*_names(), "api_key", "admin_key"]):
        print(f"fovea: {line}", file=sys.stderr)
    listen = options.settings(ListenSettings, args, _read_file(path))
    make_setup = functools.partial(read_setup, args, path)
    setup = make_setup()  # wrong settings are reported before the port is open
    own = setup.settings
    is_closed = own.api_keys or own.admin_keys or own.keys_file is not None
    keys = "needed" if is_closed else "none, open to all"
    try:
        return serve(
            make_setup,
            listen.host,
            listen.port,
            lambda: log.info("http://%s:%d/v1  keys: %s", listen.host, listen.port, keys),
        )
    except OSError as error:
        raise ConfigError(
            f"{listen.host}:{listen.port} cannot be listened on: {error.strerror}", param="port"
        ) from error


def read_setup(args: argparse.Namespace, path: Path | None) -> Setup:
    """Read everything that one worker needs. It runs in every worker. Raises ConfigError."""
    file = _read_file(path)
    set_log_level(args, file)
    keys = {f"{name}s": keys_of(name, args, file) for name in ("api_key", "admin_key")}
    settings = options.settings(GatewaySettings, args, file, **keys)
    host = options.settings(ListenSettings, args, file).host
    settings = dataclasses.replace(settings, http=with_own_name(settings.http, host))
    folder = path.parent if path is not None else Path.cwd()
    from fovea.engine.vision.token_rules import rule_for
    from fovea.gateway.build import Setup

    use_log_format(settings.logs.log_format)
    return Setup(
        settings,
        _tables(args, path),
        read_experiments(file, folder),
        rule_for,
        None if path is None else functools.partial(_tables, args, path),
        path,
    )


def _tables(args: argparse.Namespace, path: Path | None) -> Tables:
    """Read the tables of the file, and add the backends of flags. Raises ConfigError."""
    tables = read_tables(_read_file(path), None if path is None else path.parent)
    flags = tuple(BackendConfig(url) for url in args.backend or ())
    merged = dataclasses.replace(tables, backends=(*flags, *tables.backends))
    if not merged.backends and not merged.discover:
        raise ConfigError(
            "no backend is given; accepted: --backend URL, or [[backend]] or [[discover]] in the file",
            param="backend",
        )
    return merged


def _read_file(path: Path | None) -> dict[str, Any]:
    return options.read_file(None if path is None else str(path), _names())


def _names() -> list[str]:
    """The keys of the file: settings and tables."""
    own = options.setting_names(ListenSettings, GatewaySettings)
    return [*(name for name in own if name not in NOT_DECODED), *TABLES, "log_level", "api_key", "admin_key"]
