"""The shape of a vision-language model: the numbers from which its memory and its work follow.

`engine.profile.shape` reads a shape from a model that has no weights yet. The shapes of published models come
with the package: `tools/known_shapes.py` writes known.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from dataclasses import field as dataclass_field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fovea.core.names import canonical, spellings

PARTS = ("decoder", "experts", "head", "encoder", "patches", "merged", "projector", "cross")
"""The parts of a model that have linear maps.

decoder: the layers of the text model, without the experts that only some tokens use. head: the language
head. encoder: the blocks of the vision tower. patches: the embedding of patches. merged: blocks of the tower
after a merge of rows inside it. projector: from the tower's rows to the decoder's width. cross: keys and
values of image states in the decoder's layers, computed once with the image.
"""


@dataclass(frozen=True, slots=True)
class Maps:
    """Equal linear maps of one part.

    outputs, inputs: sides of the weight, (outputs, inputs).
    count: how many maps are equal.
    bias: whether they have biases.
    gated: the first half of the outputs are gates of the second half, and C++ applies them in the product.
    plain: no recipe quantizes them, because they are convolutions over patches.
    """

    outputs: int
    inputs: int
    count: int = 1
    bias: bool = False
    gated: bool = False
    plain: bool = False

    @property
    def weights(self) -> int:
        """Numbers of all these weights, without biases."""
        return self.outputs * self.inputs * self.count


@dataclass(frozen=True, slots=True)
class AttentionLayers:
    """Layers of the decoder with equal attention.

    count: number of layers that compute this attention.
    stored: how many of them store keys and values of their own (the others read those of earlier layers).
    heads, kv_heads, head_dim: query heads, KV heads, numbers per head.
    window: tokens that a token sees at most; None: all before it.
    """

    count: int
    stored: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None

    def kv_bytes_per_token(self, itemsize: float) -> float:
        """Bytes of keys and values that one token stores. itemsize: bytes of a number, scales included."""
        return 2 * self.stored * self.kv_heads * self.head_dim * itemsize

    def seen(self, context: float) -> float:
        """Tokens that the last token of a context attends to."""
        return context if self.window is None else min(context, self.window)


@dataclass(frozen=True, slots=True)
class CrossLayers:
    """Layers that read image states, which lie outside of the prompt (Llama 3.2 Vision).

    count, heads, kv_heads, head_dim: as in `AttentionLayers`.
    rows_per_tile: image states of one tile of an image.
    """

    count: int
    heads: int
    kv_heads: int
    head_dim: int
    rows_per_tile: int


@dataclass(frozen=True, slots=True)
class Tower:
    """The vision tower, reduced to what decides the work of one image (`planner.vision.encoder_work`).

    An image is one picture or several, such as tiles. Rows attend only to rows of the same picture.

    hidden: width of the rows.
    patches_per_token: patches for each visual token.
    tiling: how an image becomes pictures.
        "": it is one picture of any size.
        "whole": tiles of `tile_tokens` and `tile_patches`. A view of the whole image comes first if
            `view_tokens` is not 0.
        "rest": pictures of `tile_tokens`, and one of the tokens that remain.
        "equal": pictures of equal size, of about `tile_tokens` each.
    tile_tokens, tile_patches: visual tokens and patches of a tile.
    view_tokens, view_patches: visual tokens and patches of the view of the whole image; 0: there is none.
    extra_rows: rows of each picture beside its patches, such as a class token.
    projected_extra_rows: how many of these the projector gets.
    padded_rows: rows that every image has, padding included; 0: there is no padding. Rows of padding attend
        to rows that are not.
    full_layers: blocks in which all rows of a picture attend to each other.
    window_layers: blocks in which rows attend to each other only within a window.
    window_rows: rows of such a window, which is a square.
    padded_windows: windows at the edges of a picture are filled with padding.
    merged_layers: blocks after a merge of rows inside the tower.
    merged_rows_per_patch: rows of these blocks for each patch.
    merged_pairs: pairs of rows that attend to each other in such a block, as a share of the squared number of
        its rows. A block of another width than `hidden` counts in proportion to its width.
    projector_rows_per_patch: rows of the projector for each patch.
    """

    hidden: int
    patches_per_token: float
    tiling: str = ""
    tile_tokens: int = 0
    tile_patches: int = 0
    view_tokens: int = 0
    view_patches: int = 0
    extra_rows: int = 0
    projected_extra_rows: int = 0
    padded_rows: int = 0
    full_layers: int = 0
    window_layers: int = 0
    window_rows: int = 0
    padded_windows: bool = False
    merged_layers: int = 0
    merged_rows_per_patch: float = 0.0
    merged_pairs: float = 1.0
    projector_rows_per_patch: float = 1.0


NO_TOWER = Tower(1, 1.0)
"""The tower of a model without one. Its numbers are not read, because no request has images."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of a model.

    name: hub id, or the name of a folder.
    family: `model_type` of its configuration.
    hidden: width of the decoder's rows.
    vocabulary: tokens that an answer may have.
    max_positions: longest sequence.
    layers: layers of the decoder.
    maps: the linear maps by part (see PARTS).
    rest: numbers that no linear map holds and that have the model's type, by part: norms, tables of
        positions, and, under "embedding", the tables from which a token reads one row: the vocabulary, and
        per-layer embeddings.
    exact: the same for numbers that stay float32.
    tied: the language head is the embedding table. Then the table is counted as the head, and not under
        "embedding".
    attention: attention layers of the decoder.
    active_experts, experts: experts that a token uses, and that there are; 0 for dense models.
    state: numbers of the states of one sequence that have the model's type, and those that stay float32.
    state_operations: operations of one token in all layers with a state, beside their linear maps.
    cross: layers that read image states; None: there are none.
    tower: the vision tower.
    visual_token_numbers: numbers of the encoder's output for one visual token, levels of DeepStack included;
        0: the model takes no images.
    whole_images: tokens of an image see each other.
    """

    name: str
    family: str
    hidden: int
    vocabulary: int
    max_positions: int
    layers: int
    maps: Mapping[str, tuple[Maps, ...]]
    rest: Mapping[str, int] = dataclass_field(default_factory=lambda: MappingProxyType({}))
    exact: Mapping[str, int] = dataclass_field(default_factory=lambda: MappingProxyType({}))
    tied: bool = False
    attention: tuple[AttentionLayers, ...] = ()
    experts: int = 0
    active_experts: int = 0
    state: tuple[int, int] = (0, 0)
    state_operations: int = 0
    cross: CrossLayers | None = None
    tower: Tower = NO_TOWER
    visual_token_numbers: int = 0
    whole_images: bool = False

    def weights(self, part: str) -> int:
        """Numbers of the weights of a part's linear maps."""
        return sum(maps.weights for maps in self.maps.get(part, ()))

    @property
    def takes_images(self) -> bool:
        """Whether requests can have images."""
        return self.visual_token_numbers > 0

    @property
    def parameters(self) -> int:
        """All numbers of the model, biases included. A tied table counts once."""
        maps = [(part, item) for part, items in self.maps.items() for item in items]
        biases = sum(item.outputs * item.count for _, item in maps if item.bias)
        return (
            sum(item.weights for _, item in maps)
            + biases
            + sum(self.rest.values())
            + sum(self.exact.values())
        )

    @property
    def active_weights(self) -> int:
        """Weights of the decoder's linear maps that one token is multiplied with, the head not counted."""
        share = self.active_experts / self.experts if self.experts else 0.0
        return self.weights("decoder") + round(self.weights("experts") * share)

    @property
    def attention_operations_per_pair(self) -> int:
        """Operations of one pair of a query and a key, in all layers without a window together."""
        return sum(4 * a.count * a.heads * a.head_dim for a in self.attention if a.window is None)

    def kv_bytes_per_token(self, itemsize: float) -> float:
        """Bytes of keys and values of one token, layers with windows included."""
        return sum(layers.kv_bytes_per_token(itemsize) for layers in self.attention)

    def kv_bytes(self, context: int, itemsize: float) -> float:
        """Bytes of keys and values of a sequence: layers with a window keep only that window."""
        return sum(layers.kv_bytes_per_token(itemsize) * layers.seen(context) for layers in self.attention)

    def state_bytes(self, itemsize: float) -> float:
        """Bytes of the states of one sequence."""
        return self.state[0] * itemsize + 4 * self.state[1]


FILE = Path(__file__).with_name("known.json")


def known_models() -> tuple[str, ...]:
    """Return the hub ids of all models whose shapes are known, sorted without regard to case."""
    return tuple(sorted(_entries(), key=str.lower))


def find(name: str) -> ModelShape | None:
    """Return the shape of the known model that a name means; None: no known model has this name.

    name: hub id, also under another owner and with endings such as "-AWQ", "-FP8", "-GGUF" or ":free" (see
        `core.model_names.canonical`). It is compared as a whole: no shape is guessed from a part of it.
    """
    model = _index().get(canonical(name))
    return None if model is None else _shape(model)


def to_json(shape: ModelShape) -> dict[str, Any]:
    """Return a shape as values of JSON. Fields with their default are left out."""
    return _without_defaults(
        shape,
        maps={part: [_positional(item) for item in items] for part, items in shape.maps.items()},
        rest=dict(shape.rest),
        exact=dict(shape.exact),
        attention=[_positional(item) for item in shape.attention],
        state=list(shape.state),
        cross=None if shape.cross is None else _positional(shape.cross),
        tower=_without_defaults(shape.tower),
    )


def from_json(values: Mapping[str, Any]) -> ModelShape:
    """Return the shape from values that `to_json` made."""
    shape = ModelShape(
        **{
            **values,
            "maps": MappingProxyType(
                {part: tuple(Maps(*item) for item in items) for part, items in values["maps"].items()}
            ),
            "rest": MappingProxyType(values.get("rest", {})),
            "exact": MappingProxyType(values.get("exact", {})),
            "attention": tuple(AttentionLayers(*item) for item in values.get("attention", ())),
            "tower": Tower(**values.get("tower", asdict(NO_TOWER))),
        }
    )
    state = values.get("state", (0, 0))
    cross = values.get("cross")
    return replace(shape, state=(state[0], state[1]), cross=None if cross is None else CrossLayers(*cross))


def _without_defaults(value: Any, **written: Any) -> dict[str, Any]:
    """Fields of a value by name, those with their default left out. written: other forms of some fields."""
    found: dict[str, Any] = {}
    for field in fields(value):
        content = getattr(value, field.name)
        if content not in (field.default, {}, ()):
            found[field.name] = written.get(field.name, content)
    return found


def _positional(value: Any) -> list[Any]:
    """Fields of a value in their order, without the last ones that have their default."""
    content = [getattr(value, field.name) for field in fields(value)]
    defaults = [field.default for field in fields(value)]
    while content and content[-1] == defaults[-1]:
        content.pop()
        defaults.pop()
    return content


@cache
def _entries() -> Mapping[str, Mapping[str, Any]]:
    """Values of known.json by hub id."""
    return {entry["name"]: entry for entry in json.loads(FILE.read_text(encoding="utf-8"))}


@cache
def _shape(model: str) -> ModelShape:
    return from_json(_entries()[model])


@cache
def _index() -> Mapping[str, str]:
    """Known models by canonical name. A test checks that no two models share one."""
    return {spelling: model for model in _entries() for spelling in spellings(model)}
