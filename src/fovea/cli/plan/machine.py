"""This machine as a device of the planner: measured rates, memory, and no price."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from fovea.core.hardware import available_memory, instruction_sets, usable_cores
from fovea.planner.hardware import Hardware

if TYPE_CHECKING:
    import torch

    from fovea.kernels.calibrate import Machine

NAME = "this"
MEASURED_WEIGHTS = 512 << 20
"""Bytes that a measurement of the bandwidth reads over and over, as large weights do."""
USABLE = 0.8
"""Share of the memory for weights, KV and caches."""
EFFICIENCY: Mapping[str, float] = MappingProxyType({"encode": 0.7, "prefill": 0.8, "decode": 0.8})
"""Shares of the measured rates. They are higher than those of rates on data sheets."""
ARITHMETIC = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def this_machine(threads: int = 0) -> Hardware:
    """Measure this machine's CPU, which takes some seconds.

    threads: threads of the engine; 0: one for each usable core.
    """
    import torch

    torch.set_num_threads(threads or len(usable_cores()))
    device = torch.device("cpu")
    peaks: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        machine = _calibrate(device, dtype)
        peaks |= _peaks(machine, str(dtype))
    return hardware_of(machine, peaks, EFFICIENCY, device)


def profiled(machine: Machine, dtype: str, device: torch.device, ratios: Mapping[str, float]) -> Hardware:
    """Return the machine of a profile as a device.

    machine: its rates. dtype: type of the model's numbers, such as "bfloat16".
    ratios: busy time over lower bound, by stage of the planner (`planner.hardware.STAGES`).
    """
    import torch

    peaks = _peaks(machine, dtype)
    if "fp32" not in peaks:  # every device has this rate, and plans for other models may need it
        peaks |= _peaks(_calibrate(device, torch.float32), "float32")
    shares = {stage: min(1.0, 1 / ratio) for stage, ratio in ratios.items()}
    return hardware_of(machine, peaks, {**EFFICIENCY, **shares}, device)


def hardware_of(
    machine: Machine, peaks: Mapping[str, float], efficiency: Mapping[str, float], device: torch.device
) -> Hardware:
    """Return a measured machine as a device.

    peaks, efficiency: see `Hardware`. device: what was measured.
    """
    note = f"{machine.threads} threads of {len(usable_cores())} cores, {machine.kernels}, "
    memory, kind, vendor = available_memory(), "cpu", ""
    if device.type == "cuda":
        import torch

        memory, kind, vendor = torch.cuda.get_device_properties(device).total_memory, "gpu", "nvidia"
        note = f"{torch.cuda.get_device_name(device)}, {machine.kernels}"
    else:
        note += " ".join(instruction_sets())
    return Hardware(
        name=NAME,
        kind=kind,
        vendor=vendor,
        memory_bytes=memory,
        bandwidth=machine.bandwidth,
        peaks=MappingProxyType(dict(peaks)),
        usable=USABLE,
        efficiency=MappingProxyType(dict(efficiency)),
        note=note,
    )


def to_toml(device: Hardware) -> str:
    """Return a device as a hardware file, which `fovea plan --hardware-file` reads."""
    peaks = ", ".join(f"{name} = {rate / 1e12:.6g}" for name, rate in device.peaks.items())
    shares = ", ".join(f"{name} = {share:.3g}" for name, share in device.efficiency.items())
    lines = [
        "[[hardware]]",
        f'name = "{device.name}"',
        f'kind = "{device.kind}"',
        *([f'vendor = "{device.vendor}"'] if device.vendor else []),
        f"memory_gib = {device.memory_bytes / 2**30:.3f}",
        f"bandwidth_gb_s = {device.bandwidth / 1e9:.4g}",
        f"peaks = {{ {peaks} }}",
        f"usable = {device.usable:g}",
        f"efficiency = {{ {shares} }}",
        f'note = "{device.note}"',
    ]
    return "\n".join(lines) + "\n"


def _calibrate(device: torch.device, dtype: torch.dtype) -> Machine:
    import torch

    from fovea.kernels.attention import Heads
    from fovea.kernels.calibrate import calibrate
    from fovea.kernels.choose import choose
    from fovea.kernels.quantize import INT8

    formats = [None, INT8] if dtype is torch.bfloat16 and device.type == "cpu" else [None]
    return calibrate(
        choose("auto", device, dtype, Heads(8, 8, 128)), dtype, device, formats, MEASURED_WEIGHTS
    )


def _peaks(machine: Machine, dtype: str) -> dict[str, float]:
    """Rates by the planner's names of arithmetic. int4 weights are multiplied as int8."""
    from fovea.kernels.calibrate import PLAIN

    plain = ARITHMETIC[dtype.removeprefix("torch.")]
    names = {PLAIN: plain, "int8": "int8", "fp8": "fp8"}
    return {names[name]: rate for name, rate in machine.peaks.items() if name in names}
