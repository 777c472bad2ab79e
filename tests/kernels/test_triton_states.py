"""Triton's kernels of layers with a state against torch's, in Triton's interpreter."""

from __future__ import annotations

import os

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is a GPU: tests/gpu runs the kernels on it", allow_module_level=True)

from fovea.kernels import NO_SLOT
from fovea.kernels.states import StatePlan, StateRun, state_plan
from fovea.kernels.torch_kernels import PLAIN
from fovea.kernels.triton import states as triton_states
from fovea.kernels.triton.kernels import TritonKernels
from tests.support.states import Shape, mix, plan_of, recorded_plan

pytestmark = pytest.mark.kernels

CPU = torch.device("cpu")
KERNELS = TritonKernels(CPU)
CLOSE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 0.06}
TYPES = pytest.mark.parametrize("dtype", list(CLOSE), ids=str)
SMALL = 2, 12, 4, 20


def check(shape: Shape, plan: StatePlan, rows: int, dtype: torch.dtype = torch.float32) -> None:
    ours, theirs = (mix(kernels, shape, plan, rows, dtype, CPU) for kernels in (KERNELS, PLAIN))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@TYPES
@pytest.mark.parametrize("shape", [SMALL, (1, 16, 1, 64), (2, 40, 6, 33)], ids=str)
def test_one_token_of_several_sequences(shape: Shape, dtype: torch.dtype) -> None:
    """States stay in their slot, move to another one, or come from one that keeps its state."""
    check(shape, plan_of([(5, 5), (2, 6), (0, 0)], CPU), 3, dtype)


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(8)), st.integers(1, 4), st.lists(st.booleans(), min_size=4, max_size=4))
def test_any_slots(slots: list[int], rows: int, moves: list[bool]) -> None:
    pairs = [(slots[row], slots[row + 4] if moves[row] else slots[row]) for row in range(rows)]
    check(SMALL, plan_of(pairs, CPU), rows)


def test_a_row_without_slots_begins_at_zero_and_writes_nothing() -> None:
    """Rows that fill up a recorded batch have no slots. The other rows do not notice them."""
    rows = [(3, 3), (NO_SLOT, NO_SLOT), (1, 4)]
    ours = mix(KERNELS, SMALL, recorded_plan(rows, CPU), 3, torch.float32, CPU)
    alone = mix(KERNELS, SMALL, recorded_plan([(3, 3), (NO_SLOT, 7), (1, 4)], CPU), 3, torch.float32, CPU)
    from_zero = [[StateRun(row, 1, source, ((1, target),))] for row, (source, target) in enumerate(rows[:1])]
    from_zero += [[StateRun(1, 1, NO_SLOT, ())], [StateRun(2, 1, 1, ((1, 4),))]]
    theirs = mix(PLAIN, SMALL, state_plan(from_zero, CPU), 3, torch.float32, CPU)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
    for mine, other in zip(ours[3:], alone[3:], strict=True):
        assert torch.equal(mine[:7], other[:7])
        assert not torch.equal(mine[7], other[7])


def test_prompts_beside_decodes_and_drafts_after_them() -> None:
    """One sequence begins, one has a draft, and one decodes: runs of torch between Triton's launches."""
    runs = [
        [StateRun(0, 1, 2, ((1, 2),)), StateRun(3, 1, 2, ((1, 5),))],
        [StateRun(1, 1, 1, ((1, 1),))],
        [StateRun(4, 9, NO_SLOT, ((5, 6), (9, 7)))],
        [StateRun(2, 1, 3, ((1, 0), (1, 3)))],
    ]
    check(SMALL, state_plan(runs, CPU), 13)


def test_a_tokens_numbers_are_the_same_whichever_tokens_are_beside_it() -> None:
    rows = [(5, 5), (2, 6), (0, 0)]
    together = mix(KERNELS, SMALL, plan_of(rows, CPU), 3, torch.float32, CPU)
    padded = mix(KERNELS, SMALL, recorded_plan([*rows[:2], (NO_SLOT, NO_SLOT)], CPU), 3, torch.float32, CPU)
    for mine, other in zip(together[:3], padded[:3], strict=True):
        assert torch.equal(mine[:2], other[:2])


def test_large_and_small_steps_have_the_right_decay() -> None:
    """softplus is its argument when that is large, and an exponential when it is small."""
    sizes = torch.tensor([-60.0, -20.0, -9.0, -1.0, 0.0, 3.0, 19.9, 20.1, 80.0])
    for size in sizes:
        state, qkv = torch.ones(1, 1, 4, 4), torch.zeros(1, 12)
        plan = plan_of([(0, 0)], CPU)
        expected = torch.exp(-torch.nn.functional.softplus(size.double()))
        KERNELS.gated_delta(
            qkv, qkv[:, :1], size.view(1, 1), (torch.zeros(1), torch.zeros(1)), 1, state, plan
        )
        torch.testing.assert_close(state.double(), expected.expand(1, 1, 4, 4), rtol=1e-6, atol=1e-12)


def test_one_launch_each(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for name in ("_conv", "_delta", "_gated_norm"):
        kernel = getattr(triton_states, name)

        class Noting:
            def __getitem__(self, grid: object, name: str = name, kernel: object = kernel) -> object:
                names.append(name)
                return kernel[grid]  # type: ignore[index]

        monkeypatch.setattr(triton_states, name, Noting())
    mix(KERNELS, SMALL, plan_of([(1, 1), (2, 3)], CPU), 2, torch.float32, CPU)
    assert names == ["_conv", "_delta", "_gated_norm"]
