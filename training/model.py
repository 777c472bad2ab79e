"""A compact Qwen3-VL for training, on dense batches of equal sizes, with the parameter names of Hugging Face.

The two frames of a still image are equal, so the two temporal halves of the patch kernel are added up first.
Auxiliary heads predict the content under each visual token, and the content at its place in the previous
picture. They are left out of the export.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SHAPE_CLASSES, COLOUR_CLASSES, CHARACTER_CLASSES = 7, 9, 33
CENTRE_CLASSES, RANKS, PLACES = 49, 6, 9
PATCHES_PER_TOKEN, CHARACTER_SLOTS = 4, 8
BLOCK = 64
MIDDLE = 2
"""The text layer whose output predicts the content of the previous picture. Later layers can use that."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class VisionAttention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, count, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, count, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        if count > 600 or x.is_cuda:
            x = F.scaled_dot_product_attention(q, k, v)
        else:  # two to four times as fast as the fused kernel on a CPU
            x = (q * (hidden // self.heads) ** -0.5 @ k.mT).softmax(-1).to(v.dtype) @ v
        return self.proj(x.transpose(1, 2).reshape(batch, count, hidden))


class VisionMLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(hidden, inner)
        self.linear_fc2 = nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class VisionBlock(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.norm1 = nn.LayerNorm(hidden, eps=1e-6)
        self.norm2 = nn.LayerNorm(hidden, eps=1e-6)
        self.attn = VisionAttention(hidden, config["num_heads"])
        self.mlp = VisionMLP(hidden, config["intermediate_size"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Merger(nn.Module):
    """Four patches, consecutive in merge order, become one token."""

    def __init__(self, config: dict[str, Any], after: bool) -> None:
        super().__init__()
        self.after = after
        wide = config["hidden_size"] * 4
        self.norm = nn.LayerNorm(wide if after else config["hidden_size"], eps=1e-6)
        self.linear_fc1 = nn.Linear(wide, wide)
        self.linear_fc2 = nn.Linear(wide, config["out_hidden_size"])

    def forward(self, x: Tensor) -> Tensor:
        batch, count, hidden = x.shape
        merged = (batch, count // 4, 4 * hidden)
        x = self.norm(x.reshape(merged)) if self.after else self.norm(x).reshape(merged)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class PatchEmbed(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        side = config["patch_size"]
        self.proj = nn.Conv3d(3, config["hidden_size"], (2, side, side))

    def forward(self, patches: Tensor) -> Tensor:
        """Embed patches (N, patches, frames, values): one frame of a still image, or the two of a group."""
        weight = self.proj.weight.sum(2, keepdim=True) if patches.shape[2] == 1 else self.proj.weight
        return F.linear(patches.flatten(2), weight.transpose(1, 2).flatten(1), self.proj.bias)


def merge_order(grid: Tensor, rows: int, columns: int) -> Tensor:
    """Reorder patches (rows, columns, ...) to (rows * columns, ...) with consecutive 2x2 blocks."""
    rest = grid.shape[2:]
    grid = grid.reshape(rows // 2, 2, columns // 2, 2, *rest).transpose(1, 2)
    return grid.reshape(rows * columns, *rest)


def patches(images: Tensor) -> Tensor:
    """Cut images into patches (N, patches, frames, 768) in [-1, 1], in merge order.

    images: (N, H, W, 3), or (N, 2, H, W, 3) for the groups of a video, uint8.
    """
    images = images.unsqueeze(1) if images.ndim == 4 else images
    count, frames, height, width, _ = images.shape
    x = images.view(count, frames, height // 32, 2, 16, width // 32, 2, 16, 3)
    x = x.permute(0, 2, 5, 3, 6, 1, 8, 4, 7).reshape(count, height * width // 256, frames, 768)
    return x.float() * (2 / 255) - 1


class Vision(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.pos_embed = nn.Embedding(config["num_position_embeddings"], config["hidden_size"])
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config["depth"]))
        self.merger = Merger(config, after=False)
        self.taps = list(config["deepstack_visual_indexes"])
        self.deepstack_merger_list = nn.ModuleList(Merger(config, after=True) for _ in self.taps)

    def positions(self, rows: int, columns: int, at: Tensor | None = None) -> Tensor:
        """Learned position embeddings of patches, in merge order.

        at: positions of the patches in a larger picture, (N, patches, 2) in [0, 1], down and across; None:
            the patches are a whole picture.
        """
        side = math.isqrt(self.pos_embed.num_embeddings)
        table = self.pos_embed.weight.float().T.reshape(1, -1, side, side)
        if at is not None:
            spots = (2 * at.flip(-1) - 1).view(1, -1, 1, 2)
            embeddings = F.grid_sample(table, spots, mode="bilinear", align_corners=True)
            return embeddings[0, :, :, 0].T.reshape(*at.shape[:2], -1)
        table = F.interpolate(table, (rows, columns), mode="bilinear", align_corners=True)
        return merge_order(table[0].permute(1, 2, 0), rows, columns)

    def rope(self, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
        spatial = self.config["hidden_size"] // self.config["num_heads"] // 2
        inverse = 1.0 / 10000.0 ** (torch.arange(0, spatial, 2, device=device).float() / spatial)
        y, x = torch.meshgrid(
            torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij"
        )
        at = merge_order(torch.stack((y, x), dim=-1), rows, columns).float()
        angles = (at[:, :, None] * inverse).flatten(1)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    def forward(self, images: Tensor, at: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """Encode images to tokens (N, tokens, out), and to DeepStack features of that shape.

        images: see `patches`. at: see `positions`.
        """
        rows, columns = images.shape[-3] // 16, images.shape[-2] // 16
        x = self.patch_embed(patches(images)).float() + self.positions(rows, columns, at)
        cos, sin = self.rope(rows, columns, images.device)
        features = []
        for index, block in enumerate(self.blocks):
            x = block(x, cos, sin)
            if index in self.taps:
                features.append(self.deepstack_merger_list[self.taps.index(index)](x))
        return self.merger(x), features


class TextAttention(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, size = config["hidden_size"], config["head_dim"]
        self.heads, self.kv_heads, self.size = (
            config["num_attention_heads"],
            config["num_key_value_heads"],
            size,
        )
        self.q_proj = nn.Linear(hidden, self.heads * size, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * size, bias=False)
        self.o_proj = nn.Linear(self.heads * size, hidden, bias=False)
        self.q_norm = nn.RMSNorm(size, eps=config["rms_norm_eps"])
        self.k_norm = nn.RMSNorm(size, eps=config["rms_norm_eps"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, prefix: int) -> Tensor:
        batch, count, _ = x.shape
        v = self.v_proj(x).view(batch, count, self.kv_heads, self.size).transpose(1, 2)
        q = self.q_norm(self.q_proj(x).view(batch, count, self.heads, self.size)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, count, self.kv_heads, self.size)).transpose(1, 2)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        repeat = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        x = attend(q, k, v, mask, prefix)
        return self.o_proj(x.transpose(1, 2).reshape(batch, count, -1))


@torch.compiler.disable
def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, prefix: int) -> Tensor:
    """Masked attention, for packed sequences with or without a common prefix.

    With a prefix, the prefix is causal, and blocks of BLOCK tokens follow. Each block attends to the prefix
    and, as `mask` allows, to itself.

    q, k, v: (B, H, prefix + n * BLOCK, D).
    mask: (B, 1, n, BLOCK, BLOCK), added to the scores; without a prefix (B, 1, L, L).
    prefix: length of the prefix in tokens; 0: none.
    """
    if not prefix:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    batch, heads, count, size = q.shape
    q = q * size**-0.5
    k_prefix, v_prefix = k[:, :, :prefix], v[:, :, :prefix]
    causal = torch.ones(prefix, prefix, dtype=torch.bool, device=q.device).tril()
    scores = (q[:, :, :prefix] @ k_prefix.mT).masked_fill(~causal, float("-inf"))
    first = scores.softmax(-1) @ v_prefix
    blocks = (batch, heads, (count - prefix) // BLOCK, BLOCK, size)
    q, k, v = (t[:, :, prefix:].reshape(blocks) for t in (q, k, v))
    to_prefix = (q.flatten(2, 3) @ k_prefix.mT).unflatten(2, blocks[2:4])
    weights = torch.cat((to_prefix, q @ k.mT + mask), dim=-1).softmax(-1)
    second = (weights[..., :prefix].flatten(2, 3) @ v_prefix) + (weights[..., prefix:] @ v).flatten(2, 3)
    return torch.cat((first, second), dim=2)


class TextMLP(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TextLayer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.self_attn = TextAttention(config)
        self.mlp = TextMLP(config)
        self.input_layernorm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])
        self.post_attention_layernorm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, prefix: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, prefix)
        return x + self.mlp(self.post_attention_layernorm(x))


class Text(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(TextLayer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of interleaved M-RoPE, each (B, 1, L, head_dim). positions: (3, B, L)."""
        parameters, size = self.config["rope_parameters"], self.config["head_dim"]
        steps = torch.arange(0, size, 2, device=positions.device).float() / size
        freqs = positions[..., None].float() * (1.0 / parameters["rope_theta"] ** steps)
        mixed = freqs[0].clone()
        for axis in (1, 2):
            where = slice(axis, parameters["mrope_section"][axis] * 3, 3)
            mixed[..., where] = freqs[axis][..., where]
        angles = torch.cat((mixed, mixed), dim=-1)[:, None]
        return angles.cos(), angles.sin()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor,
        prefix: int,
        slots: Tensor,
        visual: Tensor,
        features: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """The last hidden states (B, L, hidden), and those of the visual tokens after layer MIDDLE.

        The latter are scaled to a mean square of 1.

        slots: flat indices into (B * L) of the visual tokens, in order.
        visual, features: embeddings and DeepStack features of the visual tokens.
        """
        x = self.embed_tokens(tokens)
        shape = x.shape
        if slots.numel():
            x = x.flatten(0, 1).index_copy(0, slots, visual.to(x.dtype)).view(shape)
        cos, sin = self.rope(positions)
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, mask, prefix)
            if index < len(features) and slots.numel():
                x = x.flatten(0, 1).index_add(0, slots, features[index].to(x.dtype)).view(shape)
            if index == MIDDLE:
                middle = x.flatten(0, 1)[slots]
        return self.norm(x), F.rms_norm(middle.float(), middle.shape[-1:])


def attention_mask(segment: Tensor, prefix: int) -> Tensor:
    """The mask that `TextAttention` adds to its scores: 0 or -inf.

    segment: (B, L), number of the branch of each token; a token attends to its own branch. -1 is padding; the
        result for it is not used.
    """
    kind = torch.bfloat16 if torch.is_autocast_enabled(segment.device.type) else torch.float32
    if prefix:
        segment = segment[:, prefix:].unflatten(1, (-1, BLOCK))
    same = segment[..., None, :] == segment[..., :, None]
    length = segment.shape[-1]
    allowed = same & torch.ones(length, length, dtype=torch.bool, device=segment.device).tril()
    return torch.zeros(same.shape, dtype=kind, device=segment.device).masked_fill(~allowed, float("-inf"))[
        :, None
    ]


class Fovea(nn.Module):
    """The model with its tied output head (`model.*`), and auxiliary heads for training (`auxiliary.*`)."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.model = nn.ModuleDict(
            {"visual": Vision(config["vision_config"]), "language_model": Text(config["text_config"])}
        )
        hidden = config["text_config"]["hidden_size"]
        self.auxiliary = nn.ModuleDict(
            {
                "shape": nn.Linear(hidden, PATCHES_PER_TOKEN * SHAPE_CLASSES),
                "colour": nn.Linear(hidden, PATCHES_PER_TOKEN * COLOUR_CLASSES),
                "character": nn.Linear(hidden, CHARACTER_SLOTS * CHARACTER_CLASSES),
                "centre": nn.Linear(hidden, PATCHES_PER_TOKEN * CENTRE_CLASSES),
                "rank": nn.Linear(hidden, RANKS * CHARACTER_CLASSES),
                "place": nn.Linear(hidden, PLACES),
                "cell": nn.Linear(hidden, PATCHES_PER_TOKEN * (PLACES + 1)),
                "count": nn.Linear(hidden, 4 * 10),
                "moved": nn.Linear(hidden, PATCHES_PER_TOKEN * 3),
                "before": nn.Linear(hidden, PATCHES_PER_TOKEN * CENTRE_CLASSES),
            }
        )
        self.reset()

    def reset(self) -> None:
        depth = len(self.model["language_model"].layers) + len(self.model["visual"].blocks)
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                (nn.init.zeros_ if name.endswith("bias") else nn.init.ones_)(parameter)
                continue
            fan = parameter[0].numel()
            scale = 0.02 if "embed_tokens" in name or "pos_embed" in name else fan**-0.5
            if name.endswith(
                ("attn.proj.weight", "mlp.linear_fc2.weight", "o_proj.weight", "down_proj.weight")
            ):
                scale /= math.sqrt(depth)
            if "deepstack" in name and "fc2" in name:
                scale *= 0.3
            nn.init.normal_(parameter, std=scale)

    def fuse(self) -> None:
        """Compile the blocks in place, for any shapes."""
        vision = self.model["visual"]
        blocks = [
            *vision.blocks,
            vision.merger,
            *vision.deepstack_merger_list,
            *self.model["language_model"].layers,
        ]
        for block in blocks:
            block.compile(dynamic=True)

    def encode(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Encode images to flat visual tokens and features, each (B * n * tokens, hidden).

        images: (B, n, H, W, 3), or (B, n, 2, H, W, 3) for the groups of a video.
        """
        visual, features = self.model["visual"](images.flatten(0, 1))
        return visual.flatten(0, 1), [feature.flatten(0, 1) for feature in features]

    def encode_views(self, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Encode views of several sizes to flat visual tokens and features, in the order of the prompts.

        batch: see `varied.gather_views`.
        """
        outputs = []
        for number in range(sum(name.startswith("views") for name in batch)):
            visual, features = self.model["visual"](batch[f"views{number}"], batch[f"at{number}"])
            outputs.append([visual, *features])
        levels = [
            torch.cat([part.flatten(0, 1) for part in parts])[batch["order"]]
            for parts in zip(*outputs, strict=True)
        ]
        return levels[0], levels[1:]

    def hidden(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The last hidden states (B, L, hidden), the visual tokens, and their states after layer MIDDLE."""
        prefix = int(batch["prefix"])
        mask = attention_mask(batch["segment"], prefix)
        if "order" in batch:
            visual, features = self.encode_views(batch)
        elif batch["images"].numel():
            visual, features = self.encode(batch["images"])
        else:
            visual, features = torch.empty(0, device=batch["tokens"].device), []
        states, middle = self.model["language_model"](
            batch["tokens"], batch["positions"], mask, prefix, batch["slots"], visual, features
        )
        return states, visual, middle

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(states, self.model["language_model"].embed_tokens.weight.to(states.dtype)).float()
