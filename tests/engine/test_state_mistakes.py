"""Mistakes that were found in the first version of states and experts. Each test tells how it showed."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from fovea.core.errors import UnsupportedModel
from fovea.engine.config import MIB, EngineConfig
from fovea.engine.execute import pool_sizes
from fovea.engine.layers.config import (
    Attention,
    DecoderConfig,
    Dense,
    GatedDelta,
    LayerConfig,
    Mixer,
    Rotary,
    ShortConv,
)
from fovea.engine.layers.decoder import Decoder
from fovea.engine.layers.linear import Linear, use_kernels
from fovea.engine.layers.mixers import DeltaMixer
from fovea.engine.layers.ranks import ALONE
from fovea.engine.layers.step import DecoderMemory, DecoderPlan, Step
from fovea.engine.models.stored import SafetensorsWeights
from fovea.engine.models.text import decoder_config
from fovea.engine.models.weights import load_weights
from fovea.kernels.native.kernels import NativeKernels
from fovea.kernels.states import StateRun, state_plan
from tests.kernels.conftest import lib
from tests.support.brains import SlotRunner, scheduler, sequence

__all__ = ["lib"]

CPU = torch.device("cpu")
ATTENTION = Attention(heads=2, kv_heads=1, head_dim=32, scale=1.0)


def decoder(
    mixers: list[Mixer], *, hidden: int = 64, scaling: tuple[float, int] | None = None
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=16,
        hidden=hidden,
        layers=tuple(LayerConfig(mixer, Dense(64, "silu")) for mixer in mixers),
        rotaries=(Rotary((1.0,) * 16),),
        eps=1e-6,
        tied=False,
        max_positions=128_000,
        query_scaling=scaling,
    )


@pytest.mark.kernels
@pytest.mark.parametrize("heads", [20, 28])
def test_the_state_of_a_sequence_does_not_depend_on_the_rows_beside_it(
    lib: ctypes.CDLL,
    heads: int,
) -> None:
    """Numbers of heads that no vector length divides; 16 and 48 heads fail with AVX-512, too."""
    torch.manual_seed(0)
    shape, count = GatedDelta(heads, 8, heads, 8, 4, "silu"), 7
    config = decoder([shape, ATTENTION])
    kernels = NativeKernels(lib)
    mixer = DeltaMixer(config, shape, 0).to(torch.bfloat16)
    for name in ("A_log", "dt_bias"):
        getattr(mixer, name).data = torch.rand(heads)
    for child in mixer.modules():
        for parameter in child.parameters(recurse=False):
            if parameter.dtype is torch.bfloat16:
                parameter.data.normal_(std=0.5)
        if isinstance(child, Linear):
            child.pack(kernels)
    use_kernels(mixer, kernels)
    x = torch.randn(count, 64).bfloat16()

    def states(sequences: list[int]) -> torch.Tensor:
        store = DecoderMemory.allocate(config, (1,), 4, count, torch.bfloat16, CPU)
        inputs, matrices = store.states[0]
        inputs.fill_(0.5)
        matrices.copy_(torch.randn(matrices.shape, generator=torch.Generator().manual_seed(1)))
        plan = state_plan([[StateRun(row, 1, slot, ((1, slot),))] for row, slot in enumerate(sequences)], CPU)
        mixer.mix(mixer.project(x[sequences]), Step((), DecoderPlan((), plan), store))
        return matrices

    together = states(list(range(count)))
    for slot in range(count):
        assert torch.equal(states([slot])[slot], together[slot])


def test_long_prompts_that_wait_are_not_searched_to_their_end() -> None:
    """Every place of every waiting prompt was looked up in every step: 70 ms beside 32 long prompts."""
    made = scheduler(blocks=20_000, block_size=16, state_slots=600, state_spacing=1024)
    for number in range(32):
        made.add(sequence(f"s{number}", [number, *range(1, 20_000)], arrival=number))
    made.update(made.schedule(), {})
    assert made.kv.states is not None
    slots, lookups = made.kv.states.slots, 0
    parts_after = slots.parts_after

    def counted(parent: bytes) -> list[int]:
        nonlocal lookups
        lookups += 1
        return parts_after(parent)

    slots.parts_after = counted  # type: ignore[method-assign]
    made.schedule()
    assert 0 < lookups < 32 * 100


def test_drafts_evict_no_checkpoint() -> None:
    """An answer with wrong drafts evicts the state after an image, which a follow-up then prefills again."""
    made = scheduler(blocks=64, block_size=4, state_slots=8)
    runner = SlotRunner(made, drafts=lambda seq, new: [98] * 6 if seq.id == "json" else [])
    seq = sequence("follow-up", [("cat", 30), 2], max_tokens=1, arrival=2)
    made.add(sequence("first", [("cat", 30), 1], max_tokens=1))
    runner.run()
    made.add(sequence("json", [5, 6, 7], max_tokens=10, arrival=1))
    runner.run()
    made.add(seq)
    runner.run()
    assert seq.cached_tokens == 30


def test_a_checkpoint_in_the_last_slot_stops_nobody() -> None:
    """Three slots: three texts ran together, but of three questions about a cached image only two did."""
    made = scheduler(blocks=64, block_size=4, state_slots=3)
    runner = SlotRunner(made)
    made.add(sequence("first", [("cat", 9), 1], max_tokens=1))
    runner.run()
    seqs = [sequence(f"q{n}", [("cat", 9), 2 + n], max_tokens=40, arrival=1 + n) for n in range(3)]
    for seq in seqs:
        made.add(seq)
    for _ in range(10):
        runner.step()
    assert len(made.running) == 3


def test_memory_that_states_cannot_use_is_for_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """LFM2 of 1.2B: its states take 45 MiB at most, and 2 of 4 GiB stay unused."""
    attention = Attention(heads=32, kv_heads=8, head_dim=64, scale=0.125)
    places = (2, 5, 8, 10, 12, 14)
    config = decoder([attention if n in places else ShortConv(3) for n in range(16)], hidden=2048)
    parts = SimpleNamespace(config=config)
    model = SimpleNamespace(decoder=parts, ranks=ALONE, dtype=torch.bfloat16, device=CPU)
    monkeypatch.setattr(pool_sizes, "_automatic", lambda device: 4096 * MIB)
    settings = EngineConfig()
    kv = pool_sizes.pool_sizes(settings, model).blocks * 16 * config.kv_bytes_per_token(2)  # type: ignore[arg-type]
    states = pool_sizes.state_slots(settings, model) * config.state_bytes(2)  # type: ignore[arg-type]
    assert kv + states > 0.95 * 4096 * MIB


class StackingKernels:
    def stack(self, shape: object, layers: object) -> object:
        return object()


def test_scaled_queries_do_not_read_values_on_the_host() -> None:
    """Kernels for CUDA have a stack, too. A CUDA graph cannot be recorded of code that reads values."""
    made = Decoder(decoder([ATTENTION], scaling=(0.1, 8))).to("meta")
    made.use_stack(StackingKernels())  # type: ignore[arg-type]
    made.query_scale(torch.zeros(3, device="meta"), torch.float32)


@pytest.mark.parametrize("name", ["decoder.layers.0.mlp.experts.gate_up_proj", "tower.positions"])
def test_a_square_tensor_is_loaded_as_it_is(name: str, tmp_path: Path) -> None:
    """Qwen's own layout of experts is guessed from the shape, for every tensor of three dimensions."""
    stored = torch.arange(32.0).view(2, 4, 4)
    save_file({name: stored}, tmp_path / "model.safetensors")
    target = torch.empty(2, 4, 4)
    load_weights(SafetensorsWeights([tmp_path / "model.safetensors"]), iter([(name, target)]))
    assert torch.equal(target, stored)


def test_lfm2_without_attention_is_refused() -> None:
    text = SimpleNamespace(
        model_type="lfm2", num_attention_heads=2, num_key_value_heads=1, hidden_size=32, head_dim=16,
        conv_L_cache=3, conv_bias=False, layer_types=["conv"], intermediate_size=32,
        block_auto_adjust_ff_dim=False, rope_parameters={"rope_theta": 1e4}, vocab_size=8, norm_eps=1e-6,
        max_position_embeddings=64,
    )  # fmt: skip
    with pytest.raises(UnsupportedModel):
        _ = decoder_config(text, tied=True).attention_heads
