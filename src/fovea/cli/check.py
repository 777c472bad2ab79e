"""`fovea serve --check` and `fovea gateway --check`: read everything that is needed, and start nothing.

All errors are reported together, and the exit status is 2 then. Otherwise the command says what would run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from fovea.cli import gateway, options, serve
from fovea.cli.serve import ServeSettings, free_port, keys_in_words, url_of
from fovea.cli.text import fitted
from fovea.core.errors import ConfigError, FoveaError
from fovea.core.findings import Findings
from fovea.doctor.check import Check, Status, Verdict, examine
from fovea.engine.config import EngineConfig
from fovea.http.settings import HttpSettings
from fovea.http.tls import Certificate

if TYPE_CHECKING:
    import torch

LABEL = 12
PARTS = ("memory", "revision")
"""Checks of `fovea doctor` about a model that need no server."""
Facts = list[tuple[str, str]]
"""What would run: labels and texts."""


def check_server(args: argparse.Namespace) -> int:
    """Check what `fovea serve` would read. Returns 0; raises ConfigError with all errors."""
    findings, facts = Findings(), Facts()
    found = serve.read_inputs(args, findings)
    _check_address(found, findings, facts)
    if found.simulates:
        _check_costs(found.address, findings, facts)
    else:
        _check_engines(found.address, found.engine, findings)
        _check_model(found, findings, facts)
    return _told("fovea serve", args.config, facts, findings)


def _check_address(found: serve.Inputs, findings: Findings, facts: Facts) -> None:
    from fovea.server.access import Access

    address, settings = found.address, found.settings
    if address is not None:
        with findings.part():
            free_port(address.host, address.port)
    if settings is None:
        return
    with findings.part():
        Access(
            replace(settings, access=replace(settings.access, access_log="false"))
        )  # it reads the keys file
    _check_certificate(settings.http, findings)
    if address is not None:
        place = url_of(settings, address.host, address.port)
        facts.append(("address", f"{place}/v1" if address.port else f"{place}/v1 (port 0: any free one)"))
    facts += [("keys", keys_in_words(settings)), ("TLS", _tls(settings.http))]


def _check_certificate(http: HttpSettings, findings: Findings) -> None:
    with findings.part():
        if (certificate := Certificate.of(http)) is not None:
            certificate.context()


def _tls(http: HttpSettings) -> str:
    return "none" if http.tls_cert is None else str(http.tls_cert)


def _check_costs(address: ServeSettings | None, findings: Findings, facts: Facts) -> None:
    from fovea.planner.cost import CostModel

    with findings.part():
        cost = CostModel.load(address.cost) if address and address.cost else CostModel()
        facts.append(("model", f"none, simulated; costs: {cost.made_from}"))


def _check_engines(address: ServeSettings | None, engine: EngineConfig | None, findings: Findings) -> None:
    """Check what several engine processes need."""
    from fovea.engine.config.others import check_event_addresses
    from fovea.engine.process.cores import divide_cores

    if address is not None and engine is not None and address.data_parallel > 1:
        with findings.part():
            serve.check_parallel(engine)
        with findings.part():
            divide_cores(address.data_parallel)
        with findings.part():
            check_event_addresses(engine.events, address.data_parallel)


def _check_model(found: serve.Inputs, findings: Findings, facts: Facts) -> None:
    """Check the files of the model, its settings of the device, and its sizes against the memory."""
    from fovea.cli.doctor_subject import checkpoint_facts
    from fovea.engine.load import pick_device

    model, engine, device = found.model, found.engine or EngineConfig(), None
    with findings.part(), _as_settings():
        device = pick_device(engine.model.device)
    try:
        read = checkpoint_facts(model, engine.model.revision, engine.model.mmproj)
    except FoveaError as error:
        if serve.is_hub_id(model):
            facts.append(("model", f"{model}, which would be downloaded: its files are not checked"))
        else:
            findings.errors.append(ConfigError(error.message, param="model"))
        return
    findings.errors += [ConfigError(f"{model}: {line}", param="model") for line in read.errors]
    facts.append(("model", ", ".join(_figures(model, read.figures))))
    facts += [("warning", line) for line in (*read.warnings, *read.unchecked)]
    if device is not None and "dtype" in read.figures:
        with findings.part():
            _check_types(engine, device, str(read.figures["dtype"]))
    if not read.errors:
        _check_sizes(found, findings, facts)


def _check_types(engine: EngineConfig, device: torch.device, stored: str) -> None:
    """Raise ConfigError if the device cannot run the types of weights, or of keys and values, as a load does.

    stored: name of the checkpoint's type, such as "bfloat16".
    """
    import torch

    from fovea.engine.load import pick_dtype
    from fovea.kernels.choose import described

    kernels = engine.model.kernels
    dtype = pick_dtype(engine.model.dtype, device, getattr(torch, stored), kernels)
    engine.check_on(described(kernels, device, dtype), str(dtype).removeprefix("torch."))


@contextmanager
def _as_settings() -> Iterator[None]:
    """Turn another error of Fovea's in a block into a ConfigError."""
    try:
        yield
    except FoveaError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(error.message) from error


def _figures(model: str, figures: Mapping[str, str | int]) -> Iterator[str]:
    yield model
    yield str(figures.get("architecture", "an unknown architecture"))
    if isinstance(parameters := figures.get("parameters"), int):
        yield f"{parameters:,} parameters"
    if "dtype" in figures:
        yield str(figures["dtype"])


def _check_sizes(found: serve.Inputs, findings: Findings, facts: Facts) -> None:
    """Compare the sizes of weights, KV pool and caches with the free memory, as `fovea doctor` does."""
    from fovea.cli.doctor_subject import offline
    from fovea.doctor.checks.model import CHECKS

    if found.settings is None or found.engine is None or found.address is None:
        return
    subject = offline(found.model, found.engine, found.settings, found.address.host)
    for result in examine([check for check in CHECKS if check.name in PARTS], subject):
        _add(result.check, result.verdict, findings, facts)


def _add(check: Check, verdict: Verdict, findings: Findings, facts: Facts) -> None:
    text = "; ".join(filter(None, (verdict.figure, verdict.reason)))
    fix = f" (fix: {verdict.fix})" if verdict.fix else ""
    if verdict.status is Status.FAIL:
        findings.errors.append(ConfigError(f"{check.name}: {text}{fix}"))
    elif verdict.status is Status.WARN:
        facts.append(("warning", f"{check.name}: {text}{fix}"))
    elif verdict.status is Status.PASS:
        facts.append((check.name, text))


def check_gateway(args: argparse.Namespace) -> int:
    """Check what `fovea gateway` would read. Returns 0; raises ConfigError with all errors."""
    from fovea.gateway.config import api_key
    from fovea.gateway.tenants.keys import Tenants
    from fovea.gateway.usage.prices import read_prices

    findings, facts = Findings(), Facts()
    found = gateway.read_inputs(args, options.file_path(args.config), findings)
    if found.listen is not None:
        with findings.part():
            free_port(found.listen.host, found.listen.port)
    if found.settings is not None:
        settings = found.settings
        _check_certificate(settings.http, findings)
        with findings.part():
            Tenants(settings.keys_file, api_keys=settings.api_keys, admin_keys=settings.admin_keys)
        with findings.part():
            if settings.prices is not None:
                read_prices(settings.prices)
        if found.listen is not None:
            listen, http = found.listen, settings.http
            scheme = "http" if http.tls_cert is None else "https"
            facts += [("address", f"{scheme}://{listen.host}:{listen.port}/v1"), ("TLS", _tls(http))]
        closed = [f"{len(settings.api_keys)}"] if settings.api_keys else []
        closed += [f"those of {settings.keys_file}"] if settings.keys_file else []
        facts.append(("keys", " and ".join(closed) or "none, open to all"))
    for backend in found.tables.backends if found.tables else ():
        with findings.part():
            facts.append(
                ("backend", f"{backend.name} {backend.url}{', with a key' if api_key(backend) else ''}")
            )
    if found.tables is not None:
        facts += [("discover", each.source) for each in found.tables.discover]
        facts += [("model", each.name) for each in found.tables.models]
    if found.experiments is not None:
        facts += [("experiment", f"{each.name} of {each.model}") for each in found.experiments.experiments]
    facts += [("warning", line) for line in gateway.misspelt()]
    return _told("fovea gateway", args.config, facts, findings)


def _told(command: str, config: str | None, facts: Facts, findings: Findings) -> int:
    """Print what would run. Raises ConfigError if there are errors."""
    findings.check()
    path = options.file_path(config)
    lines = [("file", str(path) if path else "none"), *facts]
    print(f"{command} would run with")
    print(fitted("\n".join(f"  {label:{LABEL}}{text}" for label, text in lines)))
    print("No error was found. Nothing was started.")
    return 0
