"""Assembles a simulated engine: the real scheduler and caches over a cost model."""

from __future__ import annotations

from collections.abc import Callable

from fovea.engine.cache.embeddings import EmbeddingCache
from fovea.engine.config import MIB, EngineConfig
from fovea.engine.kv.blocks import BlockPool
from fovea.engine.kv.manager import KVManager
from fovea.engine.schedule.batch import BatchControl
from fovea.engine.schedule.policy import Policy
from fovea.engine.schedule.scheduler import Scheduler
from fovea.engine.simulate.oracle import Oracle
from fovea.engine.step.executor import Executor
from fovea.engine.step.stepper import Stepper
from fovea.planner.cost import CostModel

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
) -> Stepper:
    """Return a stepper over an executor without a model.

    executor: returns an executor that fills the given encoder-output cache.
    policy, control: None: those of the configuration.
    oracle: knows the costs in advance; None: they are learnt, as in the engine.
    learnt: a stepper that has run already, whose predictions of durations are taken over; None: none are.
    """
    kv = config.kv
    embeddings: EmbeddingCache[None] = EmbeddingCache(config.outputs.embed_cache_mib * MIB)
    blocks = BlockPool(pool_tokens(config, cost) // kv.block_size)
    manager = KVManager(blocks, kv.block_size, share_prefixes=kv.prefix_cache, ttl_s=kv.kv_ttl_s)
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


def pool_tokens(config: EngineConfig, cost: CostModel) -> int:
    """Return how many tokens the simulated KV pool holds."""
    kv = config.kv
    blocks = kv.kv_blocks or (kv.kv_cache_mib or KV_CACHE_MIB) * MIB // (cost.kv_token_bytes * kv.block_size)
    return blocks * kv.block_size


def context_limit(config: EngineConfig, cost: CostModel) -> int:
    """Return the limit of prompt and answer together, in tokens."""
    return min(config.kv.max_context or cost.max_context, pool_tokens(config, cost))
