from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny products gain nothing from threads, and a busy machine makes them wait for each other."""
    torch.set_num_threads(1)
