"""Divides the memory of a GPU at the start: the KV pool gets what the largest step leaves.

Before the pool is allocated, a runner with a pool of a few blocks computes the largest things that the
settings allow, with zeros for pixels and tokens:

    the largest image of the model, in the encoder's stream, which holds its memory apart
    a step of max_step_tokens tokens at the end of the longest context, and of as many decodes as may run, all
        of which sample from filtered distributions
    a step of decodes alone
    the recording of all CUDA graphs

The log has one line with all parts. They add up to the memory of the device.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Protocol

from fovea.core.errors import ConfigError, InvalidRequest, OutOfMemory
from fovea.core.media import Image, PixelBudget
from fovea.core.sampling import SamplingParams
from fovea.engine.config import MIB, EngineConfig
from fovea.engine.execute.device_memory import DeviceMemory, is_out_of_memory
from fovea.engine.execute.pool_sizes import most_new_tokens
from fovea.engine.execute.runner import Runner
from fovea.engine.job import SequenceInputs
from fovea.engine.layers.config import DecoderConfig
from fovea.engine.schedule.decode_batches import Padding
from fovea.engine.schedule.plan import EncodeJob, StepPlan, Work
from fovea.engine.sequence import ImageSpan, Sequence, StateWork
from fovea.engine.step.executor import StepOutOfMemory
from fovea.engine.vision.processor.base import ImageProcessor, VisualPlan
from fovea.kernels import NO_SLOT

log = logging.getLogger("fovea.engine")
HEADROOM_SHARE, LEAST_HEADROOM = 0.02, 256 * MIB
"""The part of the device's memory that nothing gets, and its least size: memory fragments over time."""
MOST_BLOCKS = 64
"""Most blocks of the pool of the profile run."""
DECODE_CONTEXT = 2048
"""Longest context of its decodes."""
SIDES = (4096, 2048, 1024, 512)
"""Longest side of the images that are tried, until one fits."""
SHAPES = ((1, 1), (1, 0.75), (0.75, 1), (1, 0.5), (0.5, 1), (1, 0.25), (0.25, 1))
"""Width and height of these images, as shares of the side. Tiles cover some shapes with more tokens."""
SAMPLING = SamplingParams(temperature=1.0, top_p=0.9)


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """The parts of a device's memory, in bytes.

    total: all of it.
    others: other processes, and CUDA itself.
    weights: the model.
    libraries: kernels, and workspaces of libraries, that were loaded by the first steps.
    step: the largest step, and the largest image beside it.
    graphs: recorded CUDA graphs.
    outputs: the caches of encoder outputs and regions, when they are full.
    copies: staging memory for copies of KV from and to host memory.
    headroom: nothing has it.
    """

    total: int
    others: int
    weights: int
    libraries: int
    step: int
    graphs: int
    outputs: int
    copies: int
    headroom: int

    @property
    def room(self) -> int:
        """The bytes that are left for KV and states; below 0 if the parts are more than there is."""
        taken: int = sum(size for name, size in asdict(self).items() if name != "total")
        return self.total - taken

    def stats(self, kv: int) -> dict[str, float]:
        """Return the parts by the names of `observe.table`. kv: bytes of the KV pool and of states."""
        parts = {f"memory_{name}_bytes": size for name, size in asdict(self).items()}
        return {**parts, "memory_kv_bytes": kv, "memory_spare_bytes": self.room - kv}

    def report(self, kv: int, *, configured: bool) -> None:
        """Log all parts, and a warning if they are more than there is.

        kv: bytes of the KV pool and of states. configured: the settings name the size of the pool.
        """
        named = {
            "other processes and CUDA": self.others, "weights": self.weights, "libraries": self.libraries,
            "largest step": self.step, "CUDA graphs": self.graphs, "encoder outputs": self.outputs,
            "copies": self.copies, "headroom": self.headroom, "KV and states": kv,
        }  # fmt: skip
        parts = " + ".join(f"{size // MIB} {name}" for name, size in named.items())
        spare = self.room - kv
        rest = f"+ {spare // MIB} unused" if spare >= 0 else f"- {-spare // MIB} that are missing"
        log.info("device memory in MiB: %d = %s %s", self.total // MIB, parts, rest)
        if spare < 0 and configured:
            log.warning(
                "kv_cache_mib and state_cache_mib take %d MiB, and beside the largest step %d MiB are left: "
                "large steps will be tried again in halves; accepted without this: a smaller kv_cache_mib, "
                "max_step_tokens or max_running",
                kv // MIB,
                max(0, self.room) // MIB,
            )


class MakeRunner(Protocol):
    """Makes a runner with an encoder-output cache of its own, without padding and host memory."""

    def __call__(self, *, blocks: int, window_blocks: int, state_slots: int) -> Runner: ...


def measure(
    memory: DeviceMemory,
    make: MakeRunner,
    config: EngineConfig,
    processor: ImageProcessor,
    context: int,
    padding: Padding | None,
    copies: int,
) -> MemoryParts:
    """Compute the largest step, and return the parts of the memory without KV.

    context: tokens of the longest sequence.
    padding: padding of decodes, for any pool; None: decodes are not padded.
    copies: bytes of staging memory.

    Raises ConfigError if the step does not fit into the memory, even without a pool.
    """
    before = memory.usage()
    try:
        step, graphs = _peaks(memory, make, config, processor, context, padding)
    except Exception as error:
        if not isinstance(error, StepOutOfMemory) and not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"the largest step does not fit into the device's memory beside the weights: "
            f"{config.schedule.max_step_tokens} tokens (max_step_tokens), {config.schedule.max_running} "
            "sequences (max_running); accepted: fewer",
            param="max_step_tokens",
        ) from error
    after = memory.usage()  # the runner of the profile is gone
    return MemoryParts(
        total=before.total,
        others=before.used - before.reserved,
        weights=before.reserved,
        libraries=max(0, after.used - before.used),
        step=step,
        graphs=graphs,
        outputs=(config.outputs.embed_cache_mib + config.outputs.region_cache_mib) * MIB,
        copies=copies,
        headroom=max(LEAST_HEADROOM, int(HEADROOM_SHARE * before.total)),
    )


def _peaks(
    memory: DeviceMemory,
    make: MakeRunner,
    config: EngineConfig,
    processor: ImageProcessor,
    context: int,
    padding: Padding | None,
) -> tuple[int, int]:
    """Return the bytes of the largest step, and of all CUDA graphs. The arguments are those of `measure`."""
    blocks = min(config.schedule.max_running, MOST_BLOCKS)
    # One block more than the run uses takes the KV of padding rows, in each pool, and one slot their states.
    runner = make(blocks=blocks + 1, window_blocks=2, state_slots=2)
    run, base = ProfileRun(runner, config, context, blocks), memory.begin_peak()
    run.encode(processor)
    run.compute(chunk=True)
    run.compute(chunk=False)
    step = memory.peak() - base
    recording = memory.usage()
    runner.pad_decodes(None if padding is None else padding.fit((blocks, 1), context, 1))
    return step, max(0, memory.usage().used - recording.used)


class ProfileRun:
    """Steps of sequences that no client sent.

    Their block tables repeat a few blocks, so what they compute means nothing, but it takes as much memory as
    a real step.
    """

    def __init__(self, runner: Runner, config: EngineConfig, context: int, blocks: int) -> None:
        self._runner = runner
        self._config = config
        self._context = context
        self._blocks = blocks
        self._decoder: DecoderConfig = runner.model.decoder.config
        self._names = 0

    def encode(self, processor: ImageProcessor) -> None:
        """Encode the largest image that fits."""
        for side in SIDES:
            plan = largest_plan(processor, side)
            if plan is None:
                continue
            error = self._encode(processor, plan)
            if error is None:
                return
            if not isinstance(error, OutOfMemory):
                raise error
            log.warning(
                "an image of %d x %d pixels (%d visual tokens) does not fit into the device's memory; "
                "requests with such an image will fail",
                plan.width,
                plan.height,
                plan.rows,
            )

    def _encode(self, processor: ImageProcessor, plan: VisualPlan) -> Exception | None:
        pixels = bytes(plan.width * plan.height * 3)
        image = processor.process(Image("0" * 64, plan.width, plan.height, pixels), plan)
        span = ImageSpan(0, 0, plan.tokens, plan.tokens, "profile", plan.grid, states=plan.states)
        seq = self._sequence(1, 1, SequenceInputs(pixels={span.key: lambda: image}))
        try:
            while True:
                result = self._runner.execute(StepPlan(encode=(EncodeJob(span, [seq.id]),)))
                if seq.id in result.failures:
                    return result.failures[seq.id]
                if span.key in result.encoded:
                    return None
        finally:
            self._runner.embeddings.release(span.key, seq.id)
            self._runner.remove(seq)

    def compute(self, *, chunk: bool) -> None:
        """Compute a step of as many sequences as may run. chunk: one of them computes tokens of a prompt."""
        running = min(self._config.schedule.max_running, self._config.schedule.max_step_tokens)
        decodes = [self._decode(number) for number in range(running - chunk)]
        # A model whose images are computed whole may exceed the tokens of a step by one image.
        most = most_new_tokens(self._config, self._decoder) - len(decodes)
        if chunk:
            decodes.append(self._prompt(min(most, self._context), len(decodes)))
        self._runner.execute(StepPlan(work=tuple(decodes)))
        for work in decodes:
            self._runner.remove(work.seq)

    def _decode(self, number: int) -> Work:
        length = min(self._context, DECODE_CONTEXT)
        seq = self._sequence(max(1, length - 1), number)
        seq.append([0])
        seq.computed_tokens = seq.length - 1
        return Work(seq, seq.length - 1, 1, self._state(0, seq.length))

    def _prompt(self, count: int, number: int) -> Work:
        seq = self._sequence(self._context, number)
        seq.computed_tokens = seq.length - count
        return Work(
            seq, seq.computed_tokens, count, self._state(0 if count < seq.length else NO_SLOT, seq.length)
        )

    def _state(self, source: int, stop: int) -> StateWork | None:
        return StateWork(source, ((stop, 0),)) if self._decoder.stateful else None

    def _sequence(self, tokens: int, number: int, inputs: SequenceInputs | None = None) -> Sequence:
        """Return a sequence whose prompt has so many tokens, known to the runner.

        Its first block is its own, as far as there are blocks: decodes with the same blocks are computed
        together, which takes less memory.
        """
        self._names += 1
        seq = Sequence(f"fovea-profile:{self._names}", [0] * tokens, SAMPLING, 2)
        table = -(-(tokens + 1) // self._config.kv.block_size)
        seq.blocks = [number % self._blocks] + [0] * (table - 1)
        seq.window_blocks = [0] * table
        self._runner.add(seq, inputs or SequenceInputs())
        return seq


def largest_plan(processor: ImageProcessor, side: int) -> VisualPlan | None:
    """Return the plan with the most rows among images of that side; None: the model takes none of them."""
    plans = []
    for width, height in SHAPES:
        try:
            plans.append(processor.plan(int(side * width), int(side * height), PixelBudget()))
        except InvalidRequest:
            continue
    return max(plans, key=lambda plan: plan.rows, default=None)
