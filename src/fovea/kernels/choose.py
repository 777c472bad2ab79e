"""Chooses the set of kernels that a model runs on, its threads, and the folders of compiled code.

The caches of torch's compiler, Triton and FlashInfer hold machine code that is loaded without a check. By
default torch's is in /tmp, under a name that another user can take first. So each of them must be a folder
that no other user can change; otherwise this process gets one of its own.
"""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec
from pathlib import Path

import torch

from fovea.core.errors import ConfigError
from fovea.core.hardware import physical_cores, usable_cores
from fovea.core.precision import Device
from fovea.core.private_files import exposure, private_folder, temporary_folder
from fovea.kernels import flash
from fovea.kernels.attention import ChunkAttention, Heads, prefill_each
from fovea.kernels.base import Kernels
from fovea.kernels.native.build import build_failure, library
from fovea.kernels.native.instruction_sets import VARIABLE, chosen
from fovea.kernels.native.kernels import NativeKernels
from fovea.kernels.torch_kernels import TorchKernels

log = logging.getLogger("fovea.kernels")
TORCH, TRITON, FLASHINFER = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"


def choose(name: str, device: torch.device, dtype: torch.dtype, heads: Heads) -> Kernels:
    """Return the kernels for a device and a type.

    name: "auto": the best kernels that device, type and machine allow; otherwise one of "native", "onednn",
        "torch", "triton", "flashinfer".
    heads: heads of the decoder.

    Raises ConfigError if the name is "native", "triton" or "flashinfer" and these kernels cannot run here.
    """
    if name == "native" and device.type != "cpu":
        raise ConfigError(f"native kernels are for CPUs, the device is {device}", param="kernels")
    if name in ("triton", "flashinfer") or (name == "auto" and device.type == "cuda"):
        return _triton(name, device, dtype, heads)
    if name == "torch" or device.type != "cpu":
        return TorchKernels()
    if name != "onednn" and dtype is torch.bfloat16:
        cpp = library()
        if cpp is not None:
            return NativeKernels(cpp)
    if name == "native":
        raise ConfigError(f"the native kernels cannot run: {_native_obstacle(dtype)}", param="kernels")
    return TorchKernels(pack=True)


def _native_obstacle(dtype: torch.dtype) -> str:
    """Return what the native kernels lack here, and what to do about it."""
    if dtype is not torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        return f"they compute in bfloat16, and the model runs in {name}; start with --dtype bfloat16"
    if chosen() is None:
        if os.environ.get(VARIABLE) == "off":
            return f"{VARIABLE} is off; remove it, or set it to on"
        return "this CPU has none of their instruction sets (AVX2, AVX-512 or NEON); use --kernels torch"
    return f"they could not be compiled: {build_failure()}"


def described(name: str, device: torch.device, dtype: torch.dtype) -> Device:
    """Return a device for the table of what runs where. name: that of the kernels, as in `choose`."""
    if device.type == "cuda":
        kind = "rocm" if torch.version.hip else "cuda"
        numbers = torch.cuda.get_device_capability(device)
        return Device(torch.cuda.get_device_name(device), kind, ".".join(map(str, numbers)))
    native = name in ("auto", "native") and dtype is torch.bfloat16 and library() is not None
    instructions = chosen() if native else None
    return Device(f"the device {device}", "cpu", instructions.name if instructions else "")


def results_depend_on(kernels: Kernels) -> str:
    """Return what decides about the last bits of results: the set of kernels, and its instruction set."""
    instructions = chosen() if isinstance(kernels, NativeKernels) else None
    return f"{type(kernels).__name__} {instructions.name}" if instructions else type(kernels).__name__


def _triton(name: str, device: torch.device, dtype: torch.dtype, heads: Heads) -> Kernels:
    """Return Triton's kernels. If they cannot run, "auto" returns torch's, any other name raises ConfigError.

    CUDA builds of torch bring Triton along.
    """
    obstacle = _triton_obstacle(device)
    if obstacle and name != "auto":
        raise ConfigError(obstacle, param="kernels")
    if obstacle:
        log.warning(
            "%s; torch's kernels are used instead, which read gathered copies of the KV cache", obstacle
        )
        return TorchKernels()
    secure_gpu_caches()
    from fovea.kernels.triton.kernels import TritonKernels

    return TritonKernels(device, _chunks(name, device, dtype, heads))


def _chunks(name: str, device: torch.device, dtype: torch.dtype, heads: Heads) -> ChunkAttention:
    """Return FlashInfer's attention of prompts if it works here, otherwise torch's.

    The name "triton" always gets torch's. "flashinfer" raises ConfigError if FlashInfer does not work.
    """
    if name == "triton":
        return prefill_each
    try:
        attention = flash.load(heads, device, dtype)
    except ConfigError as error:
        if name == "flashinfer":
            raise
        log.info("attention of prompts: torch's, over gathered copies of the KV cache; %s", error.message)
        return prefill_each
    log.info("attention of prompts: FlashInfer's, over the KV cache in place")
    return attention


def _triton_obstacle(device: torch.device) -> str:
    """Return the reason why Triton's kernels cannot run; an empty string if they can."""
    if find_spec("triton") is None:
        return "triton kernels need the package triton, which is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"triton kernels are for CUDA, the device is {device}"
    if device.index:
        # Triton launches on the current GPU of the calling thread. In every new thread that is the first one.
        return (
            f"triton kernels run on the first visible GPU only, the device is {device}; "
            "choose the GPU with CUDA_VISIBLE_DEVICES"
        )
    return ""


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
