"""The inputs of a plan: its model, with the tokens of an image in it, and this machine as a device."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

from fovea.core.errors import CheckpointError, ConfigError
from fovea.core.hardware import available_memory, instruction_sets, usable_cores
from fovea.core.names import BUNDLED, bundled_model
from fovea.engine.models.gguf.reader import holds_gguf
from fovea.engine.vision.token_rules import ProcessorRule, folder_rule, known_rule
from fovea.planner.hardware import Hardware
from fovea.planner.shape import ModelShape, find, known_models
from fovea.planner.workload import ImageTokens, TokenCount

if TYPE_CHECKING:
    import torch

    from fovea.kernels.calibrate import Machine


FIXED = {"llava": 576, "gemma3": 256}
"""Visual tokens of an image of any size, in families whose images have one size.

llava: LLaVA-1.5, a picture of 336 by 336 pixels in patches of 14. gemma3: as its processor says.
"""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """The model of a plan. name: as given. shape: its shape. count: tokens of an image."""

    name: str
    shape: ModelShape
    count: TokenCount


def find_model(name: str, visual_tokens: int = 0) -> PlannedModel:
    """Return the model that a name or a folder means.

    name: a folder with config.json and the settings of the image processor; a GGUF file, or a folder with
        one and its vision tower; a hub id of a known model, or of one in the local cache of the hub;
        "fovea-tiny".
    visual_tokens: tokens of every image, for models whose processor is not known; 0: by the model's rule.
    Raises ConfigError for an unknown name, CheckpointError or UnsupportedModel for a folder.
    """
    folder = Path(name).expanduser()
    if name != BUNDLED and ((folder / "config.json").is_file() or holds_gguf(folder)):
        return _from_folder(name, folder, visual_tokens)
    shape_or_none = find(name)
    if shape_or_none is None and (cached := _downloaded(name)) is not None:
        return _from_folder(name, cached, visual_tokens)
    if shape_or_none is None:
        known = known_models()
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}? " if near else ""
        raise ConfigError(
            f"model {name!r} is neither a folder with config.json, nor a known model, nor in the local cache "
            f"of the hub; {hint}"
            f"`fovea plan --models` lists the {len(known)} that are known",
            param="model",
        )
    rule = None if visual_tokens else _known(name)
    return PlannedModel(name, shape_or_none, _count(shape_or_none, rule, visual_tokens))


def _from_folder(name: str, folder: Path, visual_tokens: int) -> PlannedModel:
    # torch builds the model without weights, so a folder takes seconds and a known name does not.
    from fovea.engine.check import shape_of_folder

    shape = shape_of_folder(folder, name)
    rule = _rule(folder, name) if shape.takes_images and not visual_tokens else None
    return PlannedModel(name, shape, _count(shape, rule, visual_tokens))


def _rule(folder: Path, name: str) -> ProcessorRule:
    """Return how many tokens the checkpoint in a folder, or in a GGUF file, makes of an image."""
    if not holds_gguf(folder):
        return folder_rule(folder)
    from fovea.engine.load import open_checkpoint

    checkpoint = open_checkpoint(folder)
    return ProcessorRule(name, checkpoint.processors(checkpoint.config())[0])


def _downloaded(name: str) -> Path | None:
    """The folder of a hub id whose files are in the local cache; None: they are not."""
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        return None
    from fovea.engine.load import resolve

    try:
        folder = resolve(name, download=False)
    except CheckpointError:
        return None
    return folder if (folder / "config.json").is_file() else None


def _known(name: str) -> ProcessorRule | None:
    return folder_rule(bundled_model()) if name == BUNDLED else known_rule(name)


def _count(shape: ModelShape, rule: ProcessorRule | None, visual_tokens: int) -> TokenCount:
    if not shape.takes_images:
        if visual_tokens:
            raise ConfigError(
                f"{shape.name} takes text alone; --visual-tokens is for models with images",
                param="visual_tokens",
            )
        return partial(_refuse_image, shape.name)
    fixed = visual_tokens or (FIXED.get(shape.family, 0) if rule is None else 0)
    if fixed:
        return lambda width, height: ImageTokens(fixed, fixed)
    if rule is None:
        raise ConfigError(
            f"the image processor of {shape.name} is not known; accepted: --visual-tokens N, the tokens of "
            "an image",
            param="visual_tokens",
        )
    if shape.cross is not None:
        return _states(rule, shape.cross.rows_per_tile)
    return lambda width, height: _both(rule.tokens(width, height))


def _refuse_image(name: str, width: int, height: int) -> NoReturn:
    raise ConfigError(
        f"the workload has an image of {width}x{height} pixels, and {name} takes text alone; accepted: "
        "requests without images and videos",
        param="images",
    )


def _both(tokens: int) -> ImageTokens:
    return ImageTokens(tokens, tokens)


def _states(rule: ProcessorRule, rows_per_tile: int) -> Callable[[int, int], ImageTokens]:
    """Image states lie outside of the prompt, a fixed number of them for each tile."""

    def count(width: int, height: int) -> ImageTokens:
        plan = rule.plan(width, height)
        return ImageTokens(plan.tokens, plan.grid[1] * plan.grid[2] * rows_per_tile)

    return count


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
    import torch

    from fovea.kernels.choose import described

    found = described("auto", device, torch.bfloat16)
    note = f"{machine.threads} threads of {len(usable_cores())} cores, {machine.kernels}, "
    memory, kind, vendor = available_memory(), "cpu", ""
    if device.type == "cuda":
        memory, kind = torch.cuda.get_device_properties(device).total_memory, "gpu"
        vendor = "amd" if found.kind == "rocm" else "nvidia"
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
        capability=found.capability,
        measured=True,
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
        *([f'capability = "{device.capability}"'] if device.capability else []),
        f"measured = {str(device.measured).lower()}",
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
