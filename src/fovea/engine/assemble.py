"""Puts an engine together: caches, KV pool, scheduler, runner, loop, and the preparation of requests.

It also collects the engine's metrics from these parts, by the names of `observe.table`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from fovea.core.errors import ConfigError, InvalidRequest
from fovea.core.media import PixelBudget, VisualTokens
from fovea.core.types import ModelInfo
from fovea.engine.cache.embeddings import CacheShares, EmbeddingCache, RegionCache, owner_of_key
from fovea.engine.changes import DEVICE, HOST, watch_outputs
from fovea.engine.config import MIB, EngineConfig
from fovea.engine.config.memory import PixelSettings
from fovea.engine.config.schedule import SpeculationSettings
from fovea.engine.drafting import load_drafting
from fovea.engine.execute.block_moves import STAGING_BUFFERS, staging_blocks
from fovea.engine.execute.device_memory import device_memory
from fovea.engine.execute.memory_profile import MemoryParts, measure
from fovea.engine.execute.pool_sizes import (
    PoolSizes,
    block_bytes,
    decode_padding,
    host_slots,
    most_new_tokens,
    pool_bytes,
    pool_format,
    pool_sizes,
    state_slots,
)
from fovea.engine.execute.runner import Runner
from fovea.engine.grammar.compiler import GrammarCompiler
from fovea.engine.grammar.trial import load_vocabulary
from fovea.engine.intake import Intake
from fovea.engine.keep import KeepPolicy
from fovea.engine.kv.blocks import BlockPool, HostBlocks, WindowBlocks
from fovea.engine.kv.manager import KVManager
from fovea.engine.kv.states import StateSlots
from fovea.engine.layers.config import DecoderConfig
from fovea.engine.layers.step import DecoderMemory
from fovea.engine.load import LoadedModel
from fovea.engine.models.look_heads import heads_digest
from fovea.engine.models.registry import video_model_names
from fovea.engine.peering import Peering, connect_peers
from fovea.engine.publish import CacheEvents
from fovea.engine.regions.encoder import VisualEncoder
from fovea.engine.request.admission import Admission, FirstTokenGate
from fovea.engine.request.pixels import PixelPool, PixelStore
from fovea.engine.request.prepare import Preparer
from fovea.engine.request.prompt import PromptBuilder
from fovea.engine.sample.sampler import Sampler
from fovea.engine.schedule.decode_batches import Padding
from fovea.engine.schedule.draft_budget import DraftBudget
from fovea.engine.schedule.scheduler import Scheduler
from fovea.engine.schedule.step_times import StepTimes
from fovea.engine.speculate.answers import AnswerStore, EarlierAnswers
from fovea.engine.speculate.drafter import Drafter
from fovea.engine.speculate.hints import Hints
from fovea.engine.speculate.prompt import PromptLookup
from fovea.engine.speculate.speculator import Speculator
from fovea.engine.step.loop import EngineLoop
from fovea.engine.step.stats import loop_stats, scheduler_stats, waiting_ages
from fovea.engine.step.stepper import Stepper
from fovea.engine.tiers import SlowerTiers, slower_tiers
from fovea.engine.vision.encoding import VisualFeatures
from fovea.engine.visual_budget.detail import DetailPolicy, DetailRule
from fovea.engine.visual_budget.methods import parse_visual_tokens

if TYPE_CHECKING:
    pass


log = logging.getLogger("fovea.engine")
LARGE_PICTURE = 4096
"""Side in pixels of a picture that no usual model encodes without making it smaller."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """All components of an engine.

    info: description of the model, with the context length that this engine allows.
    memory: the parts of the device's memory by the names of `observe.table`; empty on a CPU.
    peering: engines that work for this one, and for which it works.
    events: announcements of what the caches hold.
    """

    embeddings: EmbeddingCache[VisualFeatures]
    slower: SlowerTiers
    regions: RegionCache[VisualFeatures]
    kv: KVManager
    scheduler: Scheduler
    speculator: Speculator | None
    runner: Runner
    loop: EngineLoop
    preparer: Preparer
    admission: Admission
    intake: Intake
    info: ModelInfo
    memory: Mapping[str, float]
    peering: Peering
    events: CacheEvents


def assemble(
    loaded: LoadedModel, config: EngineConfig, detail_policy: DetailPolicy | None = None
) -> Assembly:
    """Build all components; nothing runs yet. detail_policy: replaces the configured one.

    Raises ConfigError if max_context is more than the model or the KV pool allows.
    """
    config = config.for_role()
    model, tokenizer = loaded.model, loaded.tokenizer
    drafting = load_drafting(loaded, config)  # before the rest of the memory is divided
    slots, decoder = host_slots(config, model, drafting.layer_bytes), model.decoder.config
    longest = min(loaded.info.max_context, config.kv.max_context or loaded.info.max_context)
    padding = decode_padding(config, model, longest)
    parts = _measure(loaded, config, slots, longest, padding)
    room = None if parts is None else parts.room
    if parts is not None and parts.room <= 0:
        parts.report(0, configured=False)  # before the error about it
    beside = drafting.token_bytes
    sizes, states = pool_sizes(config, model, room, beside), state_slots(config, model, room)
    memory = pool_bytes(config, model, sizes, states, beside)
    if parts is not None:
        parts.report(memory, configured=config.kv.kv_cache_mib > 0)
    blocks = sizes.blocks
    rows = blocks * config.kv.block_size
    keep = _keep_policy(config, decoder, rows)
    info = replace(
        loaded.info,
        max_context=_context(config, loaded.info, keep.most_context(loaded.info.max_context, keep.default)),
        max_running=config.schedule.max_running,
        kv_dtype=config.kv.kv_dtype,
    )
    if decoder.cross_layers:
        _warn_if_few_images_fit(config, loaded)
    ttl_s = config.outputs.embed_ttl_s or None
    shares = CacheShares()
    events = CacheEvents.open(config)
    slower = slower_tiers(
        config.outputs, loaded.fingerprint, model.device, shares, watch_outputs(events.outputs, HOST)
    )
    embeddings: EmbeddingCache[VisualFeatures] = EmbeddingCache(
        config.outputs.embed_cache_mib * MIB,
        ttl_s=ttl_s,
        on_evict=slower.add_evicted,
        watch=watch_outputs(events.outputs, DEVICE),
    )
    embeddings.divide(owner_of_key, shares.share_of)
    regions: RegionCache[VisualFeatures] = RegionCache(config.outputs.region_cache_mib * MIB, ttl_s=ttl_s)
    kv = KVManager(
        BlockPool(blocks),
        config.kv.block_size,
        share_prefixes=config.kv.prefix_cache,
        host=HostBlocks(slots),
        ttl_s=config.kv.kv_ttl_s,
        states=StateSlots(states, config.kv.state_spacing) if states else None,
        window=_window(config, decoder, sizes),
        whole_images=decoder.whole_images > 0,
        changes=events.blocks,
    )
    scheduler = Scheduler(
        config.schedule,
        kv,
        embeddings,
        visual_token_bytes=model.visual_token_bytes,
        whole_images=decoder.whole_images > 0,
        lasting_images=bool(decoder.cross_layers),
    )
    encoder = VisualEncoder(model, loaded.processor, embeddings, regions, heads=loaded.look_heads)
    times = StepTimes(config.schedule.target_percentile)
    budget = DraftBudget(times)
    speculator = _speculator(config.speculation, budget, tokenizer.eos_ids)
    runner = Runner(
        model,
        embeddings,
        _sampler(loaded, config),
        blocks=blocks,
        window_blocks=sizes.window,
        block_size=config.kv.block_size,
        host_blocks=slots,
        state_slots=states,
        slower=slower,
        padding=None
        if padding is None
        else padding.fit((sizes.blocks, sizes.window), info.max_context, states),
        encoder_graphs=config.model.decode_graphs == "auto" and model.device.type == "cuda",
        encode=encoder.slices,
        kv_format=pool_format(config, model),
        speculator=speculator,
        draft_layer=drafting.layer,
        draft_model=drafting.model,
    )
    stepper = Stepper(scheduler, runner, times=times, drafts=budget)
    loop = EngineLoop(stepper, tokenizer)
    detail = DetailRule.of(config.visual)
    builder = prompt_builder(
        loaded,
        replace(detail, policy=detail_policy or detail.policy),
        parse_visual_tokens(config.visual.visual_tokens),
        special_tokens_in_text=config.model.special_tokens_in_text,
    )
    pool = _pixel_pool(config.pixels)
    pool.divide(owner_of_key, shares.share_of)
    pixels = PixelStore(
        loaded.processor,
        config.pixels.preprocess_workers,
        pool,
        config.pixels.frame_workers,
        value_bytes=model.dtype.itemsize,
    )
    preparer = Preparer(tokenizer, builder, pixels, embeddings, slower, model.visual_token_bytes, keep)
    refuse = config.schedule.when_full == "refuse"
    token_bytes = runner.block_bytes // config.kv.block_size
    admission = Admission(config.schedule.max_in_flight, rows, token_bytes, refuse=refuse)
    peering = connect_peers(loaded, config, runner, kv, embeddings, loop.call)
    intake = Intake(
        loop,
        preparer,
        admission,
        info,
        refuse=refuse,
        find_realization=encoder.relevance.recent_realization,
        gate=FirstTokenGate(stepper.first_tokens, config.schedule),
        shares=shares,
        grammars=GrammarCompiler(partial(load_vocabulary, tokenizer, loaded.info.vocab_size)),
        peers=peering.peers,
        handover=peering.handover,
    )
    figures = {} if parts is None else parts.stats(memory)
    return Assembly(
        embeddings,
        slower,
        regions,
        kv,
        scheduler,
        speculator,
        runner,
        loop,
        preparer,
        admission,
        intake,
        info,
        figures,
        peering,
        events,
    )


def _measure(
    loaded: LoadedModel, config: EngineConfig, host_blocks: int, context: int, padding: Padding | None
) -> MemoryParts | None:
    """Measure the memory that steps take; None: on a CPU, or with a pool of so many blocks.

    host_blocks: KV blocks in host memory. context: tokens of the longest sequence.
    """
    model = loaded.model
    memory = device_memory(model.device)
    if memory is None or config.kv.kv_blocks:
        return None
    outputs: EmbeddingCache[VisualFeatures] = EmbeddingCache(0)
    encoder = VisualEncoder(model, loaded.processor, outputs, RegionCache(0), heads=loaded.look_heads)
    make = partial(
        Runner,
        model,
        outputs,
        _sampler(loaded, config),
        block_size=config.kv.block_size,
        encode=encoder.slices,
        kv_format=pool_format(config, model),
    )
    block = block_bytes(config, model)
    copies = STAGING_BUFFERS * staging_blocks(block, host_blocks) * block
    return measure(memory, make, config, loaded.processor, context, padding, copies)


def _speculator(
    settings: SpeculationSettings, budget: DraftBudget, ends: frozenset[int]
) -> Speculator | None:
    """Return the drafters, of which those that find drafts in texts are ready; None: none may be used."""
    store = settings.answer_cache_mib * MIB // 2
    known: dict[str, Callable[[], Drafter]] = {
        "prompt": PromptLookup,
        "hints": lambda: Hints(AnswerStore(store)),
        "answers": lambda: EarlierAnswers(AnswerStore(store)),
    }
    drafters = [known[name]() for name in settings.drafters if name in known]
    if not settings.drafters:
        return None
    budget.careful = settings.speculate == "auto"  # who names drafters wants them
    return Speculator(drafters, settings.speculative_tokens, budget, ends)


def _sampler(loaded: LoadedModel, config: EngineConfig) -> Sampler:
    return Sampler(
        frozenset(i for i in loaded.tokenizer.eos_ids if i < loaded.info.vocab_size),
        batched=loaded.model.device.type == "cuda",
        most_drafts=config.schedule.max_draft_tokens,
    )


def engine_stats(parts: Assembly) -> dict[str, float]:
    """Return the current value of every metric of the engine."""
    preparer, regions, runner, grammars = parts.preparer, parts.regions, parts.runner, parts.intake.grammars
    pixels = preparer.pixel_pool.stats()
    scheduler = scheduler_stats(parts.scheduler)
    state = runner.memory.state_nbytes
    return parts.slower.stats() | {
        "speculating": runner.speculates and parts.loop.stepper.drafts.worthwhile,
        "region_cache_bytes": regions.bytes,
        "region_cache_capacity_bytes": regions.capacity,
        "region_cache_entries": len(regions),
        "region_cache_hits": regions.hits,
        "region_cache_misses": regions.misses,
        "region_cache_evictions": regions.evictions,
        **scheduler,
        **waiting_ages(parts.scheduler, time.monotonic()),
        **_block_bytes(runner.memory),
        "state_checkpoint_bytes": scheduler.get("state_checkpoints", 0) * state,
        "state_capacity_bytes": scheduler.get("state_slots_total", 0) * state,
        "pixel_bytes": pixels.reserved_bytes,
        "pixel_cache_bytes": pixels.bytes,
        "pixel_cache_capacity_bytes": preparer.pixel_pool.capacity,
        "pixel_cache_entries": pixels.entries,
        "pixel_cache_lookups": pixels.hits + pixels.misses,
        "pixel_cache_hits": pixels.hits,
        "pixel_cache_misses": pixels.misses,
        "pixel_cache_evictions": pixels.evictions,
        "pixel_cache_expired": pixels.expired,
        "memory_image_retries": runner.image_memory_retries,
        "encoder_engines": len(runner.model.engines),
        "encoder_engine_hits": runner.model.engines.hits,
        "encoder_engine_misses": runner.model.engines.misses,
        "grammar_hits": grammars.hits,
        "grammar_misses": grammars.misses,
        **parts.memory,
        **parts.peering.stats(),
        **parts.events.stats(),
        **parts.intake.gate.stats(),
        **loop_stats(parts.loop),
    }


def _block_bytes(memory: DecoderMemory) -> dict[str, float]:
    """Bytes of one block of each pool. The first KV group has no window, a second one has."""
    names = ("kv_block_bytes", "window_block_bytes")
    return {name: pool.block_bytes for name, pool in zip(names, memory.kv, strict=False)}


def _warn_if_few_images_fit(config: EngineConfig, loaded: LoadedModel) -> None:
    """Log a warning if few answers can run beside each other, because they hold their images' outputs."""
    rows = loaded.processor.plan(LARGE_PICTURE, LARGE_PICTURE, PixelBudget()).rows
    size = rows * loaded.model.visual_token_bytes
    fitting = config.outputs.embed_cache_mib * MIB // size
    if fitting < config.schedule.max_running:
        log.warning(
            "embed_cache_mib is %d: answers about %d different large images run at a time; each holds "
            "%.1f MiB of encoder output until it ends; for max_running (%d) answers it would be %d",
            config.outputs.embed_cache_mib,
            max(1, fitting),
            size / MIB,
            config.schedule.max_running,
            -(-config.schedule.max_running * size // MIB),
        )


def _keep_policy(config: EngineConfig, decoder: DecoderConfig, rows: int) -> KeepPolicy:
    """Return the rules that requests may name. Raises ConfigError if the model cannot take the default."""
    try:
        return KeepPolicy.of(
            config.kv.kv_keep,
            config.kv.block_size,
            rows,
            states=decoder.stateful,
            windows=decoder.window is not None,
            whole_images=decoder.whole_images > 0,
        )
    except InvalidRequest as error:
        raise ConfigError(error.message, param="kv_keep") from None


def _window(config: EngineConfig, decoder: DecoderConfig, sizes: PoolSizes) -> WindowBlocks | None:
    """The blocks of layers with a sliding window; None: the model has no such layers."""
    group = decoder.window
    if group is None or group.window is None:
        return None
    most = most_new_tokens(config, decoder)
    return WindowBlocks(BlockPool(sizes.window), config.kv.block_size, group.window, most)


def prompt_builder(
    loaded: LoadedModel,
    detail: DetailRule | None = None,
    visual: VisualTokens | None = None,
    *,
    special_tokens_in_text: bool = False,
) -> PromptBuilder:
    """Build the component that turns messages into this model's tokens.

    detail: the rule for `detail: auto`; None: the model's own resolution.
    visual: method and share of visual tokens for requests that name none; None: images keep all.
    special_tokens_in_text: control tokens in the text of messages are control tokens, not text.
    """
    model, videos = loaded.model, loaded.videos
    video_support = None
    if videos is not None and model.video_token_id is not None:
        video_support = videos, model.video_token_id
    return PromptBuilder(
        loaded.tokenizer,
        loaded.processor,
        model.image_token_id,
        video_support,
        video_models=video_model_names(),
        detail=detail,
        visual=visual,
        relevance_digest=heads_digest(loaded.look_heads),
        special_tokens_in_text=special_tokens_in_text,
    )


def _pixel_pool(settings: PixelSettings) -> PixelPool:
    return PixelPool(
        settings.pixel_pool_mib * MIB, settings.pixel_cache_mib * MIB, settings.pixel_ttl_s or None
    )


def _context(config: EngineConfig, info: ModelInfo, rows: int) -> int:
    limit = min(info.max_context, rows)
    if config.kv.max_context > limit:
        raise ConfigError(
            f"max_context is {config.kv.max_context}; the model allows {info.max_context} tokens, "
            f"the KV pool holds {rows}",
            param="max_context",
        )
    return config.kv.max_context or limit
