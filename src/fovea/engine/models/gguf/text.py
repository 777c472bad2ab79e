"""Text models in GGUF files: their configuration in the form of transformers, and the names of their tensors.

Facts about the files, such as the names of entries and which rows are stored in another order, are those of
llama.cpp's converter and of its loader.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fovea.core.errors import CheckpointError, UnsupportedModel
from fovea.engine.files import check_bounds
from fovea.engine.models.gguf.metadata import Metadata
from fovea.engine.models.gguf.reader import GgufFile, StoredTensor
from fovea.engine.models.gguf.weights import Source, mapping_of

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor with a divisor for each rotary frequency, as Llama 3 has them."""
LLAMA3_CONTEXT, LLAMA3_HIGH = 8192, 4.0
"""Original context of all published Llama 3 models, and turns in it from which on nothing is divided."""
GEMMA3_PATTERN, GEMMA3_LOCAL_BASE, GEMMA3_LARGEST = 6, 10_000.0, 62
"""Gemma 3: every sixth layer has no window; base of the others' RoPE; number of layers of the 27 B model,
whose queries are scaled by their width instead of the size of a head."""


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of text models.

    model_type: of the text configuration in transformers.
    convert: adds fields to the configuration; see `text_config`.
    names: names of tensors that differ from NAMES.
    paired: rows of queries and keys are stored so that the numbers which rotate together are neighbours.
    centered: 1 was added to the weights of norms.
    """

    model_type: str
    convert: Callable[[Metadata, dict[str, Any]], None] | None = None
    names: tuple[tuple[str, str], ...] = ()
    paired: bool = False
    centered: bool = False


NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
"""Names in transformers of the tensors of a layer, without "weight" and "bias"."""
OUTER_NAMES: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = re.compile(r"^blk\.(\d{1,6})\.(\w+)\.(weight|bias)$", re.ASCII)
_EXPERTS = re.compile(r"^ffn_(gate|up|down)_exps$", re.ASCII)


def architecture_of(file: GgufFile) -> str:
    """Return general.architecture of a text model. Raises UnsupportedModel, naming those that are."""
    name = Metadata(file).text("general.architecture")
    if name == "clip":
        raise CheckpointError(
            f"{file.path} is a vision tower (general.architecture is clip), no language model; accepted: the "
            "model itself, with --mmproj for this file"
        )
    if name not in FAMILIES:
        raise UnsupportedModel(
            f"{file.path}: general.architecture {name[:50]!r} is not supported; supported in GGUF files: "
            f"{', '.join(FAMILIES)}"
        )
    return name


def text_config(files: list[GgufFile]) -> dict[str, Any]:
    """Return the text configuration as config.json of transformers has it.

    Raises CheckpointError or UnsupportedModel.
    """
    name = architecture_of(files[0])
    family, entries = FAMILIES[name], Metadata(files[0], f"{name}.")
    tensors = mapping_of(files)
    table = _tensor(files[0], tensors, "token_embd.weight", 2)
    heads = entries.integer("attention.head_count")
    width = entries.integer("embedding_length")
    size = entries.integer("attention.key_length", width // heads if heads > 0 else 0)
    for other in ("attention.value_length", "rope.dimension_count"):
        if entries.integer(other, size) != size:
            entries.refuse(other, f"the size of a head, {size}")
    if not entries.boolean("attention.causal", True):
        entries.refuse("attention.causal", "true")
    if family.model_type not in EXPERT_TYPES and entries.integer("expert_count", 0):
        entries.refuse("expert_count", f"0 for models of architecture {name}")
    config = {
        "model_type": family.model_type,
        "vocab_size": table.shape[0],
        "hidden_size": width,
        "intermediate_size": entries.integer("feed_forward_length"),
        "num_hidden_layers": entries.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": entries.integer("attention.head_count_kv", heads),
        "head_dim": size,
        "rms_norm_eps": entries.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": entries.integer("context_length"),
        "rope_parameters": _rope(entries, files, tensors, size),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "use_cache": True,
    }
    check_bounds(config, files[0].path)
    if family.convert is not None:
        family.convert(entries, config)
    return config


def text_only(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a model without its vision tower. config: see `text_config`.

    Without images, positions have one dimension. Raises UnsupportedModel.
    """
    kind = config["model_type"]
    if kind in EXPERT_TYPES:
        raise UnsupportedModel(
            f"{file.path}: a model with experts is supported with its vision tower only: --mmproj FILE"
        )
    rope = {name: value for name, value in config["rope_parameters"].items() if name != "mrope_section"}
    return {**config, "model_type": TEXT_TYPES.get(kind, kind), "rope_parameters": rope}


def text_sources(files: list[GgufFile], config: Mapping[str, Any]) -> Iterator[Source]:
    """Yield the tensors of the model. config: see `text_config`.

    A tensor that has no name in transformers keeps its own. Raises CheckpointError.
    """
    family = FAMILIES[architecture_of(files[0])]
    names = {**NAMES, **dict(family.names)}
    size = config["head_dim"]
    for name, (number, tensor) in mapping_of(files).items():
        if name == ROPE_FACTORS:
            continue
        match = _LAYER.match(name)
        if match is None:
            source = Source(OUTER_NAMES.get(name, name), (tensor,), number)
            yield _centered(source) if family.centered and name == "output_norm.weight" else source
            continue
        layer, part, kind = match.groups()
        prefix = f"model.layers.{int(layer)}"
        if part == "ffn_gate_up_exps":
            yield Source(f"{prefix}.mlp.experts.gate_up_proj", (tensor,), number)
            continue
        if experts := _EXPERTS.match(part):
            yield from _experts(files[number], tensor, number, f"{prefix}.mlp.experts", experts[1])
            continue
        source = Source(f"{prefix}.{names[part]}.{kind}" if part in names else name, (tensor,), number)
        if family.paired and part in ("attn_q", "attn_k"):
            if size % 2 or tensor.shape[0] % size:
                raise CheckpointError(
                    f"{files[number].path}: tensor {name!r} has {tensor.shape[0]} rows; accepted: a multiple "
                    f"of the size of a head, {size}, which is even"
                )
            source = Source(source.name, source.parts, number, order=halves(tensor.shape[0], size))
        if family.centered and part.endswith("norm") and kind == "weight":
            source = _centered(source)
        yield source


def halves(rows: int, size: int) -> Tensor:
    """Return for each row of queries or keys the row of the file that it is.

    In the files, numbers i and i + size / 2 of a head, which rotate together, are neighbours.
    """
    return torch.arange(rows).view(-1, size // 2, 2).transpose(1, 2).flatten()


def _centered(source: Source) -> Source:
    """The weights of a norm whose weights transformers stores without the 1 that is added to them."""
    return Source(source.name, source.parts, source.file, shift=-1.0)


def _experts(file: GgufFile, tensor: StoredTensor, number: int, prefix: str, part: str) -> Iterator[Source]:
    """Yield the matrix of each expert of a tensor (experts, outputs, inputs)."""
    if len(tensor.shape) != 3:
        raise CheckpointError(
            f"{file.path}: tensor {tensor.name!r} has {len(tensor.shape)} dimensions; accepted: 3"
        )
    for expert in range(tensor.shape[0]):
        name = f"{prefix}.{expert}.{part}_proj.weight"
        yield Source(name, (tensor,), number, shape=tensor.shape[1:], rows=slice(expert, expert + 1))


def _tensor(
    file: GgufFile, tensors: Mapping[str, tuple[int, StoredTensor]], name: str, dimensions: int
) -> StoredTensor:
    found = tensors.get(name)
    if found is None or len(found[1].shape) != dimensions:
        state = "is missing" if found is None else f"has shape {list(found[1].shape)}"
        raise CheckpointError(f"{file.path}: tensor {name!r} {state}; accepted: {dimensions} dimensions")
    return found[1]


def _rope(
    entries: Metadata, files: list[GgufFile], tensors: Mapping[str, tuple[int, StoredTensor]], size: int
) -> dict[str, Any]:
    """Return the parameters of RoPE in the form of transformers.

    size: numbers of a head.

    Raises CheckpointError or UnsupportedModel.
    """
    base = entries.number("rope.freq_base", 10_000.0)
    parameters = {"rope_type": "default", "rope_theta": base, **_scaling(entries)}
    if ROPE_FACTORS in tensors:
        if parameters["rope_type"] != "default":
            entries.refuse("rope.scaling.type", f"none beside the tensor {ROPE_FACTORS}")
        parameters |= _llama3(files[0], _read_floats(files, *tensors[ROPE_FACTORS]), base, size)
    if "rope.dimension_sections" in entries:
        parameters["mrope_section"] = entries.numbers("rope.dimension_sections")[:3]
    return parameters


def _scaling(entries: Metadata) -> dict[str, Any]:
    """Return the parameters by which positions are scaled; empty: they are not."""
    kind = entries.text("rope.scaling.type", "linear")
    # A factor of 0 says that there is none.
    factor = entries.number("rope.scaling.factor", entries.number("rope.scale_linear", 1.0)) or 1.0
    if kind == "yarn":
        if entries.number("rope.scaling.yarn_ext_factor", 1.0) not in (1.0, -1.0):
            entries.refuse("rope.scaling.yarn_ext_factor", "1")
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": entries.integer("rope.scaling.original_context_length"),
            **{ours: entries.number(theirs) for theirs, ours in _YARN.items() if theirs in entries},
        }
    if kind not in ("none", "linear"):
        entries.refuse("rope.scaling.type", "none, linear, yarn")
    return {} if factor == 1 or kind == "none" else {"rope_type": "linear", "factor": factor}


_YARN = {
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
}
"""Further parameters of YaRN, and their names in transformers."""


def _llama3(file: GgufFile, divisors: Tensor, base: float, size: int) -> dict[str, Any]:
    """Return the parameters of Llama 3's RoPE that give these divisors of the frequencies.

    The inverse of a divisor is a straight line of the number of turns within the original context, between
    1 / factor and 1. Two points of the line tell its parameters, up to a common factor of them, which
    changes nothing. If fewer are on the line, those of the published models are tried.

    divisors: (size / 2,).

    Raises UnsupportedModel if no parameters give them.
    """
    count, factor = len(divisors), float(divisors.max()) if len(divisors) else 0.0
    choices = [(float(LLAMA3_CONTEXT), LLAMA3_HIGH)]
    frequencies = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float64) / size) / (2 * torch.pi)
    if count == len(frequencies) and factor > 1:
        smooth = (1 / divisors.double() - 1 / factor) / (1 - 1 / factor)
        inner = torch.nonzero((smooth > 1e-4) & (smooth < 1 - 1e-4)).flatten().tolist()
        if len(inner) > 1:
            first, last = inner[0], inner[-1]
            slope = float((smooth[first] - smooth[last]) / (frequencies[first] - frequencies[last]))
            start = slope * float(frequencies[first]) - float(smooth[first])
            if start > 0:
                choices.append((slope / start, 1 + 1 / start))
        for context, high in choices:
            line = ((context * frequencies - 1) / (high - 1)).clamp(0, 1)
            expected = 1 / ((1 - line) / factor + line)
            if torch.allclose(divisors.double(), expected, rtol=1e-4):
                return {
                    "rope_type": "llama3",
                    "factor": round(factor, 4),
                    "low_freq_factor": 1.0,
                    "high_freq_factor": round(high, 4),
                    "original_max_position_embeddings": round(context),
                }
    raise UnsupportedModel(
        f"{file.path}: the {count} divisors of frequencies in tensor {ROPE_FACTORS!r} are not those of Llama "
        f"3's RoPE; supported: these, {size // 2} of them"
    )


def _read_floats(files: list[GgufFile], number: int, tensor: StoredTensor) -> Tensor:
    """Read a small tensor of type F32."""
    if tensor.type.name != "F32" or len(tensor.shape) != 1:
        raise CheckpointError(f"{files[number].path}: tensor {tensor.name!r} is no vector of type F32")
    with files[number].path.open("rb") as file:
        file.seek(tensor.start)
        return torch.frombuffer(bytearray(file.read(tensor.nbytes)), dtype=torch.float32)


def _gemma3(entries: Metadata, config: dict[str, Any]) -> None:
    layers = config["num_hidden_layers"]
    window = entries.integer("attention.sliding_window", 0)
    # Rotary positions of layers with a window are never scaled.
    local = {"rope_type": "default", "rope_theta": entries.number("rope.freq_base_swa", GEMMA3_LOCAL_BASE)}
    by_width = layers == GEMMA3_LARGEST
    config |= {
        "query_pre_attn_scalar": (
            config["hidden_size"] // config["num_attention_heads"] if by_width else config["head_dim"]
        ),
        "sliding_window": window or None,
        "layer_types": [
            "sliding_attention" if flag and window else "full_attention"
            for flag in _windowed(entries, layers)
        ],
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": entries.number("final_logit_softcapping", 0.0) or None,
        "attn_logit_softcapping": None,
    }


def _windowed(entries: Metadata, layers: int) -> list[bool]:
    """Whether each layer has a window. The file has a flag for each, or after how many one has none."""
    name = "attention.sliding_window_pattern"
    if isinstance(entries.get(name), np.ndarray):
        return [bool(flag) for flag in entries.numbers(name, layers)]
    period = entries.integer(name, GEMMA3_PATTERN)
    if period < 1:
        entries.refuse(name, "1 or more, or a flag for each layer")
    return [(layer + 1) % period != 0 for layer in range(layers)]


def _mistral3(entries: Metadata, config: dict[str, Any]) -> None:
    beta = entries.number("attention.temperature_scale", 0.0)
    if beta:
        config["model_type"] = "ministral3"
        rope = config["rope_parameters"]
        rope["llama_4_scaling_beta"] = beta
        # The models have both factors of YaRN, and they are equal.
        rope["mscale"] = rope.setdefault("mscale_all_dim", 1.0)


def _qwen_moe(entries: Metadata, config: dict[str, Any]) -> None:
    config |= {
        "num_experts": entries.integer("expert_count"),
        "num_experts_per_tok": entries.integer("expert_used_count"),
        "moe_intermediate_size": entries.integer("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


GEMMA3_NAMES = (
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
)
FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", paired=True),
    "mistral3": Family("mistral", _mistral3, paired=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "gemma3": Family("gemma3_text", _gemma3, GEMMA3_NAMES, centered=True),
    "qwen2vl": Family("qwen2_vl_text"),
    "qwen3vl": Family("qwen3_vl_text"),
    "qwen3vlmoe": Family("qwen3_vl_moe_text", _qwen_moe),
}
"""The text models by general.architecture."""
TEXT_TYPES: Mapping[str, str] = {"qwen2_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Model types of text models by those that they have beside a vision tower."""
EXPERT_TYPES = ("qwen3_vl_moe_text",)
"""Model types whose layers have experts."""
