"""Engines that a process can load. The values travel to it; nothing is imported before they are loaded."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from fovea.core.errors import ConfigError
from fovea.core.protocols import EngineClient
from fovea.engine.config import EngineConfig

if TYPE_CHECKING:
    from fovea.engine.engine import Engine
    from fovea.engine.simulate.serving import SimulatedEngine
    from fovea.planner.cost import CostModel

ONLY_CPU = (
    "data_parallel is for engines on the CPU; for several GPUs use several servers behind the gateway "
    "(fovea gateway), one for each GPU; for the CPU start with --device cpu"
)
log = logging.getLogger("fovea.serve")


class Hosted(EngineClient, Protocol):
    """An engine of this process. config: its settings."""

    config: EngineConfig


class EngineSource(Protocol):
    """Loads an engine in the process that calls it."""

    def load(self) -> Hosted: ...


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A checkpoint.

    model: a folder, a hub id, or "fovea-tiny".
    config: settings of the engine.
    chat_template: replaces the checkpoint's own; None: it has its own.
    name: the name that clients use.
    processes: number of engine processes of the server.
    """

    model: str
    config: EngineConfig
    chat_template: str | None
    name: str
    processes: int = 1

    def load(self) -> Engine:
        """Load the engine. Raises what `Engine.from_pretrained` raises."""
        from fovea.engine.engine import Engine
        from fovea.engine.load import pick_device
        from fovea.kernels.choose import results_depend_on

        if self.processes > 1 and pick_device(self.config.model.device).type != "cpu":
            raise ConfigError(ONLY_CPU, param="data_parallel")
        engine = Engine.from_pretrained(self.model, config=self.config, chat_template=self.chat_template)
        engine.rename(self.name)
        info = engine.info
        log.info(
            "ready: %s (%s, %.1f M parameters, %s on %s, %s), context %d",
            info.name, info.architecture, info.parameters / 1e6, info.dtype, info.device,
            results_depend_on(engine.runner.model.kernels), info.max_context,
        )  # fmt: skip
        return engine


@dataclass(frozen=True, slots=True)
class SimulatedSource:
    """A simulated engine: its settings, its costs, and the name that clients use."""

    config: EngineConfig
    cost: CostModel
    name: str

    def load(self) -> SimulatedEngine:
        from fovea.engine.simulate.serving import SimulatedEngine

        return SimulatedEngine(self.config, self.cost, self.name)


def numbered(source: ModelSource | SimulatedSource, number: int) -> EngineSource:
    """Return the source of one of several engines behind one server, which announce their caches apart."""
    return replace(source, config=source.config.changed(event_rank=number))


def share_weights(descriptor: int) -> None:
    """Let the engine that this process loads have its weights in a pool. descriptor: of the pool."""
    from fovea.kernels.shared import WeightPool, use_pool

    try:
        use_pool(WeightPool(descriptor))
    except OSError as error:
        log.warning("this process has a copy of the weights of its own: %s", error)
