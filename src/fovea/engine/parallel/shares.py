"""The share of a decoder that a process computes: the shape of it, and the parts of checkpoint tensors.

Tensor parallelism (arXiv 1909.08053) divides every layer. A process has some of the heads and a part of the
width of every feed-forward block. Input projections are divided by output, output projections by input, so
the results of the latter are parts of a sum: two sums over all processes per layer. Norms, routers and the
small maps of per-layer embeddings are in every process.

Pipeline parallelism (arXiv 1811.06965) divides the list of layers into stages. The driver is in the first
one, and has the embedding table, the last norm and the language head.

This module knows sizes alone. It must not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import gcd

from fovea.core.errors import ConfigError
from fovea.engine.layers.config import (
    Attention,
    CrossAttention,
    DecoderConfig,
    Dense,
    Experts,
    FeedForward,
    GatedDelta,
    LayerConfig,
    Mixer,
    ShortConv,
)
from fovea.engine.models.targets import Cut

Run = tuple[int, int]
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")


@dataclass(frozen=True, slots=True)
class Grid:
    """The place of one process among all.

    rank: its number. The processes of a stage have consecutive numbers.
    tensor: processes that divide each layer.
    pipeline: number of stages.
    """

    rank: int
    tensor: int
    pipeline: int = 1

    @property
    def size(self) -> int:
        return self.tensor * self.pipeline

    @property
    def stage(self) -> int:
        return self.rank // self.tensor

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor

    def part(self, count: int, unit: int = 1) -> Run:
        """Return this process' run of `count` things of `unit` numbers each."""
        own = count // self.tensor * unit
        return self.tensor_rank * own, (self.tensor_rank + 1) * own

    def kv_part(self, heads: int, unit: int = 1) -> Run:
        """Return this process' run of KV heads. If there are more processes than heads, some share one."""
        if heads >= self.tensor:
            return self.part(heads, unit)
        head = self.tensor_rank * heads // self.tensor
        return head * unit, (head + 1) * unit


def share_of(config: DecoderConfig, grid: Grid) -> DecoderConfig:
    """Return the shape of a process' share. Raises ConfigError if the decoder cannot be divided so."""
    check(config, grid)
    layers = tuple(_layer(layer, grid, config.hidden) for layer in config.layers)
    stage = None if grid.pipeline == 1 else stages(config, grid.pipeline)[grid.stage]
    return replace(config, layers=layers, stage=stage)


def check(config: DecoderConfig, grid: Grid) -> None:
    """Raise ConfigError if a decoder cannot be divided so, naming what does not divide, and what would."""
    wrong = next((size for size in _sizes(config) if not size.divides(grid.tensor)), None)
    if wrong is not None:
        accepted = [count for count in range(1, 1025) if all(size.divides(count) for size in _sizes(config))]
        raise ConfigError(
            f"tensor_parallel is {grid.tensor}, and {wrong.what} of this model are {wrong.count}; accepted "
            f"for this model: {', '.join(map(str, accepted))}",
            param="tensor_parallel",
        )
    stages(config, grid.pipeline)


@dataclass(frozen=True, slots=True)
class _Size:
    """A number of things that are divided. shared: if there are fewer than processes, some share one."""

    what: str
    count: int
    shared: bool = False

    def divides(self, parts: int) -> bool:
        return self.count % parts == 0 or (self.shared and parts % self.count == 0)


def _sizes(config: DecoderConfig) -> Iterator[_Size]:
    """Yield everything that is divided."""
    for number, layer in enumerate(config.layers):
        mixer, block, where = layer.mixer, layer.feed_forward, f" of layer {number}"
        if isinstance(mixer, Attention | CrossAttention):
            yield _Size(f"the heads{where}", mixer.heads)
            yield _Size(f"the KV heads{where}", mixer.kv_heads, shared=True)
        elif isinstance(mixer, GatedDelta):
            # A key head goes with its value heads.
            yield _Size(f"the key heads{where}", gcd(mixer.key_heads, mixer.value_heads))
        else:
            yield _Size(f"the channels{where}", mixer.channels or config.hidden)
        if isinstance(block, Dense):
            yield _Size(f"the numbers in the feed-forward block{where}", block.intermediate)
            continue
        yield _Size(f"the numbers in the experts{where}", block.intermediate)
        yield _Size(f"the numbers in the shared expert{where}", block.shared)
        yield _Size(f"the numbers in the dense block{where}", block.dense)


def stages(config: DecoderConfig, count: int) -> tuple[Run, ...]:
    """Divide the layers into stages of about equal length.

    A layer that reads keys and values of another is in its stage.

    Raises ConfigError if that is not possible.
    """
    layers = config.layers
    cuts = [number for number in range(1, len(layers)) if _may_cut(config, number)]
    chosen: list[int] = []
    for stage in range(1, count):
        ideal = len(layers) * stage / count
        left = [number for number in cuts if not chosen or number > chosen[-1]]
        left = left[: len(left) - (count - 1 - stage)]  # each later stage needs a cut, too
        if not left:
            raise ConfigError(
                f"pipeline_parallel is {count}, and the {len(layers)} layers of this model can be divided "
                f"into at most {len(cuts) + 1} stages",
                param="pipeline_parallel",
            )
        chosen.append(min(left, key=lambda number: abs(number - ideal)))
    bounds = [0, *chosen, len(layers)]
    return tuple(zip(bounds, bounds[1:], strict=False))


def _may_cut(config: DecoderConfig, number: int) -> bool:
    """Whether a stage may begin with that layer."""
    mixers = [layer.mixer for layer in config.layers]
    reads = (
        isinstance(mixer, Attention) and mixer.source is not None and mixer.source < number
        for mixer in mixers[number:]
    )
    return not any(reads)


def largest_share(config: DecoderConfig, grid: Grid) -> DecoderConfig:
    """Return the share of the stage whose tokens take most memory."""
    shares = [share_of(config, replace(grid, rank=stage * grid.tensor)) for stage in range(grid.pipeline)]
    return max(shares, key=lambda share: (share.kv_bytes_per_token(2), share.state_bytes(2)))


def _layer(layer: LayerConfig, grid: Grid, hidden: int) -> LayerConfig:
    return replace(
        layer, mixer=_mixer(layer.mixer, grid, hidden), feed_forward=_block(layer.feed_forward, grid)
    )


def _mixer(mixer: Mixer, grid: Grid, hidden: int) -> Mixer:
    count = grid.tensor
    if isinstance(mixer, Attention):
        first, last = grid.kv_part(mixer.kv_heads)
        return replace(mixer, heads=mixer.heads // count, kv_heads=last - first)
    if isinstance(mixer, CrossAttention):
        return replace(mixer, heads=mixer.heads // count, read=grid.kv_part(mixer.kv_heads))
    if isinstance(mixer, GatedDelta):
        return replace(mixer, key_heads=mixer.key_heads // count, value_heads=mixer.value_heads // count)
    return replace(mixer, channels=(mixer.channels or hidden) // count)


def _block(block: FeedForward, grid: Grid) -> FeedForward:
    count = grid.tensor
    if isinstance(block, Dense):
        return replace(block, intermediate=block.intermediate // count)
    return replace(
        block,
        intermediate=block.intermediate // count,
        shared=block.shared // count,
        dense=block.dense // count,
    )


def cut_of(config: DecoderConfig, name: str, grid: Grid) -> Cut | None:
    """Return the part of a tensor that a process has; None: all of it.

    config: the shape of the whole decoder.
    name: canonical name of the tensor.
    """
    if grid.tensor == 1:
        return None
    if name == "lm_head.weight":
        return _cut(0, config.vocab_size, head_rows(config, grid))
    match = _LAYER.match(name)
    if match is None:
        return None
    layer = config.layers[int(match[1])]
    part, _, rest = match[2].partition(".")
    if part == "mlp":
        return _block_cut(layer.feed_forward, rest, grid)
    find = _MIXERS.get(part)
    return None if find is None else find(config, layer.mixer, rest, grid)


def skipped(config: DecoderConfig, grid: Grid) -> tuple[str, ...]:
    """Return which tensors a process does not load: regular expressions of canonical names.

    config: the shape of the whole decoder.
    """
    found = []
    if grid.rank:
        found.append(r"^(?!decoder\.layers\.|lm_head\.)")
        if grid.stage or config.tied:
            found.append(r"^lm_head\.")
        found.append(r"\.cross_attn\.(k_proj|v_proj|k_norm)\.")
    if grid.tensor_rank:
        found.append(r"\.(o_proj|out_proj|down_proj)\.bias$")
    first, last = stages(config, grid.pipeline)[grid.stage]
    others = [str(number) for number in range(len(config.layers)) if not first <= number < last]
    if others:
        found.append(rf"^decoder\.layers\.({'|'.join(others)})\.")
    return tuple(found)


def head_rows(config: DecoderConfig, grid: Grid) -> Run:
    """Return a process' rows of a language head that is not tied. All but the last have equally many.

    The processes of the first stage have it. A tied head is the embedding table, which the driver has.
    """
    if grid.stage:
        return 0, 0
    rows = -(-config.vocab_size // grid.tensor)
    return min(grid.tensor_rank * rows, config.vocab_size), min(
        (grid.tensor_rank + 1) * rows, config.vocab_size
    )


def _cut(axis: int, size: int, *runs: Run) -> Cut:
    return Cut(axis, runs, size)


def _shifted(run: Run, by: int) -> Run:
    return run[0] + by, run[1] + by


def _attention(config: DecoderConfig, mixer: Mixer, rest: str, grid: Grid) -> Cut | None:
    assert isinstance(mixer, Attention | CrossAttention)
    head = mixer.head_dim
    if rest == "o_proj.weight":
        return _cut(1, mixer.heads * head, grid.part(mixer.heads, head))
    kind = rest.partition(".")[0]
    if kind == "q_proj":
        unit = 2 * head if isinstance(mixer, Attention) and mixer.gated else head
        return _cut(0, mixer.heads * unit, grid.part(mixer.heads, unit))
    if kind in ("k_proj", "v_proj") and isinstance(mixer, Attention):
        return _cut(0, mixer.kv_heads * head, grid.kv_part(mixer.kv_heads, head))
    return None


def _delta(config: DecoderConfig, mixer: Mixer, rest: str, grid: Grid) -> Cut | None:
    assert isinstance(mixer, GatedDelta)
    keys, values = mixer.key_heads * mixer.key_dim, mixer.value_heads * mixer.value_dim
    own = grid.part(mixer.value_heads, mixer.value_dim)
    kind = rest.partition(".")[0]
    if kind in ("in_proj_qkv", "conv1d"):
        key = grid.part(mixer.key_heads, mixer.key_dim)
        return _cut(0, mixer.channels, key, _shifted(key, keys), _shifted(own, 2 * keys))
    if kind == "in_proj_z":
        return _cut(0, values, own)
    if kind in ("in_proj_b", "in_proj_a", "A_log", "dt_bias"):
        return _cut(0, mixer.value_heads, grid.part(mixer.value_heads))
    return _cut(1, values, own) if rest == "out_proj.weight" else None


def _convolution(config: DecoderConfig, mixer: Mixer, rest: str, grid: Grid) -> Cut | None:
    assert isinstance(mixer, ShortConv)
    channels = mixer.channels or config.hidden
    own = grid.part(channels)
    kind = rest.partition(".")[0]
    if kind == "in_proj":
        return _cut(0, 3 * channels, *(_shifted(own, third * channels) for third in range(3)))
    if kind == "conv":
        return _cut(0, channels, own)
    return _cut(1, channels, own) if rest == "out_proj.weight" else None


def _block_cut(block: FeedForward, rest: str, grid: Grid) -> Cut | None:
    kind, _, last = rest.rpartition(".")
    if kind == "experts" and isinstance(block, Experts):
        width, own = block.intermediate, grid.part(block.intermediate)
        if last == "gate_up_proj":
            return _cut(1, 2 * width, own, _shifted(own, width))
        return _cut(2, width, own)
    path, _, kind = kind.rpartition(".")
    if isinstance(block, Dense):
        width = block.intermediate if not path else 0
    else:
        width = {"shared_expert": block.shared, "dense": block.dense}.get(path, 0)
    if not width:
        return None
    own = grid.part(width)
    if kind in ("gate_proj", "up_proj"):
        return _cut(0, width, own)
    return _cut(1, width, own) if rest.endswith("down_proj.weight") else None


_MIXERS: dict[str, Callable[[DecoderConfig, Mixer, str, Grid], Cut | None]] = {
    "self_attn": _attention,
    "cross_attn": _attention,
    "linear_attn": _delta,
    "conv": _convolution,
}
