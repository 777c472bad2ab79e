"""Tests of what a rehearsal of `make gpu` needs: stand-ins for CUDA's graphs, and wheels to carry."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tools.gpu_wheels import PACKAGES, ROOT, command, pinned

pytest.importorskip("triton", reason="triton is not installed")

from tests.support.fake_cuda import Graph, Recording


def test_a_replay_repeats_the_recorded_operations_on_the_recorded_tensors() -> None:
    """A number that Python computed is the one of the recording, as in a graph of CUDA."""
    x, factor, graph = torch.tensor([1.0, 2.0, 3.0, 4.0]), 2, Graph()
    with torch.inference_mode(), Recording(graph):
        view = x.view(2, 2)
        y = view.sum(0) * factor
        y.add_(1)
    assert y.tolist() == [9.0, 13.0]
    x.copy_(torch.tensor([10.0, 20.0, 30.0, 40.0]))
    factor = 5
    with torch.inference_mode():
        graph.replay()
    assert y.tolist() == [81.0, 121.0]


@pytest.mark.parametrize("wait", [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x.nonzero()])
def test_an_operation_that_waits_for_the_gpu_cannot_be_recorded(wait: object) -> None:
    assert callable(wait)
    with pytest.raises(RuntimeError, match="waits for the GPU"), Recording(Graph()):
        wait(torch.ones(3))


def test_carried_packages_have_the_versions_of_the_project() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    (package,) = pinned(PACKAGES, constraints)
    assert f"\n{package}\n" in constraints
    with pytest.raises(SystemExit, match=r"constraints\.txt has no version of no-such-package"):
        pinned(["no-such-package"], constraints)
    pip = command([package], "3.12", Path("wheels"))
    assert "--no-deps" in pip
    assert "--python-version=3.12" in pip
    assert pip[-1] == package
