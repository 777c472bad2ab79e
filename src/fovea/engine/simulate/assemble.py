"""Assembles a simulated engine: the real scheduler and caches over a cost model.

It also says which engine settings a simulation uses. An `Oracle` knows the costs that a real engine has
to
learn: the yardstick for the engine's own predictions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import mul

from fovea.core.settings import settings_of
from fovea.engine.cache.embeddings import EmbeddingCache
from fovea.engine.changes import DEVICE, watch_outputs
from fovea.engine.config import MIB, EngineConfig
from fovea.engine.config.others import EVENT_ADDRESSES
from fovea.engine.kv.blocks import BlockPool
from fovea.engine.kv.manager import KVManager
from fovea.engine.publish import CacheEvents
from fovea.engine.schedule.itl_limit import BatchControl
from fovea.engine.schedule.policy import Policy
from fovea.engine.schedule.scheduler import Scheduler
from fovea.engine.schedule.step_times import ImageTimes, StepTimes
from fovea.engine.simulate.executor import Noise, NoiseSettings
from fovea.engine.step.executor import Executor
from fovea.engine.step.stepper import Stepper
from fovea.planner.cost import CostModel

TRACE_SETTINGS = frozenset(
    {
        "block_size",
        "embed_cache_mib",
        "kv_blocks",
        "kv_cache_mib",
        "kv_ttl_s",
        "max_context",
        "max_passes",
        "max_queue",
        "max_running",
        "max_step_tokens",
        "max_step_visual_tokens",
        "pace",
        "policy",
        "prefix_cache",
        "target_itl_ms",
        "target_percentile",
        "target_ttft_ms",
        "when_late",
    }
)
"""Settings that `fovea simulate` uses, which replays a trace."""
SERVER_SETTINGS = TRACE_SETTINGS | {
    *EVENT_ADDRESSES,
    "events_kept",
    "event_rank",
    "kv_events_topic",
    "degrade_by",
    "degrade_from",
    "detail_policy",
    "special_tokens_in_text",
    "visual_tokens",
    "when_full",
}
"""Settings that `fovea serve --simulate` uses, which also plans real images and refuses requests."""
DRAWS = 20_000
"""Number of disturbances from which their percentile is taken."""
KV_CACHE_MIB = 1024
"""Size of the KV pool if the configuration derives it from free memory, which a simulation does not have."""


def simulated_stepper(
    config: EngineConfig,
    cost: CostModel,
    executor: Callable[[EmbeddingCache[None]], Executor],
    *,
    policy: Policy | None = None,
    control: BatchControl | None = None,
    oracle: Oracle | None = None,
    learnt: Stepper | None = None,
    events: CacheEvents | None = None,
) -> Stepper:
    """Return a stepper over an executor without a model.

    executor: returns an executor that fills the given encoder-output cache.
    policy, control: None: those of the configuration.
    oracle: knows the costs in advance; None: they are learnt, as in the engine.
    learnt: a stepper that has run already, whose predictions of durations are taken over; None: none are.
    events: announcements of what the caches hold; None: there are none.
    """
    kv = config.kv
    events = events or CacheEvents()
    embeddings: EmbeddingCache[None] = EmbeddingCache(
        config.outputs.embed_cache_mib * MIB, watch=watch_outputs(events.outputs, DEVICE)
    )
    blocks = BlockPool(pool_tokens(config, cost) // kv.block_size)
    manager = KVManager(
        blocks,
        kv.block_size,
        share_prefixes=kv.prefix_cache,
        ttl_s=kv.kv_ttl_s,
        changes=events.blocks,
    )
    scheduler = Scheduler(
        config.schedule, manager, embeddings, visual_token_bytes=cost.visual_token_bytes, policy=policy
    )
    times, image_times = (learnt.times, learnt.image_times) if learnt else (None, None)
    if oracle:
        times, image_times = oracle.times(cost, config.schedule.target_percentile), oracle.images(cost)
    return Stepper(
        scheduler,
        executor(embeddings),
        control,
        times=times,
        image_times=image_times,
        first_factor=oracle.first_factor if oracle else None,
    )


def not_simulated(simulated: Iterable[str]) -> tuple[str, ...]:
    """Return the engine settings that are not among `simulated`, in order of declaration."""
    known = frozenset(simulated)
    return tuple(entry.name for entry in settings_of(EngineConfig) if entry.name not in known)


class KnownCosts:
    """Costs that do not change. It implements `schedule.step_times.Costs`."""

    measured = True

    def __init__(self, *costs: float) -> None:
        self.costs = list(costs)

    def predict(self, amounts: Sequence[float]) -> float:
        return float(sum(map(mul, self.costs, amounts)))

    def observe(self, amounts: Sequence[float], seconds: float) -> None:
        """There is nothing to learn."""


@dataclass(frozen=True, slots=True)
class KnownScatter:
    """The percentile of the disturbances. It implements `schedule.step_times.Scatter`."""

    percentile: float
    factor: float

    def observe(self, predicted: float, measured: float) -> None:
        """There is nothing to learn."""


@dataclass(frozen=True, slots=True)
class Oracle:
    """Knows the costs of steps and the size of their disturbances.

    noise: the disturbances.
    first_factor: fixed factor from expected to bounded first tokens; None: it is learnt.
    """

    noise: NoiseSettings
    first_factor: float | None = None

    def times(self, cost: CostModel, percentile: float) -> StepTimes:
        """Return predictions that need no measurement."""
        disturb, draws = Noise(self.noise).disturb, DRAWS
        factors = sorted(disturb(1.0) for _ in range(draws))
        factor = factors[min(draws - 1, math.ceil(draws * percentile / 100))]
        costs = KnownCosts(
            cost.step_s + cost.between_s,
            cost.decode_s,
            cost.context_s,
            cost.token_s,
            cost.chunk_s,
            cost.pair_s,
        )
        return StepTimes(percentile, costs, KnownScatter(percentile, factor))

    def images(self, cost: CostModel) -> ImageTimes:
        """Return predictions of the encoder that need no measurement."""
        return ImageTimes(KnownCosts(cost.image_s, cost.visual_s, cost.visual_pair_s))


def pool_tokens(config: EngineConfig, cost: CostModel) -> int:
    """Return how many tokens the simulated KV pool holds."""
    kv = config.kv
    blocks = kv.kv_blocks or (kv.kv_cache_mib or KV_CACHE_MIB) * MIB // (cost.kv_token_bytes * kv.block_size)
    return blocks * kv.block_size


def context_limit(config: EngineConfig, cost: CostModel) -> int:
    """Return the limit of prompt and answer together, in tokens."""
    return min(config.kv.max_context or cost.max_context, pool_tokens(config, cost))
