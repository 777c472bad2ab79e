"""Decoders with random weights, and timed steps on them, without an engine: shared code of decoders.py."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from fovea.engine.layers.config import Attention, DecoderConfig, FeedForward, LayerConfig, Mixer, Rotary
from fovea.engine.layers.decoder import Decoder
from fovea.engine.layers.experts import ExpertsBlock
from fovea.engine.layers.linear import Linear, use_kernels
from fovea.engine.layers.step import DecoderMemory, DecoderPlan
from fovea.kernels import NO_SLOT
from fovea.kernels.attention import AttentionPlan, Chunk, Decodes
from fovea.kernels.codes import Format
from fovea.kernels.native.build import library
from fovea.kernels.native.kernels import SIGNATURES, NativeKernels
from fovea.kernels.pages import KVFormat
from fovea.kernels.states import StateRun, state_plan

BLOCK = 16
CPU = torch.device("cpu")


class TimedLibrary:
    """The C++ kernels as attributes. Within `timed`, the seconds of every function are added up.

    Outside of it the attributes are the functions themselves, so that nothing is slower.
    """

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._functions = {name: getattr(loaded, name) for name in SIGNATURES}
        self._set(self._functions)

    def _set(self, functions: dict[str, Any]) -> None:
        for name, function in functions.items():
            setattr(self, name, function)

    @contextmanager
    def timed(self) -> Iterator[dict[str, float]]:
        seconds: dict[str, float] = defaultdict(float)

        def timed(name: str, function: Callable[..., None]) -> Callable[..., None]:
            def call(*arguments: Any) -> None:
                started = time.perf_counter()
                function(*arguments)
                seconds[name] += time.perf_counter() - started

            return call

        self._set({name: timed(name, function) for name, function in self._functions.items()})
        try:
            yield seconds
        finally:
            self._set(self._functions)


def native_kernels() -> NativeKernels:
    """Return the C++ kernels, whose functions can be timed one by one."""
    loaded = library()
    if loaded is None:
        raise SystemExit("this machine cannot run the C++ kernels")
    kernels = NativeKernels(loaded)
    kernels.library = TimedLibrary(loaded)  # type: ignore[assignment]
    return kernels


def decoder_config(hidden: int, layers: list[tuple[Mixer, FeedForward]], **options: Any) -> DecoderConfig:
    """Return a decoder of these layers with a small vocabulary: only the layers are measured."""
    attention = next(mixer for mixer, _ in layers if isinstance(mixer, Attention))
    rotated = options.pop("rotated", attention.head_dim)
    inverse = tuple(10_000.0 ** (-2 * i / rotated) for i in range(rotated // 2))
    return DecoderConfig(
        vocab_size=64,
        hidden=hidden,
        layers=tuple(LayerConfig(mixer, block) for mixer, block in layers),
        rotaries=(Rotary(inverse),),
        eps=1e-6,
        tied=False,
        max_positions=1 << 20,
        **options,
    )


def build(config: DecoderConfig, kernels: NativeKernels, format: Format | None = None) -> Decoder:
    """Return a decoder with random weights in bf16, packed for the kernels.

    format: format to which all linear maps are quantized, as `quantization` does; None: they stay bf16.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        decoder = Decoder(config)
    finally:
        torch.set_default_dtype(before)
    for module in decoder.modules():
        for parameter in module.parameters(recurse=False):
            # Norms near 1, and maps that keep the size of their inputs.
            parameter.data.fill_(1.0) if parameter.dim() == 1 else parameter.data.normal_(std=0.02)
        if isinstance(module, Linear):
            module.pack(kernels, format)
    use_kernels(decoder, kernels)
    decoder.use_stack(kernels)
    return decoder


class Subject:
    """A decoder that is measured, with memory for `rows` sequences of up to `tokens` tokens."""

    def __init__(self, decoder: Decoder, rows: int, tokens: int, kv_format: KVFormat | None = None) -> None:
        self.decoder, self.rows = decoder, rows
        self.hidden = decoder.config.hidden
        self.blocks = -(-tokens // BLOCK)
        self.memory = DecoderMemory.allocate(
            decoder.config, (rows * self.blocks,), BLOCK, rows, torch.bfloat16, CPU, kv_format
        )

    def decode_plan(self, rows: int, context: int) -> DecoderPlan:
        """One token for each of `rows` sequences, which have `context` tokens with it."""
        tables = torch.arange(rows * self.blocks).view(rows, self.blocks)
        tables = tables[:, : -(-context // BLOCK)].contiguous()
        slots = tables[:, (context - 1) // BLOCK] * BLOCK + (context - 1) % BLOCK
        decodes = Decodes(0, tables, torch.full((rows,), context), context, None)
        runs = [[StateRun(row, 1, row, ((1, row),))] for row in range(rows)]
        return self._plan(AttentionPlan(slots, (decodes,), ()), runs)

    def prompt_plan(self, first: int, count: int) -> DecoderPlan:
        """Tokens [first, first + count) of the prompt of the first sequence."""
        table = torch.arange(-(-(first + count) // BLOCK))
        chunk = Chunk(0, count, first, table)
        source = NO_SLOT if first == 0 else 0
        runs = [[StateRun(0, count, source, ((count, 0),))]]
        return self._plan(AttentionPlan(torch.arange(first, first + count), (), (chunk,)), runs)

    def _plan(self, attention: AttentionPlan, runs: list[list[StateRun]]) -> DecoderPlan:
        return DecoderPlan((attention,), state_plan(runs, CPU) if self.decoder.config.stateful else None)

    def run(self, plan: DecoderPlan, x: Tensor, positions: Tensor, read: Tensor | None = None) -> None:
        self.decoder(x, positions, self.memory, plan, read=read)

    def decode_step(self, rows: int, context: int) -> Callable[[], None]:
        """A step of `rows` single tokens. Every call has other tokens, which choose other experts."""
        plan, positions = self.decode_plan(rows, context), torch.full((rows,), context - 1)
        inputs = torch.randn(64, rows, self.hidden).to(torch.bfloat16)
        number = count()
        return lambda: self.run(plan, inputs[next(number) % 64], positions)

    def prefill(self, tokens: int, step: int) -> Callable[[], None]:
        """A whole prompt in steps of `step` tokens. Only its last row is read."""
        x = torch.randn(tokens, self.hidden).to(torch.bfloat16)
        parts = []
        for first in range(0, tokens, step):
            some = min(step, tokens - first)
            positions = torch.arange(first, first + some)
            last = torch.tensor([some - 1] if first + some == tokens else [], dtype=torch.long)
            parts.append((self.prompt_plan(first, some), x[first : first + some], positions, last))

        def call() -> None:
            for part in parts:
                self.run(*part)

        return call


def one_by_one(subject: Subject, call: Callable[[], None]) -> Callable[[], None]:
    """Return a call that computes as `call` does, with layers and experts that Python calls one by one."""
    decoder = subject.decoder
    blocks = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, ExpertsBlock)]

    def run() -> None:
        stack, mixtures = decoder._stack, [block.mixture for block in blocks]
        decoder._stack = None
        for block in blocks:
            block.mixture = None
        call()
        decoder._stack = stack
        for block, mixture in zip(blocks, mixtures, strict=True):
            block.mixture = mixture

    return run


def weight_bytes(decoder: Decoder) -> int:
    """Bytes of all linear maps, as they are stored."""
    return sum(module.weight_bytes for module in decoder.modules() if isinstance(module, Linear))


@dataclass(frozen=True)
class Times:
    """Seconds of the repetitions of one call, in the order in which they ran."""

    samples: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def over(self, other: Times) -> tuple[float, float, float]:
        """Median and quartiles of the ratios to another call's repetitions, pair by pair."""
        ratios = [a / b for a, b in zip(self.samples, other.samples, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        return middle, low, high


@torch.inference_mode()
def interleaved(
    calls: dict[str, Callable[[], None]],
    repeats: int,
    each: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Times]:
    """Time calls in turns, so that other processes on the machine disturb all of them alike.

    each: a sample is the mean of so many calls in a row. The first sample of each call is left out.
    clock: `time.process_time` adds up the processor time of all threads, for machines that are too busy.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            started = clock()
            for _ in range(each):
                call()
            if repeat:
                samples[name].append((clock() - started) / each)
    return {name: Times(values) for name, values in samples.items()}


@torch.inference_mode()
def shares(kernels: NativeKernels, call: Callable[[], None], calls: int) -> dict[str, float]:
    """Shares of a call's time in each function of C++.

    "python" is the rest: Python and small operations of torch. That of layers in one call is not known.
    """
    timed_library = kernels.library
    assert isinstance(timed_library, TimedLibrary)
    call()
    with timed_library.timed() as seconds:
        started = time.perf_counter()
        for _ in range(calls):
            call()
        whole = time.perf_counter() - started
    found = {name.removeprefix("fovea_"): spent / whole for name, spent in seconds.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1])) | {"python": 1 - sum(found.values())}
