"""fovea gateway: route requests to OpenAI-compatible engines."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fovea.cli import options
from fovea.cli.common import LOG_LEVELS, keys_of, set_log_level, use_log_format
from fovea.core.config_files import TomlFile
from fovea.core.errors import ConfigError
from fovea.core.findings import Findings
from fovea.core.settings import check_settings, setting
from fovea.gateway.config import TABLES, BackendConfig, Tables, check_backends, read_tables
from fovea.gateway.experiments.config import ExperimentConfig, read_experiments
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
    parser.add_argument(
        "--check",
        action="store_true",
        help="read settings, tables, keys, prices and certificate, and say what would run; start nothing, "
        "ask no backend, and exit with 2 if something is wrong",
    )
    options.add_options(parser, "address", ListenSettings)
    options.add_options(parser, "gateway", GatewaySettings, skip=NOT_DECODED)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.check:
        from fovea.cli.check import check_gateway

        return check_gateway(args)
    from fovea.gateway.run import serve

    path = options.file_path(args.config)
    make_setup = functools.partial(read_setup, args, path)
    setup = make_setup()  # wrong settings are reported before the port is open
    for line in misspelt():
        print(f"fovea: {line}", file=sys.stderr)
    listen = options.settings(ListenSettings, args, _read_file(path))
    own = setup.settings
    is_closed = own.api_keys or own.admin_keys or own.keys_file is not None
    keys = "needed" if is_closed else "none, open to all"
    try:
        return serve(
            make_setup,
            listen.host,
            listen.port,
            lambda: log.info("http://%s:%d  API: /v1  keys: %s", listen.host, listen.port, keys),
        )
    except OSError as error:
        raise ConfigError(
            f"{listen.host}:{listen.port} cannot be listened on: {error.strerror}", param="port"
        ) from error


def misspelt() -> list[str]:
    """Return a line for every variable that resembles a setting of the gateway but is none."""
    return options.misspelt_variables([*_names(), "api_key", "admin_key"])


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that flags, variables and the file say; None: that part is wrong."""

    listen: ListenSettings | None = None
    settings: GatewaySettings | None = None
    tables: Tables | None = None
    experiments: ExperimentConfig | None = None


def read_inputs(args: argparse.Namespace, path: Path | None, findings: Findings) -> Inputs:
    """Read flags, variables and the file. All errors are added to the findings."""
    file, found = options.read_file(None if path is None else str(path), _names(), findings), Inputs()
    with findings.part():
        set_log_level(args, file)
    with findings.part():
        found = dataclasses.replace(found, listen=options.settings(ListenSettings, args, file))
    keys: dict[str, tuple[str, ...]] = {}
    for name in ("api_key", "admin_key"):
        with findings.part():
            keys[f"{name}s"] = keys_of(name, args, file)
    with findings.part():
        settings = options.settings(GatewaySettings, args, file, **keys)
        host = found.listen.host if found.listen else ""
        http = with_own_name(settings.http, host)
        found = dataclasses.replace(found, settings=dataclasses.replace(settings, http=http))
    with findings.part():
        found = dataclasses.replace(found, tables=_tables(args, file, path))
    with findings.part(), _errors_of(file):
        folder = path.parent if path is not None else Path.cwd()
        found = dataclasses.replace(found, experiments=read_experiments(file, folder))
    return found


def read_setup(args: argparse.Namespace, path: Path | None) -> Setup:
    """Read everything that one worker needs. It runs in every worker. Raises ConfigError with all errors."""
    findings = Findings()
    found = read_inputs(args, path, findings)
    findings.check()
    assert found.settings is not None
    assert found.tables is not None
    assert found.experiments is not None
    from fovea.engine.vision.token_rules import rule_for
    from fovea.gateway.build import Setup

    use_log_format(found.settings.logs.log_format)
    again = None if path is None else functools.partial(_tables_again, args, path)
    return Setup(found.settings, found.tables, found.experiments, rule_for, again, path)


def _tables_again(args: argparse.Namespace, path: Path) -> Tables:
    return _tables(args, _read_file(path), path)


def _errors_of(file: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Name file and line in the errors of a block, if there is a file."""
    return file.errors() if isinstance(file, TomlFile) else contextlib.nullcontext()


def _tables(args: argparse.Namespace, file: Mapping[str, Any], path: Path | None) -> Tables:
    """Read the tables of the file, and add the backends of flags. Raises ConfigError."""
    with _errors_of(file):
        tables = read_tables(file, None if path is None else path.parent)
    flags = tuple(BackendConfig(url) for url in args.backend or ())
    merged = dataclasses.replace(tables, backends=(*flags, *tables.backends))
    if not merged.backends and not merged.discover:
        raise ConfigError(
            "no backend is given; accepted: --backend URL, or [[backend]] or [[discover]] in the file",
            param="backend",
        )
    with _errors_of(file):
        check_backends(merged)
    return merged


def _read_file(path: Path | None) -> Mapping[str, Any]:
    return options.read_file(None if path is None else str(path), _names())


def _names() -> list[str]:
    """The keys of the file: settings and tables."""
    own = options.setting_names(ListenSettings, GatewaySettings)
    return [*(name for name in own if name not in NOT_DECODED), *TABLES, "log_level", "api_key", "admin_key"]
