"""The arithmetic of a machine's rates. The tests replace the times, which depend on the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fovea.kernels import calibrate as module
from fovea.kernels.calibrate import MIN_STREAM_BYTES, PLAIN, Machine, calibrate
from fovea.kernels.quantize import INT4, INT8
from fovea.kernels.torch_kernels import TorchKernels


@pytest.fixture(autouse=True)
def _every_call_takes_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(work: Callable[[], object], device: torch.device) -> float:
        work()
        return 2.0

    monkeypatch.setattr(module, "_seconds", seconds)
    monkeypatch.setattr(module, "CPU_PRODUCT", (4, 64))
    monkeypatch.setattr(module, "CPU_ROWS", (2, 4))


@pytest.mark.parametrize("pack", [False, True])
def test_bytes_and_operations_per_second(pack: bool) -> None:
    machine = calibrate(
        TorchKernels(pack=pack), torch.float32, torch.device("cpu"), (None, INT8, INT4, INT8), 100
    )
    assert machine.stream_bytes == MIN_STREAM_BYTES
    assert machine.bandwidth == MIN_STREAM_BYTES / 2
    assert machine.peaks == dict.fromkeys((PLAIN, "int8", "int4"), 2 * 4 * 64 * 64 / 2)
    assert machine.threads == torch.get_num_threads()


def test_best_takes_the_better_figures_of_two_measurements() -> None:
    first = Machine(10, {PLAIN: 5, "int8": 7}, 1, 2, "torch")
    second = Machine(9, {PLAIN: 6, "int8": 6}, 1, 2, "torch")
    assert first.best(second) == Machine(10, {PLAIN: 6, "int8": 7}, 1, 2, "torch")


def test_products_and_streams_read_numbers_that_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    """On constant numbers a GPU is faster than on a model's, so the peak would be out of reach."""
    read: list[torch.Tensor] = []
    normal = module._normal

    def remember(*arguments: Any) -> torch.Tensor:
        read.append(normal(*arguments))
        return read[-1]

    monkeypatch.setattr(module, "_normal", remember)
    calibrate(TorchKernels(), torch.float32, torch.device("cpu"), (None,), 100)
    assert [tuple(numbers.shape) for numbers in read] == [
        (64, 64), (2, 64), (4, 64), (64, MIN_STREAM_BYTES // 256), (256, 4096), (1, 4096),
    ]  # fmt: skip
    assert min(float(numbers.std()) for numbers in read) == pytest.approx(0.02, rel=0.1)
