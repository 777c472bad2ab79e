"""Settings of the kernel tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Use one thread. Threads do not speed up tiny products, and on a busy machine they wait."""
    torch.set_num_threads(1)
