"""The subject of the checks of `fovea doctor`: settings, facts about model and kernels, servers, and load.

Here the packages meet that the doctor may not import itself: the engine, the load generator, the monitoring.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import secrets
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fovea.bench import session as event_loop
from fovea.bench.measure import Sample
from fovea.bench.run import WorkloadResult
from fovea.bench.session import Session, measure
from fovea.bench.settings import Shape, Target, Traffic
from fovea.bench.sla import DEFAULT_SLA, Sla
from fovea.cli import options
from fovea.cli.common import DEFAULT_MODEL, config_file, keys_of
from fovea.cli.serve import ServeSettings
from fovea.core.errors import ConfigError
from fovea.core.settings import flat_values
from fovea.doctor.launch import ProcessLauncher
from fovea.doctor.load import DoctorSettings, LoadFigures, LoadTest
from fovea.doctor.machine import ThisMachine
from fovea.doctor.server import HttpWeb, Server
from fovea.doctor.subject import BuiltFacts, CheckpointFacts, KernelFacts, MonitoringFacts, Subject, Workload
from fovea.engine.config import EngineConfig
from fovea.server.settings import ServerSettings

REFUSED = ("http 429", "http 503")


class Silent:
    """An observer that shows nothing."""

    def begin(self, name: str, total: int) -> None:
        """Ignore the beginning of a workload."""

    def advance(self, sample: Sample) -> None:
        """Ignore the end of a request."""


def load_test(settings: DoctorSettings, sla: Sla | None) -> LoadTest:
    """Return a load test. sla: targets; None: latencies are not judged."""
    shape = Shape(
        visual_tokens=(settings.image_tokens,),
        token_side=settings.token_side,
        prompt_tokens=settings.prompt_tokens,
        output_tokens=settings.output_tokens,
        repeats=1,
        warmup=0,
    )

    def closed(server: Server, clients: int, requests: int) -> LoadFigures:
        traffic = Traffic(clients=clients, requests=requests)
        return _figures(_measure(server, "closed", shape, traffic, sla), sla)

    def arriving(server: Server, rate: float, requests: int) -> LoadFigures:
        traffic = Traffic(rate=(rate,), requests=requests)
        return _figures(_measure(server, "open", shape, traffic, sla), sla)

    return LoadTest(closed, arriving, settings, judged=sla is not None)


def _measure(server: Server, name: str, shape: Shape, traffic: Traffic, sla: Sla | None) -> WorkloadResult:
    if not server.takes_images:
        traffic = replace(traffic, text=1.0)
    session = Session(
        target=Target(server.url, api_key=server.api_key or None),
        names=(name,),
        shape=shape,
        traffic=traffic,
        nonce=uuid.uuid4().hex[:8],
        sla=sla or DEFAULT_SLA,
    )
    return event_loop.run(measure(session, Silent())).results[0]


def _figures(result: WorkloadResult, sla: Sla | None) -> LoadFigures:
    summary = result.summary
    missed = [
        f"{each.name} is {each.value:.6g}, target {each.limit:.6g}"
        for each in result.verdicts
        if each.met is False
    ]
    return LoadFigures(
        requests=summary.requests,
        failed=summary.failed,
        refused=sum(count for kind, (count, _) in summary.errors.items() if kind in REFUSED),
        errors={kind: count for kind, (count, _) in summary.errors.items()},
        seconds=summary.seconds,
        per_second=summary.requests_per_s,
        ttft=(summary.ttft.p50, summary.ttft.p95, summary.ttft.p99),
        end_to_end=(summary.end_to_end.p50, summary.end_to_end.p95, summary.end_to_end.p99),
        missed=missed if sla is not None else (),
    )


OWN_FLAGS = (
    "--tls-cert", "none", "--tls-key", "none",
    "--batch-dir", "none",
    "--access-log", "false",
    "--otlp-endpoint", "",
)  # fmt: skip
"""Settings of an own server in which it differs from the user's.

It has no TLS, because the certificate would name another host. It does not go on with the batches of a server
that may be running, and adds nothing to its logs and traces.
"""
ROLES = ("api_key", "admin_key", "metrics_key")


@contextlib.contextmanager
def wired(args: argparse.Namespace) -> Iterator[Subject]:
    """Read the flags and yield the subject. At the end, no process that doctor started is left.

    Raises ConfigError for wrong flags.
    """
    from fovea.bench.sla import read_sla

    doctor = options.settings(DoctorSettings, args, {})
    sla = read_sla(Path(args.sla)) if args.sla else None
    is_url = bool(args.target) and args.target.startswith(("http://", "https://"))
    common: dict[str, Any] = {
        "machine": ThisMachine(),
        "web": HttpWeb(),
        "load": load_test(doctor, sla),
        "workload": Workload(doctor.image_tokens, doctor.prompt_tokens, doctor.output_tokens),
        "monitoring": monitoring_facts(),
        "prometheus": _url("prometheus", args.prometheus),
        "grafana": _url("grafana", args.grafana),
        "grafana_token": os.environ.get("FOVEA_GRAFANA_TOKEN", ""),
    }
    if is_url:
        yield Subject(
            **common,
            name=args.target,
            kernels=functools.cache(lambda: kernel_facts("auto")),
            settings=read_settings(args, config_file(args)).flat if args.config else None,
            live=_live(args, common["web"]),
            destructive=args.destructive,
        )
        return
    if args.destructive:
        raise ConfigError("--destructive is for a live server, given by its URL", param="destructive")
    yield from _own(args, common, doctor)


def _live(args: argparse.Namespace, web: HttpWeb) -> Server:
    for name in ("revision", "mmproj"):
        if getattr(args, name):
            raise ConfigError(f"--{name} is for a MODEL, not for a URL", param=name)
    keys = {name: next(iter(keys_of(name, args, {})), "") for name in ROLES}
    return Server(_url("url", args.target), web, **keys)


def _own(args: argparse.Namespace, common: dict[str, Any], doctor: DoctorSettings) -> Iterator[Subject]:
    """Yield the subject of a model. Its servers are started by need."""
    args.model = args.target
    file = config_file(args)
    model = str((options.lookup("model", args, file) or (DEFAULT_MODEL, ""))[0])
    read = read_settings(args, file)
    engine, settings = read.engine, read.flat
    env, sent = _environment(args, settings)
    command = [sys.executable, "-m", "fovea.cli.main", "serve", model, *OWN_FLAGS]
    for name in ("revision", "mmproj"):
        if getattr(args, name):
            command += [f"--{name}", getattr(args, name)]
    launcher = ProcessLauncher(
        command,
        env,
        common["web"],
        keys=sent,
        timeout=doctor.start_timeout,
        drain_s=settings["drain_seconds"] + settings["lame_duck_s"],
        disk_cache=bool(settings["embed_disk_dir"]),
    )
    with launcher:
        yield Subject(
            **common,
            name=model,
            kernels=functools.cache(lambda: kernel_facts(engine.model.device)),
            settings=settings,
            checkpoint=functools.cache(
                lambda: checkpoint_facts(model, engine.model.revision, engine.model.mmproj)
            ),
            built=lambda: built_facts(model, engine),
            launcher=launcher,
        )


def offline(model: str, engine: EngineConfig, server: ServerSettings, host: str) -> Subject:
    """Return the subject of checks that read a model and settings, and need no server."""
    usual = DoctorSettings()
    return Subject(
        name=model,
        machine=ThisMachine(),
        web=HttpWeb(),
        kernels=functools.cache(lambda: kernel_facts(engine.model.device)),
        load=load_test(usual, None),
        workload=Workload(usual.image_tokens, usual.prompt_tokens, usual.output_tokens),
        monitoring=MonitoringFacts((), (), ()),
        settings={**flat_values(engine), **flat_values(server), "host": host},
        checkpoint=functools.cache(
            lambda: checkpoint_facts(model, engine.model.revision, engine.model.mmproj)
        ),
    )


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """The settings of a server. engine: those of its engine. flat: all values by name, with host and keys."""

    engine: EngineConfig
    flat: Mapping[str, Any]


def read_settings(args: argparse.Namespace, file: Mapping[str, Any]) -> ReadSettings:
    """Read the settings as `fovea serve` would with this file and environment. Raises ConfigError."""
    keys = {f"{name}s": keys_of(name, args, file) for name in ROLES}
    server = options.settings(ServerSettings, args, file, **keys)
    engine = options.settings(EngineConfig, args, file)
    address = options.settings(ServeSettings, args, file)
    if address.simulate:
        raise ConfigError(
            "the settings simulate a server, which has no model to check; remove simulate", param="simulate"
        )
    return ReadSettings(engine, {**flat_values(engine), **flat_values(server), **keys, "host": address.host})


def _environment(
    args: argparse.Namespace, settings: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the environment of an own server, and the keys for requests to it.

    A role that has keys gets one more, which only doctor knows. A role without keys stays open, so that the
    server is as exposed as its settings make it.
    """
    # Variables of OpenTelemetry name a collector, too.
    env = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    if args.config:
        env["FOVEA_CONFIG"] = str(Path(args.config).absolute())
    sent = {}
    has_file = settings["keys_file"] is not None
    for name in ROLES:
        configured = settings[f"{name}s"]
        if configured or (has_file and name == "api_key"):
            sent[name] = secrets.token_urlsafe(24)
            env[f"FOVEA_{name.upper()}"] = ",".join((*configured, sent[name]))
    if has_file:
        # A keys file closes every role, so its holders are not the only ones who may ask for figures.
        for name in ROLES[1:]:
            sent.setdefault(name, secrets.token_urlsafe(24))
            env[f"FOVEA_{name.upper()}"] = ",".join((*settings[f"{name}s"], sent[name]))
    return env, sent


def _url(name: str, text: str) -> str:
    """Return a URL without a slash at its end; "" for none. Raises ConfigError for a wrong one."""
    parts = urlsplit(text)
    try:
        good = not text or (parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0)
    except ValueError:
        good = False
    if not good or "@" in parts.netloc:
        raise ConfigError(
            f"--{name} is {text!r}; accepted: http:// or https:// and a host, without credentials", param=name
        )
    return text.rstrip("/")


def kernel_facts(device: str) -> KernelFacts:
    """Return facts about kernels and GPUs. This imports torch, and may compile the C++ kernels.

    device: the setting; with "cpu" no GPU counts.
    """
    import torch

    from fovea.kernels.native.build import build_failure, library
    from fovea.kernels.native.instruction_sets import amx_refusal, chosen

    picked = chosen()
    works = library() is not None
    return KernelFacts(
        instruction_set=picked.title if picked else "",
        failure="" if works or picked is None else build_failure() or "they could not be loaded",
        cuda_build=str(torch.version.cuda or ""),
        gpus=torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0,
        amx_refusal=amx_refusal(),
    )


def checkpoint_facts(model: str, revision: str, mmproj: str = "") -> CheckpointFacts:
    """Return the report of a checkpoint. Raises CheckpointError if there is none in the local cache."""
    from fovea.engine.check import check_checkpoint

    report = check_checkpoint(model, revision, mmproj)
    lines = {
        name: [f"{item.part}: {item.message}" for item in getattr(report, name)]
        for name in ("errors", "warnings", "unchecked")
    }
    is_folder = model == DEFAULT_MODEL or Path(model).expanduser().exists()
    return CheckpointFacts(model, is_folder, **lines, figures=report.facts)


def built_facts(model: str, engine: EngineConfig) -> BuiltFacts:
    """Return facts about the built encoders of the settings, else of those beside the checkpoint."""
    from fovea.engine.load import resolve
    from fovea.engine.models.compile import ENGINES_FOLDER
    from fovea.engine.vision.built.manifest import NAME, Manifest, UnusableEngine

    chosen = engine.model.encoder_engines
    beside = chosen in ("off", "", "auto")
    folder = (
        resolve(model, engine.model.revision, download=False) / ENGINES_FOLDER if beside else Path(chosen)
    )
    if not (folder / NAME).exists():
        return BuiltFacts(str(folder), False, 0, ())
    try:
        manifest = Manifest.read(folder)
    except UnusableEngine as error:
        return BuiltFacts(str(folder), True, 0, (str(error),))
    problems = []
    for grid in manifest.grids:
        try:
            manifest.check(folder, grid)
        except UnusableEngine as error:
            problems.append(str(error))
    return BuiltFacts(str(folder), True, len(manifest.grids), problems)


def monitoring_facts() -> MonitoringFacts:
    """Return the names of rules and dashboards that `fovea deploy` renders."""
    from fovea.deploy.monitoring.files import DASHBOARDS
    from fovea.deploy.monitoring.objectives import Targets, alert_groups, recording_groups

    return MonitoringFacts(
        alerts=tuple(group.name for group in alert_groups()),
        records=tuple(group.name for group in recording_groups(Targets())),
        dashboards=tuple(f"fovea-{name}" for name in DASHBOARDS),
    )
