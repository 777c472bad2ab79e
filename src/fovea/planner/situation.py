"""The situation in which an engine is needed, as the engine advisor sees it."""

from __future__ import annotations

from dataclasses import dataclass

from fovea.core.settings import check_settings, setting

DEVICES = (
    "nvidia-gpu", "amd-gpu", "intel-gpu", "intel-npu", "apple", "x86-cpu", "arm-cpu", "browser", "mobile",
)  # fmt: skip
"""Kinds of devices that rules tell apart."""
AIMS = ("balanced", "throughput", "latency")
"""Aims: throughput or latency, where both cannot be had."""
CHECKPOINTS = ("plain", "awq", "gptq", "gguf", "fp8")
"""Formats of weights. plain: 16 or 32 bits, as models are published first."""


@dataclass(frozen=True, slots=True)
class Situation:
    """The situation in which an engine is needed. Wrong values raise ConfigError."""

    device: str = setting("nvidia-gpu", "Kind of device that the model runs on.", choices=DEVICES)
    family: str = setting("", "Model family by its model_type, such as qwen3_vl; empty: any.")
    several_devices: bool = setting(False, "Whether the model is too large or too slow for one device.")
    images: str = setting("many", "Whether few or many of the requests have images.", choices=("few", "many"))
    follow_ups: bool = setting(False, "Whether several requests are about the same image or prefix.")
    aim: str = setting("balanced", "Aim that matters most.", choices=AIMS)
    steady_streams: bool = setting(False, "Whether answers must not stop while images of others arrive.")
    json_answers: bool = setting(False, "Whether answers have to follow a schema or grammar.")
    visual_budgets: bool = setting(False, "Whether requests choose how many visual tokens they spend.")
    strangers: bool = setting(False, "Whether strangers send images or URLs of images.")
    tenants: bool = setting(False, "Whether several clients need keys, limits and budgets of their own.")
    lora: bool = setting(False, "Whether adapters are loaded beside the model.")
    proven: bool = setting(False, "Whether only engines with years of use in production come into question.")
    checkpoint: str = setting("plain", "Format of the weights.", choices=CHECKPOINTS)
    licences: tuple[str, ...] = setting(
        (), "Accepted licences of the engine, separated by commas; empty: any."
    )

    def __post_init__(self) -> None:
        check_settings(self)
