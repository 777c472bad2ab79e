"""Times of steps and images on a device, from the model's shape and the device's rates.

    reading     bytes / (bandwidth * efficiency of decode)
    arithmetic  operations / (peak of the weights' arithmetic * efficiency of the stage)

Quantized weights take their share of these times by the table that the engine reads as well
(`core.precision`): `few` of reading, `many` of arithmetic. Types that Fovea does not run on a device take the
times of their bytes and peaks, as other engines might.

A step takes the fixed times of `Overheads`, and the longer of reading and arithmetic, which hide each other
well on a GPU (`overlap`) and not at all on a CPU. A multiplication and an addition are two operations.

    a token          2 * (weights that it is multiplied with) operations
    a pair           4 * heads * head_dim operations per layer: scores, and the sum over values
    a decode         reads KV of its whole context, in layers with a window of the window, and its states
    a step           reads all weights of the decoder and the head once; of experts, those that its rows use
    an image         2 * rows * weights of each part of the tower, and its pairs; reads the tower once, on one
                     device: with tensor parallel each device has a copy of the tower
    image states     of layers outside of the prompt are read by each decode, as KV is
    tensor parallel  two sums over the devices for each layer, of all rows (Megatron-LM, arXiv 1909.08053)

The work of the vision tower follows from the number of an image's visual tokens. The engine counts the same
rows from the plan of an image (`VisionLanguageModel.visual_shape`). Where the number of tokens decides them,
both agree. Where it does not, this is an estimate:

    windows at the edges of a picture are smaller than others (Qwen2.5-VL): without its aspect the mean loss
        is subtracted; with it the grid is the factors of the number of tokens that fit best
    patches beyond the last whole square have no token (LightOnOCR): they are left out
    tiles of one image have sizes of their own (MiniCPM-V): they are taken as equal
    padding inside tiles has no tokens (LLaVA-NeXT), or a picture with too many tokens is shrunk
        (LLaVA-OneVision): as many tiles are counted as the tokens could fill, which are too few
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fovea.core.precision import Speed, speed_of
from fovea.planner.cost import CostModel, together
from fovea.planner.hardware import Hardware
from fovea.planner.memory import kv_bytes_per_token, output_bytes, state_bytes, weight_bytes
from fovea.planner.precision import QUANTIZED, Precision
from fovea.planner.shape import AttentionLayers, Maps, ModelShape, Tower

Pictures = Sequence[tuple[float, float]]
"""Numbers of pictures, each with the patches of one of them."""


@dataclass(frozen=True, slots=True)
class EncoderWork:
    """Rows that each part of the tower computes for an image. They are whole numbers in most towers.

    patches: rows of the patch embedding.
    rows: rows of the blocks.
    projector_rows: rows of the projector.
    merged_rows: rows of the part "merged".
    pairs: pairs of rows that attend to each other, summed over all blocks. A block of another width than
        `Tower.hidden` counts in proportion to its width.
    """

    patches: float
    rows: float
    projector_rows: float
    merged_rows: float
    pairs: float


def encoder_work(shape: ModelShape, tokens: float, aspect: float | None = None) -> EncoderWork:
    """Return the work of encoding one image.

    tokens: rows of the encoder's output for this image, at least 1: its visual tokens, or, in models whose
        image states lie outside of the prompt (`shape.cross`), those states.
    aspect: width of the image through its height; None: it is not known. Only towers with windows read it.
    """
    tower = shape.tower
    found = pictures(tower, tokens)
    number = sum(count for count, _ in found)
    patches = sum(count * size for count, size in found)
    real = patches + number * tower.extra_rows
    full = sum(count * (size + tower.extra_rows) ** 2 for count, size in found)
    if tower.padded_rows:
        # Rows of padding attend to all others, and all others to them, but not to each other.
        full = 2 * real * tower.padded_rows - real**2
    windows = sum(count * _window_pairs(tower, size, aspect) for count, size in found)
    merged = sum(count * (size * tower.merged_rows_per_patch) ** 2 for count, size in found)
    return EncoderWork(
        patches,
        tower.padded_rows or real,
        patches * tower.projector_rows_per_patch + number * tower.projected_extra_rows,
        patches * tower.merged_rows_per_patch,
        tower.full_layers * full
        + tower.window_layers * windows
        + tower.merged_layers * tower.merged_pairs * merged,
    )


def pictures(tower: Tower, tokens: float) -> Pictures:
    """Return the pictures that an image of so many visual tokens becomes."""
    if tower.tiling == "whole":
        view = tower.view_tokens
        if tokens <= view:
            return ((1, tower.view_patches * tokens / view),)
        whole = (max(1, math.ceil((tokens - view) / tower.tile_tokens)), tower.tile_patches)
        return ((1, tower.view_patches), whole) if view else (whole,)
    if tower.tiling == "rest":
        tiles, rest = divmod(tokens, tower.tile_tokens)
        return (
            (tiles, tower.tile_tokens * tower.patches_per_token),
            (1.0 if rest else 0.0, rest * tower.patches_per_token),
        )
    count = max(1, round(tokens / tower.tile_tokens)) if tower.tiling == "equal" else 1
    return ((count, tokens / count * tower.patches_per_token),)


def _window_pairs(tower: Tower, patches: float, aspect: float | None) -> float:
    """Pairs of one block with windows in a picture of so many patches; 0: the tower has no such blocks."""
    if not tower.window_layers:
        return 0.0
    edge, side = math.sqrt(tower.window_rows), math.sqrt(patches)
    if tower.padded_windows:
        return (math.ceil(side / edge) * tower.window_rows) ** 2
    step = math.sqrt(tower.patches_per_token)
    tokens = patches / tower.patches_per_token
    if aspect is not None and tokens == int(tokens):
        rows, columns = _grid(int(tokens), aspect)
        return _squares(rows * step, edge) * _squares(columns * step, edge)
    if side <= edge:
        return patches**2
    # The mean of `_squares` over all remainders, which are multiples of the side of a visual token.
    return (side * edge - max(0.0, edge**2 - step**2) / 6) ** 2


def _squares(side: float, edge: float) -> float:
    """Sum of the squared lengths of the windows along a side: whole ones, and one that remains."""
    whole, rest = divmod(side, edge)
    return whole * edge**2 + rest**2


def _grid(tokens: int, aspect: float) -> tuple[int, int]:
    """Return the rows and columns of so many tokens whose ratio is nearest to columns / rows = aspect."""
    factors = (n for n in range(1, math.isqrt(tokens) + 1) if tokens % n == 0)
    grids = [grid for n in factors for grid in ((n, tokens // n), (tokens // n, n))]
    return min(grids, key=lambda grid: abs(math.log(grid[1] / grid[0] / aspect)))


LATENCY_S = {"nvlink": 8e-6, "infinity-fabric": 12e-6, "pcie": 25e-6, "ethernet": 50e-6, "socket": 5e-6}
"""Seconds of one sum over the devices beside its bytes, by link: rough figures of small all-reduces."""
OVERLAP = {"gpu": 4.0, "cpu": 1.0}
TYPICAL_TOKENS = 1024
"""Visual tokens of a typical image: there, at half and at twice that, the cost model's curve is exact."""


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds that follow from the engine and not from the model's size.

    step_s: a step: launching its kernels, sampling.
    sequence_s: a decoding sequence: sampling, detokenizing.
    chunk_s: a chunk of a prompt.
    image_s: an image in the encoder.
    between_s: from one step to the next.
    request_s: reading a request and preparing its text.
    pixel_s: decoding and resizing one pixel.
    slice_s: longest piece of an encoding that cannot be interrupted.
    """

    step_s: float
    sequence_s: float
    chunk_s: float
    image_s: float
    between_s: float
    request_s: float
    pixel_s: float
    slice_s: float


OVERHEADS = {
    "cpu": Overheads(2.5e-4, 6e-5, 5e-4, 2e-3, 3e-4, 2e-3, 3e-8, 2e-3),
    "gpu": Overheads(1.5e-3, 2e-5, 2e-4, 1e-3, 4e-4, 2e-3, 3e-8, 2e-3),
}
"""Those of a CPU are fits of the bundled model (benchmarks/costs); those of a GPU are assumptions."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A model on the devices of one replica.

    shape: the model.
    hardware: one device.
    precision: of weights and KV.
    devices: devices that hold the model together (tensor parallel).
    """

    shape: ModelShape
    hardware: Hardware
    precision: Precision
    devices: int = 1

    @property
    def overheads(self) -> Overheads:
        return OVERHEADS[self.hardware.kind]

    @property
    def bandwidth(self) -> float:
        """Bytes per second that a step reads, all devices together."""
        return self.hardware.bandwidth * self.hardware.share("decode") * self.devices

    def speed(self, format: str) -> Speed | None:
        """Row of `core.precision` for a format; None: it is no format, or Fovea cannot run it here."""
        return speed_of(format, self.hardware.device) if format in QUANTIZED else None

    def rate(self, format: str, stage: str) -> float:
        """Operations per second of products with many rows and weights of that format, on one device."""
        hardware, dtype = self.hardware, self.precision.dtype
        arithmetic, speed = arithmetic_of(format, hardware.kind, dtype), self.speed(format)
        if speed is None or (hardware.measured and arithmetic in hardware.peaks):
            return hardware.rate(arithmetic)[1] * hardware.share(stage)
        plain = hardware.rate(arithmetic_of(dtype, hardware.kind, dtype))[1]
        return plain * hardware.share(stage) / speed.many

    @property
    def kv_rate(self) -> float:
        """Bytes of different KV per second that all devices read together; copies do not count."""
        return self.bandwidth / self.devices * self.kv_devices

    @property
    def kv_devices(self) -> int:
        """Devices among which KV is divided: KV heads are not split, so more devices hold copies."""
        heads = min((layers.kv_heads for layers in self.shape.attention), default=1)
        parts = [count for count in range(1, self.devices + 1) if heads % count == 0]
        return max(count for count in parts if self.devices % count == 0)

    @property
    def kv_token_bytes(self) -> float:
        """Bytes of a token's KV, on all devices together, copies included."""
        return kv_bytes_per_token(self.shape, self.precision) * self.devices / self.kv_devices


def arithmetic_of(format: str, kind: str, dtype: str) -> str:
    """Return the arithmetic (`hardware.ARITHMETIC`) of products with weights of a format.

    Weights of 4 bits are widened before a product, on a GPU to `dtype`, in our kernels for CPUs to 8 bits.
    """
    if format == "int4" and kind == "cpu":
        return "int8"
    if format in ("int4", "awq", "gptq"):
        format = dtype
    return {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}.get(format, format)


@dataclass(frozen=True, slots=True)
class ImageWork:
    """The work of encoding one image.

    operations: of its rows with weights, and of the pairs of rows in attention.
    pair_operations: how many of these are of pairs.
    bytes: weights that are read.
    """

    operations: float
    pair_operations: float
    bytes: int


def image_work(setup: Setup, tokens: int) -> ImageWork:
    """Return the work of encoding one image of so many visual tokens."""
    shape, work = setup.shape, encoder_work(setup.shape, tokens)
    rows = {
        "patches": work.patches, "encoder": work.rows, "merged": work.merged_rows,
        "projector": work.projector_rows, "cross": work.projector_rows,
    }  # fmt: skip
    pairs = 4.0 * shape.tower.hidden * work.pairs
    sizes = weight_bytes(shape, setup.precision)
    return ImageWork(
        pairs + sum(2.0 * count * shape.weights(part) for part, count in rows.items()),
        pairs,
        sum(sizes.get(part, 0) for part in rows),
    )


def image_bounds(setup: Setup, work: ImageWork) -> tuple[float, float]:
    """Return the seconds of reading and of arithmetic of an image's work, on one device."""
    encoder = setup.precision.format_of("encoder")
    arithmetic = (work.operations - work.pair_operations) / setup.rate(encoder, "encode")
    arithmetic += work.pair_operations / setup.rate(setup.precision.dtype, "encode")
    return work.bytes * setup.devices / setup.bandwidth, arithmetic


def image_seconds(setup: Setup, tokens: int) -> float:
    """Return the seconds of encoding one image of so many visual tokens."""
    reading, arithmetic = image_bounds(setup, image_work(setup, tokens))
    return setup.overheads.image_s + together(reading, arithmetic, OVERLAP[setup.hardware.kind])


def cost_model(
    setup: Setup, tokens: int = TYPICAL_TOKENS, context: int = 0, image_rows: float = 0.0
) -> CostModel:
    """Return the cost model of a model on its devices.

    tokens: visual tokens of a typical image.
    context: tokens of a typical context, for layers with a window; 0: longer than all windows.
    image_rows: image states of a typical request, in models with `shape.cross`.
    """
    shape, overheads, precision = setup.shape, setup.overheads, setup.precision
    sizes = weight_bytes(shape, precision)
    prefill = setup.rate(precision.format_of("decoder"), "prefill") * setup.devices
    attention = setup.rate(precision.dtype, "prefill") * setup.devices
    windows = [group for group in shape.attention if group.window is not None]
    seen = {group: group.seen(context or 1 << 40) for group in windows}
    window_operations = sum(
        4.0 * group.count * group.heads * group.head_dim * seen[group] for group in windows
    )
    cross_bytes, cross_operations = _cross(setup, image_rows)
    token = (2.0 * shape.active_weights + shape.state_operations) / prefill
    token += (window_operations + cross_operations) / attention
    exchange_s, exchange_row_s = _exchange(setup)
    # A decode reads these beside the weights. They belong to a sequence, whatever its context, and
    # nothing hides them: the arithmetic of a decode is short.
    own = sum(_kv_bytes(group, precision) * seen[group] for group in windows) + cross_bytes
    own_s = own / setup.kv_rate + 2 * state_bytes(shape, precision) / setup.bandwidth  # read and written
    head = 2.0 * shape.weights("head")
    head /= setup.rate(precision.format_of("head"), "prefill") * setup.devices
    return CostModel(
        step_s=overheads.step_s + exchange_s,
        decode_s=overheads.sequence_s + exchange_row_s + own_s,
        context_s=sum(_kv_bytes(group, precision) for group in shape.attention if group.window is None)
        / setup.kv_rate,
        token_s=token + exchange_row_s,
        chunk_s=overheads.chunk_s,
        pair_s=shape.attention_operations_per_pair / attention,
        between_s=overheads.between_s,
        read_s=read_seconds(setup),
        row_s=token + head,
        expert_s=_part_seconds(setup, "experts", sizes.get("experts", 0)),
        expert_share=shape.active_experts / shape.experts if shape.experts else 0.0,
        overlap=OVERLAP[setup.hardware.kind],
        **_image_parameters(setup, tokens),
        slice_s=overheads.slice_s,
        kv_token_bytes=max(1, round(setup.kv_token_bytes)),
        visual_token_bytes=max(1, output_bytes(shape, precision, 1)),
        max_context=shape.max_positions,
        made_from=f"roofline: {shape.name} on {setup.devices} x {setup.hardware.name}",
    )


def read_bytes(setup: Setup) -> int:
    """Return the bytes of weights that each step reads: the decoder without experts, and the head."""
    return weight_bytes(setup.shape, setup.precision)["decoder"] + _head_bytes(setup, setup.precision)


def read_seconds(setup: Setup) -> float:
    """Return the seconds in which a step reads these weights, and multiplies them by few rows.

    Formats that Fovea's table has a time for take that share of the time of plain weights: unpacking can take
    longer than reading. Others take as long as their bytes.
    """
    decoder = weight_bytes(setup.shape, setup.precision)["decoder"]
    return _part_seconds(setup, "decoder", decoder) + _part_seconds(
        setup, "head", _head_bytes(setup, setup.precision)
    )


def _part_seconds(setup: Setup, part: str, size: int) -> float:
    """Return the seconds of products of few rows with the weights of a part that has so many bytes."""
    speed = setup.speed(setup.precision.format_of(part))
    if speed is None or not size:
        return size / setup.bandwidth
    plain = replace(setup.precision, decoder="", encoder="", head="")
    of_part = _head_bytes(setup, plain) if part == "head" else weight_bytes(setup.shape, plain)[part]
    return speed.few * of_part / setup.bandwidth


def _head_bytes(setup: Setup, precision: Precision) -> int:
    head = weight_bytes(setup.shape, precision).get("head", 0)
    plain = setup.shape.weights("head") * precision.itemsize
    # A small table that is the head as well has a packed copy, and products read only the copy.
    return head - plain if setup.shape.tied and head > plain else head


def _cross(setup: Setup, image_rows: float) -> tuple[float, float]:
    """Bytes of the image states that each decode reads, and operations of each token with them."""
    cross = setup.shape.cross
    if cross is None:
        return 0.0, 0.0
    return (
        image_rows * cross_state_bytes(setup),
        4.0 * cross.count * cross.heads * cross.head_dim * image_rows,
    )


def cross_state_bytes(setup: Setup) -> float:
    """Return the bytes of keys and values of one image state; 0 for models without such layers."""
    cross = setup.shape.cross
    if cross is None:
        return 0.0
    return 2 * cross.count * cross.kv_heads * cross.head_dim * setup.precision.kv_itemsize(cross.head_dim)


def _kv_bytes(group: AttentionLayers, precision: Precision) -> float:
    return group.kv_bytes_per_token(precision.kv_itemsize(group.head_dim))


def _exchange(setup: Setup) -> tuple[float, float]:
    """Seconds that tensor parallel adds to a step, and to each of its rows."""
    if setup.devices == 1:
        return 0.0, 0.0
    sums = reductions(setup.shape)
    rate = setup.hardware.link_bandwidth * setup.hardware.share("link")
    share = 2 * (setup.devices - 1) / setup.devices
    row = sums * share * setup.shape.hidden * 2 / rate
    return sums * LATENCY_S[setup.hardware.link_kind], row


def reductions(shape: ModelShape) -> int:
    """Return how many sums over the devices a step has with tensor parallel: one per output projection."""
    ending = [maps.count for maps in shape.maps.get("decoder", ()) if _ends_in(maps, shape)]
    experts = [maps.count for maps in shape.maps.get("experts", ()) if _ends_in(maps, shape)]
    return sum(ending) + (sum(experts) // shape.experts if shape.experts else 0)


def _ends_in(maps: Maps, shape: ModelShape) -> bool:
    return maps.outputs == shape.hidden


def _image_parameters(setup: Setup, tokens: int) -> dict[str, Any]:
    """The parabola of seconds over visual tokens through half, once and twice a typical image."""
    low, middle, high = max(1, tokens // 2), max(2, tokens), max(3, 2 * tokens)
    a, b, c = (image_seconds(setup, count) for count in (low, middle, high))
    first, second = (b - a) / (middle - low), (c - b) / (high - middle)
    square = max(0.0, (second - first) / (high - low))
    linear = max(0.0, first - square * (low + middle))
    return {
        "image_s": max(0.0, b - linear * middle - square * middle**2),
        "visual_s": linear,
        "visual_pair_s": square,
    }
