"""GPUs that pools can name, the MIG profiles that exist on each, and which of them fit on one GPU together.

Profiles are those of NVIDIA's MIG user guide (tables of supported GPUs and profiles). A profile's name holds
its share of compute ("3g" of seven) and its memory. A GPU of seven compute slices has eight memory slices; an
A30 has four and four. An instance takes as many memory slices as its profile has of the memory, and it may
begin at few places only: those that `nvidia-smi mig -lgipp` prints. So three 3g.20gb, which are 60 GB of 40
and nine compute slices of seven, do not fit on an A100-40GB: `mig -cgi 9,9,9` creates two at most.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from fovea.core.errors import ConfigError
from fovea.planner.hardware import Hardware, find, known_hardware

PRODUCTS: dict[str, tuple[str, ...]] = {
    "T4": ("Tesla-T4",),
    "L4": ("NVIDIA-L4",),
    "A10": ("NVIDIA-A10", "NVIDIA-A10G"),
    "L40S": ("NVIDIA-L40S",),
    "A30": ("NVIDIA-A30",),
    "A100-40GB": ("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-PCIE-40GB"),
    "A100-80GB": ("NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-80GB-PCIe"),
    "A100-80GB-PCIe": ("NVIDIA-A100-80GB-PCIe",),
    "H100-80GB": ("NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe"),
    "H100-PCIe": ("NVIDIA-H100-PCIe",),
    "H100-96GB": ("NVIDIA-H100-96GB-HBM3", "NVIDIA-GH200-480GB"),
    "H200-141GB": ("NVIDIA-H200", "NVIDIA-H200-NVL"),
    "B200-180GB": ("NVIDIA-B200",),
    "RTX-4090": ("NVIDIA-GeForce-RTX-4090",),
    "RTX-5090": ("NVIDIA-GeForce-RTX-5090",),
}
"""The GPUs, with the values that the GPU operator gives the label nvidia.com/gpu.product: the driver's names.

They are those of the planner's catalogue that an engine can use, by a name or alias there, and a few more."""
GPUS = tuple(PRODUCTS)

_OF_80_GB = ("1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")
MIG_PROFILES: dict[str, tuple[str, ...]] = {
    "A30": ("1g.6gb", "1g.6gb+me", "2g.12gb", "2g.12gb+me", "4g.24gb"),
    "A100-40GB": ("1g.5gb", "1g.5gb+me", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"),
    **dict.fromkeys(("A100-80GB", "A100-80GB-PCIe", "H100-80GB", "H100-PCIe"), _OF_80_GB),
    "H100-96GB": ("1g.12gb", "1g.12gb+me", "1g.24gb", "2g.24gb", "3g.48gb", "4g.48gb", "7g.96gb"),
    "H200-141GB": ("1g.18gb", "1g.18gb+me", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"),
    "B200-180GB": ("1g.23gb", "1g.23gb+me", "1g.45gb", "2g.45gb", "3g.90gb", "4g.90gb", "7g.180gb"),
}
"""MIG profiles by GPU. A GPU that is not listed has no MIG."""


_PROFILE = re.compile(r"(\d)g\.(\d+)gb(\+me)?")
_STARTS: Mapping[int, Mapping[str, tuple[int, tuple[int, ...]]]] = {
    # memory slices of the GPU: (compute, memory) of a profile -> its memory slices, and where it may begin
    8: {
        "1": (1, (0, 1, 2, 3, 4, 5, 6)),
        "1 double": (2, (0, 2, 4, 6)),
        "2": (2, (0, 2, 4)),
        "3": (4, (0, 4)),
        "4": (4, (0,)),
        "7": (8, (0,)),
    },
    4: {"1": (1, (0, 1, 2, 3)), "2": (2, (0, 2)), "4": (4, (0,))},
}


def hardware_of(gpu: str) -> Hardware | None:
    """Return a GPU as the planner knows it; None: it does not."""
    try:
        return find(gpu, known_hardware()) if gpu else None
    except ConfigError:
        return None


def check_engine(gpu: str, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError if an engine with these settings refuses a GPU, or one of these values.

    settings: those of `fovea serve`. A GPU that the planner does not know is not checked.
    """
    hardware = hardware_of(gpu)
    own = {name: settings[name] for name in ("quantization", "kv_dtype", "kernels") if name in settings}
    if hardware is None or not own:
        return
    from fovea.engine.config import EngineConfig  # only such specs need it

    dtype = settings.get("dtype", "auto")
    EngineConfig.of(**own).check_on(hardware.device, "bfloat16" if dtype == "auto" else str(dtype))


def check_profile(gpu: str, profile: str) -> None:
    """Raise ConfigError if the GPU has no such profile."""
    profiles = MIG_PROFILES.get(gpu, ())
    if profile not in profiles:
        accepted = ", ".join(profiles) or "none, it has no MIG"
        raise ConfigError(f"mig is {profile!r}; profiles of {gpu}: {accepted}", param="mig")


def mig_places(gpu: str, profile: str) -> tuple[int, tuple[int, ...]]:
    """Return the memory slices of a profile, and the slices at which it may begin.

    Raises ConfigError if the GPU has no such profile.
    """
    check_profile(gpu, profile)
    profiles, match = MIG_PROFILES[gpu], _PROFILE.fullmatch(profile)
    assert match is not None  # so are all profiles of the table
    memory = int(match[2])
    smallest = min(int(each[2]) for name in profiles if (each := _PROFILE.fullmatch(name)))
    double = match[1] == "1" and memory > smallest
    return _STARTS[4 if gpu == "A30" else 8][f"{match[1]} double" if double else match[1]]


def mig_fits(gpu: str, profiles: Iterable[str]) -> bool:
    """Tell whether instances of these profiles fit on one GPU together.

    At most one instance of a GPU has the media engines (`+me`).
    Raises ConfigError if the GPU has no such profile.
    """
    wanted = sorted(profiles, key=lambda name: -mig_places(gpu, name)[0])
    if sum(name.endswith("+me") for name in wanted) > 1:
        return False
    return _place([mig_places(gpu, name) for name in wanted], 0)


def _place(wanted: list[tuple[int, tuple[int, ...]]], taken: int) -> bool:
    """Tell whether the wanted instances fit beside the taken slices, a set of bits."""
    if not wanted:
        return True
    size, starts = wanted[0]
    masks = (((1 << size) - 1) << start for start in starts)
    return any(_place(wanted[1:], taken | mask) for mask in masks if not taken & mask)


def most_instances(gpu: str, profile: str) -> int:
    """Return how many instances of one profile fit on a GPU."""
    number = 0
    while mig_fits(gpu, [profile] * (number + 1)):
        number += 1
    return number


def mig_resource(profile: str) -> str:
    """Return the resource of a profile, by the mixed strategy of NVIDIA's device plugin."""
    return f"nvidia.com/mig-{profile.replace('+', '.')}"
