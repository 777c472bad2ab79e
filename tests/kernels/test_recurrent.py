"""Short convolutions and the gated delta rule: fast forms against one token after the other."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.nn import functional

from fovea.kernels import NO_SLOT
from fovea.kernels.base import Kernels
from fovea.kernels.native.kernels import NativeKernels
from fovea.kernels.states import StateRun, state_plan
from fovea.kernels.torch_kernels import TorchKernels

pytestmark = pytest.mark.kernels

CPU = torch.device("cpu")
KEY_HEADS, KEY_DIM, HEADS, VALUE_DIM, WIDTH, SLOTS = 2, 24, 4, 40, 4, 8
CHANNELS = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM


@pytest.fixture(scope="module")
def native(lib: ctypes.CDLL) -> NativeKernels:
    return NativeKernels(lib)


@dataclass
class Tokens:
    """Inputs of one sequence of T tokens. decay, and beta before its sigmoid: (T, HEADS)."""

    qkv: Tensor
    beta: Tensor
    decay: Tensor

    def part(self, start: int, stop: int) -> Tokens:
        return Tokens(self.qkv[start:stop], self.beta[start:stop], self.decay[start:stop])


def tokens(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tokens:
    random = torch.Generator().manual_seed(seed)
    qkv = torch.randn(count, CHANNELS, generator=random).to(dtype)
    beta = torch.rand(count, HEADS, generator=random).logit().to(dtype)
    return Tokens(qkv, beta, -2 * torch.rand(count, HEADS, generator=random))


def states(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Slots of inputs and matrices, full of numbers that no test may read by mistake."""
    inputs = torch.full((SLOTS, WIDTH - 1, CHANNELS), 7.0).to(dtype)
    return inputs, torch.full((SLOTS, HEADS, KEY_DIM, VALUE_DIM), 7.0)


def naive_delta(t: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """The rule token by token, as the paper writes it. state: (HEADS, KEY_DIM, VALUE_DIM), float64."""
    out = []
    for qkv, beta, decay in zip(t.qkv.double(), t.beta.sigmoid().double(), t.decay.double(), strict=True):
        keys = KEY_HEADS * KEY_DIM
        query, key = (
            functional.normalize(part.view(KEY_HEADS, KEY_DIM), dim=-1).repeat_interleave(2, dim=0)
            for part in (qkv[:keys], qkv[keys : 2 * keys])
        )
        value = qkv[2 * keys :].view(HEADS, VALUE_DIM)
        state = state * decay.exp()[:, None, None]
        wrong = value - torch.einsum("hk,hkv->hv", key, state)
        state = state + torch.einsum("hk,hv->hkv", key, beta[:, None] * wrong)
        out.append(torch.einsum("hk,hkv->hv", query * KEY_DIM**-0.5, state))
    return torch.stack(out).flatten(1), state


def naive_conv(x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor) -> Tensor:
    rows = torch.cat((before, x)).double()
    sums = torch.stack([(rows[i : i + WIDTH] * weight.double()).sum(0) for i in range(len(x))])
    return sums if bias is None else sums + bias.double()


def steps(decay: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Steps and rates of which a decay follows."""
    rate, bias = torch.full((HEADS,), 0.3), torch.full((HEADS,), -0.5)
    return (-decay / rate.exp()).double().expm1().log().float() - bias, (rate, bias)


def delta(kernels: Kernels, t: Tokens, runs: list[list[StateRun]], state: Tensor) -> Tensor:
    return kernels.gated_delta(t.qkv, t.beta, *steps(t.decay), KEY_HEADS, state, state_plan(runs, CPU))


def test_the_chunked_form_is_the_rule() -> None:
    """Chunks of 64 tokens, a remainder, and a state that is continued, against one token after the other."""
    t, (_, slots) = tokens(150), states()
    zero = torch.zeros(HEADS, KEY_DIM, VALUE_DIM).double()
    expected, middle = naive_delta(t.part(0, 100), zero)
    got = delta(TorchKernels(), t.part(0, 100), [[StateRun(0, 100, NO_SLOT, ((100, 3),))]], slots)
    torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=1e-4)
    torch.testing.assert_close(slots[3].double(), middle, atol=2e-6, rtol=1e-4)
    expected, last = naive_delta(t.part(100, 150), middle)
    got = delta(TorchKernels(), t.part(100, 150), [[StateRun(0, 50, 3, ((50, 3),))]], slots)
    torch.testing.assert_close(got.double(), expected, atol=4e-6, rtol=1e-4)
    torch.testing.assert_close(slots[3].double(), last, atol=4e-6, rtol=1e-4)
    assert bool((slots[:3] == 7).all()), "a slot was written that the plan does not name"


def test_strong_decay_does_not_overflow() -> None:
    t, (_, slots) = tokens(130), states()
    t.decay *= 60
    out = delta(TorchKernels(), t, [[StateRun(0, 130, NO_SLOT, ((130, 0),))]], slots)
    expected, _ = naive_delta(t, torch.zeros(HEADS, KEY_DIM, VALUE_DIM).double())
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decodes_of_several_sequences_do_not_mix(dtype: torch.dtype, native: NativeKernels) -> None:
    t, (_, slots) = tokens(3, dtype=dtype), states()
    slots.normal_(generator=torch.Generator().manual_seed(1))
    before = slots.clone()
    runs = [
        [StateRun(row, 1, source, ((1, target),))]
        for row, source, target in ((0, 5, 5), (1, 2, 6), (2, 0, 0))
    ]
    kernels = native if dtype is torch.bfloat16 else TorchKernels()
    out = delta(kernels, t, runs, slots)
    close = {"atol": 0.05, "rtol": 0.02} if dtype is torch.bfloat16 else {"atol": 2e-6, "rtol": 1e-4}
    for (run,) in runs:
        expected, state = naive_delta(t.part(run.row, run.row + 1), before[run.source].double())
        torch.testing.assert_close(out[run.row].double(), expected[0], **close)
        torch.testing.assert_close(slots[run.saves[0][1]].double(), state, atol=1e-5, rtol=1e-4)
    assert torch.equal(slots[2], before[2])


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_division_of_the_tokens_gives_the_same_bits_on_native_kernels(
    native: NativeKernels, data: st.DataObject
) -> None:
    """Chunked prefill, drafts and checkpoints only cut a sequence: outputs and states stay as they are."""
    count = data.draw(st.integers(2, 40))
    t = tokens(count, seed=count, dtype=torch.bfloat16)
    save_at = data.draw(st.integers(1, count))
    cuts = sorted({0, count, *data.draw(st.sets(st.integers(1, count - 1), max_size=4))})
    pieces, source = [], NO_SLOT
    for first, last in itertools.pairwise(cuts):
        saves = [(save_at - first, 2)] if first < save_at <= last else []
        pieces.append(StateRun(first, last - first, source, (*saves, (last - first, 1))))
        source = 1

    whole = both(native, t, [[StateRun(0, count, NO_SLOT, ((count, 0),))]], states(torch.bfloat16))
    slots = states(torch.bfloat16)
    if data.draw(st.booleans()):
        out = both(native, t, [pieces], slots)[0]
    else:
        steps = [(t.part(run.row, run.row + run.count), replace(run, row=0)) for run in pieces]
        out = torch.cat([both(native, part, [[run]], slots)[0] for part, run in steps])
    alone = both(native, t.part(0, save_at), [[StateRun(0, save_at, NO_SLOT, ((save_at, 5),))]], slots)
    assert torch.equal(out, whole[0])
    for divided, undivided, short in zip(slots, whole[1], alone[1], strict=True):
        assert torch.equal(divided[1], undivided[0])
        assert torch.equal(divided[2], short[5]), "a checkpoint differs from the state after its tokens"


def both(
    kernels: Kernels, t: Tokens, runs: list[list[StateRun]], slots: tuple[Tensor, Tensor]
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Compute a convolution and the rule after it, as a layer does. Returns the output and the slots."""
    weight = torch.randn(WIDTH, CHANNELS, generator=torch.Generator().manual_seed(9)).to(t.qkv.dtype)
    plan = state_plan(runs, CPU)
    conv = kernels.short_conv(t.qkv, weight, None, "silu", slots[0], plan)
    return kernels.gated_delta(conv, t.beta, *steps(t.decay), KEY_HEADS, slots[1], plan), slots


@pytest.mark.parametrize("count", [1, 2, 7, 90])
@pytest.mark.parametrize("silu", [False, True])
def test_native_kernels_compute_what_torch_computes(native: NativeKernels, count: int, silu: bool) -> None:
    t, plan = tokens(count, dtype=torch.bfloat16), None
    weight, bias = torch.randn(WIDTH, CHANNELS).bfloat16(), torch.randn(CHANNELS).bfloat16()
    plan = state_plan([[StateRun(0, count, 4, ((count, 4),))]], CPU)
    results = []
    for kernels in (native, TorchKernels()):
        inputs, matrices = states(torch.bfloat16)
        conv = kernels.short_conv(t.qkv, weight, bias, "silu" if silu else None, inputs, plan)
        out = kernels.gated_delta(conv, t.beta, *steps(t.decay), KEY_HEADS, matrices, plan)
        results.append((conv.float(), out.float(), matrices[4], inputs[4].float()))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.06, rtol=0.02)


@settings(max_examples=20, deadline=None)
@given(count=st.integers(1, 9), first=st.booleans())
def test_a_convolution_reads_the_tokens_before(count: int, first: bool) -> None:
    t, (inputs, _) = tokens(count), states()
    weight, bias = torch.randn(WIDTH, CHANNELS), torch.randn(CHANNELS)
    before = torch.zeros(WIDTH - 1, CHANNELS) if first else inputs[3].clone()
    plan = state_plan([[StateRun(0, count, NO_SLOT if first else 3, ((count, 3),))]], CPU)
    out = TorchKernels().short_conv(t.qkv, weight, bias, None, inputs, plan)
    torch.testing.assert_close(out.double(), naive_conv(t.qkv, weight, bias, before), atol=1e-5, rtol=1e-4)
    assert torch.equal(inputs[3], torch.cat((before, t.qkv))[-(WIDTH - 1) :])


def test_the_gated_norm_is_the_norm_times_the_gate(native: NativeKernels) -> None:
    x, weight = torch.randn(3, 2, 40).bfloat16(), torch.randn(40).bfloat16()
    gate = torch.randn(3, 110).bfloat16()[:, 30:].view(3, 2, 40)
    ours, theirs = (kernels.gated_norm(x, gate, weight, 1e-6) for kernels in (native, TorchKernels()))
    torch.testing.assert_close(ours.float(), theirs.float(), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("rotary", [16, 64])
def test_centered_norms_and_partial_rotation(native: NativeKernels, rotary: int) -> None:
    rows, heads, kv_heads, dim = 5, 4, 2, 64
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim).bfloat16()
    cos, sin = torch.randn(rows, 1, rotary), torch.randn(rows, 1, rotary)
    norms = torch.randn(dim).bfloat16(), torch.randn(dim).bfloat16()
    results = []
    for kernels in (native, TorchKernels()):
        kv = torch.zeros(2, 4, 2, kv_heads, dim).bfloat16()
        arguments = (heads, cos, sin, norms, 1e-6, kv, torch.arange(rows))
        query = kernels.rotate_store(qkv.clone(), *arguments, centered=True)
        results.append((query.float(), kv.float()))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0.02)
