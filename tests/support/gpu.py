"""The device of the GPU tests: CUDA, or in a rehearsal a stand-in for it on this machine's CPU.

`make gpu-rehearsal` sets FOVEA_GPU_REHEARSAL=1. Then Triton's kernels run in its interpreter, streams, events
and graphs are those of `fake_cuda`, and answers are short, because the interpreter is slow. So a mistake in a
test is found before a GPU is at hand.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from fovea import Engine

T = TypeVar("T")
REHEARSAL = os.environ.get("FOVEA_GPU_REHEARSAL") == "1"
DEVICE = torch.device("cpu" if REHEARSAL else "cuda")
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not REHEARSAL and not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
NEEDS_CUDA = pytest.mark.skipif(REHEARSAL, reason="there is no stand-in for this in a rehearsal")
NEEDS_HOPPER = pytest.mark.skipif(
    REHEARSAL or not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="this GPU has no products of 8-bit floats",
)


def either(on_gpu: T, rehearsed: T) -> T:
    """Return the first on a GPU, the second in a rehearsal."""
    return rehearsed if REHEARSAL else on_gpu


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Return |ours - theirs| / |theirs|, norms over all numbers, in float32. With a NaN it is NaN."""
    reference = theirs.float().cpu()
    return float((ours.float().cpu() - reference).norm() / reference.norm())


@contextmanager
def engine_of(folder: Path | str, **settings: Any) -> Iterator[Engine]:
    """Start an engine on the device. Its graphs are recorded in a rehearsal if `decode_graphs` is "auto"."""
    settings = {"device": "cuda", "max_running": 8, **settings}
    if not REHEARSAL:
        # A pool of so many blocks needs no run of the largest step at the start.
        settings = settings if "kv_cache_mib" in settings else {"kv_blocks": 2048, **settings}
        with Engine.from_pretrained(str(folder), **settings) as engine:
            yield engine
        return
    from tests.support import fake_cuda

    # Triton's interpreter multiplies the bits of bfloat16 numbers as if they were whole numbers.
    kernels = "torch" if settings["dtype"] == "bfloat16" else "triton"
    graphs = settings.get("decode_graphs", "off")
    settings = {"kernels": kernels} | settings | {"device": "cpu", "threads": 1, "kv_cache_mib": 16}
    settings["decode_graphs"] = "padded" if graphs == "auto" else graphs
    with (
        fake_cuda.installed(graphs=graphs == "auto"),
        Engine.from_pretrained(str(folder), **settings) as engine,
    ):
        yield engine
