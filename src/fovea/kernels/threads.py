"""The number of threads that compute, of torch's operations and of the C++ kernels."""

from __future__ import annotations

import torch

from fovea.core.hardware import usable_cores


def set_threads(count: int) -> None:
    """Compute with `count` threads.

    count: 0: torch's own choice, which OMP_NUM_THREADS sets, but at most one for each core that the process
        may use. torch does not see the limit of a cgroup, and with more threads than that it becomes many
        times slower.
    """
    torch.set_num_threads(count or min(torch.get_num_threads(), len(usable_cores())))
