"""Quantizes a checkpoint, one decoder layer at a time, and writes it in the format compressed-tensors.

For each layer: run the calibration prompts through it, fold factors of its inputs into the step before (`FOLDS`), round
the weights (`search`), and write a file. The rounded layer's outputs are the next layer's inputs, so that later layers
see the errors of earlier ones. A run that was stopped continues after the last complete file.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fovea.core.errors import CheckpointError, ConfigError
from fovea.engine.files import read_json
from fovea.engine.layers.decoder import build_layer
from fovea.engine.layers.experts import ExpertLinear
from fovea.engine.layers.layer import Layer
from fovea.engine.layers.linear import FusedLinear, Linear, PatchLinear, RMSNorm, checkpoint_targets
from fovea.engine.layers.mixers import AttentionMixer, RotaryAngles
from fovea.engine.layers.step import DecoderMemory, Step
from fovea.engine.load import build_model, read_config, resolve, untie_own_head
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.quantized import open_weights
from fovea.engine.models.stored import STORED_TYPES, StoredWeights
from fovea.engine.models.targets import Fill, assign
from fovea.engine.models.weights import expect_complete, load_weights
from fovea.engine.quantize.record import BLOCK_SIZE, BLOCKS, Sample
from fovea.engine.quantize.schemes import Rounded, Scheme, round_weight
from fovea.engine.quantize.search import Moments, round_by_columns, smooth

PARTS = ("decoder", "tower", "projector", "head")
"""Components with a scheme of their own. The embedding table and norms are not quantized."""
STATE = "calibration.safetensors"
"""File of the rows between two layers, in the output folder until the last layer is written."""
INDEX = "model.safetensors.index.json"
COPIED = ("*.json", "*.jinja", "*.txt", "*.model")


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked for.

    schemes: the scheme of each of PARTS; None: it is not quantized.
    exceptions: schemes of single maps, by a part of their names in the checkpoint; the first that fits counts.
    visual_weight: weight of rows of images beside rows of text; None: it is measured.
    """

    schemes: Mapping[str, Scheme | None]
    exceptions: Mapping[str, Scheme | None] = field(default_factory=dict)
    visual_weight: float = 1.0

    def scheme_of(self, part: str, name: str, k: int) -> Scheme | None:
        """Return the scheme of a map of that name in the checkpoint, with k inputs."""
        scheme = self.schemes.get(part)
        for piece, other in self.exceptions.items():
            if piece in name:
                scheme = other
                break
        return scheme if scheme is not None and scheme.fits(k) else None


class Checkpoint:
    """A plain checkpoint whose tensors are read layer by layer.

    name: see `load.resolve`. Raises CheckpointError, or UnsupportedModel.
    """

    def __init__(self, name: str) -> None:
        self.folder = resolve(name)
        self.config = read_config(self.folder)
        self.stored: StoredWeights = open_weights(self.folder, self.config)
        if self.stored.quantization:
            raise CheckpointError(
                f"{self.folder} is quantized already ({self.stored.quantization}); accepted: a plain one"
            )
        entries = [entry for _, part in self.stored.files for entry in part]
        untie_own_head(self.config, (entry.name for entry in entries))
        self.model: VisionLanguageModel = build_model(
            self.folder, self.config, torch.device("meta"), torch.float32
        )
        shapes = {name: tuple(tensor.shape) for name, tensor in self.model.checkpoint_targets()}
        assignment = assign(
            self.stored.files, shapes, self.model.ignored, self.model.renames, self.model.fused_tensors()
        )
        expect_complete(assignment)
        self.fills = assignment.fills

    def load(self, module: nn.Module, prefix: str) -> None:
        """Fill a module of the model, whose attribute path is `prefix`, with its weights."""
        targets = checkpoint_targets(module, f"{prefix}.")
        others = rf"^(?!{prefix.replace('.', chr(92) + '.')}\.)"
        load_weights(
            self.stored,
            targets,
            (*self.model.ignored, others),
            None,
            self.model.renames,
            self.model.fused_tensors(),
        )

    def fills_of(self, prefix: str) -> list[Fill]:
        """Return the tensors of the files that belong to a part of the model."""
        return [fill for fill in self.fills if fill.pieces[0].target.startswith(f"{prefix}.")]

    def read(self, fill: Fill) -> Tensor:
        """Return a tensor of the files as it is stored."""
        assert fill.entry.shape is not None
        tensor = torch.empty(fill.entry.shape, dtype=STORED_TYPES[fill.entry.dtype])
        self.stored.read(fill.file, fill.entry, tensor)
        return tensor


def row_numbers(layer: Linear) -> dict[str, Tensor]:
    """Return the rows of a linear map's weight that each of its checkpoint tensors has, in the tensor's order.

    The names are relative to the layer, such as "weight" or "../q_proj.weight".
    """
    weight, bias = layer.weight.data, layer.bias
    layer.weight.data = torch.arange(len(weight), dtype=torch.float32)[:, None].clone()
    layer.bias = None
    try:
        return {name: view.reshape(-1).long() for name, view in layer.checkpoint_views()}
    finally:
        layer.weight.data, layer.bias = weight, bias


class LayerRun:
    """One decoder layer and the rows of all samples before it."""

    def __init__(
        self, model: VisionLanguageModel, layer: nn.Module, number: int, samples: Sequence[Sample]
    ) -> None:
        config = model.decoder.config
        self.layer, self.number, self.samples = layer, number, samples
        memory = DecoderMemory.allocate(
            config, tuple(BLOCKS for _ in config.kv_groups), BLOCK_SIZE, 2, torch.float32, torch.device("cpu")
        )
        # All layers use the memory of the first one, so the others never take any.
        places = tuple((place[0], 0) if isinstance(place, tuple) else place for place in memory.places)
        self._memory = replace(memory, places=places)
        self._rotary = [RotaryAngles(rotary) for rotary in config.rotaries]

    def forward(self, sample: Sample) -> Tensor:
        """Return the layer's output rows for a sample."""
        angles = tuple(rotary(sample.positions, torch.float32) for rotary in self._rotary)
        step = Step(angles, sample.plan, self._memory, None, sample.per_layer, sample.images)
        out: Tensor = self.layer(sample.x, step)
        if self.number < len(sample.deepstack) and sample.visual_rows is not None:
            out = out.index_add(0, sample.visual_rows, sample.deepstack[self.number])
        return out

    def inputs(self, maps: Iterable[Linear], wish: Wish) -> dict[Linear, Moments]:
        """Run all samples, and return the statistics of these maps' inputs."""
        found = {each: Moments.empty(each.in_features) for each in maps}
        importance = torch.ones(0)

        def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0]
            rows = importance if len(importance) == len(x) else torch.ones(len(x))
            found[layer].add(x, rows)  # type: ignore[index]

        hooks = [each.register_forward_pre_hook(note) for each in found]
        try:
            for sample in self.samples:
                importance = torch.where(sample.is_visual(), wish.visual_weight, 1.0)
                self.forward(sample)
        finally:
            for hook in hooks:
                hook.remove()
        return found


def stages(layer: nn.Module) -> list[tuple[Linear, Fold | None]]:
    """Return the linear maps of a layer in the order of computation, and what their factors are folded into."""
    maps = [
        each for each in layer.modules() if isinstance(each, Linear) and not isinstance(each, ExpertLinear)
    ]
    if not isinstance(layer, Layer):
        return [(each, None) for each in maps]
    folds: dict[Linear, Fold] = {}
    mixer, block = layer.mixer, layer.mlp
    if isinstance(mixer, AttentionMixer):
        folds[mixer.qkv] = NormFold(layer.input_layernorm)
        shape = mixer.shape
        if shape.source is None and not (shape.gated or shape.value_norm or shape.shared_values):
            folds[mixer.o_proj] = ValueFold(mixer)
    gate_up, down = getattr(block, "gate_up", None), getattr(block, "down_proj", None)
    if isinstance(gate_up, FusedLinear) and isinstance(down, Linear):
        norm = layer.pre_feedforward_layernorm or layer.post_attention_layernorm
        folds[gate_up], folds[down] = NormFold(norm), RowFold(gate_up, gate_up.out_features // 2)
    return [(each, folds.get(each)) for each in maps]


class NormFold:
    """Divides the weight of the norm before a map. The factors are those that the rounded weight really gives."""

    def __init__(self, norm: RMSNorm) -> None:
        self._norm = norm

    def reduce(self, factors: Tensor) -> Tensor:
        return factors

    def apply(self, factors: Tensor, dtype: torch.dtype) -> Tensor:
        """Divide by factors (k,), rounding to `dtype`. Returns the factors by which the inputs are divided."""
        weight, one = self._norm.weight.data, 1.0 if self._norm.centered else 0.0
        before = weight + one
        rounded = ((before / factors - one).to(dtype)).float()
        after = rounded + one
        usable = (before != 0) & (after != 0)
        real = torch.where(usable, before / after, 1.0)
        self._norm.weight.data = torch.where(usable, rounded, weight)
        return real


class RowFold:
    """Divides rows of the map before. first: number of the row that makes the first input."""

    def __init__(self, before: Linear, first: int) -> None:
        self._before, self._first = before, first

    def reduce(self, factors: Tensor) -> Tensor:
        return factors

    def apply(self, factors: Tensor, dtype: torch.dtype) -> Tensor:
        rows = slice(self._first, self._first + len(factors))
        self._before.weight.data[rows] /= factors[:, None]
        if self._before.bias is not None:
            self._before.bias.data[rows] /= factors
        return factors


class ValueFold:
    """Divides the values of attention. The query heads that read one value head get the same factors."""

    def __init__(self, mixer: AttentionMixer) -> None:
        self._mixer = mixer
        self._shape = mixer.kv_heads, mixer.heads // mixer.kv_heads, mixer.dim

    def reduce(self, factors: Tensor) -> Tensor:
        heads = factors.view(self._shape)
        return heads.log().mean(1, keepdim=True).exp().expand_as(heads).reshape(-1)

    def apply(self, factors: Tensor, dtype: torch.dtype) -> Tensor:
        first = (self._mixer.heads + self._mixer.kv_heads) * self._mixer.dim
        own = factors.view(self._shape)[:, 0].reshape(-1)
        RowFold(self._mixer.qkv, first).apply(own, dtype)
        return factors


Fold = NormFold | RowFold | ValueFold


@dataclass(frozen=True, slots=True)
class Line:
    """What became of a linear map.

    name: its first tensor in the checkpoint. error: share of the outputs' energy that rounding changes; None: it was
    not measured, because the map was not calibrated.
    """

    name: str
    part: str
    scheme: str
    numbers: int
    error: float | None = None


class Quantizer:
    """Writes a quantized copy of a checkpoint to a folder.

    samples: what `record` returns; empty: nothing is calibrated, and every weight is rounded to the nearest.
    advance: called after each decoder layer, and after the rest.
    """

    def __init__(
        self,
        source: Checkpoint,
        out: Path,
        wish: Wish,
        samples: Sequence[Sample],
        advance: Callable[[], None],
    ) -> None:
        self._source, self._out, self._wish, self._samples = source, out, wish, list(samples)
        self._advance = advance
        self._schemes: dict[str, Scheme | None] = {}
        self._index: dict[str, str] = {}
        self.lines: list[Line] = []

    @torch.no_grad()
    def run(self) -> list[Line]:
        """Write all files. Returns a line for each linear map."""
        self._out.mkdir(parents=True, exist_ok=True)
        model = self._source.model
        done = self._resume()
        for number in range(len(model.decoder.layers)):
            if number >= done:
                self._layer(number)
                self._save(number + 1)
            self._advance()
        self._rest()
        self._finish()
        self._advance()
        return self.lines

    def _layer(self, number: int) -> None:
        """Round one layer, write its file, and replace the rows of the samples by its outputs."""
        model, prefix = self._source.model, f"decoder.layers.{number}"
        layer = model.decoder.layers[number] = build_layer(model.decoder.config, number)
        self._source.load(layer, prefix)
        run = LayerRun(model, layer, number, self._samples)
        paths = {module: f"{prefix}.{path}" for path, module in layer.named_modules()}
        chosen: list[tuple[Linear, Fold | None, Scheme]] = []
        for each, fold in stages(layer):
            scheme = self._wish.scheme_of("decoder", paths[each], each.in_features)
            if scheme is not None:
                chosen.append((each, fold, scheme))
        moments = run.inputs([each for each, _, _ in chosen], self._wish) if self._samples else {}
        for each, fold, scheme in chosen:
            if fold is not None and each in moments:
                factors = fold.reduce(smooth(each.weight.data, moments[each], scheme))
                factors = fold.apply(factors, self._dtype(prefix))
                each.weight.data *= factors
                moments[each] = moments[each].divided(factors)
        tensors: dict[str, Tensor] = {}
        rounded: dict[str, tuple[Rounded, Tensor]] = {}
        for each, _, scheme in chosen:
            result, error = self._round(each.weight.data, moments.get(each), scheme)
            each.weight.data = result.values()
            names = [name for name, _ in checkpoint_targets(each, paths[each] + ".")]
            for name, rows in zip(names, row_numbers(each).values(), strict=False):
                if name.endswith(".weight"):
                    rounded[name] = result, rows
            self.lines.append(Line(names[0], "decoder", str(scheme), each.weight.numel(), error))
        values = dict(checkpoint_targets(layer, prefix + "."))
        for fill in self._source.fills_of(prefix):
            tensors |= self._stored(fill, values, rounded)
        self._write(f"layer-{number:05}.safetensors", tensors)
        for sample in self._samples:
            sample.x = run.forward(sample)
        model.decoder.layers[number] = layer.to("meta")

    def _round(self, weight: Tensor, moments: Moments | None, scheme: Scheme) -> tuple[Rounded, float | None]:
        """Return a rounded weight, and the share of its outputs' energy that this changes."""
        if moments is None:
            return round_weight(weight, scheme), None
        result = round_by_columns(weight, moments, scheme)
        change = result.values() - weight
        energy = float(((weight @ moments.second) * weight).sum())
        return result, float(((change @ moments.second) * change).sum()) / max(energy, 1e-30)

    def _stored(
        self, fill: Fill, values: Mapping[str, Tensor], rounded: Mapping[str, tuple[Rounded, Tensor]]
    ) -> dict[str, Tensor]:
        """Return the tensors that stand for one of the checkpoint's."""
        entry, targets = fill.entry, [piece.target for piece in fill.pieces]
        if fill.transposed or any(piece.expert is not None for piece in fill.pieces):
            return {entry.name: self._source.read(fill)}
        # The rows of a tensor that holds several targets, in its own order.
        order = torch.arange(0) if fill.fused is None else torch.cat(
            [rows for _, rows in fill.fused.split(torch.arange(fill.fused.rows))]
        )  # fmt: skip
        place = order.argsort()
        found = [rounded[target] for target in targets if target in rounded]
        if len(found) == len(targets) and all(one[0] is found[0][0] for one in found):
            rows = torch.cat([rows for _, rows in found])
            rows = rows if fill.fused is None else rows[place]
            self._schemes[entry.name.removesuffix(".weight")] = found[0][0].scheme
            return found[0][0].rows(rows).tensors(entry.name)
        whole = (
            torch.cat([values[target].flatten(0, 0) for target in targets])
            if fill.fused
            else values[targets[0]]
        )
        whole = whole[place] if fill.fused else whole
        if len(entry.shape or ()) == 2:
            self._schemes[entry.name.removesuffix(".weight")] = None
        return {entry.name: whole.reshape(entry.shape).to(STORED_TYPES[entry.dtype])}  # type: ignore[arg-type]

    def _rest(self) -> None:
        """Write everything outside of the decoder's layers. Its maps are rounded to the nearest."""
        model = self._source.model
        maps = {
            name: path
            for path, layer in model.named_modules()
            if isinstance(layer, Linear) and not isinstance(layer, PatchLinear)
            for name in model.checkpoint_names(path, layer)
        }
        tensors: dict[str, Tensor] = {}
        for fill in self._source.fills:
            target, entry = fill.pieces[0].target, fill.entry
            if target.startswith("decoder.layers."):
                continue
            tensor = self._source.read(fill)
            is_map = target in maps and target.endswith(".weight") and tensor.ndim == 2
            part = (
                "head"
                if target.startswith("lm_head.")
                else "projector"
                if target.startswith("projector.")
                else "tower"
            )
            scheme = self._wish.scheme_of(part, target, tensor.shape[1]) if is_map else None
            if is_map:
                self._schemes[entry.name.removesuffix(".weight")] = scheme
            if scheme is None:
                tensors[entry.name] = tensor
                continue
            tensors |= round_weight(tensor.float(), scheme).tensors(entry.name)
            self.lines.append(Line(target, part, str(scheme), tensor.numel()))
        self._write("rest.safetensors", tensors)

    def _write(self, file: str, tensors: Mapping[str, Tensor]) -> None:
        from safetensors.torch import save_file

        part = self._out / f"{file}.part"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, {"format": "pt"})
        part.rename(self._out / file)
        self._index |= dict.fromkeys(tensors, file)

    def _dtype(self, prefix: str) -> torch.dtype:
        """The type of the plain tensors of a layer."""
        types = [fill.entry.dtype for fill in self._source.fills_of(prefix)]
        return STORED_TYPES[max(set(types), key=types.count)]

    def _digest(self) -> str:
        """Identifies what is done, so that a run continues only its own work."""
        sizes = [len(sample.x) for sample in self._samples]
        text = repr((str(self._source.folder), self._wish, sizes))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _save(self, done: int) -> None:
        """Note that so many layers are done, and keep the rows before the next one."""
        from safetensors.torch import save_file

        rows = {f"{number:06}": sample.x.contiguous() for number, sample in enumerate(self._samples)}
        state = {
            "digest": self._digest(), "done": done, "index": self._index, "lines": [astuple(line) for line in self.lines],
            "schemes": {name: scheme and astuple(scheme) for name, scheme in self._schemes.items()},
        }  # fmt: skip
        part = self._out / f"{STATE}.part"
        save_file(rows, part, {"state": json.dumps(state)})
        part.rename(self._out / STATE)

    def _resume(self) -> int:
        """Return the number of layers that an earlier run has written, and take over its state."""
        from safetensors import safe_open

        path = self._out / STATE
        if not path.is_file():
            if any(self._out.iterdir()):
                raise ConfigError(f"{self._out} is not empty; accepted: an empty or new folder", param="out")
            return 0
        with safe_open(path, "pt") as file:
            state = json.loads(file.metadata()["state"])
            if state["digest"] != self._digest():
                raise ConfigError(
                    f"{self._out} holds a run with other settings; accepted: the same command, or another folder",
                    param="out",
                )
            for number, sample in enumerate(self._samples):
                sample.x = file.get_tensor(f"{number:06}")
        self._index = dict(state["index"])
        self.lines = [Line(*line) for line in state["lines"]]
        self._schemes = {name: scheme and Scheme(*scheme) for name, scheme in state["schemes"].items()}
        return int(state["done"])

    def _finish(self) -> None:
        """Write the index and the configuration, and copy the other files."""
        for pattern in COPIED:
            for file in self._source.folder.glob(pattern):
                if file.name not in ("config.json", INDEX):
                    shutil.copyfile(file, self._out / file.name)
        config = read_json(self._source.folder / "config.json")
        config["quantization_config"] = describe(self._schemes)
        (self._out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        size = sum((self._out / file).stat().st_size for file in set(self._index.values()))
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(self._index.items()))}
        (self._out / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        (self._out / STATE).unlink(missing_ok=True)


def describe(schemes: Mapping[str, Scheme | None]) -> dict[str, Any]:
    """Return the configuration of compressed-tensors for linear maps by their names in the checkpoint.

    The scheme of most maps is that of all linear layers; the maps of others are named, and names go first.
    """
    used = Counter(scheme for scheme in schemes.values() if scheme is not None)
    groups: dict[str, Any] = {}
    formats = {scheme.format for scheme in used}
    for number, (scheme, _) in enumerate(used.most_common()):
        names = (
            ["Linear"]
            if number == 0
            else [pattern(name) for name, other in schemes.items() if other == scheme]
        )
        groups[f"group_{number}"] = scheme.settings() | {"targets": names, "format": scheme.format}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": groups,
        "ignore": sorted(
            {pattern(name) for name, scheme in schemes.items() if scheme is None}
            | {"lm_head"} - _heads(schemes)
        ),
    }


def _heads(schemes: Mapping[str, Scheme | None]) -> set[str]:
    return (
        {"lm_head"} if any(name.endswith("lm_head") and scheme for name, scheme in schemes.items()) else set()
    )


def pattern(name: str) -> str:
    """Return a regular expression of a map's name that also matches it in models that rename their parts.

    Only what comes before the first of these words differs between versions of transformers.
    """
    parts = name.split(".")
    if "lm_head" in parts:
        return "lm_head"
    return "re:.*" + re.escape(".".join(parts[-4:])) + "$" if len(parts) > 4 else name
