"""Triton decides when it is first imported whether kernels are compiled for a card or interpreted on the CPU."""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
