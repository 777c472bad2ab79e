"""The threads that compute, of torch's operations and of the C++ kernels: their number, and their cores."""

from __future__ import annotations

import logging

import torch

from fovea.core.hardware import physical_cores, usable_cores
from fovea.kernels.native.kernels import NativeKernels

log = logging.getLogger("fovea.kernels")


def set_threads(count: int) -> None:
    """Compute with `count` threads.

    count: 0: torch's own choice, which OMP_NUM_THREADS sets, but at most one for each core that the process
        may use. torch does not see the limit of a cgroup, and with more threads than that it becomes many
        times slower.
    """
    torch.set_num_threads(count or min(torch.get_num_threads(), len(usable_cores())))


def bind_threads(kernels: NativeKernels) -> None:
    """Bind the threads of the C++ kernels to one physical core each.

    If a cgroup limits the process to fewer cores than it sees, threads are not bound, and a warning says so:
    other containers would bind theirs to the same cores.
    """
    cores, usable = physical_cores(), usable_cores()
    if len(usable) < len(cores):
        log.warning(
            "threads are not bound to cores: the cgroup allows %d of %d, whichever they are",
            len(usable),
            len(cores),
        )
        return
    kernels.pin(cores)
