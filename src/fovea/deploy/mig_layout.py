"""Which MIG profiles fit on a GPU together.

A GPU of seven compute slices has eight memory slices; an A30 has four and four. An instance takes as many
memory slices as its profile has of the memory, and it may begin at few places only. The places are those that
`nvidia-smi mig -lgipp` prints, and that NVIDIA's MIG user guide shows. So three 3g.20gb, which are 60 GB of
40 and nine compute slices of seven, do not fit on an A100-40GB: `mig -cgi 9,9,9` creates two at most.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from fovea.core.errors import ConfigError
from fovea.deploy.gpus import MIG_PROFILES

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


def check_profile(gpu: str, profile: str) -> None:
    """Raise ConfigError if the GPU has no such profile."""
    profiles = MIG_PROFILES.get(gpu, ())
    if profile not in profiles:
        accepted = ", ".join(profiles) or "none, it has no MIG"
        raise ConfigError(f"mig is {profile!r}; profiles of {gpu}: {accepted}", param="mig")


def places(gpu: str, profile: str) -> tuple[int, tuple[int, ...]]:
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


def fits(gpu: str, profiles: Iterable[str]) -> bool:
    """Tell whether instances of these profiles fit on one GPU together.

    At most one instance of a GPU has the media engines (`+me`).
    Raises ConfigError if the GPU has no such profile.
    """
    wanted = sorted(profiles, key=lambda name: -places(gpu, name)[0])
    if sum(name.endswith("+me") for name in wanted) > 1:
        return False
    return _place([places(gpu, name) for name in wanted], 0)


def _place(wanted: list[tuple[int, tuple[int, ...]]], taken: int) -> bool:
    """Tell whether the wanted instances fit beside the taken slices, a set of bits."""
    if not wanted:
        return True
    size, starts = wanted[0]
    masks = (((1 << size) - 1) << start for start in starts)
    return any(_place(wanted[1:], taken | mask) for mask in masks if not taken & mask)


def most(gpu: str, profile: str) -> int:
    """Return how many instances of one profile fit on a GPU."""
    number = 0
    while fits(gpu, [profile] * (number + 1)):
        number += 1
    return number


def devices(profiles: Iterable[str]) -> dict[str, int]:
    """Return the number of each profile."""
    return dict(sorted(Counter(profiles).items()))


def resource(profile: str) -> str:
    """Return the resource of a profile, by the mixed strategy of NVIDIA's device plugin."""
    return f"nvidia.com/mig-{profile.replace('+', '.')}"
