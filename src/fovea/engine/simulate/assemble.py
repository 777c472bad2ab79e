"""Puts a simulated engine together: the real scheduler and caches over a cost model."""

from __future__ import annotations

from collections.abc import Callable

from fovea.engine.cache.embeddings import EmbeddingCache
from fovea.engine.config import MIB, EngineConfig
from fovea.engine.kv.blocks import BlockPool
from fovea.engine.kv.manager import KVManager
from fovea.engine.schedule.batch import BatchControl
from fovea.engine.schedule.policy import Policy
from fovea.engine.schedule.scheduler import Scheduler
from fovea.engine.simulate.cost import CostModel
from fovea.engine.step.executor import Executor
from fovea.engine.step.stepper import Stepper

KV_CACHE_MIB = 1024
"""Size of the KV pool if the configuration leaves it to the machine's free memory: a simulated machine has none."""


def simulated_stepper(
    config: EngineConfig,
    cost: CostModel,
    executor: Callable[[EmbeddingCache[None]], Executor],
    *,
    policy: Policy | None = None,
    control: BatchControl | None = None,
) -> Stepper:
    """A stepper over an executor without a model.

    executor: made with the encoder-output cache, which it fills.
    policy, control: None is the configuration's.
    """
    kv = config.kv
    embeddings: EmbeddingCache[None] = EmbeddingCache(config.outputs.embed_cache_mib * MIB)
    blocks = BlockPool(pool_tokens(config, cost) // kv.block_size)
    manager = KVManager(blocks, kv.block_size, share_prefixes=kv.prefix_cache, ttl_s=kv.kv_ttl_s)
    scheduler = Scheduler(
        config.schedule, manager, embeddings, visual_token_bytes=cost.visual_token_bytes, policy=policy
    )
    return Stepper(scheduler, executor(embeddings), control)


def pool_tokens(config: EngineConfig, cost: CostModel) -> int:
    """Tokens that the simulated KV pool holds."""
    kv = config.kv
    blocks = kv.kv_blocks or (kv.kv_cache_mib or KV_CACHE_MIB) * MIB // (cost.kv_token_bytes * kv.block_size)
    return blocks * kv.block_size


def context_limit(config: EngineConfig, cost: CostModel) -> int:
    """Tokens of prompt and answer together."""
    return min(config.kv.max_context or cost.max_context, pool_tokens(config, cost))
