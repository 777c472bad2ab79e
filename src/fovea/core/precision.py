"""Which types of weights, and of keys and values, run on which device, and how fast.

    Device      a device, as far as this table tells devices apart
    Speed       a row of the table: a type of weights on a kind of device
    obstacle    why a device cannot run something; the engine refuses with these words
    speed_of    the times of products that the planner predicts with

The engine and the planner read the same table, so no plan recommends what the engine refuses. Add a row here
when a format gets kernels for a device, and change a time when it is measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from fovea.core.errors import ConfigError

INSTRUCTION_SETS = (
    "amx", "avx512", "avx2_vnni", "avx2", "neon_i8mm", "neon_bf16", "neon_dotprod", "neon"
)  # fmt: skip
"""Capabilities of CPUs: the sets that Fovea's C++ kernels are compiled for (`kernels.native`)."""
KINDS = {"cuda": "an NVIDIA GPU", "rocm": "a GPU of AMD", "cpu": "a CPU", "other": "another accelerator"}
"""Kinds of devices, in words. The engine has no code for the last one."""
_GPU = re.compile(r"\d{1,2}\.\d")


@dataclass(frozen=True, slots=True)
class Device:
    """A device, real or a stand-in for one that nobody has yet.

    name: for messages.
    kind: one of KINDS.
    capability: compute capability of an NVIDIA GPU, such as "9.0"; one of INSTRUCTION_SETS of a CPU; "": not
        known.
    """

    name: str
    kind: str
    capability: str = ""

    @property
    def compute(self) -> tuple[int, int]:
        """Compute capability of an NVIDIA GPU as numbers; (0, 0): it is not known."""
        major, _, minor = self.capability.partition(".") if self.kind == "cuda" else ("", "", "")
        return int(major or 0), int(minor or 0)


def check_capability(kind: str, capability: str) -> str:
    """Return what would be accepted as the capability of a "gpu" or a "cpu"; "": this one is."""
    if not capability:
        return ""
    if kind == "cpu":
        return "" if capability in INSTRUCTION_SETS else ", ".join(INSTRUCTION_SETS)
    return "" if _GPU.fullmatch(capability) else "a compute capability, such as 9.0"


class Speed(NamedTuple):
    """A type of weights on a kind of device. Times are those of products, through those of plain weights.

    weights: a value of the setting `quantization`.
    kind: of the device.
    sets: instruction sets of a CPU that the row is for; empty: any, and CPUs without C++ kernels.
    compute: least compute capability of an NVIDIA GPU.
    few: time of a product of few rows, such as a decode's.
    many: time of a product of many rows, such as a prompt's or an image's.
    measured: names of devices on which both were measured. Elsewhere they are assumed.
    source: where the figures are from, and how they were chosen.
    """

    weights: str
    kind: str
    few: float
    many: float
    measured: tuple[str, ...]
    source: str
    sets: tuple[str, ...] = ()
    compute: tuple[int, int] = (0, 0)


_H100 = "products of 32 and of 512 rows on an H100, 2026-11-27"
_AVX512 = "products of 1 and of 288 rows with AVX-512"
_AVX2 = "decode and first token with AVX2 (benchmarks/avx2.py)"
_NEAR_AVX2 = ("avx2_vnni", "neon_i8mm", "neon_bf16", "neon_dotprod", "neon")
TABLE = (
    Speed("none", "cuda", 1.0, 1.0, ("H100-SXM", "H200"), "steps on an H100 and an H200, 2026-11-27"),
    Speed("fp8", "cuda", 0.79, 0.62, ("H100-SXM",), _H100, compute=(9, 0)),
    Speed("int8", "cuda", 0.72, 1.72, ("H100-SXM",), _H100),
    Speed("int4", "cuda", 2.0, 1.63, (), f"the format before the present one: {_H100}"),
    Speed("none", "rocm", 1.0, 1.0, (), "nobody has tried Fovea on a GPU of AMD"),
    Speed("none", "cpu", 1.0, 1.0, (), "fits of small models (benchmarks/costs)"),
    Speed("int8", "cpu", 0.54, 0.59, (), _AVX512, ("avx512",)),
    Speed("int4", "cpu", 0.33, 0.64, (), _AVX512, ("avx512",)),
    Speed("int8", "cpu", 0.54, 0.71, (), f"{_AVX512}, and of 288 rows with AMX", ("amx",)),
    Speed("int4", "cpu", 0.33, 0.79, (), f"{_AVX512}, and of 288 rows with AMX", ("amx",)),
    Speed("int8", "cpu", 0.82, 0.67, (), _AVX2, ("avx2",)),
    Speed("int4", "cpu", 0.63, 0.67, (), _AVX2, ("avx2",)),
    Speed("int8", "cpu", 0.82, 0.67, (), f"as with AVX2: {_AVX2}", _NEAR_AVX2),
    Speed("int4", "cpu", 0.63, 0.67, (), f"as with AVX2: {_AVX2}", _NEAR_AVX2),
    Speed("int8", "cpu", 2.0, 2.0, (), "slower without C++ kernels; nobody has measured how much"),
    Speed("int4", "cpu", 2.0, 2.0, (), "slower without C++ kernels; nobody has measured how much"),
)
"""All types of weights, the finest first for each kind of device. Figures: docs/quantization.md, docs/gpu.md.

A GPU's figures of few rows are those of 32 rows: a replica under load seldom decodes one.
"""
KV_COMPUTE = {"int8": (0, 0), "fp8": (8, 9)}
"""Least compute capability with which Triton's kernels read keys and values in 8 bits, by type."""


class Obstacle(NamedTuple):
    """The reason why a device cannot run something.

    need: what the type needs, as a sentence. lack: what the device has instead.
    """

    need: str
    lack: str

    def __str__(self) -> str:
        return f"{self.need}; {self.lack}"


def speed_of(weights: str, device: Device) -> Speed | None:
    """Return the row of a type of weights on a device; None: it cannot run there."""
    for row in TABLE:
        if (row.weights, row.kind) == (weights, device.kind) and (
            not row.sets or device.capability in row.sets
        ):
            return row if row.compute <= device.compute else None
    return None


def obstacle(weights: str, dtype: str, device: Device) -> Obstacle | None:
    """Return why a device cannot run a type of weights; None: it can.

    weights: a value of the setting `quantization`.
    dtype: type of all other numbers, such as "bfloat16".
    """
    if device.kind == "other":
        return Obstacle("Fovea's engine runs on NVIDIA GPUs and on CPUs", f"{device.name} is neither")
    rows = [row for row in TABLE if row.weights == weights]
    own = [row for row in rows if row.kind == device.kind]
    least = min((row.compute for row in own or rows), default=(0, 0))
    if least > (0, 0):
        short = _short(f"{weights} needs compute capability {_dotted(least)}", least, device)
        if short is None and dtype != "bfloat16":
            short = Obstacle(f"{weights} needs bfloat16", f"the model runs in {dtype}")
        return short
    if rows and not own:
        return Obstacle(f"{weights} needs an NVIDIA GPU or a CPU", f"{device.name} is {KINDS[device.kind]}")
    return None


def kv_obstacle(kv: str, device: Device) -> Obstacle | None:
    """Return why a device cannot read keys and values of a type with the kernels `auto`; None: it can."""
    least = KV_COMPUTE.get(kv, (0, 0))
    if least == (0, 0):
        return None
    if device.kind == "cpu" and not device.capability:
        return None  # torch's kernels read them
    return _short(f"keys and values in {kv} need compute capability {_dotted(least)}", least, device)


def _dotted(compute: tuple[int, int]) -> str:
    return ".".join(map(str, compute))


def _short(need: str, least: tuple[int, int], device: Device) -> Obstacle | None:
    if device.kind != "cuda":
        return Obstacle(need, f"{device.name} is {KINDS[device.kind]}")
    if not device.capability:
        return Obstacle(need, f"that of {device.name} is not known")
    return None if least <= device.compute else Obstacle(need, f"{device.name} has {device.capability}")


def check_precision(weights: str, dtype: str, kv: str, device: Device) -> None:
    """Raise ConfigError if a device cannot run these types, naming the setting and what is accepted.

    weights, kv: values of the settings `quantization` and `kv_dtype`. dtype: type of all other numbers.
    """
    found = obstacle(weights, dtype, device)
    if found is not None:
        ours = [name for name in _names() if obstacle(name, dtype, device) is None]
        raise _refusal("quantization", weights, found, ours)
    found = kv_obstacle(kv, device)
    if found is not None:
        ours = ["auto", *(name for name in KV_COMPUTE if kv_obstacle(name, device) is None)]
        raise _refusal("kv_dtype", kv, found, ours)


def _names() -> list[str]:
    return list(dict.fromkeys(row.weights for row in TABLE))


def _refusal(setting: str, value: str, found: Obstacle, accepted: Iterable[str]) -> ConfigError:
    names = ", ".join(accepted) or "another device"
    return ConfigError(
        f"{setting} is {value!r}, which cannot run here: {found}; accepted here: {names}", param=setting
    )
