"""This machine as a device of the planner: measured rates, memory, and no price."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from fovea.core.hardware import available_memory, instruction_sets, usable_cores
from fovea.planner.hardware import Hardware

if TYPE_CHECKING:
    from fovea.kernels.calibrate import Machine

NAME = "this"
MEASURED_WEIGHTS = 512 << 20
"""Bytes that a measurement of the bandwidth reads over and over, as large weights do."""


def this_machine(threads: int = 0) -> Hardware:
    """Measure this machine's CPU, which takes some seconds.

    threads: threads of the engine; 0: one for each usable core.
    """
    import torch

    from fovea.kernels.attention import Heads
    from fovea.kernels.calibrate import PLAIN, calibrate
    from fovea.kernels.choose import choose
    from fovea.kernels.quantize import INT8

    torch.set_num_threads(threads or len(usable_cores()))
    device, peaks = torch.device("cpu"), {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        kernels = choose("auto", device, dtype, Heads(8, 8, 128))
        machine = calibrate(
            kernels, dtype, device, [None, INT8] if name == "bf16" else [None], MEASURED_WEIGHTS
        )
        peaks[name] = machine.peaks[PLAIN]
        if "int8" in machine.peaks:
            peaks["int8"] = machine.peaks["int8"]
    return hardware_of(machine, peaks)


def hardware_of(machine: Machine, peaks: dict[str, float]) -> Hardware:
    """Return a measured machine as a device. Measured rates need no further efficiency for products."""
    return Hardware(
        name=NAME,
        kind="cpu",
        vendor="",
        memory_bytes=available_memory(),
        bandwidth=machine.bandwidth,
        peaks=MappingProxyType(peaks),
        usable=0.8,
        efficiency=MappingProxyType({"encode": 0.7, "prefill": 0.8, "decode": 0.8}),
        note=f"{machine.threads} threads of {len(usable_cores())} cores, {machine.kernels}, "
        + " ".join(instruction_sets()),
    )


def to_toml(device: Hardware) -> str:
    """Return a device as a hardware file, which `fovea plan --hardware-file` reads."""
    peaks = ", ".join(f"{name} = {rate / 1e12:.6g}" for name, rate in device.peaks.items())
    shares = ", ".join(f"{name} = {share:.3g}" for name, share in device.efficiency.items())
    lines = [
        "[[hardware]]",
        f'name = "{device.name}"',
        f'kind = "{device.kind}"',
        f"memory_gib = {device.memory_bytes / 2**30:.3f}",
        f"bandwidth_gb_s = {device.bandwidth / 1e9:.4g}",
        f"peaks = {{ {peaks} }}",
        f"usable = {device.usable:g}",
        *([f"efficiency = {{ {shares} }}"] if shares else []),
        f'note = "{device.note}"',
    ]
    return "\n".join(lines) + "\n"
