"""Draft layers with random weights, what engines draft with them, and their plain definition in torch.

The definition computes every row anew, in float32, from the states of transformers' own model.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest
import torch
from PIL import Image as PILImage
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from fovea import Engine
from fovea.core.media import Image
from fovea.engine.files import read_json
from fovea.engine.load import resolve
from fovea.engine.speculate import speculator
from fovea.engine.speculate.speculator import DeviceDrafter, DraftRequest
from fovea.engine.speculate.texts import Continuation
from tests.support.reference import Reference

Tensors = dict[str, Tensor]
WORD = 300
"""A token that is no image."""


class Eagle3Files(NamedTuple):
    """An EAGLE-3 checkpoint: its configuration, and its tensors by the names of the first publication."""

    config: dict[str, Any]
    tensors: Tensors

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, folder / "model.safetensors")
        return folder


def eagle3(
    target: str | Path, *, vocabulary: int = 0, own_embedding: bool = False, seed: int = 5, **changed: Any
) -> Eagle3Files:
    """Make a layer for a target.

    vocabulary: rows of a head of its own, with a table of ids; 0: it shares the target's head.
    own_embedding: it has an embedding table.
    changed: values that replace those of the configuration, which are the target's.
    """
    content = read_json(resolve(str(target)) / "config.json")
    text = content.get("text_config", content)
    width, heads = text["hidden_size"], text["num_attention_heads"]
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": text["num_key_value_heads"],
        "head_dim": text.get("head_dim") or width // heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": text.get("rope_parameters"),
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        **changed,
    }
    if vocabulary:
        config["draft_vocab_size"] = vocabulary
    random = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=random) * 0.12 + (len(shape) == 1)
        for name, shape in eagle3_shapes(config, width).items()
    }
    rows = text["vocab_size"]
    if own_embedding:
        tensors["embed_tokens.weight"] = torch.randn((rows, config["hidden_size"]), generator=random) * 0.12
    if vocabulary:
        tensors["lm_head.weight"] = torch.randn((vocabulary, config["hidden_size"]), generator=random) * 0.12
        used = torch.randperm(rows, generator=random)[:vocabulary].sort().values
        tensors["d2t"] = used - torch.arange(vocabulary)
        tensors["t2d"] = torch.zeros(rows, dtype=torch.bool).index_fill(0, used, True)
    return Eagle3Files(config, tensors)


def eagle3_shapes(config: Mapping[str, Any], width: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that every layer has. width: the target's."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    taps = config.get("eagle_aux_hidden_state_layer_ids") or [0, 0, 0]
    return {
        "midlayer.self_attn.q_proj.weight": (query, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (key, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (key, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, query),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "fc.weight": (hidden, len(taps) * width),
    }


def random_eagle3(
    folder: Path, target: str | Path = "fovea-tiny", *, vocabulary: int = 0, **changed: Any
) -> Path:
    """Write a layer for a target, see `eagle3`."""
    return eagle3(target, vocabulary=vocabulary, **changed).write(folder)


def add_mtp(folder: Path, *, fused: bool = True) -> Path:
    """Give a tiny Qwen3.5 an MTP layer with random weights.

    fused: the experts of the layer, if it has any, are one tensor, and not one tensor each.
    """
    text = read_json(folder / "config.json")["text_config"]
    hidden = text["hidden_size"]
    tensors = load_file(folder / "model.safetensors")
    place = text["layer_types"].index("full_attention")
    layer = f"model.language_model.layers.{place}."
    random = torch.Generator().manual_seed(9)
    shapes = {name.replace(layer, "mtp.layers.0."): tensors[name].shape for name in tensors if layer in name}
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    shapes |= {f"mtp.{name}.weight": torch.Size([hidden]) for name in norms}
    shapes["mtp.fc.weight"] = torch.Size([hidden, 2 * hidden])
    mtp = {name: torch.randn(shape, generator=random) * 0.12 for name, shape in shapes.items()}
    if fused and text.get("num_experts"):
        mtp = join_experts(mtp, "mtp.layers.0.", text["num_experts"])
    save_file(tensors | mtp, folder / "model.safetensors", {"format": "pt"})
    return folder


def join_experts(tensors: Tensors, prefix: str, count: int) -> Tensors:
    """Join the experts of a layer as published checkpoints have them, the rows of the gate first."""
    place = f"{prefix}mlp.experts."
    gate, up, down = (
        torch.stack([tensors[f"{place}{number}.{part}_proj.weight"] for number in range(count)])
        for part in ("gate", "up", "down")
    )
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith(place)}
    return rest | {f"{place}gate_up_proj": torch.cat((gate, up), 1), f"{place}down_proj": down}


@dataclass(frozen=True, slots=True)
class Drafted:
    """The result of a drafter for one text. text: all tokens before the drafts."""

    text: tuple[int, ...]
    tokens: tuple[int, ...]
    chances: tuple[float, ...]


@dataclass(slots=True)
class DraftLog:
    """All drafts of an engine's computed drafter."""

    found: list[Drafted] = field(default_factory=list)

    def take(self) -> list[Drafted]:
        """Return the drafts, and forget them."""
        found, self.found = self.found, []
        return found


def computed(machine: Engine) -> DeviceDrafter:
    """The only computed drafter of an engine."""
    assert machine.parts.speculator is not None
    (drafter,) = machine.parts.speculator.computed
    return drafter


def draft_always(machine: Engine, monkeypatch: pytest.MonkeyPatch) -> DraftLog:
    """Let the computed drafter draft after every step, and let steps compute all drafts.

    Otherwise an engine soon leaves out the drafts of random weights. Returns a log of its drafts.
    """
    parts, drafter = machine.parts.speculator, computed(machine)
    assert parts is not None
    monkeypatch.setattr(speculator, "LEAST_CHANCE", 0.0)
    drafter.least_chance = 0.0  # type: ignore[attr-defined]
    budget = parts._budget
    budget.choose = lambda sequences: None  # type: ignore[method-assign]
    budget.pays_to_compute = lambda *figures: True  # type: ignore[method-assign]
    worth = parts.worth[drafter.name]
    worth.gain, worth.note_gain = 1e12, lambda right: None  # type: ignore[method-assign]
    log, draft = DraftLog(), drafter.draft

    def logged(asked: Sequence[DraftRequest], most: int) -> dict[str, Continuation]:
        found = draft(asked, most)
        for seq, new in asked:
            if seq.id in found:
                text = (*seq.prompt_ids, *seq.output_ids, *new)
                drafts = found[seq.id]
                log.found.append(Drafted(text, tuple(drafts.tokens), tuple(drafts.shares)))
        return found

    drafter.draft = logged  # type: ignore[method-assign]
    return log


class Text(NamedTuple):
    """The target's view of a text, from transformers.

    ids: (T,). inputs: the states before each layer and after the last one, (T, hidden) each.
    final: the states after the final norm.
    positions: (3, T + some), also of tokens after the text; equal rows without M-RoPE.
    """

    ids: list[int]
    inputs: list[Tensor]
    final: Tensor
    positions: Tensor


class Target:
    """A tiny checkpoint in transformers, whose states between layers are read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reference = Reference(folder)
        model = self.reference.model.model
        self.decoder = getattr(model, "language_model", model)
        self.table: Tensor = self.decoder.embed_tokens.weight
        self.head: Tensor = self.reference.model.lm_head.weight

    @torch.inference_mode()
    def read(self, ids: Sequence[int], images: Sequence[Image] = (), beyond: int = 8) -> Text:
        """Compute a text. beyond: number of tokens after it whose positions are wanted."""
        whole = [*ids, *[WORD] * beyond]
        taken: list[Tensor] = []
        places: list[Tensor] = []

        def take(_module: Any, args: Any, kwargs: Any) -> None:
            taken.append((args[0] if args else kwargs["hidden_states"])[0, : len(ids)])

        def place(_module: Any, args: Any, kwargs: Any) -> None:
            places.append(args[1] if len(args) > 1 else kwargs["position_ids"])

        modules = [*self.decoder.layers, self.decoder.norm]
        hooks = [each.register_forward_pre_hook(take, with_kwargs=True) for each in modules]
        hooks.append(self.decoder.rotary_emb.register_forward_pre_hook(place, with_kwargs=True))
        pictures = [PILImage.frombytes("RGB", (each.width, each.height), each.rgb) for each in images]
        if hasattr(self.reference.model.model, "rope_deltas"):
            self.reference.model.model.rope_deltas = None
        try:
            self.reference.model(**self.reference.inputs(whole, pictures))
        finally:
            for hook in hooks:
                hook.remove()
        return Text(
            [*ids],
            taken,
            self.decoder.norm(taken[-1]),
            places[0].reshape(-1, len(whole))[-3:].expand(3, -1),
        )


class Plain(Protocol):
    """The plain definition of a draft layer."""

    def fuse(self, text: Text) -> Tensor:
        """The first states of rows, (T, hidden)."""
        ...

    def rows(self, states: Tensor, ids: Sequence[int], positions: Tensor) -> Tensor:
        """Compute rows from the beginning of a text, each with the token after it: (T, hidden)."""
        ...

    def choose(self, output: Tensor) -> Tensor:
        """Probabilities of all of the target's tokens after an output, (V,)."""
        ...


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads (T, heads, size). cos, sin: (T, size / 2)."""
    first, second = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class PlainEagle3:
    """EAGLE-3 (arXiv 2503.01840), as its authors define it.

    axes: coordinate of each rotary frequency; None: all have the first one.
    after_norm: the states are added to the attention's output after their norm.
    """

    def __init__(
        self,
        target: Target,
        files: Eagle3Files,
        taps: Sequence[int],
        axes: Sequence[int] | None = None,
        *,
        theta: float = 10000.0,
        after_norm: bool = False,
    ) -> None:
        self.config, self.tensors = files
        self.taps, self.after_norm = taps, after_norm
        size = self.config["head_dim"]
        self.inverse = theta ** (-torch.arange(0, size, 2) / size)
        self.axes = torch.zeros(size // 2, dtype=torch.long) if axes is None else torch.tensor(axes)
        self.table = self.tensors.get("embed_tokens.weight", target.table)
        self.head = self.tensors.get("lm_head.weight", target.head)
        self.count = len(target.head)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[f"{name}.weight"]

    def fuse(self, text: Text) -> Tensor:
        return torch.cat([text.inputs[tap] for tap in self.taps], -1) @ self["fc"].T

    def rows(self, states: Tensor, ids: Sequence[int], positions: Tensor) -> Tensor:
        eps, heads = self.config["rms_norm_eps"], self.config["num_attention_heads"]
        embedded = rms_norm(self.table[list(ids)], self["midlayer.input_layernorm"], eps)
        normed = rms_norm(states, self["midlayer.hidden_norm"], eps)
        both = torch.cat((embedded, normed), -1)
        shape = len(ids), -1, self.config["head_dim"]
        query, key, value = (
            (both @ self[f"midlayer.self_attn.{name}_proj"].T).view(shape) for name in ("q", "k", "v")
        )
        if "midlayer.self_attn.q_norm.weight" in self.tensors:
            query = rms_norm(query, self["midlayer.self_attn.q_norm"], eps)
            key = rms_norm(key, self["midlayer.self_attn.k_norm"], eps)
        angles = positions[self.axes].T.float() * self.inverse
        query, key = (turn(x, angles.cos(), angles.sin()) for x in (query, key))
        copies = heads // key.shape[1]
        query, key, value = (
            x.transpose(0, 1)
            for x in (query, key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1))
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(0, 1).reshape(len(ids), -1) @ self["midlayer.self_attn.o_proj"].T
        x = (normed if self.after_norm else states) + mixed
        inner = rms_norm(x, self["midlayer.post_attention_layernorm"], eps)
        gate = functional.silu(inner @ self["midlayer.mlp.gate_proj"].T)
        return x + (gate * (inner @ self["midlayer.mlp.up_proj"].T)) @ self["midlayer.mlp.down_proj"].T

    def choose(self, output: Tensor) -> Tensor:
        own = (rms_norm(output, self["norm"], self.config["rms_norm_eps"]) @ self.head.T).softmax(-1)
        if "d2t" not in self.tensors:
            return own
        ids = torch.arange(len(own)) + self.tensors["d2t"]
        return torch.zeros(self.count).index_copy(0, ids, own)


class PlainMTP:
    """MTP as Qwen3.5 has it, with transformers' own decoder layer."""

    def __init__(self, target: Target) -> None:
        self.target = target
        config = copy.deepcopy(target.decoder.config)
        config._attn_implementation = "eager"
        module = import_module(type(target.decoder).__module__)
        names = [name for name in dir(module) if name.endswith("DecoderLayer")]
        layer = getattr(module, names[0])(config, config.layer_types.index("full_attention")).eval()
        stored = {
            name.removeprefix("mtp."): tensor
            for name, tensor in load_file(target.folder / "model.safetensors").items()
            if name.startswith("mtp.")
        }
        self.own = {name: tensor for name, tensor in stored.items() if not name.startswith("layers.")}
        inside = {name[len("layers.0.") :]: tensor for name, tensor in stored.items() if name not in self.own}
        if "mlp.experts.0.up_proj.weight" in inside:
            inside = join_experts(inside, "", config.num_experts)
        layer.load_state_dict(inside)
        self.layer = layer
        self.eps = config.rms_norm_eps

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, 1 + self.own[f"{name}.weight"], self.eps)

    def fuse(self, text: Text) -> Tensor:
        return text.final

    def rows(self, states: Tensor, ids: Sequence[int], positions: Tensor) -> Tensor:
        both = (
            self._norm(self.target.table[list(ids)], "pre_fc_norm_embedding"),
            self._norm(states, "pre_fc_norm_hidden"),
        )
        x = (torch.cat(both, -1) @ self.own["fc.weight"].T)[None]
        angles = self.target.decoder.rotary_emb(x, positions[:, None])
        mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1)[None, None]
        out = self.layer(x, position_embeddings=angles, attention_mask=mask)
        return self._norm((out[0] if isinstance(out, tuple) else out)[0], "norm")

    def choose(self, output: Tensor) -> Tensor:
        return (output @ self.target.head.T).softmax(-1)


class Definition:
    """The plain definition of a layer, applied to whole texts of its target, each computed once."""

    def __init__(self, target: Target, layer: Plain) -> None:
        self.target, self.layer = target, layer
        self._texts: dict[tuple[int, ...], tuple[Text, Tensor, Tensor]] = {}

    @torch.inference_mode()
    def add(self, ids: Sequence[int], images: Sequence[Image] = ()) -> None:
        """Compute a text: prompt and answer."""
        text = self.target.read(ids, images)
        states = self.layer.fuse(text)
        outputs = self.layer.rows(states[:-1], text.ids[1:], text.positions[:, : len(ids) - 1])
        self._texts[tuple(ids)] = text, states, outputs

    @torch.inference_mode()
    def check(self, drafts: Sequence[Drafted], tolerance: float = 1e-4, chains: int = 12) -> None:
        """Assert that drafts are those of the definition.

        Each must be the most likely token after those before it, but for `tolerance`, and its probability
        must be that of the definition.

        drafts: they follow the beginnings of known texts.
        chains: number of them of which all drafts are checked; of the others, the first one.
        """
        assert drafts
        for number, each in enumerate(drafts):
            whole = next(ids for ids in self._texts if ids[: len(each.text)] == each.text)
            text, states, outputs = self._texts[whole]
            count = len(each.text) - 1
            self._assert_right(each, 0, outputs[count - 1], tolerance)
            if number % (len(drafts) // chains + 1):
                continue
            states, output, ids = states[:count], outputs[count - 1 : count], list(whole[1 : count + 1])
            for place, token in enumerate(each.tokens[:-1], 1):
                states, ids = torch.cat((states, output)), [*ids, token]
                output = self.layer.rows(states, ids, text.positions[:, : len(ids)])[-1:]
                self._assert_right(each, place, output[0], tolerance)

    def _assert_right(self, each: Drafted, place: int, output: Tensor, tolerance: float) -> None:
        probabilities = self.layer.choose(output)
        chance = float(probabilities[each.tokens[place]])
        assert float(probabilities.max()) - chance < tolerance, (place, each)
        assert abs(each.chances[place] - chance) < tolerance, (place, each)
