"""Chooses among configurations, and says why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fovea.core.precision import speed_of
from fovea.planner.hardware import Hardware
from fovea.planner.option import Option, evaluate
from fovea.planner.precision import QUANTIZED, Precision, parse_precision
from fovea.planner.roofline import Setup
from fovea.planner.shape import ModelShape
from fovea.planner.workload import TokenCount, Workload

PRECISIONS = ("none", "fp8", "int8", "int4")
"""The precisions that are tried, from the one that loses least to the one that loses most."""
WORTH_LESS_PRECISION = 0.75
"""A coarser precision is recommended if it costs at most this share of a finer one."""
NEAR = 1.10
"""Configurations that cost up to this multiple of the best one are named as equals."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A configuration with the reasons for and against it.

    option: its figures.
    precision: its value of the setting `quantization`, or its formats by part (`planner.precision_text`).
    reasons: sentences.
    """

    option: Option
    precision: str
    reasons: tuple[str, ...]

    @property
    def title(self) -> str:
        setup = self.option.setup
        each = f"{setup.devices} x " if setup.devices > 1 else ""
        weights = self.precision if "=" in self.precision else setup.precision.format_of("decoder")
        return f"{self.option.replicas} x ({each}{setup.hardware.name}), {weights}"


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The result of a search.

    best: the recommended configuration; None: none meets the targets.
    others: the runners-up, the best one of each device, the cheapest first.
    impossible: configurations of devices that cannot work at all, each with its reason, one per device and
        count: that of the coarsest precision.
    refused: what Fovea's engine refuses on the devices, a sentence for each need.
    """

    best: Choice | None
    others: tuple[Choice, ...]
    impossible: tuple[tuple[str, str], ...]
    refused: tuple[str, ...] = ()


def recommend(
    shape: ModelShape,
    hardware: Iterable[Hardware],
    workload: Workload,
    count: TokenCount,
    *,
    precisions: Sequence[str] = PRECISIONS,
    devices: Sequence[int] = (1, 2, 4, 8),
    storage: bool = True,
) -> Recommendation:
    """Search the configurations of a model for a workload.

    hardware: the devices to choose from.
    precisions: values of the setting `quantization`, or formats by part (`planner.precision_text`), from the
        one that loses least to the one that loses most.
    devices: numbers of devices of a replica; a device with fewer in a machine is not divided further.
    storage: CPUs store bfloat16 in panels, as Fovea's own kernels do.
    """
    possible: list[tuple[str, Option]] = []
    failed: dict[tuple[str, int], tuple[str, str]] = {}
    refused: dict[str, dict[str, None]] = {}
    tried = ((device, number) for device in hardware for number in sorted(set(devices)))
    for device, number in tried:
        if number > device.devices:
            continue
        for name in precisions:
            title, precision = f"{number} x {device.name}, {name}", _precision(name, device, storage)
            obstacle = precision.obstacle(device.device)
            if obstacle is not None:
                lacks = refused.setdefault(obstacle.need, {})
                if obstacle.lack not in lacks:  # once, not for every number of devices
                    lacks[obstacle.lack] = None
                    failed.setdefault((device.name, number), (title, str(obstacle)))
                continue
            option = evaluate(Setup(shape, device, precision, number), workload, count)
            if option.replicas:
                possible.append((name, option))
            else:
                failed[device.name, number] = title, option.problem
    names = {option.setup.hardware.name for _, option in possible}
    impossible = tuple(reason for (device_name, _), reason in failed.items() if device_name not in names)
    ranked = sorted(possible, key=lambda item: _price(item[1], item[0], precisions))
    best = _finest(ranked, precisions)
    chosen = None if best is None else Choice(best[1], best[0], _reasons(best, ranked, workload))
    others = []
    seen = {best[1].setup.hardware.name} if best else set()
    for name, option in ranked:
        if option.setup.hardware.name not in seen:
            seen.add(option.setup.hardware.name)
            against = _against((name, option), best, workload) if best else ()
            others.append(Choice(option, name, against))
    sentences = tuple(f"{need}; {', '.join(lacks)}" for need, lacks in refused.items())
    return Recommendation(chosen, tuple(others), impossible, sentences)


def _precision(name: str, device: Hardware, storage: bool) -> Precision:
    """The precision of a name, with the type that the device has arithmetic for."""
    cpu = device.kind == "cpu"
    # Fovea's C++ kernels compute in bfloat16 on every CPU that has one of their instruction sets.
    bfloat16 = "bf16" in device.peaks or (cpu and bool(device.capability))
    wide = "float32" if cpu else "float16"
    return replace(
        parse_precision(name),
        dtype="bfloat16" if bfloat16 else wide,
        storage="panels" if storage and cpu and bfloat16 else "plain",
    )


def _price(option: Option, name: str, precisions: Sequence[str]) -> tuple[float, int, int]:
    """Order of configurations: price, or devices where there is no price; then precision."""
    return _cost(option), option.devices, list(precisions).index(name)


def _finest(ranked: list[tuple[str, Option]], precisions: Sequence[str]) -> tuple[str, Option] | None:
    """The cheapest configuration, unless a finer precision costs little more."""
    if not ranked:
        return None
    cheapest = ranked[0][1].price_per_hour
    if cheapest is None:
        return min(ranked, key=lambda item: (item[1].devices, list(precisions).index(item[0])))
    allowed = [
        item for item in ranked
        if item[1].price_per_hour is not None and item[1].price_per_hour * WORTH_LESS_PRECISION <= cheapest
    ]  # fmt: skip
    return min(allowed, key=lambda item: (list(precisions).index(item[0]), item[1].price_per_hour or 0.0))


def _reasons(
    best: tuple[str, Option], ranked: list[tuple[str, Option]], workload: Workload
) -> tuple[str, ...]:
    name, option = best
    speed, memory = option.speed, option.capacity
    reasons = [
        f"weights take {memory.weight_bytes / 1e9:.1f} GB of {memory.total / 1e9:.1f} GB, and "
        f"{memory.requests:,} requests fit into the rest at once",
        f"one replica meets the targets up to {option.rate:.2f} requests/s; the workload has "
        f"{workload.requests_per_s:.2f}, for {option.replicas}",
    ]
    if speed is not None:
        first = speed.requests_per_s * sum(share * one.first for share, one in option.mix)
        bound = "images and prompts" if first > speed.busy / 2 else "decoding"
        reasons.append(
            f"at that rate {speed.batch:.1f} sequences decode together, and {bound} takes most of the time; "
            f"first token {speed.ttft_s * 1e3:.0f} ms in the mean, {speed.ttft_p_s * 1e3:.0f} ms at "
            f"{workload.percentile:g}%"
        )
    cheaper = [item for item in ranked if _cost(item[1]) < _cost(option)]
    if cheaper:
        other = cheaper[0]
        reasons.append(
            f"{_title(other)} costs {_cost(other[1]) / _cost(option):.0%} of it with a coarser precision; "
            "measure its accuracy first (docs/quantization.md)"
        )
    if name != "none":
        reasons.append(
            f"precision {name}: finer ones cost more or do not meet the targets; docs/quantization.md has "
            "the measured accuracy"
        )
    reasons.append(speed_source(option.setup))
    return tuple(reasons)


def speed_source(setup: Setup) -> str:
    """Return where the speed of a configuration is from: measured on this device, or assumed, and why."""
    device, precision = setup.hardware, setup.precision
    if device.measured:
        return f"speed: predicted from rates that were measured on {device.name}"
    format = next((one for one in (precision.decoder, precision.encoder, precision.head) if one), "none")
    row = speed_of(format if format in QUANTIZED else "none", device.device)
    if row is None:
        return f"speed: assumed; Fovea has no figure for {format}"
    if device.name in row.measured:
        return f"speed: predicted with times that were measured on this device ({row.source})"
    return f"speed: assumed; not measured on {device.name} ({row.source})"


def _against(item: tuple[str, Option], best: tuple[str, Option], workload: Workload) -> tuple[str, ...]:
    option, chosen = item[1], best[1]
    reasons = []
    if option.price_per_hour is None:
        reasons.append("no price is known; state yours in a hardware file")
    elif chosen.price_per_hour:
        ratio = option.price_per_hour / chosen.price_per_hour
        near = ", nearly the same" if 1 / NEAR <= ratio <= NEAR else ""
        coarser = f", with the coarser precision {item[0]}" if ratio < 1 and item[0] != best[0] else ""
        reasons.append(f"{ratio:.2f} times the price{near}{coarser}")
    if option.speed is not None and chosen.speed is not None:
        ratio = option.speed.ttft_p_s / chosen.speed.ttft_p_s
        word = "later" if ratio > 1 else "sooner"
        reasons.append(f"first token {max(ratio, 1 / ratio):.1f} times {word}")
    if speed_source(option.setup).startswith("speed: assumed"):
        reasons.append("assumed speed")
    return tuple(reasons)


def _cost(option: Option) -> float:
    return float("inf") if option.price_per_hour is None else option.price_per_hour


def _title(item: tuple[str, Option]) -> str:
    return Choice(item[1], item[0], ()).title
