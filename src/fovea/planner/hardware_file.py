"""Reader of hardware files: the built-in one, and those of users.

[[hardware]]
name = "my-server"
kind = "cpu"                 # or gpu
memory_gib = 256             # GiB of one device
bandwidth_gb_s = 180         # 10**9 bytes per second
peaks = { fp32 = 3.1, bf16 = 6.2 }   # 10**12 operations per second, dense

# All of these may be left out:
vendor = "amd"
aliases = ["box"]
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

import functools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fovea.core.errors import ConfigError
from fovea.planner.hardware import ARITHMETIC, KINDS, LINKS, STAGES, Hardware, Source
from fovea.planner.toml_values import Table, check_keys, read_toml, tables

FILE = Path(__file__).with_name("hardware.toml")
"""The built-in table."""
GIB, GIGA, TERA = 2**30, 1e9, 1e12
FIGURES = ("memory_gib", "bandwidth_gb_s", "peaks", "link_gb_s", "tdp_w", "price_usd_h", "efficiency")
"""Fields that hold figures, so that a source can name them."""
_KEYS = (
    *FIGURES, "name", "kind", "vendor", "aliases", "usable", "devices", "link", "note", "source",
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
    found = [_device(where, number, table) for number, table in enumerate(_tables(where, content), 1)]
    names = [device.name for device in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{where}: two devices have the name {name!r}", param="name")
    return tuple(found)


def _tables(where: str, content: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = tables(where, content, "hardware")
    if not found:
        raise ConfigError(f"{where} has no device; accepted: one [[hardware]] for each", param="hardware")
    return found


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
    return Hardware(
        name=name,
        kind=table.text("kind", choices=KINDS),
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
    )


def _source(where: str, values: Mapping[str, Any]) -> Source:
    where = f"{where}, [[hardware.source]]"
    check_keys(where, values, ("url", "date", "figures", "how"))
    table = Table(where, values)
    return Source(
        table.text("url"), table.day("date"), table.texts("figures", FIGURES), table.text("how", "")
    )
