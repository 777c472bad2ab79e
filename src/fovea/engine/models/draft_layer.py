"""A trained layer that expects an answer's next tokens from the target's own states: EAGLE-3, and MTP.

Both compute one row for each token, beside the target. Row i joins the states of the target at token i with
the embedding of token i + 1, and expects token i + 2. Image tokens have states like all others, so the layer
sees the image. To expect a further token, a row takes the output of the row before it in place of the
target's states, and the expected token's embedding.

EAGLE-3 (arXiv 2503.01840) has a checkpoint of its own, and reads the inputs of three of the target's layers,
joined by a linear map. MTP (multi-token prediction, of DeepSeek-V3 and Qwen3.5) is stored in the target's
checkpoint, and reads its last states after the norm.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fovea.core.errors import CheckpointError, FoveaError, UnsupportedModel
from fovea.engine.files import read_json
from fovea.engine.layers.config import Attention, DecoderConfig, Dense, LayerConfig, Rotary
from fovea.engine.layers.draft import DraftLayer, most_likely
from fovea.engine.layers.layer import Layer
from fovea.engine.layers.linear import Embedding, Linear, RMSNorm, checkpoint_targets
from fovea.engine.layers.mixers import QueryKeyValue
from fovea.engine.layers.step import Step
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.stored import StoredWeights
from fovea.engine.models.text.parts import STATIC_ROPE, head_dim, mrope, rotary
from fovea.engine.models.tokenizer import reason
from fovea.engine.models.weights import load_weights

MTP_PREFIX = "mtp."
"""Beginning of the names of an MTP layer's tensors in its target's checkpoint."""
EAGLE_FOLDER = "eagle3"
"""Folder of an EAGLE-3 checkpoint inside the folder of its target, found without a setting."""
NAMES = {
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
}
"""Names of the architecture in published configurations."""
UNREAD = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")
"""Tensors that only training needs."""
VARIANTS = ("norm_output", "norm_before_fc", "fc_norm")
"""Options of later versions of EAGLE-3 that are not supported."""


class Eagle3(DraftLayer):
    """A layer as EAGLE-3 has it: its attention reads the embedding beside the states."""

    def __init__(self, target: VisionLanguageModel, shape: EagleShape) -> None:
        super().__init__(target, shape.config, shape.taps)
        hidden, width = shape.config.hidden, target.decoder.config.hidden
        self.fc = Linear(len(shape.taps) * width, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, shape.config.eps)
        self.midlayer = Layer(shape.config, shape.config.layers[0], 0)
        mixer = shape.config.layers[0].mixer
        assert isinstance(mixer, Attention)
        rotated = 2 * len(shape.config.rotaries[0].inverse)
        self.midlayer.self_attn.qkv = QueryKeyValue(2 * hidden, mixer, rotated)
        self.norm = RMSNorm(hidden, shape.config.eps)
        self.lm_head = Linear(hidden, shape.vocabulary, bias=False) if shape.own_head else None
        self.embed_tokens = Embedding(shape.config.vocab_size, hidden) if shape.own_embedding else None
        self.residual_after_norm = shape.residual_after_norm
        self.ids: Tensor | None
        """Token id of each row of the head; None: they are the same."""
        self.register_buffer("ids", None, persistent=False)

    def fuse(self, features: Tensor) -> Tensor:
        return self.fc(features)  # type: ignore[no-any-return]

    def embed(self, ids: Tensor) -> Tensor:
        own = self.embed_tokens
        # The norm after it makes a scale of embeddings, which Gemma has, meaningless.
        return (self.target.decoder.embed_tokens if own is None else own)(ids)  # type: ignore[no-any-return]

    def forward(self, embeds: Tensor, states: Tensor, step: Step) -> Tensor:
        layer, normed = self.midlayer, self.hidden_norm(states)
        mixed = layer.mixer.mix(
            layer.mixer.project(torch.cat((layer.input_layernorm(embeds), normed), -1)), step
        )
        return layer.after(mixed, normed if self.residual_after_norm else states)

    def expect(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm(outputs)
        logits = self.target.head(normed) if self.lm_head is None else self.lm_head(normed).float()
        tokens, chances = most_likely(logits)
        return tokens if self.ids is None else self.ids[tokens], chances


class MTPLayer(DraftLayer):
    """A layer of the target's own kind, after a map that joins embedding and states."""

    def __init__(self, target: VisionLanguageModel) -> None:
        whole = target.whole
        layer = next(each for each in whole.layers if isinstance(each.mixer, Attention))
        config = DecoderConfig(
            vocab_size=whole.vocab_size,
            hidden=whole.hidden,
            layers=(layer,),
            rotaries=whole.rotaries,
            eps=whole.eps,
            tied=True,
            max_positions=whole.max_positions,
            centered_norms=whole.centered_norms,
        )
        super().__init__(target, config, (len(whole.layers),))
        hidden, eps = whole.hidden, whole.eps
        self.pre_fc_norm_embedding = RMSNorm(hidden, eps, centered=whole.centered_norms)
        self.pre_fc_norm_hidden = RMSNorm(hidden, eps, centered=whole.centered_norms)
        self.fc = Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([Layer(config, layer, 0)])
        self.norm = RMSNorm(hidden, eps, centered=whole.centered_norms)

    def fuse(self, features: Tensor) -> Tensor:
        return self.target.decoder.norm(features)  # type: ignore[no-any-return]

    def embed(self, ids: Tensor) -> Tensor:
        return self.target.decoder.embed(ids)

    def forward(self, embeds: Tensor, states: Tensor, step: Step) -> Tensor:
        x = torch.cat((self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(states)), -1)
        return self.norm(self.layers[0](self.fc(x), step))  # type: ignore[no-any-return]

    def expect(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        return most_likely(self.target.head(outputs))


class EagleShape:
    """The shape of an EAGLE-3 layer, from its configuration and the names of its tensors.

    vocabulary: rows of its head. own_head, own_embedding: whether it has them, or shares the target's.
    residual_after_norm: the states are added after their norm, as checkpoints of vLLM's speculators say.
    Raises UnsupportedModel or CheckpointError.
    """

    def __init__(
        self, content: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], target: VisionLanguageModel
    ) -> None:
        """content: config.json. shapes: those of the tensors, by name."""
        whole = target.decoder.config
        text = SimpleNamespace(**_text_values(content, whole))
        used = [name for name in VARIANTS if content.get(name)]
        if (content.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
            used.append("use_aux_hidden_state: false")
        if used:
            raise UnsupportedModel(f"EAGLE-3 with {', '.join(used)} is not supported")
        if text.num_hidden_layers != 1:
            raise UnsupportedModel(f"EAGLE-3 with {text.num_hidden_layers} layers; supported: 1")
        size, bias = head_dim(text), bool(getattr(text, "attention_bias", False))
        mixer = Attention(
            text.num_attention_heads,
            text.num_key_value_heads,
            size,
            size**-0.5,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm="midlayer.self_attn.q_norm.weight" in shapes,
        )
        layer = LayerConfig(mixer, Dense(text.intermediate_size, text.hidden_act))
        self.config = DecoderConfig(
            vocab_size=whole.vocab_size + whole.extra_embeddings,
            hidden=text.hidden_size,
            layers=(layer,),
            rotaries=(_rotary(text, size, whole),),
            eps=text.rms_norm_eps,
            tied=True,
            max_positions=whole.max_positions,
        )
        self.taps = _taps(content, len(whole.layers))
        self.own_head = "lm_head.weight" in shapes
        self.own_embedding = "embed_tokens.weight" in shapes
        self.residual_after_norm = bool(content.get("norm_before_residual"))
        self.vocabulary = shapes["lm_head.weight"][0] if self.own_head else whole.vocab_size
        if text.hidden_size != whole.hidden and not (self.own_head and self.own_embedding):
            raise CheckpointError(
                f"EAGLE-3 of width {text.hidden_size} for a model of width {whole.hidden} needs an embedding "
                "table and a head of its own, which the file does not have"
            )


def load_eagle3(folder: Path, target: VisionLanguageModel) -> Eagle3:
    """Load an EAGLE-3 checkpoint for a loaded target. Raises CheckpointError or UnsupportedModel."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json")
    content = read_json(folder / "config.json")
    names = set(content.get("architectures") or ())
    if not names & NAMES:
        raise UnsupportedModel(
            f"{folder}: architectures {sorted(names)} are no EAGLE-3 layer; supported: "
            f"{', '.join(sorted(NAMES))}"
        )
    tensors = _read(folder)
    try:
        shape = EagleShape(content, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, target)
        with torch.device(target.device):
            layer = _in_type(lambda: Eagle3(target, shape), target.dtype)
    except FoveaError:
        raise
    except Exception as error:  # anybody may have written the file
        raise CheckpointError(f"{folder}/config.json cannot be used: {reason(error)}") from error
    ids = _ids(tensors.pop("d2t", None), shape.vocabulary, target.decoder.config.vocab_size, folder)
    layer.ids = None if ids is None else ids.to(target.device)
    for name in UNREAD:
        tensors.pop(name, None)
    _fill(layer, tensors, str(folder))
    layer.finish_loading()
    return layer


def load_mtp(stored: StoredWeights, target: VisionLanguageModel) -> MTPLayer:
    """Load the MTP layer of a target's own checkpoint. Raises CheckpointError.

    stored: the checkpoint's weights; quantized ones get their values.
    """
    with torch.device(target.device):
        layer = _in_type(lambda: MTPLayer(target), target.dtype)
    others = (rf"^(?!{re.escape(MTP_PREFIX)})",)
    load_weights(stored, checkpoint_targets(layer, MTP_PREFIX), others)
    layer.finish_loading()
    return layer


def _ids(offsets: Tensor | None, rows: int, vocabulary: int, folder: Path) -> Tensor | None:
    """Return the token id of each row of a head, from the tensor d2t; None: it is the row's number.

    rows: of the head. vocabulary: of the target. Raises CheckpointError.
    """
    if offsets is None:
        if rows != vocabulary:
            raise CheckpointError(f"{folder}: a head of {rows} rows needs the tensor d2t")
        return None
    if offsets.shape != (rows,) or offsets.is_floating_point():
        kind = str(offsets.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{folder}: d2t has shape {list(offsets.shape)} and type {kind}; expected a whole number for "
            f"each of the {rows} rows of the head"
        )
    ids = torch.arange(rows) + offsets.long()
    if int(ids.max()) >= vocabulary or int(ids.min()) < 0:
        raise CheckpointError(f"{folder}: d2t names tokens outside of the model's vocabulary")
    return ids


Layered = TypeVar("Layered", bound=DraftLayer)


def _in_type(make: Callable[[], Layered], dtype: torch.dtype) -> Layered:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return make().eval()
    finally:
        torch.set_default_dtype(before)


def _fill(layer: DraftLayer, tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy tensors into the layer. Raises CheckpointError for a missing, unknown or misshapen one."""
    targets = dict(checkpoint_targets(layer))
    missing, unknown = sorted(targets.keys() - tensors.keys()), sorted(tensors.keys() - targets.keys())
    if missing or unknown:
        raise CheckpointError(f"{where}: missing tensors {missing[:4]}, unknown tensors {unknown[:4]}")
    for name, storage in targets.items():
        tensor = tensors[name]
        if tensor.shape != storage.shape:
            raise CheckpointError(
                f"{where}: {name} has shape {list(tensor.shape)}, expected {list(storage.shape)}"
            )
        if not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(f"{where}: {name} has type {kind}; accepted: floating-point numbers")
        storage.copy_(tensor)


def _read(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder by the names of the first publication."""
    files = sorted(folder.glob("*.safetensors"))
    tensors: dict[str, Tensor] = {}
    try:
        if files:
            from safetensors.torch import load_file

            for file in files:
                tensors |= load_file(file)
        else:
            tensors = dict(torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True))
    except Exception as error:
        raise CheckpointError(f"{folder}: its weights cannot be read: {error}") from error
    if not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in tensors.items()):
        raise CheckpointError(f"{folder}: pytorch_model.bin holds other things than tensors")
    return {_name(name): tensor for name, tensor in tensors.items()}


def _name(name: str) -> str:
    name = name.removeprefix("model.").replace("layers.0.", "midlayer.", 1)
    return name.removeprefix("midlayer.") if name == "midlayer.hidden_norm.weight" else name


def _text_values(content: Mapping[str, Any], whole: DecoderConfig) -> dict[str, Any]:
    """Return the values of the layer, which speculators' configurations nest, with defaults of Llama."""
    values = {**content, **(content.get("transformer_layer_config") or {})}
    defaults = {"num_hidden_layers": 1, "hidden_act": "silu", "rms_norm_eps": 1e-6, "head_dim": None}
    values = {**defaults, **values}
    values.setdefault("num_key_value_heads", values.get("num_attention_heads"))
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    wrong = [name for name in sizes if type(values.get(name)) is not int or values[name] < 1]
    if wrong:
        raise CheckpointError(f"config.json of the EAGLE-3 layer: {', '.join(wrong)} must be whole numbers")
    if not isinstance(values["rms_norm_eps"], int | float):
        raise CheckpointError("config.json of the EAGLE-3 layer: rms_norm_eps must be a number")
    scaling = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    scaling.setdefault("rope_theta", values.get("rope_theta") or 10000.0)
    scaling["rope_type"] = scaling.get("rope_type") or scaling.pop("type", None) or "default"
    if scaling["rope_type"] == "mrope":
        scaling["rope_type"] = "default"
    return {**values, "rope_parameters": scaling}


def _rotary(text: Any, size: int, whole: DecoderConfig) -> Rotary:
    """Return the rotary positions. With sections, they have three coordinates if the target's have.

    Their layout is that of the target, unless the configuration names one.
    """
    axes = whole.rotaries[0].axes
    if text.rope_parameters.get("mrope_section") and axes is not None:
        interleaved = text.rope_parameters.get("mrope_interleaved", list(axes) != sorted(axes))
        return mrope(text, size, (), interleaved=bool(interleaved))
    kind = text.rope_parameters["rope_type"]
    if kind in ("default", "dynamic") or kind not in STATIC_ROPE:
        return rotary(text, size)
    from transformers import LlamaConfig

    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "rope_parameters")
    longest = getattr(text, "max_position_embeddings", None) or whole.max_positions
    own = {name: getattr(text, name) for name in names}
    return rotary(LlamaConfig(**own, head_dim=size, max_position_embeddings=longest), size)


def _taps(content: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """Return the numbers of the layers whose inputs are read. count: layers of the target.

    At the top level they are as here. Nested ones, as SGLang and SpecForge write them, number the layers
    whose outputs are read. Without any: the third layer, the middle one, the third from the end.
    """
    taps = content.get("eagle_aux_hidden_state_layer_ids")
    nested = (content.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if taps is None and nested is not None:
        taps = [number + 1 for number in nested]
    if taps is None:
        taps = [2, count // 2, count - 3]
    if not _are_taps(taps, count):
        raise UnsupportedModel(f"EAGLE-3 reads the layers {taps} of a model with {count} layers")
    return tuple(taps)


def _are_taps(taps: Iterable[Any], count: int) -> bool:
    numbers = list(taps)
    whole = all(type(number) is int and 0 <= number <= count for number in numbers)
    return bool(numbers) and whole and numbers == sorted(numbers)
