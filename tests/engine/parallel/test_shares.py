"""The shares of a decoder against the whole: sizes, parts of tensors, and what cannot be divided."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fovea.core.errors import ConfigError
from fovea.engine.config import EngineConfig
from fovea.engine.layers.config import (
    Attention,
    CrossAttention,
    DecoderConfig,
    Dense,
    Experts,
    GatedDelta,
    LayerConfig,
    Rotary,
    ShortConv,
)
from fovea.engine.models.targets import Cut
from fovea.engine.parallel.places import Place, own_gpu, place_of
from fovea.engine.parallel.shares import Grid, cut_of, head_rows, share_of, skipped, stages

DENSE = Dense(48, "silu")
SPARSE = Experts(4, 2, 12, "silu", shared=24, dense=36)
ATTENTION = Attention(heads=12, kv_heads=4, head_dim=8, scale=1.0, gated=True)
DELTA = GatedDelta(key_heads=4, key_dim=2, value_heads=8, value_dim=3, kernel=4, activation="silu")
CONVOLUTION = ShortConv(kernel=3)
CROSS = CrossAttention(heads=12, kv_heads=4, head_dim=8, scale=1.0)


def decoder(*layers: LayerConfig, vocabulary: int = 50) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocabulary,
        hidden=32,
        layers=layers,
        rotaries=(Rotary((1.0,)),),
        eps=1e-6,
        tied=False,
        max_positions=64,
    )


WHOLE = decoder(
    LayerConfig(ATTENTION, DENSE),
    LayerConfig(DELTA, SPARSE),
    LayerConfig(CONVOLUTION, DENSE),
    LayerConfig(CROSS, DENSE),
)
TENSORS = {
    "0.self_attn.q_proj.weight": (0, 192),
    "0.self_attn.k_proj.bias": (0, 32),
    "0.self_attn.o_proj.weight": (1, 96),
    "0.mlp.gate_proj.weight": (0, 48),
    "0.mlp.up_proj.bias": (0, 48),
    "0.mlp.down_proj.weight": (1, 48),
    "1.linear_attn.in_proj_qkv.weight": (0, 40),
    "1.linear_attn.conv1d.weight": (0, 40),
    "1.linear_attn.in_proj_z.weight": (0, 24),
    "1.linear_attn.in_proj_b.weight": (0, 8),
    "1.linear_attn.A_log": (0, 8),
    "1.linear_attn.out_proj.weight": (1, 24),
    "1.mlp.experts.gate_up_proj": (1, 24),
    "1.mlp.experts.down_proj": (2, 12),
    "1.mlp.shared_expert.up_proj.weight": (0, 24),
    "1.mlp.dense.down_proj.weight": (1, 36),
    "2.conv.in_proj.weight": (0, 96),
    "2.conv.conv.weight": (0, 32),
    "2.conv.out_proj.weight": (1, 32),
    "3.cross_attn.q_proj.weight": (0, 96),
    "3.cross_attn.o_proj.weight": (1, 96),
}
EVERYWHERE = (
    "0.input_layernorm.weight",
    "0.self_attn.q_norm.weight",
    "0.self_attn.o_proj.bias",
    "0.mlp.down_proj.bias",
    "1.linear_attn.norm.weight",
    "1.mlp.gate.weight",
    "1.mlp.shared_expert_gate.weight",
    "3.cross_attn.k_proj.weight",
    "3.cross_attn.q_norm.weight",
    "3.cross_attn_attn_gate",
)


def path(name: str) -> str:
    return f"decoder.layers.{name}"


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("name", "expected"), TENSORS.items())
def test_the_parts_of_all_processes_are_the_tensor(name: str, expected: tuple[int, int], size: int) -> None:
    axis, length = expected
    found: list[int] = []
    counts = set()
    for rank in range(size):
        cut = cut_of(WHOLE, path(name), Grid(rank, size))
        assert cut is not None
        assert (cut.axis, cut.size) == (axis, length)
        own = [number for run in cut.runs for number in range(*run)]
        assert len(own) == cut.count
        counts.add(len(own))
        found += own
    assert sorted(found) == list(range(length))
    assert len(counts) == 1


@pytest.mark.parametrize("name", EVERYWHERE)
def test_other_tensors_are_whole_in_every_process(name: str) -> None:
    assert cut_of(WHOLE, path(name), Grid(1, 2)) is None


def test_queries_and_states_go_with_their_keys() -> None:
    cut = cut_of(WHOLE, path("1.linear_attn.in_proj_qkv.weight"), Grid(1, 2))
    assert cut == Cut(0, ((4, 8), (12, 16), (28, 40)), 40)
    third = cut_of(WHOLE, path("2.conv.in_proj.weight"), Grid(0, 2))
    assert third == Cut(0, ((0, 16), (32, 48), (64, 80)), 96)


def test_more_processes_than_heads_of_keys_share_them() -> None:
    wide = decoder(LayerConfig(replace(ATTENTION, kv_heads=2), Dense(48, "silu")))
    runs = [cut_of(wide, path("0.self_attn.k_proj.weight"), Grid(rank, 4)) for rank in range(4)]
    assert [cut.runs for cut in runs if cut] == [((0, 8),), ((0, 8),), ((8, 16),), ((8, 16),)]
    assert {share_of(wide, Grid(rank, 4)).attention_heads.kv for rank in range(4)} == {1}


def test_a_share_has_its_part_of_everything() -> None:
    share = share_of(WHOLE, Grid(1, 2))
    attention, delta, convolution, cross = (layer.mixer for layer in share.layers)
    assert attention == replace(ATTENTION, heads=6, kv_heads=2)
    assert delta == replace(DELTA, key_heads=2, value_heads=4)
    assert convolution == replace(CONVOLUTION, channels=16)
    assert cross == replace(CROSS, heads=6, read=(2, 4)), "the driver computes all keys of images"
    assert share.layers[0].feed_forward == Dense(24, "silu")
    assert share.layers[1].feed_forward == Experts(4, 2, 6, "silu", shared=12, dense=18)
    assert share.kv_bytes_per_token(2) * 2 == WHOLE.kv_bytes_per_token(2)
    assert share.state_bytes(2) * 2 == WHOLE.state_bytes(2)


@pytest.mark.parametrize(
    ("layer", "size", "words"),
    [
        (
            LayerConfig(ATTENTION, DENSE),
            5,
            "the heads of layer 0 of this model are 12; accepted.*: 1, 2, 4, 12",
        ),
        (LayerConfig(replace(ATTENTION, heads=24, kv_heads=4), DENSE), 6, "the KV heads of layer 0"),
        (
            LayerConfig(ATTENTION, Dense(50, "silu")),
            4,
            "the feed-forward block of layer 0 of this model are 50",
        ),
        (LayerConfig(DELTA, DENSE), 8, "the key heads of layer 0 of this model are 4"),
        (LayerConfig(ATTENTION, replace(SPARSE, intermediate=10)), 4, "the experts of layer 0"),
    ],
)
def test_what_does_not_divide_is_named_with_what_would(layer: LayerConfig, size: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        share_of(decoder(layer), Grid(0, size))
    assert caught.value.param == "tensor_parallel"


def test_the_vocabulary_need_not_divide() -> None:
    assert [head_rows(WHOLE, Grid(rank, 4)) for rank in range(4)] == [(0, 13), (13, 26), (26, 39), (39, 50)]
    small = decoder(LayerConfig(ATTENTION, DENSE), vocabulary=5)
    assert [head_rows(small, Grid(rank, 4)) for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert head_rows(WHOLE, Grid(2, 2, 2)) == (0, 0), "the first stage has the head"


def test_stages_are_about_equally_long_and_keep_shared_keys_together() -> None:
    plain = decoder(*[LayerConfig(ATTENTION, DENSE)] * 7)
    assert stages(plain, 3) == ((0, 2), (2, 5), (5, 7))
    reading = replace(ATTENTION, source=4)
    layers = [LayerConfig(ATTENTION, DENSE)] * 5 + [LayerConfig(reading, DENSE)] * 2
    assert stages(decoder(*layers), 2) == ((0, 3), (3, 7))
    with pytest.raises(ConfigError, match="at most 5 stages"):
        stages(decoder(*layers), 6)


def test_a_stage_has_the_memory_of_its_own_layers() -> None:
    first, second = (share_of(WHOLE, Grid(rank, 1, 2)) for rank in range(2))
    assert first.kv_bytes_per_token(2) == WHOLE.kv_bytes_per_token(2)
    assert second.kv_bytes_per_token(2) == 0
    assert [group.window for group in second.kv_groups] == [group.window for group in WHOLE.kv_groups]
    assert len(first.state_shapes()) == len(second.state_shapes()) == 1
    assert second.places[2:] == (0, 0)


def test_a_worker_skips_what_the_driver_has() -> None:
    def skips(name: str, grid: Grid, config: DecoderConfig = WHOLE) -> bool:
        return any(re.search(pattern, name) for pattern in skipped(config, grid))

    assert not skipped(WHOLE, Grid(0, 2))
    assert skips("vision.patch_embed.weight", Grid(1, 2))
    assert skips("decoder.embed_tokens.weight", Grid(1, 2))
    assert skips(path("0.self_attn.o_proj.bias"), Grid(1, 2)), "a bias is added once"
    assert not skips("lm_head.weight", Grid(1, 2))
    assert skips("lm_head.weight", Grid(1, 1, 2))
    assert skips(path("0.mlp.up_proj.weight"), Grid(1, 1, 2))
    assert not skips(path("3.mlp.up_proj.weight"), Grid(1, 1, 2))


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400"}


def test_the_place_among_processes_of_a_launcher() -> None:
    two = EngineConfig.of(tensor_parallel=2)
    assert place_of(two, {}) is None
    assert place_of(EngineConfig(), TORCHRUN) is None
    agent = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "0", "LOCAL_RANK": "0"}
    assert place_of(two, agent) == Place(0, 2, 0, "10.0.0.1", 29400, hosts_store=False)
    assert place_of(two, TORCHRUN) == Place(1, 2, 0, "10.0.0.1", 29400, hosts_store=False)
    group = {"LWS_LEADER_ADDRESS": "leader", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "0"}
    assert place_of(two, group) == Place(0, 2, 0, "leader", 29500, hosts_store=True)
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2, and tensor_parallel 4 .* accepted: as many"):
        place_of(EngineConfig.of(tensor_parallel=4), TORCHRUN)
    with pytest.raises(ConfigError, match="RANK is 'x'"):
        place_of(two, TORCHRUN | {"RANK": "x"})


def test_each_process_sees_one_gpu() -> None:
    assert [own_gpu({}, rank) for rank in range(2)] == ["0", "1"]
    assert [own_gpu({"CUDA_VISIBLE_DEVICES": "4, 6"}, rank) for rank in range(3)] == ["4", "6", ""]
    assert own_gpu({"CUDA_VISIBLE_DEVICES": ""}, 0) == ""
