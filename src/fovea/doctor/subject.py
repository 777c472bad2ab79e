"""Everything that checks read: the machine, settings, a checkpoint, a server, and ways to try it.

Facts that only other packages know, such as those about kernels, are values that cli fills in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fovea.core.errors import ConfigError
from fovea.doctor.launch import Launcher
from fovea.doctor.load import LoadTest
from fovea.doctor.machine import Machine
from fovea.doctor.server import Server, Web


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """Facts about kernels and devices of this machine.

    instruction_set: title of the set that the C++ kernels use here; empty: none.
    failure: why the C++ kernels could not be loaded or compiled; empty: they could.
    cuda_build: version of CUDA that torch was built for; empty: a build for CPUs.
    gpus: number of GPUs that torch can use.
    amx_refusal: why the operating system refuses the AMX of this CPU; empty: it does not, or there is none.
    """

    instruction_set: str
    failure: str
    cuda_build: str
    gpus: int
    amx_refusal: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """The report of a checkpoint.

    name: as it was given. is_folder: whether the name is a folder, or the bundled model.
    errors, warnings, unchecked: findings as lines.
    figures: weight_bytes, parameters, kv_bytes_per_token, context and others, where they are known.
    """

    name: str
    is_folder: bool
    errors: Sequence[str]
    warnings: Sequence[str]
    unchecked: Sequence[str]
    figures: Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class BuiltFacts:
    """A folder of encoders built ahead of time.

    folder: its path. exists: whether it holds a manifest.
    grids: number of grids in it.
    problems: files that are missing or changed, or why the manifest cannot be read.
    """

    folder: str
    exists: bool
    grids: int
    problems: Sequence[str]


@dataclass(frozen=True, slots=True)
class Workload:
    """Size of a typical request, for which caches are judged.

    visual_tokens, prompt_tokens, output_tokens: of one request.
    """

    visual_tokens: int
    prompt_tokens: int
    output_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens of a request and its answer, which its KV has to hold."""
        return self.visual_tokens + self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class MonitoringFacts:
    """Names that a deployment's monitoring should have.

    alerts, records: groups of rules in Prometheus. dashboards: uids in Grafana.
    """

    alerts: Sequence[str]
    records: Sequence[str]
    dashboards: Sequence[str]


@dataclass(frozen=True, slots=True)
class Subject:
    """The machine, the model and the server that are examined.

    name: the URL, or the name of the checkpoint.
    machine: reads files and runs programs of this machine.
    web: sends HTTP requests.
    kernels: returns facts about kernels; it may import torch, so it is called by need.
    settings: values of all settings of engine and server, and `host`, by name; None: they are not known.
    checkpoint: returns the report of the checkpoint; None: there is none.
    built: returns facts about built encoders; None: there is no checkpoint.
    live: the server at a URL; None: there is none.
    launcher: starts servers of the checkpoint; None: only `live` is examined.
    load: tries a server under load.
    workload: size of a typical request.
    monitoring: names of rules and dashboards that should exist.
    prometheus, grafana: their URLs; empty: they are not checked.
    grafana_token: token for Grafana's API; empty: none is sent.
    destructive: whether the live server may be loaded and disturbed.
    clock, sleep: time in seconds.
    """

    name: str
    machine: Machine
    web: Web
    kernels: Callable[[], KernelFacts]
    load: LoadTest
    workload: Workload
    monitoring: MonitoringFacts
    settings: Mapping[str, Any] | None = None
    checkpoint: Callable[[], CheckpointFacts] | None = None
    built: Callable[[], BuiltFacts] | None = None
    live: Server | None = None
    launcher: Launcher | None = None
    prometheus: str = ""
    grafana: str = ""
    grafana_token: str = ""
    destructive: bool = False
    clock: Callable[[], float] = field(default=time.monotonic)
    sleep: Callable[[float], None] = field(default=time.sleep)

    @property
    def server(self) -> Server:
        """The live server, or the own one, which is started if it does not run.

        Raises ConfigError if there is neither, EngineError if the own one does not start.
        """
        if self.live is not None:
            return self.live
        if self.launcher is None:
            raise ConfigError("there is no server: give a URL or a MODEL")
        return self.launcher.plain()

    def setting(self, name: str) -> Any:
        """Return the value of a setting. To be called only by checks that need settings."""
        assert self.settings is not None
        return self.settings[name]
