"""Before any test is imported.

Triton decides when it is first imported whether kernels are compiled for a card or interpreted on the CPU. Hypothesis fails an
example that took longer than 200 ms, which a busy machine can make of any. A shell starts what runs in its background deaf to
Ctrl-C, and so would be the programs that tests interrupt.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from hypothesis import settings

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("fovea", deadline=None)
settings.load_profile("fovea")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure() -> None:
    forks = sys.modules.get("tests.support.forks")
    if forks is not None:
        forks.stop()
