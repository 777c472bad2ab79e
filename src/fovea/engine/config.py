"""All settings of the engine, by subject; they are frozen after construction. It must not import torch.

Each setting is declared once, in the class of its subject, with type, default, range and help
(`core.settings`). Python code reads `config.kv.block_size`; flags, environment variables, TOML files and
`EngineConfig.of` use the flat name `block_size`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self, TypedDict, Unpack

from fovea.core.errors import ConfigError, InvalidRequest
from fovea.core.settings import build_settings, check_settings, flat_values, setting
from fovea.dialects.dialect import FORMATS, THINK, Dialect, detect
from fovea.engine.keep import ALL, parse_keep
from fovea.engine.visual_budget.methods import PARAM, find_method, parse_visual_tokens

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
KV_DTYPES = ("auto", "int8", "fp8")
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


MOST_MIB = 1 << 24
"""Upper limit of every setting in MiB."""
MOST_SECONDS = 1 << 31
"""Upper limit of every setting in seconds."""


def _kv_keep(text: str) -> str:
    try:
        parse_keep(text)
    except InvalidRequest as error:
        raise ConfigError(error.message, param="kv_keep") from None
    return ""


@dataclass(frozen=True, slots=True)
class KVSettings:
    """The KV pool and the prefixes shared in it."""

    block_size: int = setting(
        16, "Tokens per KV block. Prefixes are shared in whole blocks.", low=1, high=256
    )
    kv_cache_mib: int = setting(
        0,
        "Ceiling of the KV pool in MiB. 0 is a quarter of the free memory, at most 4 GiB; on CUDA what the "
        "largest step leaves, which is measured at the start (docs/gpu.md).",
        low=0,
        high=MOST_MIB,
    )
    kv_blocks: int = setting(
        0, "The KV pool in blocks instead of MiB. 0: by kv_cache_mib. For tests.", low=0, high=1 << 30
    )
    kv_dtype: str = setting(
        "auto",
        "Type of keys and values in the pool. auto is the model's own. int8 and fp8 (e4m3) store them in "
        "half of the bytes of bf16, with a scale for each head of each token; lossy, see docs/kv.md. fp8 is "
        "for GPUs, and for the kernels torch.",
        choices=KV_DTYPES,
    )
    kv_keep: str = setting(
        ALL,
        "Default of the request field kv_keep, which keys and values are kept: all, or METHOD:AMOUNT, as "
        "snap:0.25 (a quarter of the prompt) or snap:4096 (at most 4,096 tokens, prompt and answer). "
        "Methods: snap (for most uses), images, text, window. Lossy, and not for all models: docs/kv.md.",
        check=_kv_keep,
        words="all, or METHOD:AMOUNT",
    )
    kv_host_mib: int = setting(
        0,
        "MiB of host memory for the KV of image prefixes that are evicted from the pool, so that a "
        "follow-up question loads them. For GPUs; on a CPU a larger pool uses the same memory better. "
        "0: none.",
        low=0,
        high=MOST_MIB,
    )
    state_cache_mib: int = setting(
        0,
        "Ceiling of the states of models with recurrent or convolution layers (Qwen3.5, LFM2), in MiB. There "
        "is one per running sequence, and checkpoints from which later requests with the same prefix "
        "continue. 0 is half of the memory that is free for KV.",
        low=0,
        high=MOST_MIB,
    )
    state_spacing: int = setting(
        1024,
        "Tokens between two checkpoints in a long prompt, beside those at the ends of images and of the "
        "prompt. For models with states. 0: none.",
        low=0,
        high=1 << 24,
    )
    kv_ttl_s: int = setting(
        0,
        "Prefixes older than this are not reused, in seconds. A prefix is reused only within its own window "
        "of this length, so it is often lost earlier. 0: no bound.",
        low=0,
        high=MOST_SECONDS,
    )
    max_context: int = setting(
        0,
        "Tokens of prompt and answer together. 0 is the model's own limit, capped by the pool.",
        low=0,
        high=1 << 24,
    )
    prefix_cache: bool = setting(True, "Share the KV of equal prefixes between requests.")

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True)
class OutputSettings:
    """Caches of encoder outputs: on the device, in host memory, on disk."""

    embed_cache_mib: int = setting(
        256,
        "Ceiling of the encoder-output cache in the device's memory, in MiB. 0 turns it off.",
        low=0,
        high=MOST_MIB,
    )
    embed_host_mib: int = setting(
        0,
        "MiB of host memory for encoder outputs that were evicted from the device; for CUDA. 0: none.",
        low=0,
        high=MOST_MIB,
    )
    embed_disk_dir: str = setting(
        "",
        "Folder for encoder outputs that outlive the process. Several processes may share it. Empty: none.",
    )
    embed_disk_mib: int = setting(4096, "Ceiling of that folder in MiB.", low=1, high=MOST_MIB)
    embed_ttl_s: int = setting(
        0,
        "Encoder outputs older than this are misses in every tier, in seconds. 0: no bound.",
        low=0,
        high=MOST_SECONDS,
    )
    region_cache_mib: int = setting(
        64,
        "Ceiling of the cache of encoded image regions (visual tokens by relevance), in MiB. 0 turns it off.",
        low=0,
        high=MOST_MIB,
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True)
class PixelSettings:
    """Processed pixels between decoding and encoding."""

    pixel_pool_mib: int = setting(
        1024,
        "Ceiling of processed pixels in MiB. A request that needs more is prepared alone.",
        low=1,
        high=MOST_MIB,
    )
    pixel_cache_mib: int = setting(
        64,
        "Ceiling of pixels in the pool that no request needs and that are cached, in MiB. 0: none.",
        low=0,
        high=MOST_MIB,
    )
    pixel_ttl_s: int = setting(
        0,
        "Cached pixels expire this long after a request needed them, in seconds. 0: no bound.",
        low=0,
        high=MOST_SECONDS,
    )
    preprocess_workers: int = setting(2, "Threads that resize and normalise images.", low=1, high=64)
    frame_workers: int = setting(2, "Threads that resize and normalise frames of videos.", low=1, high=64)

    def __post_init__(self) -> None:
        check_settings(self)


POLICY_NAMES = ("dual", "fcfs", "priority", "detail")
WHEN_FULL = ("wait", "refuse")
WHEN_LATE = ("refuse", "degrade", "wait")


@dataclass(frozen=True, slots=True)
class ScheduleSettings:
    """Scheduling and admission."""

    policy: str = setting(
        "dual",
        "Which waiting request joins first: dual (text, follow-ups and known images do not wait behind new "
        "images), fcfs (order of arrival), priority (the request's own, then dual), detail (requests of "
        "similar visual cost together).",
        choices=POLICY_NAMES,
    )
    max_passes: int = setting(
        32, "How many later requests may join before one that waits.", low=0, high=1 << 20
    )
    pace: float = setting(
        2.5,
        "Longest step while prompts or images are computed beside decodes, in multiples of a step that only "
        "decodes. 0: no bound.",
        low=1,
        high=1000,
        or_zero=True,
    )
    target_itl_ms: int = setting(
        0,
        "Longest gap between tokens in milliseconds, kept by the percentage of gaps in target_percentile. It "
        "bounds steps beside pace, and the number of answers that are computed at a time. 0: none.",
        low=0,
        high=1 << 20,
    )
    target_ttft_ms: int = setting(
        0,
        "Longest time to the first token in milliseconds, kept by the percentage of requests in "
        "target_percentile. A request that would be later is treated as when_late says. 0: none.",
        low=0,
        high=1 << 24,
    )
    target_percentile: float = setting(
        95.0, "Percentage of gaps and of first tokens that should keep their target.", low=1, high=99.9
    )
    when_late: str = setting(
        "refuse",
        "Treatment of a request whose first token is expected after target_ttft_ms: refuse (429 with the "
        "figures), degrade (fewer visual tokens if that is enough, otherwise refuse), or wait.",
        choices=WHEN_LATE,
    )
    max_running: int = setting(64, "Sequences that share a step.", low=1, high=4096)
    max_step_tokens: int = setting(
        2048, "Tokens computed per step: decodes first, chunks of prompts in the rest.", low=1, high=1 << 20
    )
    max_step_visual_tokens: int = setting(
        4096,
        "Visual tokens of the images that a step works on. One image is always accepted.",
        low=1,
        high=1 << 20,
    )
    max_draft_tokens: int = setting(
        16,
        "Most tokens that one step computes for an answer in addition to one, because its form leaves no "
        "choice about them, such as the keys of a JSON schema. 0: one step each.",
        low=0,
        high=256,
    )
    max_queue: int = setting(
        256, "Requests that may wait; more are refused with 429. 0: no bound.", low=0, high=1 << 20
    )
    when_full: str = setting(
        "wait",
        "Treatment of a request whose KV or pixels do not fit beside the requests in flight: wait, or "
        "refuse with 429.",
        choices=WHEN_FULL,
    )

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def max_in_flight(self) -> int:
        """Answers that may run or wait; 0: no bound."""
        return self.max_running + self.max_queue if self.max_queue else 0


DETAIL_POLICY_NAMES = ("full", "keywords")


def _visual_tokens(text: str) -> str:
    _check_method("visual_tokens", lambda: parse_visual_tokens(text))
    return ""


def _degrade_by(text: str) -> str:
    if text != "detail":
        _check_method("degrade_by", lambda: find_method(text))
    return ""


def _check_method(name: str, read: Callable[[], object]) -> None:
    """Raise ConfigError if `read` refuses the setting.

    The message then names the setting, not the parameter.
    """
    try:
        read()
    except InvalidRequest as error:
        raise ConfigError(f"{name}: {error.message.removeprefix(f'{PARAM}: ')}", param=name) from None


@dataclass(frozen=True, slots=True)
class VisualSettings:
    """Detail levels and visual tokens of images whose request does not choose them."""

    detail_policy: str = setting(
        "full",
        "The meaning of detail=auto: full (the model's own resolution) or keywords (by the words of the "
        "question).",
        choices=DETAIL_POLICY_NAMES,
    )
    degrade_from: float = setting(
        0.0,
        "Load, as a share of what the engine can hold, from which detail=auto loses a level; half way from "
        "there to 1 it loses another one. 0: never.",
        low=0,
        high=1,
    )
    degrade_by: str = setting(
        "detail",
        "What is reduced under load: detail (the level), or visual tokens, by a method of visual_tokens.",
        check=_degrade_by,
        words="detail, or a method",
    )
    visual_tokens: str = setting(
        "off",
        "How many visual tokens an image keeps if its request does not say: off (all of them), METHOD:SHARE "
        "(relevance:0.5), relevance:auto (as many as the question needs), or a preset: document (all), "
        "general, fast.",
        check=_visual_tokens,
        words="off, METHOD:SHARE, or a preset",
    )

    def __post_init__(self) -> None:
        check_settings(self)


DRAFTERS = ("prompt", "hints", "answers", "layer", "model")
"""The drafters, in the order of preference among equals."""


def parse_speculate(text: str) -> tuple[str, ...]:
    """Return the names of drafters that a setting or request names. Raises InvalidRequest for another."""
    if text in ("auto", "off"):
        return DRAFTERS if text == "auto" else ()
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    if any(name not in DRAFTERS for name in names):
        raise InvalidRequest(
            f"speculate is {text!r}; accepted: auto, off, or some of {', '.join(DRAFTERS)}", param="speculate"
        )
    return names


def _speculate(text: str) -> str:
    try:
        parse_speculate(text)
    except InvalidRequest as error:
        raise ConfigError(error.message, param="speculate") from None
    return ""


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """Speculation: drafts, the expected tokens of an answer of which a step verifies several."""

    speculate: str = setting(
        "auto",
        "Sources of drafts, the expected tokens that one step verifies together: prompt (repetitions of "
        "the prompt), hints (a prediction in the request, earlier answers about the image), answers (earlier "
        "answers to the same client), layer (draft_layer), model (draft_model), or several of them with "
        "commas. auto: all that there are, as long as looking for drafts takes at most 2% of a step. off: "
        "none. Answers are the same, see docs/speculation.md.",
        check=_speculate,
        words="auto, off, or drafters",
    )
    speculative_tokens: int = setting(5, "Most drafts of an answer that a step verifies.", low=1, high=32)
    answer_cache_mib: int = setting(
        16,
        "Ceiling of the texts of earlier answers, in MiB; the drafters hints and answers have half each. "
        "They are kept apart by client and cache_salt. 0: none.",
        low=0,
        high=MOST_MIB,
    )
    draft_layer: str = setting(
        "auto",
        "A trained layer that drafts from the model's own states: the folder of an EAGLE-3 checkpoint (from "
        "the hub it must be downloaded first). auto: the folder eagle3 in the model's folder, or the MTP "
        "layer in the model's checkpoint. off: none.",
    )
    draft_model: str = setting(
        "",
        "A smaller model with the same tokenizer, which drafts: a folder, a GGUF file or a hub id. Empty: "
        "none.",
        words="a model",
    )
    draft_quantization: str = setting("none", "As quantization, for the draft model.", choices=QUANTIZATIONS)

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the drafters that may be used."""
        return parse_speculate(self.speculate)


ROLES = ("all", "encode", "prefill", "decode", "prefill-decode")
SERVING_ROLES = ("all", "decode", "prefill-decode")
"""The roles of engines that answer clients. The others work for these alone."""
CONNECTORS = ("shm", "mooncake", "folder")
LONGEST_PEER_KEY = 512
"""As long as the longest key of a client."""
_PEER_KEY = re.compile(f"([!-~]([ -~]{{0,{LONGEST_PEER_KEY - 2}}}[!-~])?)?")


def _peer_urls(text: str) -> str:
    good = all(re.fullmatch(r"https?://[^\s/?#@]+/?", url) for url in peer_urls(text))
    return "" if good else "http://HOST:PORT or https://HOST:PORT, several with commas"


def peer_urls(text: str) -> tuple[str, ...]:
    """Return the addresses that a setting names, without slashes at their ends."""
    return tuple(dict.fromkeys(url.strip().rstrip("/") for url in text.split(",") if url.strip()))


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """The role of this engine, and the engines that work for it."""

    role: str = setting(
        "all",
        "What this engine does. all: everything. encode: encodes images for others. prefill: computes "
        "prompts for others. decode: answers clients, and has prompts computed by prefill_peers. "
        "prefill-decode: answers clients, and has images encoded by encode_peers. See docs/roles.md.",
        choices=ROLES,
    )
    encode_peers: str = setting(
        "",
        "Addresses of engines that encode images for this one, such as http://10.0.0.5:8000, with commas.",
        check=_peer_urls,
        words="addresses",
    )
    prefill_peers: str = setting(
        "",
        "Addresses of engines that compute prompts for this one, with commas.",
        check=_peer_urls,
        words="addresses",
    )
    peer_key: str = setting(
        "",
        "Secret that all peers share: it is sent to peers, and opens the routes by which they ask this one. "
        "FOVEA_PEER_KEY keeps it out of the process list.",
    )
    peer_timeout_s: float = setting(
        10.0,
        "Seconds without news from a peer after which its work is done here. A peer that says that it is "
        "busy is waited for six times as long.",
        low=0.1,
        high=600,
    )
    remote_prefill_tokens: int = setting(
        256,
        "Fewest tokens of a prompt that are not cached here for which a prefill peer is asked.",
        low=1,
        high=MOST_MIB,
    )
    connector: str = setting(
        "shm",
        "How results travel to those who ask this engine. shm: shared memory of one host. mooncake: "
        "Mooncake's transfer engine over TCP or RDMA. folder: files in transfer_dir.",
        choices=CONNECTORS,
    )
    transfer_dir: str = setting(
        "",
        "Folder of the connectors: of their sockets (shm), or of the files (folder). Peers on one host name "
        "the same one. Empty: a folder of this user in the system's temporary folder; folder needs a name.",
    )
    transfer_mib: int = setting(
        256, "Memory, or disk space, for results that wait to be fetched, in MiB.", low=1, high=MOST_MIB
    )
    transfer_host: str = setting(
        "",
        "Address by which peers reach this host, for mooncake. It listens on all interfaces, without a key.",
    )
    transfer_protocol: str = setting("tcp", "Protocol of mooncake.", choices=("tcp", "rdma"))

    def __post_init__(self) -> None:
        check_settings(self)
        if not _PEER_KEY.fullmatch(self.peer_key):  # the message must not show it
            raise ConfigError(
                f"peer_key has {len(self.peer_key)} characters, or some that cannot be sent; accepted: 1 to "
                f"{LONGEST_PEER_KEY} printable ASCII characters without spaces at its ends",
                param="peer_key",
            )
        if self.role not in SERVING_ROLES and not self.peer_key:
            raise ConfigError(
                f"the role {self.role} works for peers, which need a secret: set peer_key", param="peer_key"
            )
        if self.asked and not self.peer_key:
            raise ConfigError(
                "peers are named, but no secret that opens them: set peer_key", param="peer_key"
            )
        for role, name in (("decode", "prefill_peers"), ("prefill-decode", "encode_peers")):
            if self.role == role and not getattr(self, name):
                raise ConfigError(f"the role {role} needs addresses: set {name}", param=name)
        if self.role == "encode" and self.asked:
            raise ConfigError("the role encode works alone; it has no peers", param="role")
        if self.role == "prefill" and self.prefill_peers:
            raise ConfigError(
                "the role prefill computes prompts itself; accepted: encode_peers", param="role"
            )
        if self.connector == "mooncake" and not self.transfer_host:
            raise ConfigError(
                "the connector mooncake needs the address of this host for its peers: set transfer_host",
                param="transfer_host",
            )
        if self.connector == "folder" and not self.transfer_dir:
            raise ConfigError("the connector folder needs transfer_dir", param="transfer_dir")

    @property
    def asked(self) -> bool:
        """Whether this engine asks others."""
        return bool(self.encode_peers or self.prefill_peers)

    @property
    def answers_peers(self) -> bool:
        """Whether others may ask this engine."""
        return bool(self.peer_key) and self.role != "decode"


@dataclass(frozen=True, slots=True)
class ParallelSettings:
    """The processes that compute one model together, one for each device (docs/parallel.md)."""

    tensor_parallel: int = setting(
        1,
        "Processes that divide each layer of the decoder. Its numbers of heads must be divisible by it.",
        low=1,
        high=1024,
    )
    pipeline_parallel: int = setting(
        1,
        "Stages into which the layers of the decoder are divided, each with tensor_parallel processes.",
        low=1,
        high=1024,
    )
    parallel_timeout_s: int = setting(
        120,
        "Seconds after which a process that does not answer counts as lost, and the engine ends.",
        low=1,
        high=86400,
    )

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.tensor_parallel * self.pipeline_parallel


_LISTEN = re.compile(r"tcp://(\*|[\w.-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})|ipc://\S+")


def _listen(text: str) -> str:
    found = _LISTEN.fullmatch(text)
    good = found is not None and (found[2] is None or 0 < int(found[2]) < 65536)
    return (
        "" if not text or good else "tcp://HOST:PORT with * for all addresses of this machine, or ipc://PATH"
    )


@dataclass(frozen=True, slots=True)
class EventSettings:
    """Events for routers, which say what the caches hold (docs/routers.md).

    They name tokens of prompts, and anyone who reaches the address may read them.
    """

    kv_events: str = setting(
        "",
        "Address on which cached keys and values are announced over ZMQ, in vLLM's format, such as "
        "tcp://*:5557; empty: they are not. Needs the extra events.",
        check=_listen,
    )
    kv_events_replay: str = setting(
        "", "Address on which subscribers ask for earlier announcements of keys and values.", check=_listen
    )
    kv_events_topic: str = setting(
        "", "Topic of these announcements. llm-d wants kv@POD_IP:PORT@MODEL, with the port of the server."
    )
    encoder_events: str = setting(
        "",
        "Address on which cached encoder outputs are announced, for routers that know them, such as Fovea's "
        "gateway; empty: they are not. Needs the extra events.",
        check=_listen,
    )
    encoder_events_replay: str = setting(
        "", "Address on which subscribers ask for earlier announcements of encoder outputs.", check=_listen
    )
    events_kept: int = setting(
        10_000,
        "Messages of each kind that are kept for subscribers who missed some. Who missed earlier ones gets "
        "the whole state.",
        low=1,
        high=10_000_000,
    )
    event_rank: int = setting(
        0, "Number of this engine among several behind one server.", low=0, high=4096, internal=True
    )

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("kv_events", "encoder_events"):
            if getattr(self, f"{name}_replay") and not getattr(self, name):
                raise ConfigError(
                    f"{name}_replay is set, but no address on which there are announcements: set {name}",
                    param=f"{name}_replay",
                )
        used = [getattr(self, name) for name in EVENT_ADDRESSES if getattr(self, name)]
        if len(set(used)) < len(used):
            raise ConfigError(
                f"{', '.join(EVENT_ADDRESSES)} must be different addresses; got: {', '.join(used)}",
                param="kv_events",
            )

    def address(self, name: str) -> str:
        """Return the address of a setting for this engine. As in vLLM, the port grows by `event_rank`."""
        text = str(getattr(self, name))
        if not text or not self.event_rank:
            return text
        head, _, port = text.rpartition(":")
        return (
            f"{text}-{self.event_rank}"
            if text.startswith("ipc:")
            else f"{head}:{int(port) + self.event_rank}"
        )


EVENT_ADDRESSES = ("kv_events", "kv_events_replay", "encoder_events", "encoder_events_replay")


class EngineOptions(TypedDict, total=False):
    """Keyword arguments of `EngineConfig.of` and `Engine.from_pretrained`.

    A test compares it with the settings.
    """

    dtype: str
    quantization: str
    device: str
    threads: int
    pin_threads: bool
    kernels: str
    decode_graphs: str
    compile: str
    encoder_engines: str
    revision: str
    mmproj: str
    tool_format: str
    reasoning: str
    special_tokens_in_text: bool
    block_size: int
    kv_cache_mib: int
    kv_blocks: int
    kv_dtype: str
    kv_keep: str
    kv_host_mib: int
    state_cache_mib: int
    state_spacing: int
    kv_ttl_s: int
    max_context: int
    prefix_cache: bool
    embed_cache_mib: int
    embed_host_mib: int
    embed_disk_dir: str
    embed_disk_mib: int
    embed_ttl_s: int
    region_cache_mib: int
    pixel_pool_mib: int
    pixel_cache_mib: int
    pixel_ttl_s: int
    preprocess_workers: int
    frame_workers: int
    policy: str
    max_passes: int
    pace: float
    target_itl_ms: int
    target_ttft_ms: int
    target_percentile: float
    when_late: str
    max_running: int
    max_step_tokens: int
    max_step_visual_tokens: int
    max_draft_tokens: int
    max_queue: int
    when_full: str
    detail_policy: str
    degrade_from: float
    degrade_by: str
    visual_tokens: str
    speculate: str
    speculative_tokens: int
    answer_cache_mib: int
    draft_layer: str
    draft_model: str
    draft_quantization: str
    role: str
    encode_peers: str
    prefill_peers: str
    peer_key: str
    peer_timeout_s: float
    remote_prefill_tokens: int
    connector: str
    transfer_dir: str
    transfer_mib: int
    transfer_host: str
    transfer_protocol: str
    tensor_parallel: int
    pipeline_parallel: int
    parallel_timeout_s: int
    kv_events: str
    kv_events_replay: str
    kv_events_topic: str
    encoder_events: str
    encoder_events_replay: str
    events_kept: int
    event_rank: int


MIB = 1024 * 1024
ENCODER_BLOCKS = 64
"""KV blocks of an engine that only encodes images."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The configuration of one engine.

    model: number types, device, kernels.
    kv: the KV pool and shared prefixes.
    outputs: caches of encoder outputs.
    pixels: processed pixels.
    schedule: scheduling and admission.
    visual: detail levels and visual tokens.
    speculation: expected tokens.
    peers: role, and engines that work for this one.
    parallel: the processes that compute the model together.
    events: announcements of what the caches hold.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    kv: KVSettings = field(default_factory=KVSettings)
    outputs: OutputSettings = field(default_factory=OutputSettings)
    pixels: PixelSettings = field(default_factory=PixelSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    visual: VisualSettings = field(default_factory=VisualSettings)
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    peers: PeerSettings = field(default_factory=PeerSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    events: EventSettings = field(default_factory=EventSettings)

    @classmethod
    def of(cls, **settings: Unpack[EngineOptions]) -> EngineConfig:
        """A configuration from flat names: `EngineConfig.of(kv_blocks=64, pace=3.0)`. Raises ConfigError."""
        return build_settings(cls, settings)

    def for_role(self) -> EngineConfig:
        """Return the settings without what the engine's role has no use for."""
        if self.peers.role == "encode":  # it computes no prompts
            return self.changed(speculate="off", kv_blocks=ENCODER_BLOCKS, max_context=0, kv_host_mib=0)
        return self.changed(speculate="off") if self.peers.role == "prefill" else self

    def changed(self, **settings: Unpack[EngineOptions]) -> EngineConfig:
        """A copy with some settings replaced. Raises ConfigError."""
        return build_settings(EngineConfig, flat_values(self) | settings)
