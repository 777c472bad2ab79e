"""Devices that models run on: memory, bandwidth, peak rates, links, power, price, and the source of each.

A device is one GPU, or one socket of a CPU server. Memory is counted in bytes from GiB (2**30), because
memory chips have such sizes: the 80 GB of a data sheet are 80 GiB. Bandwidth, links and rates use powers of
ten, as data sheets do. Rates are dense: data sheets often print twice as much, for weights that are half
zeros.

The built-in table is `hardware.toml`. Users have files of the same form:

[[hardware]]
name = "my-server"
kind = "cpu"                 # or gpu
memory_gib = 256             # GiB of one device
bandwidth_gb_s = 180         # 10**9 bytes per second
peaks = { fp32 = 3.1, bf16 = 6.2 }   # 10**12 operations per second, dense

# All of these may be left out:
vendor = "amd"
aliases = ["box"]
capability = "avx512"        # instruction set of a CPU, compute capability of an NVIDIA GPU ("8.9")
measured = false             # true: peaks are rates of Fovea's own products here, not of a data sheet
usable = 0.8                 # share of the memory for weights, KV and caches
devices = 2                  # devices of one machine; 2 or more need link and link_gb_s
link = "socket"              # how they are linked, and 10**9 bytes per second in each direction
link_gb_s = 64
tdp_w = 280
price_usd_h = 1.20           # of one device
efficiency = { encode = 0.5, prefill = 0.6, decode = 0.8, link = 0.7 }   # shares of the peaks, measured
note = "as configured in rack 3"

[[hardware.source]]
url = "https://example.com/specification"
date = 2026-11-23
figures = ["memory_gib", "bandwidth_gb_s", "peaks"]
"""

from __future__ import annotations

import datetime
import difflib
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fovea.core.config_files import Table, check_keys, read_toml, tables
from fovea.core.errors import ConfigError
from fovea.core.precision import Device, check_capability

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
    capability: what the device can run, see `core.precision.Device`.
    measured: `peaks` are rates of Fovea's own products on this device, not of a data sheet.
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
    capability: str = ""
    measured: bool = False

    @property
    def device(self) -> Device:
        """The device for the table of what runs where. A GPU without a vendor is taken for one of NVIDIA."""
        gpu = {"": "cuda", "nvidia": "cuda", "amd": "rocm"}.get(self.vendor, "other")
        return Device(self.name, "cpu" if self.kind == "cpu" else gpu, self.capability)

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


FILE = Path(__file__).with_name("hardware.toml")
"""The built-in table."""
GIB, GIGA, TERA = 2**30, 1e9, 1e12
FIGURES = ("memory_gib", "bandwidth_gb_s", "peaks", "link_gb_s", "tdp_w", "price_usd_h", "efficiency")
"""Fields that hold figures, so that a source can name them."""
_KEYS = (
    *FIGURES, "name", "kind", "vendor", "aliases", "capability", "measured", "usable", "devices", "link",
    "note", "source",
)  # fmt: skip


@functools.cache
def known_hardware() -> tuple[Hardware, ...]:
    """Return the devices of the built-in table, in its order."""
    return read_hardware(FILE)


def read_hardware(path: Path) -> tuple[Hardware, ...]:
    """Return the devices of a file, in its order.

    Raises ConfigError, which names the file, the device, the field and the accepted values.
    """
    where = f"hardware file {path}"
    content = read_toml(path, "hardware file")
    check_keys(where, content, ("hardware",))
    found = [
        _device(where, number, table) for number, table in enumerate(tables(where, content, "hardware"), 1)
    ]
    if not found:
        raise ConfigError(
            f"{where} has no device; accepted: a table [[hardware]] for each device", param="hardware"
        )
    names = [device.name for device in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{where}: two devices have the name {name!r}", param="name")
    return tuple(found)


def _device(file: str, number: int, values: Mapping[str, Any]) -> Hardware:
    where = f"{file}, [[hardware]] number {number}"
    check_keys(where, values, _KEYS)
    name = Table(where, values).text("name")
    table = Table(f"{file}, {name!r}", values)
    peaks = table.numbers("peaks", ARITHMETIC, 1e-6, 1e6)
    if "fp32" not in peaks:
        raise ConfigError(f"{table.where}: peaks has no fp32; every device computes in fp32", param="peaks")
    devices = table.whole("devices", 1, 1024, 1)
    link = table.text("link", "", choices=("", *LINKS))
    if (devices > 1) != bool(link) or bool(link) != ("link_gb_s" in values):
        raise ConfigError(
            f"{table.where}: devices is {devices} and link is {link!r}; accepted: devices of 2 or more "
            "with link and link_gb_s, or one device without them",
            param="link",
        )
    kind, capability = table.text("kind", choices=KINDS), table.text("capability", "")
    if accepted := check_capability(kind, capability):
        raise ConfigError(
            f"{table.where}: capability is {capability!r}; accepted for a {kind}: {accepted}",
            param="capability",
        )
    return Hardware(
        name=name,
        kind=kind,
        vendor=table.text("vendor", "").lower(),
        memory_bytes=round(table.number("memory_gib", 0.1, 1e6) * GIB),
        bandwidth=table.number("bandwidth_gb_s", 0.1, 1e6) * GIGA,
        peaks=MappingProxyType({kind: rate * TERA for kind, rate in peaks.items()}),
        usable=table.number("usable", 0.01, 1.0, 0.9),
        devices=devices,
        link_kind=link,
        link_bandwidth=(table.optional_number("link_gb_s", 0.001, 1e6) or 0.0) * GIGA,
        tdp=table.optional_number("tdp_w", 0.1, 1e5),
        price=table.optional_number("price_usd_h", 0.0, 1e4),
        efficiency=MappingProxyType(table.numbers("efficiency", STAGES, 0.001, 1.0)),
        aliases=table.texts("aliases"),
        sources=tuple(_source(table.where, source) for source in tables(table.where, values, "source")),
        note=table.text("note", ""),
        capability=capability,
        measured=table.flag("measured", False),
    )


def _source(where: str, values: Mapping[str, Any]) -> Source:
    where = f"{where}, [[hardware.source]]"
    check_keys(where, values, ("url", "date", "figures", "how"))
    table = Table(where, values)
    return Source(
        table.text("url"), table.day("date"), table.texts("figures", FIGURES), table.text("how", "")
    )
