"""Quantizes a checkpoint, one decoder layer at a time, and writes it in the format compressed-tensors.

For each layer: run the calibration prompts through it, fold factors of its inputs into the step before, round
the weights, and write a file. The rounded layer's outputs are the next layer's inputs, so that later layers
see the errors of earlier ones. A run that was stopped continues after the last complete layer.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fovea.core.errors import ConfigError
from fovea.engine.files import read_json
from fovea.engine.layers.decoder import build_layer
from fovea.engine.layers.linear import Linear, PatchLinear, checkpoint_targets
from fovea.engine.models.stored import STORED_TYPES
from fovea.engine.models.targets import Fill
from fovea.engine.quantize.budget import Option, choose, ladder
from fovea.engine.quantize.layers import Checkpoint, Fold, LayerRun, row_numbers, stages
from fovea.engine.quantize.measure import FOLDER as MEASURING
from fovea.engine.quantize.measure import Measured
from fovea.engine.quantize.record import Sample
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
    """The schemes that a user asks for.

    schemes: the scheme of each of PARTS; None: it is not quantized.
    exceptions: schemes of single maps, by a part of their names in the checkpoint; the first that fits
        counts.
    visual_weight: weight of rows of images beside rows of text, by which MBQ (arXiv 2412.19509) balances
        them; None: it is measured for each layer.
    size: bytes of the copy's tensors at most, or, up to 1, a share of the plain ones; maps of the decoder
        that lose most get larger schemes, as far as there is room. None: no map does.
    """

    schemes: Mapping[str, Scheme | None]
    exceptions: Mapping[str, Scheme | None] = field(default_factory=dict)
    visual_weight: float | None = 1.0
    size: float | None = None

    def scheme_of(self, part: str, name: str, k: int) -> Scheme | None:
        """Return the scheme of a map of that name in the checkpoint, with k inputs."""
        scheme = self.schemes.get(part)
        for piece, other in self.exceptions.items():
            if piece in name:
                scheme = other
                break
        return scheme if scheme is not None and scheme.fits(k) else None

    def is_exception(self, name: str) -> bool:
        """Whether the user asks for a scheme of this map by its name."""
        return any(piece in name for piece in self.exceptions)


@dataclass(frozen=True, slots=True)
class Line:
    """The result for one linear map.

    name: its first tensor.
    part: one of PARTS.
    numbers, nbytes: numbers of its weight, and their bytes after rounding.
    error: share of the outputs' energy on the calibration data that rounding changes; None: it was not
        measured.
    """

    name: str
    part: str
    scheme: str
    numbers: int
    nbytes: int
    error: float | None = None


class Quantizer:
    """Writes a quantized copy of a checkpoint to a folder.

    samples: rows of calibration prompts; empty: no map of the decoder is calibrated, and every weight is
        rounded to the nearest.
    advance: called after each decoder layer, and after the rest.
    encoder: statistics of the inputs of maps of tower and projector, by their paths; the weights of others
        are rounded to the nearest.
    measured: what `measure` returns; needed if the wish has a size or no visual weight.
    """

    def __init__(
        self,
        source: Checkpoint,
        out: Path,
        wish: Wish,
        samples: Sequence[Sample],
        advance: Callable[[], None],
        encoder: Mapping[str, Moments] | None = None,
        measured: Measured | None = None,
    ) -> None:
        self._source, self._out, self._wish, self._samples = source, out, wish, list(samples)
        self._advance, self._encoder, self._measured = advance, encoder or {}, measured
        self._chosen: dict[str, Scheme | None] = {}
        self._schemes: dict[str, Scheme | None] = {}
        self._index: dict[str, str] = {}
        self.lines: list[Line] = []

    @torch.no_grad()
    def run(self) -> list[Line]:
        """Write all files. Returns a line for each linear map."""
        self._out.mkdir(parents=True, exist_ok=True)
        model = self._source.model
        done = self._resume()
        if self._wish.size is not None:
            self._chosen = self._choose(self._wish.size)
        for number in range(len(model.decoder.layers)):
            if number >= done:
                self._layer(number)
                self._save(number + 1)
            self._advance()
        self._rest()
        self._source.stored.close()
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
            scheme = self._chosen.get(paths[each], scheme)
            if scheme is not None:
                chosen.append((each, fold, scheme))
        visual = self._visual_weight(number)
        moments = run.inputs([each for each, _, _ in chosen], visual) if self._samples else {}
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
            names = [name for name in names if name.endswith(".weight")]  # row_numbers has no biases
            for name, rows in zip(names, row_numbers(each).values(), strict=True):
                rounded[name] = result, rows
            self.lines.append(
                Line(names[0], "decoder", str(scheme), each.weight.numel(), result.nbytes, error)
            )
        values = dict(checkpoint_targets(layer, prefix + "."))
        for fill in self._source.fills_of(prefix):
            tensors |= self._stored(fill, values, rounded)
        self._source.stored.close()
        self._write(f"layer-{number:05}.safetensors", tensors)
        for sample in self._samples:
            sample.x = run.forward(sample)
        model.decoder.layers[number] = layer.to("meta")

    def _visual_weight(self, number: int) -> float:
        given = self._wish.visual_weight
        if given is not None:
            return given
        return self._measured.visual[number] if self._measured is not None else 1.0

    def _choose(self, size: float) -> dict[str, Scheme | None]:
        """Return the schemes of the decoder's maps, by their paths, for a copy of at most a size."""
        assert self._measured is not None
        plain = sum(_nbytes(fill) for fill in self._source.fills)
        room = (size * plain if size <= 1 else size) - plain
        for fill, _, scheme in self._rest_maps():
            assert fill.entry.shape is not None
            if scheme is not None:
                room += _nbytes(fill) - scheme.nbytes(*fill.entry.shape)
        maps: dict[str, list[Option]] = {}
        for number, layer in enumerate(self._source.model.decoder.layers):
            prefix = f"decoder.layers.{number}"
            itemsize = self._dtype(prefix).itemsize
            paths = {module: f"{prefix}.{path}" for path, module in layer.named_modules()}
            for each, _ in stages(layer):
                n, k, path = each.out_features, each.in_features, paths[each]
                scheme = self._wish.scheme_of("decoder", path, k)
                if scheme is None:
                    continue
                room += n * k * itemsize
                costs = self._measured.costs[path]
                ways = [scheme] if self._wish.is_exception(path) else ladder(scheme)
                maps[path] = [
                    Option(None, n * k * itemsize, 0.0)
                    if way is None
                    else Option(way, way.nbytes(n, k), costs.get(str(way), 0.0))
                    for way in ways
                    if way is None or way.fits(k)
                ]
        return choose(maps, int(room))

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
        """Write everything outside of the decoder's layers."""
        tensors: dict[str, Tensor] = {}
        maps = {fill.entry.name: (path, scheme) for fill, path, scheme in self._rest_maps()}
        for fill in self._source.fills:
            target, name = fill.pieces[0].target, fill.entry.name
            if target.startswith("decoder.layers."):
                continue
            tensor = self._source.read(fill)
            path, scheme = maps.get(name, ("", None))
            if path:
                self._schemes[name.removesuffix(".weight")] = scheme
            if scheme is None:
                tensors[name] = tensor
                continue
            result, error = self._round(tensor.float(), self._encoder.get(path), scheme)
            tensors |= result.tensors(name)
            part = self._part(path)
            self.lines.append(Line(target, part, str(scheme), tensor.numel(), result.nbytes, error))
        self._write("rest.safetensors", tensors)

    def _rest_maps(self) -> Iterator[tuple[Fill, str, Scheme | None]]:
        """Yield the linear maps outside of the decoder's layers: tensor, path of the layer, and scheme."""
        model = self._source.model
        paths = {
            name: path
            for path, layer in model.named_modules()
            if isinstance(layer, Linear) and not isinstance(layer, PatchLinear)
            for name in model.checkpoint_names(path, layer)
        }
        for fill in self._source.fills:
            target, shape = fill.pieces[0].target, fill.entry.shape or ()
            if target.startswith("decoder.layers.") or target not in paths:
                continue
            if target.endswith(".weight") and len(shape) == 2 and not fill.transposed:
                path = paths[target]
                yield fill, path, self._wish.scheme_of(self._part(path), target, shape[1])

    def _part(self, path: str) -> str:
        """Return the part of the model, one of PARTS, to which a layer at a path outside of the decoder
        belongs.
        """
        model = self._source.model
        if path.startswith("head."):
            return "head"
        projector = {layer for module in model.projector_modules() for layer in module.modules()}
        return "projector" if model.get_submodule(path) in projector else "tower"

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
            "digest": self._digest(), "done": done, "index": self._index,
            "lines": [astuple(line) for line in self.lines],
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
            if any(file.name != MEASURING for file in self._out.iterdir()):
                raise ConfigError(f"{self._out} is not empty; accepted: an empty or new folder", param="out")
            return 0
        with safe_open(path, "pt") as file:
            state = json.loads(file.metadata()["state"])
            if state["digest"] != self._digest():
                raise ConfigError(
                    f"{self._out} holds a run with other settings; accepted: the same command, or another "
                    "folder",
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
        if any(self._schemes.values()):
            config["quantization_config"] = describe(self._schemes)
        (self._out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        size = sum((self._out / file).stat().st_size for file in set(self._index.values()))
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(self._index.items()))}
        (self._out / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        shutil.rmtree(self._out / MEASURING, ignore_errors=True)
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


def _nbytes(fill: Fill) -> int:
    """Bytes of a tensor in its file."""
    return fill.entry.stop - fill.entry.start
