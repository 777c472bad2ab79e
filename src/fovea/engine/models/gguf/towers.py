"""Vision towers in GGUF files ("mmproj"): configurations, image processors and names of tensors.

A tower is known by clip.projector_type. Each kind is an entry of PROJECTORS: a function that turns the
metadata into the configuration of transformers and the settings of the image processor, and the names that
its tensors have in transformers. Facts about the files are those of llama.cpp's converters and of its loader.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fovea.core.errors import CheckpointError, UnsupportedModel
from fovea.engine.models.gguf.metadata import Metadata
from fovea.engine.models.gguf.reader import GgufFile, StoredTensor
from fovea.engine.models.gguf.text import halves
from fovea.engine.models.gguf.weights import Source
from fovea.engine.vision.processor.pixels import CLIP_MEAN, CLIP_STD

QWEN_PIXELS = (56 * 56, 28 * 28 * 16384)
"""Least and most pixels of a picture for Qwen2-VL and Qwen2.5-VL, as published."""
QWEN3_PIXELS, QWEN3_VIDEO = (1 << 16, 1 << 24), (1 << 12, 25165824)
"""Least and most pixels of a picture, and of all pictures of a video, for Qwen3-VL, as published."""
QWEN_WINDOW = 112
"""Side of a window of attention in Qwen2.5-VL, in pixels, unless the metadata says another."""
GEMMA3_POOL = 4
"""Patches per side that Gemma 3 averages to one visual token, unless the metadata says otherwise."""
IDEFICS_TILES = 4
"""Tiles along the longest edge of a picture for Idefics3 and SmolVLM, unless the metadata says otherwise."""
BICUBIC, BILINEAR, LANCZOS = 3, 2, 1
"""Numbers of filters in the settings of image processors."""
_PUBLISHED = {np.float32(number): number for number in (*CLIP_MEAN, *CLIP_STD)}
"""The pixel statistics of CLIP, which have more digits than a float of 32 bits, by such floats."""
IGNORED = ("v.token_embd.img_break", "v.image_newline", "v.view_seperator")
"""Embeddings that are in the text model, too, or that the supported models do not use."""


@dataclass(frozen=True, slots=True)
class VisionModel:
    """A vision-language model without its text model.

    model_type: of the whole model in transformers.
    text_type: model_type of its text model.
    config: fields of the configuration beside the text model's.
    images: settings of the image processor, as in preprocessor_config.json.
    videos: settings of the video processor; empty: those of images.
    joint: as in processor_config.json.
    """

    model_type: str
    text_type: str
    config: dict[str, Any]
    images: dict[str, Any]
    videos: dict[str, Any] = field(default_factory=dict)
    joint: dict[str, Any] = field(default_factory=dict)


class Tower:
    """The file of a vision tower. Raises CheckpointError or UnsupportedModel if it cannot be used.

    file: its header.
    text: the configuration of the text model.
    tokens: ids of the text model's tokens.
    """

    def __init__(self, file: GgufFile, text: Mapping[str, Any], tokens: Mapping[str, int]) -> None:
        whole = Metadata(file)
        if whole.text("general.architecture") != "clip":
            raise CheckpointError(
                f"{file.path} is no vision tower: general.architecture is "
                f"{whole.text('general.architecture')[:50]!r}; accepted for --mmproj: clip"
            )
        if not whole.boolean("clip.has_vision_encoder", False):
            whole.refuse("clip.has_vision_encoder", "true")
        name = "clip.projector_type" if "clip.projector_type" in whole else "clip.vision.projector_type"
        kind = whole.text(name, "mlp")
        if kind not in PROJECTORS:
            raise UnsupportedModel(
                f"{file.path}: {name} {kind[:50]!r} is not supported; supported: {', '.join(PROJECTORS)}"
            )
        self.file, self.text, self.tokens = file, text, tokens
        self.entries = Metadata(file, "clip.vision.")
        self.whole = whole
        self._projector = PROJECTORS[kind]
        self.kind = kind
        if text["model_type"] not in self._projector.texts:
            raise CheckpointError(
                f"{file.path} is the vision tower ({kind}) of another model: the language model is "
                f"{text['model_type']}; accepted: {', '.join(self._projector.texts)}"
            )
        width = self.entries.integer("projection_dim", text["hidden_size"])
        if width != text["hidden_size"]:
            raise CheckpointError(
                f"{file.path}: clip.vision.projection_dim is {width}; accepted: {text['hidden_size']}, the "
                "width of the language model"
            )
        self.model = self._projector.build(self)

    def config(self) -> dict[str, Any]:
        """Return the configuration of the whole model as config.json has it."""
        text = {**self.text, "model_type": self.model.text_type}
        shared = {"tie_word_embeddings": self.text["tie_word_embeddings"], "text_config": text}
        return {"model_type": self.model.model_type, **shared, **self.model.config}

    def sources(self, file: int) -> Iterator[Source]:
        """Yield the tensors of the tower and the projector. file: the number of the tower's file."""
        names = self._projector
        parts: dict[str, list[StoredTensor]] = {}
        for tensor in self.file.tensors:
            name = self._name(tensor.name)
            if name is not None:
                parts.setdefault(name, []).append(tensor)
        for name, found in parts.items():
            # Of q, k and v, and of two frames, the order is that of their names.
            tensors = tuple(sorted(found, key=lambda tensor: _ORDER.index(_part(tensor.name))))
            frames = name.endswith(names.frames) if names.frames else False
            order = None
            if names.paired and _PAIRED.search(tensors[0].name):
                heads = self.entries.integer("attention.head_count")
                rows = tensors[0].shape[0]
                if heads < 1 or rows % heads or rows // heads % 2:
                    self.entries.refuse("attention.head_count", f"a number whose double divides {rows}")
                order = halves(rows, rows // heads)
            shift = -1.0 if tensors[0].name in names.centered else 0.0
            yield Source(name, tensors, file, order=order, shift=shift, frames=frames)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises CheckpointError if there is none."""
        found = self.file.by_name.get(name)
        if found is None:
            raise CheckpointError(f"{self.file.path}: tensor {name!r} is missing")
        return found.shape

    def has(self, name: str) -> bool:
        return name in self.file.by_name

    def token(self, *names: str) -> int:
        """Return the id of the first of these tokens that exists. Raises CheckpointError."""
        for name in names:
            if name in self.tokens:
                return self.tokens[name]
        raise CheckpointError(
            f"{self.file.path}: the language model's vocabulary has none of the tokens {', '.join(names)}, "
            "which the images of this kind of model need"
        )

    def norm(self) -> dict[str, Any]:
        """Return mean and standard deviation of the pixels, as settings of an image processor."""
        return {
            name: [_PUBLISHED.get(np.float32(number), number) for number in self.entries.numbers(name, 3)]
            for name in ("image_mean", "image_std")
        }

    def activation(self) -> str:
        """Return the activation of the tower's blocks, by its name in transformers."""
        if self.whole.boolean("clip.use_gelu", False):
            return "gelu"
        return "silu" if self.whole.boolean("clip.use_silu", False) else "quick_gelu"

    def eps(self) -> float:
        return self.entries.number("attention.layer_norm_epsilon")

    def block_shape(self) -> dict[str, int]:
        """Return width, blocks and heads under the names that most towers have in transformers."""
        return {
            "hidden_size": self.entries.integer("embedding_length"),
            "intermediate_size": self.entries.integer("feed_forward_length"),
            "num_hidden_layers": self.entries.integer("block_count"),
            "num_attention_heads": self.entries.integer("attention.head_count"),
        }

    def picture_shape(self) -> dict[str, int]:
        """Return the sides of the tower's input and of a patch, in pixels."""
        return {
            "image_size": self.entries.integer("image_size"),
            "patch_size": self.entries.integer("patch_size"),
        }

    def pooled_tokens(self, sides: Mapping[str, int], factor: int) -> int:
        """Return the visual tokens of a square picture of which factor x factor patches make one.

        sides: what `picture_shape` returns.
        """
        patches = self.ratio(sides["image_size"], sides["patch_size"], "clip.vision.image_size")
        return self.ratio(patches, factor, "the number of patches per side") ** 2

    def ratio(self, whole: int, part: int, what: str) -> int:
        """Return how many parts a whole has. Raises CheckpointError unless it has some, without a rest."""
        if part < 1 or whole < part or whole % part:
            raise CheckpointError(f"{self.file.path}: {what} is {whole}; accepted: a multiple of {part}")
        return whole // part

    def _name(self, name: str) -> str | None:
        """Return the name in transformers; None: the tensor is not needed."""
        projector = self._projector
        if name in IGNORED:
            return None
        if name in projector.names:
            return projector.names[name]
        match = _BLOCK.match(name)
        if match is not None:
            number, part, kind = match.groups(default="")
            part = self._straight(part)
            ours = projector.blocks.get(part + kind) or projector.blocks.get(part, "") + kind
            return name if ours == kind else f"{projector.block}.{int(number)}.{ours}"
        match = _DEEPSTACK.match(name)
        if match is not None and projector.deepstack:
            number, part, kind = match.groups()
            layers = self.model.config["vision_config"]["deepstack_visual_indexes"]
            if int(number) in layers:
                part = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}[part]
                return f"{projector.deepstack}.{layers.index(int(number))}.{part}.{kind}"
        stem, _, kind = name.rpartition(".")
        return f"{projector.names[stem]}.{kind}" if stem in projector.names else name

    def _straight(self, part: str) -> str:
        """Return the name of a map of a feed-forward block. Older converters swapped the two of a block."""
        if part not in ("ffn_up", "ffn_down") or not self.has("v.blk.0.ffn_up.weight"):
            return part
        width = self.entries.integer("embedding_length")
        up = self.shape("v.blk.0.ffn_up.weight")
        if len(up) != 2 or up[1] == width or up[0] != width:
            return part
        return "ffn_down" if part == "ffn_up" else "ffn_up"


@dataclass(frozen=True, slots=True)
class Projector:
    """A kind of towers.

    build: see `VisionModel`.
    texts: model types of the text models that it belongs to, see `text.text_config`.
    block: name of the list of blocks in transformers.
    blocks: names of the parts of a block.
    names: names of the other tensors, whole or without ".weight" and ".bias".
    frames: end of the name of the patch embedding, if it is stored as one tensor for each of two frames.
    deepstack: name of the list of DeepStack mergers.
    paired: rows of queries and keys are stored so that the numbers which rotate together are neighbours.
    centered: tensors to which 1 was added.
    """

    build: Callable[[Tower], VisionModel]
    texts: tuple[str, ...]
    block: str
    blocks: Mapping[str, str]
    names: Mapping[str, str]
    frames: str = ""
    deepstack: str = ""
    paired: bool = False
    centered: tuple[str, ...] = ()


_BLOCK = re.compile(r"^v\.blk\.(\d{1,4})\.(\w+)(\.weight|\.bias)?$", re.ASCII)
_DEEPSTACK = re.compile(r"^v\.deepstack\.(\d{1,4})\.(norm|fc1|fc2)\.(weight|bias)$", re.ASCII)
_PAIRED = re.compile(r"\.attn_[qk]\.", re.ASCII)
_ORDER = ("attn_q", "attn_k", "attn_v", "weight", "1", "")
"""Parts of a joined tensor by the words that tell them apart, in their order."""


def _part(name: str) -> str:
    words = name.split(".")
    return next((word for word in words if word in _ORDER[:3]), words[-1] if words[-1] in _ORDER else "")


def _qwen_ids(tower: Tower) -> dict[str, Any]:
    names = ("image_pad", "video_pad", "vision_start", "vision_end")
    fields = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return {key: tower.token(f"<|{name}|>") for key, name in zip(fields, names, strict=True)}


def _qwen_images(tower: Tower, limits: tuple[int, int], merge: int) -> dict[str, Any]:
    least = tower.entries.integer("image_min_pixels", limits[0])
    most = tower.entries.integer("image_max_pixels", limits[1])
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": least,
        "max_pixels": most,
        "patch_size": tower.entries.integer("patch_size"),
        "merge_size": merge,
        "temporal_patch_size": 2,
        **tower.norm(),
    }


def _qwen2_vl(tower: Tower) -> VisionModel:
    width, ffn = tower.entries.integer("embedding_length"), max(tower.shape("v.blk.0.ffn_up.weight")[:2])
    vision = {
        "depth": tower.entries.integer("block_count"),
        "embed_dim": width,
        "hidden_size": tower.text["hidden_size"],
        # The metadata has another number here, the width of the language model.
        "mlp_ratio": tower.ratio(ffn, width, "the width of v.blk.0.ffn_up.weight"),
        "num_heads": tower.entries.integer("attention.head_count"),
        "patch_size": tower.entries.integer("patch_size"),
        "hidden_act": tower.activation(),
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
    }
    config = {"vision_config": vision, **_qwen_ids(tower)}
    return VisionModel("qwen2_vl", "qwen2_vl_text", config, _qwen_images(tower, QWEN_PIXELS, 2))


def _qwen2_5_vl(tower: Tower) -> VisionModel:
    depth, period = tower.entries.integer("block_count"), tower.entries.integer("n_wa_pattern")
    if period < 1:
        tower.entries.refuse("n_wa_pattern", "1 or more")
    vision = {
        "depth": depth,
        "hidden_size": tower.entries.integer("embedding_length"),
        "intermediate_size": tower.entries.integer("feed_forward_length"),
        "num_heads": tower.entries.integer("attention.head_count"),
        "patch_size": tower.entries.integer("patch_size"),
        "out_hidden_size": tower.text["hidden_size"],
        "hidden_act": tower.activation(),
        "window_size": tower.entries.integer("window_size", QWEN_WINDOW),
        "fullatt_block_indexes": list(range(period - 1, min(depth, 1 << 12), period)),
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "in_channels": 3,
    }
    config = {"vision_config": vision, **_qwen_ids(tower)}
    return VisionModel("qwen2_5_vl", "qwen2_5_vl_text", config, _qwen_images(tower, QWEN_PIXELS, 2))


def _qwen3_vl(tower: Tower) -> VisionModel:
    depth, merge = tower.entries.integer("block_count"), tower.entries.integer("spatial_merge_size", 2)
    flags = tower.entries.numbers("is_deepstack_layers", depth, default=())
    experts = tower.text["model_type"] == "qwen3_vl_moe_text"
    kind = "qwen3_vl_moe" if experts else "qwen3_vl"
    vision = {
        "depth": depth,
        "hidden_size": tower.entries.integer("embedding_length"),
        "intermediate_size": tower.entries.integer("feed_forward_length"),
        "num_heads": tower.entries.integer("attention.head_count"),
        "patch_size": tower.entries.integer("patch_size"),
        "out_hidden_size": tower.text["hidden_size"],
        # The metadata says "gelu" for both of its forms. All published towers have this one.
        "hidden_act": "gelu_pytorch_tanh",
        "num_position_embeddings": tower.shape("v.position_embd.weight")[0],
        "deepstack_visual_indexes": [number for number, flag in enumerate(flags) if flag],
        "spatial_merge_size": merge,
        "temporal_patch_size": 2,
        "in_channels": 3,
    }
    images = _qwen_images(tower, QWEN3_PIXELS, merge)
    videos = {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": QWEN3_VIDEO[0], "longest_edge": QWEN3_VIDEO[1]},
        **{name: images[name] for name in ("patch_size", "merge_size", "temporal_patch_size")},
        **tower.norm(),
    }
    config = {"vision_config": vision, **_qwen_ids(tower)}
    return VisionModel(kind, f"{kind}_text", config, images, videos)


def _gemma3(tower: Tower) -> VisionModel:
    sides = tower.picture_shape()
    pool = tower.entries.integer("projector.scale_factor", GEMMA3_POOL)
    tokens = tower.pooled_tokens(sides, pool)
    vision = {
        "model_type": "siglip_vision_model",
        **tower.block_shape(),
        **sides,
        "layer_norm_eps": tower.eps(),
        "hidden_act": "gelu_pytorch_tanh",
        "vision_use_head": False,
    }
    # The token that stands for a visual one is not in all vocabularies: those tokens have no embeddings.
    unused = [name for name in tower.tokens if name.startswith("<unused")]
    config = {
        "vision_config": vision,
        "mm_tokens_per_image": tokens,
        "boi_token_index": tower.token("<start_of_image>"),
        "eoi_token_index": tower.token("<end_of_image>"),
        "image_token_index": tower.token("<image_soft_token>", *unused[-1:]),
    }
    images = {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": sides["image_size"], "width": sides["image_size"]},
        "resample": BILINEAR,
        **tower.norm(),
    }
    return VisionModel("gemma3", "gemma3_text", config, images, joint={"image_seq_length": tokens})


def _internvl(tower: Tower) -> VisionModel:
    sides = tower.picture_shape()
    factor = tower.entries.integer("projector.scale_factor")
    tokens = tower.pooled_tokens(sides, factor)
    vision = {
        "model_type": "internvl_vision",
        **tower.block_shape(),
        **{name: [value, value] for name, value in sides.items()},
        "layer_norm_eps": tower.eps(),
        "hidden_act": tower.activation(),
        "norm_type": "layer_norm" if tower.has("v.blk.0.ln1.bias") else "rms_norm",
        "use_qk_norm": tower.has("v.blk.0.attn_q_norm.weight"),
        "attention_bias": tower.has("v.blk.0.attn_q.bias") or tower.has("v.blk.0.attn_qkv.bias"),
        "use_absolute_position_embeddings": True,
        "use_mask_token": False,
        "use_mean_pooling": True,
    }
    config = {
        "vision_config": vision,
        "downsample_ratio": 1 / factor,
        "image_seq_length": tokens,
        "image_token_id": tower.token("<IMG_CONTEXT>"),
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    }
    images = {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": sides["image_size"], "width": sides["image_size"]},
        "resample": BICUBIC,
        "min_patches": tower.entries.integer("preproc_min_tiles", 1),
        "max_patches": tower.entries.integer("preproc_max_tiles", 12),
        **tower.norm(),
    }
    kind = str(tower.text["model_type"])
    return VisionModel("internvl", kind, config, images, joint={"image_seq_length": tokens})


def _idefics3(tower: Tower) -> VisionModel:
    sides = tower.picture_shape()
    factor = tower.entries.integer("projector.scale_factor")
    tokens = tower.pooled_tokens(sides, factor)
    vision = {
        "model_type": "idefics3_vision",
        **tower.block_shape(),
        **sides,
        "layer_norm_eps": tower.eps(),
        "hidden_act": "gelu_pytorch_tanh",
    }
    config = {
        "vision_config": vision,
        "scale_factor": factor,
        "image_token_id": tower.token("<image>"),
    }
    longest = tower.entries.integer("preproc_image_size", IDEFICS_TILES * sides["image_size"])
    images = {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": longest},
        "max_image_size": {"longest_edge": sides["image_size"]},
        "do_image_splitting": True,
        "resample": LANCZOS,
        **tower.norm(),
    }
    return VisionModel("idefics3", "llama", config, images, joint={"image_seq_len": tokens})


def _llava(tower: Tower) -> VisionModel:
    if "image_grid_pinpoints" in tower.entries:
        tower.entries.refuse("image_grid_pinpoints", "none: LLaVA-1.5, not LLaVA-1.6")
    sides = tower.picture_shape()
    vision = {
        "model_type": "clip_vision_model",
        **tower.block_shape(),
        **sides,
        "layer_norm_eps": tower.eps(),
        "hidden_act": tower.activation(),
    }
    config = {
        "vision_config": vision,
        # The converter leaves out the blocks that the model does not use.
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "image_token_index": tower.token("<image>"),
    }
    side = sides["image_size"]
    images = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": side},
        "crop_size": {"height": side, "width": side},
        "resample": BICUBIC,
        **tower.norm(),
    }
    joint = {
        "patch_size": sides["patch_size"],
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    return VisionModel("llava", str(tower.text["model_type"]), config, images, joint=joint)


def _pixtral(tower: Tower) -> VisionModel:
    sides, shape = tower.picture_shape(), tower.block_shape()
    merge = tower.entries.integer("spatial_merge_size", 1)
    vision = {
        "model_type": "pixtral",
        **shape,
        **sides,
        "head_dim": tower.ratio(
            shape["hidden_size"], shape["num_attention_heads"], "clip.vision.embedding_length"
        ),
        "hidden_act": tower.activation(),
        "rope_theta": tower.entries.number("rope.freq_base", 10_000.0),
    }
    merges = tower.has("mm.patch_merger.weight")
    config = {
        "vision_config": vision,
        "vision_feature_layer": -1,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": tower.has("mm.1.bias"),
        "image_token_index": tower.token("[IMG]"),
    }
    config |= {"spatial_merge_size": merge} if merges else {"vision_feature_select_strategy": "full"}
    images = {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": sides["image_size"]},
        "patch_size": {"height": sides["patch_size"], "width": sides["patch_size"]},
        "resample": BICUBIC,
        **tower.norm(),
    }
    joint = {"patch_size": sides["patch_size"], "spatial_merge_size": merge}
    text = str(tower.text["model_type"])
    text = "mistral" if text == "llama" else text
    return VisionModel("mistral3" if merges else "llava", text, config, images, joint=joint)


_QWEN_BLOCKS = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_qkv": "attn.qkv",
    "attn_q": "attn.qkv",
    "attn_k": "attn.qkv",
    "attn_v": "attn.qkv",
    "attn_out": "attn.proj",
}
_QWEN_NAMES = {
    "v.patch_embd.weight": "visual.patch_embed.proj.weight",
    "v.patch_embd.weight.1": "visual.patch_embed.proj.weight",
    "v.patch_embd.bias": "visual.patch_embed.proj.bias",
}
_QWEN2_NAMES = {
    **_QWEN_NAMES,
    "v.post_ln": "visual.merger.ln_q",
    "mm.0": "visual.merger.mlp.0",
    "mm.2": "visual.merger.mlp.2",
}
_SIGLIP_BLOCKS = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_SIGLIP_NAMES = {
    "v.patch_embd": "vision_tower.embeddings.patch_embedding",
    "v.position_embd": "vision_tower.embeddings.position_embedding",
    "v.post_ln": "vision_tower.post_layernorm",
}
_QWEN_FRAMES = "patch_embed.proj.weight"
PROJECTORS: Mapping[str, Projector] = {
    "qwen2vl_merger": Projector(
        _qwen2_vl,
        ("qwen2_vl_text",),
        "visual.blocks",
        {**_QWEN_BLOCKS, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        _QWEN2_NAMES,
        frames=_QWEN_FRAMES,
    ),
    "qwen2.5vl_merger": Projector(
        _qwen2_5_vl,
        ("qwen2_vl_text",),
        "visual.blocks",
        {
            **_QWEN_BLOCKS,
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        },
        _QWEN2_NAMES,
        frames=_QWEN_FRAMES,
    ),
    "qwen3vl_merger": Projector(
        _qwen3_vl,
        ("qwen3_vl_text", "qwen3_vl_moe_text"),
        "visual.blocks",
        {**_QWEN_BLOCKS, "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
        {
            **_QWEN_NAMES,
            "v.position_embd": "visual.pos_embed",
            "v.post_ln": "visual.merger.norm",
            "mm.0": "visual.merger.linear_fc1",
            "mm.2": "visual.merger.linear_fc2",
        },
        frames=_QWEN_FRAMES,
        deepstack="visual.deepstack_merger_list",
    ),
    "gemma3": Projector(
        _gemma3,
        ("gemma3_text",),
        "vision_tower.encoder.layers",
        _SIGLIP_BLOCKS,
        {
            **_SIGLIP_NAMES,
            "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
            "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
        },
        centered=("mm.soft_emb_norm.weight",),
    ),
    "internvl": Projector(
        _internvl,
        ("qwen2", "qwen3", "llama"),
        "vision_tower.encoder.layer",
        {
            "ln1": "layernorm_before",
            "ln2": "layernorm_after",
            "attn_q": "attention.q_proj",
            "attn_k": "attention.k_proj",
            "attn_v": "attention.v_proj",
            "attn_out": "attention.projection_layer",
            "attn_q_norm": "attention.q_norm",
            "attn_k_norm": "attention.k_norm",
            "ls1.weight": "lambda_1",
            "ls2.weight": "lambda_2",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        {
            "v.class_embd": "vision_tower.embeddings.cls_token",
            "v.patch_embd": "vision_tower.embeddings.patch_embeddings.projection",
            "v.position_embd.weight": "vision_tower.embeddings.position_embeddings",
            "mm.model.mlp.0": "multi_modal_projector.layer_norm",
            "mm.model.mlp.1": "multi_modal_projector.linear_1",
            "mm.model.mlp.3": "multi_modal_projector.linear_2",
        },
    ),
    "idefics3": Projector(
        _idefics3,
        ("llama",),
        "vision_tower.encoder.layers",
        _SIGLIP_BLOCKS,
        {**_SIGLIP_NAMES, "mm.model.fc": "model.connector.modality_projection.proj"},
    ),
    "mlp": Projector(
        _llava,
        ("llama", "qwen2"),
        "vision_tower.encoder.layers",
        _SIGLIP_BLOCKS,
        {
            **_SIGLIP_NAMES,
            "v.class_embd": "vision_tower.embeddings.class_embedding",
            "v.pre_ln": "vision_tower.pre_layrnorm",
            # Converters number the two maps by their place among the activations, or one after the other.
            "mm.0": "multi_modal_projector.linear_1",
            "mm.1": "multi_modal_projector.linear_1",
            "mm.2": "multi_modal_projector.linear_2",
        },
    ),
    "pixtral": Projector(
        _pixtral,
        ("llama", "mistral", "ministral3"),
        "vision_tower.transformer.layers",
        {
            "ln1": "attention_norm",
            "ln2": "ffn_norm",
            "attn_q": "attention.q_proj",
            "attn_k": "attention.k_proj",
            "attn_v": "attention.v_proj",
            "attn_out": "attention.o_proj",
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
        },
        {
            "v.patch_embd": "vision_tower.patch_conv",
            "v.pre_ln": "vision_tower.ln_pre",
            "mm.input_norm": "multi_modal_projector.norm",
            "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
            "mm.1": "multi_modal_projector.linear_1",
            "mm.2": "multi_modal_projector.linear_2",
        },
        paired=True,
    ),
}
"""The kinds of towers by clip.projector_type."""
