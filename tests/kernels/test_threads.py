"""The threads of the C++ kernels: results do not depend on them, and nothing waits forever."""

from __future__ import annotations

import ctypes
import os
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fovea.kernels.choose import bind_threads, set_threads
from fovea.kernels.native.kernels import NativeKernels
from fovea.kernels.native.products import PackedWeight

pytestmark = pytest.mark.kernels


class Product:
    """A product whose result is known, on any number of threads."""

    def __init__(self, lib: ctypes.CDLL, rows: int) -> None:
        torch.manual_seed(rows)
        self.lib, self.x = lib, torch.randn(rows, 128).to(torch.bfloat16)
        self.weight = PackedWeight(lib, torch.randn(640, 128).to(torch.bfloat16), None, gated=False)
        self.expected = self.run(1)

    def run(self, threads: int) -> Tensor:
        out = torch.empty(len(self.x), 640, dtype=torch.bfloat16)
        self.lib.fovea_product(
            self.weight.address, self.x.data_ptr(), 128, len(self.x), 0, None, out.data_ptr(), threads
        )
        return out


@pytest.mark.parametrize("rows", [1, 7, 300])
def test_any_number_of_threads_gives_the_same_bits(lib: ctypes.CDLL, rows: int) -> None:
    product = Product(lib, rows)
    for threads in (2, 5, 3, 1, 16, 2):
        assert torch.equal(product.run(threads), product.expected)


def test_calls_of_several_threads_at_once(lib: ctypes.CDLL) -> None:
    """Two engines in one process share the team: one call has the threads, another works alone meanwhile."""
    products = [Product(lib, rows) for rows in (1, 2, 40, 200)]

    def many(product: Product) -> bool:
        return all(torch.equal(product.run(3), product.expected) for _ in range(150))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(many, products))


def test_a_child_of_fork_has_threads_of_its_own(lib: ctypes.CDLL) -> None:
    """A child has none of its parent's threads. It would wait for them forever."""
    product = Product(lib, 30)
    assert torch.equal(product.run(3), product.expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of exactly what is tested here
        child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(product.run(3), product.expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


def bound_to(core: int) -> int:
    """Return how many threads of this process may run on that one core only."""
    found = 0
    for status in Path("/proc/self/task").glob("*/status"):
        allowed = re.search(r"Cpus_allowed_list:\s*(\S+)", status.read_text())
        found += allowed is not None and allowed[1] == str(core)
    return found


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_pinned_threads_stay_on_their_core_and_the_caller_stays_free(lib: ctypes.CDLL) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("needs two cores")
    product, kernels = Product(lib, 30), NativeKernels(lib)
    before = bound_to(allowed[1])
    product.run(2)
    kernels.pin(allowed[:2])
    assert bound_to(allowed[1]) > before
    assert len(os.sched_getaffinity(0)) == len(allowed)
    assert torch.equal(product.run(3), product.expected)
    kernels.pin(allowed[:1])


def test_threads_are_as_many_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        monkeypatch.setattr("fovea.kernels.choose.usable_cores", lambda: (0, 4, 5))
        set_threads(7)
        assert torch.get_num_threads() == 7
        set_threads(0)
        assert torch.get_num_threads() == 3, "a container may use three cores, and torch sees seven"
        set_threads(0)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_threads_are_not_bound_if_a_cgroup_limits_the_cores(
    lib: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With `--cpus 2` and no set of cores, every container would bind to the first two of the machine."""
    kernels, bound = NativeKernels(lib), []
    monkeypatch.setattr(kernels, "pin", bound.append)
    monkeypatch.setattr("fovea.kernels.choose.physical_cores", lambda: (0, 1, 2, 3))
    for usable in ((0, 1), (0, 1, 2, 3)):
        monkeypatch.setattr("fovea.kernels.choose.usable_cores", lambda usable=usable: usable)
        with caplog.at_level("WARNING", "fovea.kernels"):
            bind_threads(kernels)
    assert bound == [(0, 1, 2, 3)]
    assert "the cgroup allows 2 of 4" in caplog.text
