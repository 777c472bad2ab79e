"""The engine's parts, put together: caches, KV, scheduler, runner, loop, and who prepares requests for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fovea.core.errors import ConfigError
from fovea.core.types import ModelInfo
from fovea.engine.cache.embeddings import EmbeddingCache
from fovea.engine.cache.regions import RegionCache
from fovea.engine.config import MIB, EngineConfig
from fovea.engine.execute.memory import decode_padding, host_slots, pool_blocks
from fovea.engine.execute.runner import Runner
from fovea.engine.intake import Intake
from fovea.engine.kv.blocks import BlockPool
from fovea.engine.kv.host_blocks import HostBlocks
from fovea.engine.kv.manager import KVManager
from fovea.engine.load import LoadedModel, prompt_builder
from fovea.engine.regions.encoder import ReducingEncoder
from fovea.engine.request.admission import Admission
from fovea.engine.request.pixel_pool import PixelPool
from fovea.engine.request.pixels import PixelStore
from fovea.engine.request.prepare import Preparer
from fovea.engine.sample.sampler import Sampler
from fovea.engine.schedule.scheduler import Scheduler
from fovea.engine.step.loop import EngineLoop
from fovea.engine.tiers.slower import SlowerTiers, slower_tiers
from fovea.engine.vision.features import VisualFeatures
from fovea.engine.visual_budget.detail import DetailPolicy, DetailRule
from fovea.engine.visual_budget.methods import policy


@dataclass(frozen=True, slots=True)
class Parts:
    """info: the model's, with the context that this engine allows."""

    embeddings: EmbeddingCache[VisualFeatures]
    slower: SlowerTiers
    kv: KVManager
    scheduler: Scheduler
    regions: RegionCache[VisualFeatures]
    loop: EngineLoop
    preparer: Preparer
    admission: Admission
    intake: Intake
    info: ModelInfo


def assemble(loaded: LoadedModel, config: EngineConfig, detail_policy: DetailPolicy | None = None) -> Parts:
    """Nothing runs yet. detail_policy: in place of the configuration's.

    Raises ConfigError where the context asked for is more than the model or the KV pool allows.
    """
    model, tokenizer = loaded.model, loaded.tokenizer
    blocks, slots = pool_blocks(config, model), host_slots(config, model)
    rows = blocks * config.block_size
    info = replace(loaded.info, max_context=_context(config, loaded.info, rows))
    slower = slower_tiers(config, loaded.fingerprint, model.device)
    embeddings: EmbeddingCache[VisualFeatures] = EmbeddingCache(
        config.embed_cache_mib * MIB, ttl_s=config.embed_ttl_s or None, evicted=slower.evicted
    )
    kv = KVManager(
        BlockPool(blocks),
        config.block_size,
        share_prefixes=config.prefix_cache,
        host=HostBlocks(slots),
        ttl_s=config.kv_ttl_s,
    )
    scheduler = Scheduler(config, kv, embeddings, visual_token_bytes=model.visual_token_bytes)
    encoder = ReducingEncoder(
        model,
        loaded.processor,
        embeddings,
        RegionCache(config.region_cache_mib * MIB, ttl_s=config.embed_ttl_s or None),
        head=loaded.relevance,
    )
    runner = Runner(
        model,
        embeddings,
        Sampler(
            frozenset(i for i in tokenizer.eos_ids if i < loaded.info.vocab_size),
            batched=model.device.type == "cuda",
        ),
        blocks=blocks,
        block_size=config.block_size,
        host_blocks=slots,
        slower=slower,
        padding=decode_padding(config, model, blocks, info.max_context),
        encode=encoder.slices,
    )
    loop = EngineLoop(scheduler, runner, tokenizer)
    detail = DetailRule.of(config)
    pixels = PixelPool(config.pixel_pool_mib * MIB, config.pixel_cache_mib * MIB, config.pixel_ttl_s or None)
    preparer = Preparer(
        tokenizer,
        prompt_builder(
            loaded,
            replace(detail, policy=detail_policy or detail.policy),
            policy(config.visual_tokens),
        ),
        PixelStore(loaded.processor, config.preprocess_workers, pixels),
        embeddings,
        slower,
        model.visual_token_bytes,
    )
    refuse = config.when_full == "refuse"
    admission = Admission(config.room, rows, runner.block_bytes // config.block_size, refuse=refuse)
    intake = Intake(loop, preparer, admission, info, refuse=refuse, realized=encoder.judge.seen)
    return Parts(embeddings, slower, kv, scheduler, encoder.regions, loop, preparer, admission, intake, info)


def _context(config: EngineConfig, info: ModelInfo, rows: int) -> int:
    limit = min(info.max_context, rows)
    if config.max_context > limit:
        raise ConfigError(
            f"max_context is {config.max_context}; the model allows {info.max_context} tokens, "
            f"the KV pool holds {rows}",
            param="max_context",
        )
    return config.max_context or limit
