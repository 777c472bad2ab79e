"""Devices that models run on: memory, bandwidth, peak rates, links, power, price, and the source of each.

A device is one GPU, or one socket of a CPU server. Memory is counted in bytes from GiB (2**30), because
memory chips have such sizes: the 80 GB of a data sheet are 80 GiB. Bandwidth, links and rates use powers of
ten, as data sheets do. Rates are dense: data sheets often print twice as much, for weights of which half are
zero.

The built-in table is `hardware.toml`; `planner.hardware_file` reads it and tables of users.
"""

from __future__ import annotations

import datetime
import difflib
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from fovea.core.errors import ConfigError

KINDS = ("gpu", "cpu")
"""Kinds of devices."""
ARITHMETIC = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8", "int4")
"""Types of numbers for which a device can have a rate of its own. Sums are wider: float32, or int32."""
LINKS = ("nvlink", "infinity-fabric", "ethernet", "pcie", "socket")
"""Kinds of links between the devices of one machine. socket: between the CPUs of a mainboard."""
STAGES = ("encode", "prefill", "decode", "link")
"""Parts of a request's time that have an efficiency.

encode: the vision tower, a share of the peak rate. prefill: the prompt, a share of the peak rate. decode: one
token after the other, a share of the bandwidth. link: exchange between devices, a share of the link.
"""
DEFAULT_EFFICIENCY: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "gpu": MappingProxyType({"encode": 0.4, "prefill": 0.5, "decode": 0.7, "link": 0.7}),
        "cpu": MappingProxyType({"encode": 0.5, "prefill": 0.5, "decode": 0.7, "link": 0.7}),
    }
)
"""Shares of the peaks that engines usually reach, by kind of device. docs/planner-hardware.md has reasons."""
_NEXT = {
    "fp4": "fp8",
    "fp8": "bf16",
    "int4": "int8",
    "int8": "bf16",
    "bf16": "fp32",
    "fp16": "fp32",
    "tf32": "fp32",
}
"""The type in which numbers are computed if a device has no rate for their own."""
_NOISE = frozenset(("nvidia", "amd", "intel", "aws", "geforce", "tesla", "instinct", "gpu", "r", "tm", "cpu"))
"""Words that do not tell devices apart."""
_WORD = r"[a-z0-9]+\+?"


@dataclass(frozen=True, slots=True)
class Source:
    """The page that some figures of a device were read from.

    url: address of the page.
    date: day that the page gives for its figures; if it gives none, the day on which it was read.
    figures: names of the fields of the file that were read there, or follow from it.
    how: how they follow, if the page does not print them as they are.
    """

    url: str
    date: datetime.date
    figures: tuple[str, ...]
    how: str = ""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device.

    name: the name in tables, such as "H100-SXM".
    kind: "gpu" or "cpu" (KINDS).
    vendor: its maker, in lower case.
    memory_bytes: memory of the device. Of a CPU: of a socket, as the machine was configured.
    bandwidth: bytes per second from memory, at most.
    peaks: operations per second by type (ARITHMETIC), dense, at most. A multiplication and an addition are
        two.
    usable: share of the memory for weights, KV and caches; the rest is for error correction, driver and
        copies.
    devices: devices of a usual machine.
    link_kind: link between them (LINKS); empty if there is one device.
    link_bandwidth: bytes per second of one device in each direction.
    tdp: watts at most; None if not published.
    price: US dollars per hour and device, on demand; None if we know no price.
    efficiency: shares of the peaks by stage (STAGES), 0 to 1; other stages have the defaults of the kind.
    aliases: other spellings, as tools print them.
    sources: where the figures are from.
    note: what a reader has to know.
    """

    name: str
    kind: str
    vendor: str
    memory_bytes: int
    bandwidth: float
    peaks: Mapping[str, float]
    usable: float = 0.9
    devices: int = 1
    link_kind: str = ""
    link_bandwidth: float = 0.0
    tdp: float | None = None
    price: float | None = None
    efficiency: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    aliases: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()
    note: str = ""

    @property
    def usable_bytes(self) -> int:
        """Bytes for weights, KV and caches, rounded down."""
        return int(self.memory_bytes * self.usable)

    def share(self, stage: str) -> float:
        """Return the efficiency of a stage (STAGES): the device's own, or the default of its kind."""
        return self.efficiency.get(stage, DEFAULT_EFFICIENCY[self.kind][stage])

    def rate(self, arithmetic: str) -> tuple[str, float]:
        """Return the type in which products are computed, and its peak in operations per second.

        The type is `arithmetic` if the device has a rate for it. Otherwise it is the next wider type that has
        one: without int8 in hardware, weights of 8 bits are multiplied as bf16.
        """
        while arithmetic not in self.peaks:
            arithmetic = _NEXT[arithmetic]
        return arithmetic, self.peaks[arithmetic]


def find(name: str, devices: Iterable[Hardware]) -> Hardware:
    """Return the device of a name, in any of the usual spellings.

    "a100-80gb", "NVIDIA A100-SXM4-80GB" and "A100 80 GB" are the same device. A name that leaves out words is
    accepted if only one device has the others.
    Raises ConfigError, which names the devices that could be meant, or else the nearest names.
    """
    devices = tuple(devices)
    words = _words(name)
    for device in devices:
        if any(words == spelling for spelling in _spellings(device)):
            return device
    meant = [device for device in devices if words and any(words < other for other in _spellings(device))]
    if len(meant) == 1:
        return meant[0]
    names = [device.name for device in devices]
    if meant:
        several = " or ".join(device.name for device in meant)
        raise ConfigError(f"hardware {name!r} can be {several}; accepted: one of these", param="hardware")
    lower = {device.name.lower(): device.name for device in devices}
    plain = "-".join(word for word in re.findall(_WORD, name.lower()) if word not in _NOISE)
    near = difflib.get_close_matches(plain, lower, n=3)
    hint = f"did you mean {', '.join(lower[one] for one in near)}? " if near else ""
    raise ConfigError(
        f"hardware {name!r} is not known; {hint}accepted: {', '.join(names)}, or a name of your own file",
        param="hardware",
    )


def _spellings(device: Hardware) -> list[frozenset[str]]:
    return [_words(spelling) for spelling in (device.name, *device.aliases)]


@functools.lru_cache(maxsize=1024)
def _words(name: str) -> frozenset[str]:
    """Return the words of a name that tell devices apart, in lower case; "80 GB" is one word."""
    joined = re.sub(r"(\d+)[\s-]*gi?b\b", r"\1gb", name.lower())
    return frozenset(re.findall(_WORD, joined)) - _NOISE
