"""Everything that checks read: the machine, settings, a checkpoint, a server, and ways to try it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fovea.core.errors import ConfigError
from fovea.doctor.facts import BuiltFacts, CheckpointFacts, KernelFacts, MonitoringFacts, Workload
from fovea.doctor.launch import Launcher
from fovea.doctor.load_test import LoadTest
from fovea.doctor.machine import Machine
from fovea.doctor.server import Server
from fovea.doctor.web import Web


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
