"""Settings of the model: number types, device, kernels, dialect."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from fovea.core.errors import ConfigError
from fovea.core.settings import check_settings, setting
from fovea.dialects.dialect import FORMATS, THINK, Dialect, detect

COMPONENTS = ("encoder", "projector", "decoder")
MODES = ("off", "default", "reduce-overhead", "max-autotune")
"""The modes of `torch.compile` by their names, and "off"."""


@dataclass(frozen=True, slots=True)
class CompileModes:
    """The compile mode of each component of a model: one of MODES for each of COMPONENTS."""

    encoder: str = "off"
    projector: str = "off"
    decoder: str = "off"

    @classmethod
    def of(cls, text: str) -> Self:
        """Parse the setting.

        Raises ConfigError for an unknown component or mode, or a component that appears twice.
        """
        if text in MODES:
            return cls(text, text, text)
        modes: dict[str, str] = {}
        for part in text.split(","):
            name, _, mode = (word.strip() for word in part.partition("="))
            if name not in COMPONENTS or mode not in MODES or name in modes:
                raise ConfigError(
                    f"compile is {text!r}; accepted: one of {', '.join(MODES)}, "
                    f"or COMPONENT=MODE,... with each of {', '.join(COMPONENTS)} at most once",
                    param="compile",
                )
            modes[name] = mode
        return cls(**modes)

    @property
    def active(self) -> dict[str, str]:
        """The components that torch compiles, with their modes."""
        modes = {name: getattr(self, name) for name in COMPONENTS}
        return {name: mode for name, mode in modes.items() if mode != "off"}


DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
QUANTIZATIONS = ("none", "int8", "int4", "fp8", "dequantize")
KERNELS = ("auto", "native", "onednn", "torch", "triton", "flashinfer")
DECODE_GRAPHS = ("auto", "off", "padded")


def _device(name: str) -> str:
    return "" if name in DEVICES or name.startswith("cuda:") else "auto, cpu, cuda, cuda:N"


def _compile_modes(text: str) -> str:
    CompileModes.of(text)
    return ""


def _revision(text: str) -> str:
    plain = re.fullmatch(r"[A-Za-z0-9][\w.+-]*(/[A-Za-z0-9][\w.+-]*)*", text, re.ASCII) and ".." not in text
    return "" if not text or plain else "a branch, a tag or a commit of the hub"


def _encoder_engines(text: str) -> str:
    return "" if text else "off, auto, or a folder"


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The model's number types, its device, and its kernels."""

    dtype: str = setting(
        "auto",
        "Type of weights and activations. auto is float32 for checkpoints in float32; for those in 16 bits, "
        "their own type on CUDA, bfloat16 on CPUs that run the C++ kernels or have bf16 units, float32 "
        "elsewhere.",
        choices=DTYPES,
    )
    quantization: str = setting(
        "none",
        "none keeps the weights as they are stored, quantized or not. int8 and int4 round them while they "
        "are read, to half and less than a third of their bytes; lossy, see docs/quantization.md. fp8: 8-bit "
        "floats, for CUDA from Hopper on. dequantize turns quantized weights into plain ones.",
        choices=QUANTIZATIONS,
    )
    device: str = setting(
        "auto",
        "auto is CUDA if torch finds it, else the CPU.",
        check=_device,
        words="auto, cpu, cuda, cuda:N",
    )
    threads: int = setting(
        0,
        "CPU threads of the model. 0: one for each physical core that the process may use, by its affinity "
        "and its cgroup limit.",
        low=0,
        high=1024,
    )
    pin_threads: bool = setting(
        False,
        "Bind each thread of the C++ kernels, except the engine's own, to a core. For machines that Fovea "
        "has for itself; beside other programs the system places threads better. Linux only.",
    )
    kernels: str = setting(
        "auto",
        "On a CPU: native is Fovea's own C++ (bf16; weights packed without loss to 12 bits), onednn is "
        "torch with weights in oneDNN's layout, torch is plain torch. On CUDA: flashinfer (Triton's "
        "kernels, with FlashInfer's attention for prompts), triton, torch. auto is the first of these that "
        "machine, type and model allow (docs/gpu.md).",
        choices=KERNELS,
    )
    decode_graphs: str = setting(
        "auto",
        "auto pads steps that only decode to a few batch sizes and replays them as CUDA graphs, with "
        "Triton's kernels. padded pads them and launches every kernel, to compare. off does neither.",
        choices=DECODE_GRAPHS,
    )
    compile: str = setting(
        "off",
        "torch.compile before the first use, for the kernels torch: off, default, reduce-overhead or "
        "max-autotune for all, or by component: encoder=MODE,projector=MODE,decoder=MODE. See "
        "docs/engines.md.",
        check=_compile_modes,
    )
    encoder_engines: str = setting(
        "off",
        "Vision encoders made by fovea build, for images whose grid they were built for: off, auto (the "
        "folder beside the checkpoint) or a folder. They are machine code, so a folder must be one that you "
        "trust.",
        check=_encoder_engines,
        words="off, auto, or a folder",
    )

    revision: str = setting(
        "",
        "Branch, tag or commit of a hub id, so that it does not change by itself. Empty: the hub's main "
        "branch. A folder has no revision.",
        check=_revision,
        words="a branch, tag or commit",
    )
    mmproj: str = setting(
        "",
        "File with the vision tower of a model in a GGUF file (mmproj-*.gguf). Empty: the only such file in "
        "the model's folder if a folder is named, otherwise none, and the model reads text alone.",
        words="a file *.gguf",
    )
    tool_format: str = setting(
        "auto",
        "How the model writes tool calls, see docs/tools.md. auto: as its chat template tells. none: "
        "requests with tools are refused. Others: in this format, whatever the template says.",
        choices=("auto", "none", *FORMATS),
    )
    reasoning: str = setting(
        "auto",
        "Whether answers may begin with reasoning between <think> and </think>, which is reported apart from "
        "the answer. auto: if the chat template contains these marks. off: all text is the answer. think: in "
        "any case.",
        choices=("auto", "off", "think"),
    )
    special_tokens_in_text: bool = setting(
        False,
        "Read control tokens such as <|im_end|> in the text of messages as control tokens. Off: they are "
        "plain text, so a user cannot forge a turn. Prompts of /v1/completions are read as they are.",
    )

    def __post_init__(self) -> None:
        check_settings(self)

    def dialect(self, template: str | None) -> Dialect:
        """How the model writes tool calls and reasoning. template: its chat template, for auto."""
        detected = detect(template)
        reasoning = {"auto": detected.reasoning, "off": None, "think": THINK}[self.reasoning]
        tools = detected.tools if self.tool_format == "auto" else FORMATS.get(self.tool_format)
        return Dialect(tools, reasoning)
