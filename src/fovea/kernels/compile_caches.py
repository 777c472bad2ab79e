"""The cache folders of torch's compiler, Triton and FlashInfer: machine code that is loaded without a check.

By default torch's is in /tmp, under a name that another user can take first. So each of them must be a folder
that no other user can change; otherwise this process gets one of its own.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from fovea.core.private_files import exposure, private_folder, temporary_folder

log = logging.getLogger("fovea.kernels")
TORCH, TRITON, FLASHINFER = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"


def secure_torch_cache() -> None:
    """Let torch's compiler use the folder of TORCHINDUCTOR_CACHE_DIR, or `torch` in the user's cache folder.

    Call it before torch compiles anything. Raises OSError if there is no private folder at all.
    """
    folder = Path(os.environ.get(TORCH) or _home("XDG_CACHE_HOME", ".cache") / "fovea" / "torch")
    _choose(TORCH, folder, private_folder(folder, may_be_link=True))


def secure_gpu_caches() -> None:
    """Check the folders of Triton and FlashInfer. Call it before they are used.

    Raises OSError if there is no private folder at all.
    """
    triton = Path(os.environ.get(TRITON) or _home("TRITON_HOME", "") / ".triton" / "cache")
    _choose(TRITON, triton, exposure(triton, may_be_link=True))
    base = _home(FLASHINFER, "")
    _choose(FLASHINFER, base, exposure(base / ".cache" / "flashinfer", may_be_link=True))


def _home(variable: str, folder: str) -> Path:
    """Return the folder of a variable, or a folder in the user's home; the root if there is no home."""
    try:
        return Path(os.environ.get(variable) or Path.home() / folder)
    except RuntimeError:
        return Path("/") / folder


def _choose(variable: str, folder: Path, reason: str | None) -> None:
    if reason is not None:
        log.warning("a temporary folder replaces the compiler's cache of %s: %s", variable, reason)
        folder = temporary_folder()
    os.environ[variable] = str(folder)
