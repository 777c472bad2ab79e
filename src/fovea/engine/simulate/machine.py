"""One engine on paper: its scheduler is the real one, its steps take the seconds of a cost model.

`begin` and `end` are the two halves of `EngineLoop._step`, with whatever clock the caller has in between. What is added
or ended between them takes effect with the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fovea.core.types import FinishReason
from fovea.engine.cache.embeddings import EmbeddingCache
from fovea.engine.config import MIB, EngineConfig
from fovea.engine.kv.blocks import BlockPool
from fovea.engine.kv.manager import KVManager
from fovea.engine.schedule.batch import BatchControl, DecodeBound
from fovea.engine.schedule.pace import Pace
from fovea.engine.schedule.plan import EncodeJob, StepPlan
from fovea.engine.schedule.policy import Policy
from fovea.engine.schedule.scheduler import Scheduler
from fovea.engine.sequence import Sequence as Request
from fovea.engine.sequence import Status
from fovea.engine.simulate.cost import Composition, CostModel

KV_CACHE_MIB = 1024
"""The KV pool where the configuration leaves its size to the machine's free memory: a simulated machine has none."""


@dataclass(slots=True)
class Step:
    """seconds: of the whole step, encode_s of them in the encoder. encoded: keys of the images that it completed."""

    plan: StepPlan
    seconds: float = 0.0
    encode_s: float = 0.0
    encoded: list[str] = field(default_factory=list)


class Encoder:
    """`Runner._encode` on paper: goes on with what has begun, then with what is wanted, until a slice would be too long."""

    def __init__(self, cost: CostModel, embeddings: EmbeddingCache[None]) -> None:
        self._cost = cost
        self._embeddings = embeddings
        self._left: dict[str, int] = {}
        self._holders: dict[str, tuple[str, ...]] = {}
        self.images = 0
        self.seconds = 0.0

    @property
    def encoding(self) -> bool:
        """Whether an image is encoded in part."""
        return bool(self._left)

    def encode(
        self, jobs: Sequence[EncodeJob], seconds: float, alive: Callable[[str], bool]
    ) -> tuple[float, list[str]]:
        """Seconds spent and images completed; `alive` says whether a sequence still is there to wait."""
        for key in [key for key, holders in self._holders.items() if not any(map(alive, holders))]:
            del self._left[key], self._holders[key]
        spent, last = 0.0, 0.0
        done: list[str] = []
        for job in sorted(jobs, key=lambda job: job.span.key not in self._left):
            key, tokens = job.span.key, job.span.tokens
            slices = self._cost.slices(tokens)
            while key in self._left or key not in done:
                if last and spent + last > seconds:
                    return self._spent(spent, done)
                last = self._cost.image(tokens) / slices
                spent += last
                self._holders[key] = tuple(job.holders)
                self._left[key] = self._left.get(key, slices) - 1
                if not self._left[key]:
                    del self._left[key], self._holders[key]
                    size = tokens * self._cost.visual_token_bytes
                    self._embeddings.put(key, None, size, set(job.holders))
                    done.append(key)
        return self._spent(spent, done)

    def _spent(self, seconds: float, done: list[str]) -> tuple[float, list[str]]:
        self.images += len(done)
        self.seconds += seconds
        return seconds, done


class Machine:
    def __init__(
        self,
        config: EngineConfig,
        cost: CostModel,
        pick: Callable[[Request], int],
        *,
        policy: Policy | None = None,
        control: BatchControl | None = None,
    ) -> None:
        """pick: the next token of a sequence. control: bounds the batch; None: as the engine does."""
        blocks = config.kv_blocks or (config.kv_cache_mib or KV_CACHE_MIB) * MIB // (
            cost.kv_token_bytes * config.block_size
        )
        self.cost = cost
        self.capacity = blocks * config.block_size
        self.embeddings: EmbeddingCache[None] = EmbeddingCache(config.embed_cache_mib * MIB)
        kv = KVManager(
            BlockPool(blocks), config.block_size, share_prefixes=config.prefix_cache, ttl_s=config.kv_ttl_s
        )
        self.scheduler = Scheduler(
            config, kv, self.embeddings, visual_token_bytes=cost.visual_token_bytes, policy=policy
        )
        self.pace = Pace(config.pace, config.target_itl_ms / 1000, config.max_step_tokens)
        self.encoder = Encoder(cost, self.embeddings)
        self.unfinished: dict[str, Request] = {}
        self.steps = 0
        self.computed_tokens = 0
        self._pick = pick
        self._control = control or DecodeBound(config.target_itl_ms / 1000, config.max_running)

    def add(self, seq: Request) -> None:
        self.unfinished[seq.id] = seq
        self.scheduler.add(seq)

    def finish(self, seq: Request, reason: FinishReason) -> None:
        """End it at any point of its life; everything it held comes back."""
        self.scheduler.finish(seq, reason)
        self.unfinished.pop(seq.id, None)

    def begin(self) -> Step:
        """The next step, decided and encoded; its tokens are there at `end`, `seconds` later."""
        scheduler, pace = self.scheduler, self.pace
        readers, others = scheduler.readers, len(self.unfinished) - scheduler.decodes
        tokens = pace.prompt_tokens(readers, others, encoding=self.encoder.encoding)
        plan = scheduler.schedule(tokens, self._control.allowed())
        step = Step(plan)
        if plan:
            decodes = plan.decodes
            share = pace.encode_s(readers, others, plan.tokens - decodes)
            step.encode_s, step.encoded = self.encoder.encode(
                plan.encode, share, self.unfinished.__contains__
            )
            step.seconds = self.cost.step(Composition.of(plan)) + step.encode_s
            pace.observe(decodes, plan.tokens - decodes, step.seconds, step.encode_s)
            beside_s = step.encode_s + pace.prompt_s(plan.tokens - decodes)
            self._control.observe(decodes, step.seconds, beside_s)
        return step

    def end(self, step: Step) -> list[Request]:
        """Fold the step back; the sequences that got a token by it. Ending those that are complete is the caller's."""
        self.steps += 1
        self.computed_tokens += step.plan.tokens
        told = [item.seq for item in step.plan.work if item.samples and item.seq.status is Status.RUNNING]
        self.scheduler.update(step.plan, {seq.id: self._pick(seq) for seq in told})
        return told
