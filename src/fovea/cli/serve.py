"""fovea serve [MODEL]: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fovea.cli import options
from fovea.cli.common import (
    LOG_LEVELS,
    add_engine_options,
    config_file,
    engine_arguments,
    keys_of,
    model_of,
    use_log_format,
)
from fovea.cli.loading import loading_shown
from fovea.core.errors import ConfigError
from fovea.core.findings import Findings
from fovea.core.names import served_name
from fovea.core.protocols import EngineClient
from fovea.core.settings import check_settings, setting
from fovea.engine.config import EngineConfig
from fovea.engine.parallel.places import divided, place_of
from fovea.http.browsers import with_own_name
from fovea.server.settings import ServerSettings

if TYPE_CHECKING:
    from fovea.engine.process.sources import ModelSource, SimulatedSource

OnReady = Callable[[str], None]
"""Called with the URL of a server that accepts requests."""
log = logging.getLogger("fovea.serve")
FIRST = (
    "api_key", "admin_key", "metrics_key", "log_level", "simulate", "host", "port", "served_model_name",
    "config", "dtype", "quantization", "device", "threads", "kernels", "revision", "mmproj",
    "kv_cache_mib",
    "max_context", "embed_cache_mib", "embed_disk_dir", "embed_disk_mib", "target_itl_ms",
    "target_ttft_ms", "speculate", "tensor_parallel", "max_running", "max_queue", "detail_policy",
    "visual_tokens", "drain_seconds", "request_timeout", "tls_cert", "tls_key", "trusted_proxies",
    "keys_file", "cors_origins",
    "max_body_mib", "batch_dir", "log_format", "otlp_endpoint", "max_images", "allow_remote",
    "allowed_hosts",
)  # fmt: skip
"""Settings that people set. --help shows their flags, and --help-all those of all settings."""


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Address and name of the server, and the simulation."""

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8000, "Port to listen on. 0: any free port.", low=0, high=65535)
    served_model_name: str = setting(
        "", "Name of the model for clients. Empty: derived from the folder or hub id."
    )
    simulate: bool = setting(
        False, "Serve no model, but filler words with the latencies of a cost model and the real scheduler."
    )
    engine_process: str = setting(
        "off",
        "Whether the engine runs in a process of its own, so that it and the server do not wait for each "
        "other's Python lock. It needs a second processor core.",
        choices=("on", "off"),
    )
    data_parallel: int = setting(
        1,
        "Engine processes that serve the model beside each other, over one copy of the weights. Each has an "
        "equal part of the cores, those of one NUMA node if possible. For CPUs: one for each socket.",
        low=1,
        high=64,
    )
    cost: Path | None = setting(None, "File of the cost model for --simulate; none: fovea-tiny on a CPU.")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.cost is not None and not self.simulate:
            raise ConfigError("a cost model is for --simulate, which is not given", param="cost")


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        description=f"{__doc__} Every flag is also an environment variable and a key of the --config file: "
        "--max-queue, FOVEA_MAX_QUEUE and max_queue. Flags override variables, and variables the file. "
        "These are the settings that most people set; --help-all shows all of them.",
        usage="fovea serve [OPTIONS] [MODEL]",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a folder, a hub id, or fovea-tiny (default)"
    )
    parser.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="open /v1 only to this key; may be given several times "
        "(FOVEA_API_KEY keeps it out of the process list)",
    )
    parser.add_argument(
        "--admin-key",
        action="append",
        metavar="KEY",
        help="open /admin only to this key; may be given several times (or FOVEA_ADMIN_KEY)",
    )
    parser.add_argument(
        "--metrics-key",
        action="append",
        metavar="KEY",
        help="open /metrics only to this key and to admin keys; may be given several times "
        "(or FOVEA_METRICS_KEY)",
    )
    parser.add_argument(
        "--log-level", choices=LOG_LEVELS, help="least severity that is logged (default: info)"
    )
    parser.add_argument(
        "--simulate",
        action="store_const",
        const=True,
        help="serve no model, but filler words with the latencies of a cost model and the real scheduler",
    )
    options.add_options(parser, "address and name", ServeSettings, skip=("simulate",))
    add_engine_options(parser, model_flag=False, serving=True)
    options.add_options(parser, "server", ServerSettings)
    parser.add_argument(
        "--check",
        action="store_true",
        help="read settings, keys, certificate, chat template and the files of the model, compare sizes with "
        "the memory, and say what would run; start nothing, and exit with 2 if something is wrong",
    )
    options.show_first(parser, (*FIRST, "check"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Start the server, or with --check only say what would run."""
    if args.check:
        from fovea.cli.check import check_server

        return check_server(args)
    return run_server(args)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that flags, variables and the file say; None: that part is wrong.

    model, template: of the engine; empty and None for a simulation. simulates: whether it is one.
    """

    file: Mapping[str, Any]
    address: ServeSettings | None = None
    settings: ServerSettings | None = None
    engine: EngineConfig | None = None
    model: str = ""
    template: str | None = None
    simulates: bool = False


def read_inputs(args: argparse.Namespace, findings: Findings, **fixed: Any) -> Inputs:
    """Read flags, variables and the file. All errors are added to the findings.

    fixed: values of ServeSettings that the command sets itself.
    """
    found = Inputs(config_file(args, findings))
    with findings.part():
        found = replace(found, address=options.settings(ServeSettings, args, found.file, **fixed))
    keys: dict[str, tuple[str, ...]] = {}
    for name in ("api_key", "admin_key", "metrics_key"):
        with findings.part():
            keys[f"{name}s"] = keys_of(name, args, found.file)
    with findings.part():
        settings = options.settings(ServerSettings, args, found.file, **keys)
        host = found.address.host if found.address else ""
        found = replace(found, settings=replace(settings, http=with_own_name(settings.http, host)))
    simulates = found.address.simulate if found.address else bool(getattr(args, "simulate", None))
    found = replace(found, model=model_of(args, found.file), simulates=simulates)
    with findings.part():
        if simulates:
            found = replace(found, engine=_simulated_config(args, found.file))
        else:
            _, engine, template = engine_arguments(args, found.file)
            found = replace(found, engine=engine, template=template)
    return found


def run_server(args: argparse.Namespace, on_ready: OnReady = lambda url: None, **fixed: Any) -> int:
    """Run a server until a signal arrives, and return the exit status.

    on_ready: called with the server's URL once it accepts requests. It must not block.
    fixed: values of ServeSettings that the command sets itself.
    """
    findings = Findings()
    found = read_inputs(args, findings, **fixed)
    findings.check()
    assert found.address is not None
    assert found.settings is not None
    assert found.engine is not None
    use_log_format(found.settings.logs.log_format)
    if found.address.simulate:
        return _serve_simulated(found.address, found.settings, found.engine, on_ready)
    return _serve_model(found.address, found.settings, (found.model, found.engine, found.template), on_ready)


def _serve_simulated(
    simulation: ServeSettings, settings: ServerSettings, config: EngineConfig, on_ready: OnReady
) -> int:
    """Serve a simulated engine. This imports no torch, so the server starts at once."""
    from fovea.engine.process.sources import SimulatedSource
    from fovea.planner.cost import CostModel
    from fovea.server.app import create_app
    from fovea.server.run import serve

    cost = CostModel.load(simulation.cost) if simulation.cost else CostModel()
    port = free_port(simulation.host, simulation.port)

    def start() -> None:
        _announce(settings, simulation.host, port)
        log.info("ready: no model, simulated; costs: %s", cost.made_from)
        on_ready(url_of(settings, simulation.host, port))

    source = SimulatedSource(config, cost, simulation.served_model_name or "fovea-simulated")
    engine: EngineClient = _loader(source, simulation, settings)()
    return serve(create_app(engine, settings), simulation.host, port, on_start=start)


def _loader(
    source: ModelSource | SimulatedSource, address: ServeSettings, settings: ServerSettings
) -> Callable[[], EngineClient]:
    """Return a function that loads the engine, in this process, in one of its own, or in several."""
    if address.data_parallel > 1:
        return _fleet_loader(source, address, settings)
    if address.engine_process == "off":
        return source.load
    from fovea.engine.process.client import RemoteEngine

    return lambda: RemoteEngine(source, log_format=settings.logs.log_format)


def _fleet_loader(
    source: ModelSource | SimulatedSource, address: ServeSettings, settings: ServerSettings
) -> Callable[[], EngineClient]:
    """Return a function that loads several engines, each in a process of its own with a part of the cores.

    Raises ConfigError if there are more processes than cores.
    """
    from fovea.engine.config.others import check_event_addresses
    from fovea.engine.process.client import RemoteEngine
    from fovea.engine.process.cores import divide_cores
    from fovea.engine.process.fleet import EngineFleet
    from fovea.engine.process.host import Place
    from fovea.engine.process.sources import numbered

    count = address.data_parallel
    check_event_addresses(source.config.events, count)
    if address.simulate:  # it computes nothing
        places = [Place(processes=count)] * count
    else:
        # Every process inherits the pool; it is freed when this process and all of them have ended.
        pool = os.memfd_create("fovea-weights")
        places = [Place(cores, count, pool) for cores in divide_cores(count)]
    loads = [
        partial(RemoteEngine, numbered(source, number), log_format=settings.logs.log_format, place=place)
        for number, place in enumerate(places)
    ]
    return lambda: EngineFleet(loads)


def check_parallel(config: EngineConfig) -> None:
    """Refuse settings that several engine processes cannot have. Raises ConfigError."""
    from fovea.engine.process.sources import ONLY_CPU

    if config.parallel.size > 1:
        raise ConfigError(
            "data_parallel is for models of one process each; accepted with tensor_parallel and "
            "pipeline_parallel: 1",
            param="data_parallel",
        )
    if config.model.device.startswith("cuda"):
        raise ConfigError(ONLY_CPU, param="data_parallel")
    if not hasattr(os, "memfd_create"):
        raise ConfigError("data_parallel needs Linux; accepted on this system: 1", param="data_parallel")
    if config.peers.role != "all" or config.peers.answers_peers:
        raise ConfigError(
            f"data_parallel is for servers without peers, and role is {config.peers.role}; accepted: 1, or a "
            "server without role and peer_key",
            param="data_parallel",
        )


def _simulated_config(args: argparse.Namespace, file: Mapping[str, Any]) -> EngineConfig:
    """Return the settings that a simulation uses.

    Other flags are an error. Other variables and keys may be there for a real server, so they are only
    logged.
    """
    from fovea.engine.simulate.assemble import SERVER_SETTINGS, not_simulated

    if (model := options.lookup("model", args, file)) is not None:
        raise ConfigError(
            f"--simulate serves no model, but {model[1]} is {model[0]!r}; "
            "to name the server's model, use --served-model-name",
            param="model",
        )
    for name in not_simulated(SERVER_SETTINGS):
        given = options.lookup(name, args, file)
        if given is None:
            continue
        source = given[1]
        if getattr(args, name, None) is not None:
            raise ConfigError(
                f"{source} is not simulated; accepted with --simulate: {', '.join(sorted(SERVER_SETTINGS))}",
                param=name,
            )
        log.warning("not simulated, ignored: %s", source)
    return options.settings(EngineConfig, args, file, only=SERVER_SETTINGS)


def _serve_model(
    address: ServeSettings,
    settings: ServerSettings,
    engine: tuple[str, EngineConfig, str | None],
    on_ready: OnReady,
) -> int:
    from fovea.engine.process.sources import ModelSource
    from fovea.server.app import create_app
    from fovea.server.run import serve, stop
    from fovea.server.starting import StartingClient

    model, config, template = engine
    settings = replace(settings, role=config.peers.role, peer_key=_peer_key(config))
    place = place_of(config, os.environ)
    if place is not None and place.rank:  # a launcher runs this command on every device
        from fovea.engine.parallel.worker import Start, run_worker

        return run_worker(Start(model, divided(config), place))
    name = address.served_model_name or served_name(model)
    processes = address.data_parallel
    if processes > 1:
        check_parallel(config)
    elif address.engine_process == "off":  # else this process imports no torch, and the other one checks
        _check_folder(model, config.model.revision)
    load = _loader(ModelSource(model, config, template, name, processes), address, settings)
    host, port = address.host, free_port(address.host, address.port)

    def start() -> None:
        _announce(settings, host, port)
        client.start()

    url = url_of(settings, host, port)
    client = StartingClient(name, load, on_failure=stop, on_ready=lambda: on_ready(url))
    with loading_shown(log):
        status = serve(create_app(client, settings), host, port, on_start=start)
    if client.failure is not None:
        raise client.failure
    if client.status == "loading":
        # The server was stopped before the model was loaded. A thread within torch cannot be stopped, and
        # Python would abort while it shuts down around that thread. So the process ends here, after its
        # output is flushed.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)
    return status


def _peer_key(config: EngineConfig) -> str:
    """Return the key that opens the routes for peers; "": nobody may ask this engine."""
    return config.peers.peer_key if config.peers.answers_peers else ""


def _announce(settings: ServerSettings, host: str, port: int) -> None:
    """Log the address and who may use it. To be called when the port is open, after all checks."""
    log.info("%s  API: /v1  keys: %s", url_of(settings, host, port), keys_in_words(settings))


def url_of(settings: ServerSettings, host: str, port: int) -> str:
    """Return the server's URL, without a path."""
    shown = f"[{host}]" if ":" in host else host
    scheme = "http" if settings.http.tls_cert is None else "https"
    return f"{scheme}://{shown}:{port}"


def keys_in_words(settings: ServerSettings) -> str:
    """Say which keys open /v1; if none is needed, which paths need one all the same."""
    keys = [f"{len(settings.api_keys)}"] if settings.api_keys else []
    if (file := settings.access.keys_file) is not None:
        keys.append(f"those of {file}")
    if keys:
        return " and ".join(keys)
    closed = ["/admin"] if settings.admin_keys else []
    if (settings.admin_keys or settings.access.metrics_keys) and not settings.access.open_metrics:
        closed.append("/metrics")
    return f"none, open to all except {' and '.join(closed)}" if closed else "none, open to all"


def _check_folder(model: str, revision: str) -> None:
    """Refuse a name that is no folder, no GGUF file and no possible hub id, and a revision of a folder.

    The port is not open yet. Nothing is downloaded here. Raises CheckpointError and ConfigError.
    """
    from fovea.engine.load import resolve

    if not is_hub_id(model):
        resolve(model, revision)


def is_hub_id(model: str) -> bool:
    """Tell whether a name can only be a hub id: owner/name, and no such folder."""
    is_path = model.startswith((".", "/", "~")) or model.count("/") != 1
    return not is_path and not Path(model).exists()


def free_port(host: str, port: int) -> int:
    """Return the port, or a free one for port 0. Raises ConfigError if the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{host}:{port} cannot be listened on: {reason}", param="port") from error
        return int(probe.getsockname()[1])
