"""The table of devices: its figures have sources, it is read strictly, and spellings find devices."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fovea.core.errors import ConfigError
from fovea.planner.hardware import (
    ARITHMETIC,
    DEFAULT_EFFICIENCY,
    FILE,
    GIB,
    STAGES,
    find,
    known_hardware,
    read_hardware,
)

DEVICES = known_hardware()
MINIMAL = """
[[hardware]]
name = "box"
kind = "cpu"
memory_gib = 64
bandwidth_gb_s = 50
peaks = { fp32 = 1.5 }
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_every_figure_has_a_source(device) -> None:  # type: ignore[no-untyped-def]
    needed = {"memory_gib", "bandwidth_gb_s", "peaks"}
    needed |= {"tdp_w"} if device.tdp is not None else set()
    needed |= {"price_usd_h"} if device.price is not None else set()
    needed |= {"link_gb_s"} if device.link_kind else set()
    needed |= {"efficiency"} if device.efficiency else set()
    assert needed <= {figure for source in device.sources for figure in source.figures}
    assert all(source.url.startswith("http") for source in device.sources)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_rates_double_as_numbers_get_shorter(device) -> None:  # type: ignore[no-untyped-def]
    """A figure with sparsity beside a dense one would break the ratios that the hardware has."""
    peaks = device.peaks
    if "bf16" in peaks and "fp16" in peaks:
        assert peaks["bf16"] == peaks["fp16"]
    if device.vendor == "nvidia" and "bf16" in peaks and "fp8" in peaks:
        assert peaks["fp8"] / peaks["bf16"] == pytest.approx(2, rel=0.03)
    if "int8" in peaks and "bf16" in peaks:
        assert peaks["int8"] / peaks["bf16"] == pytest.approx(4 if "RTX" in device.name else 2, rel=0.03)
    if "fp4" in peaks:
        assert peaks["fp4"] / peaks["fp8"] == pytest.approx(4 if "RTX" in device.name else 2, rel=0.03)


def test_errors_that_documents_often_repeat() -> None:
    """B200 has 8 TB/s, H100 has 3.35 TB/s, and half of the 3,958 TFLOP/s that are printed for fp8."""
    assert find("B200", DEVICES).bandwidth == 8e12
    h100 = find("H100 SXM", DEVICES)
    assert h100.bandwidth == 3.35e12
    assert h100.peaks["fp8"] == pytest.approx(3957.8e12 / 2)
    assert find("H200", DEVICES).peaks == h100.peaks
    assert find("a100-80gb", DEVICES).memory_bytes == 80 * GIB


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("a100-80gb", "A100-80GB"),
        ("A100 80 GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("AMD EPYC 7763 64-Core Processor", "EPYC-7763"),
        ("Intel(R) Xeon(R) Platinum 8480+", "Xeon-8480+"),
        ("milan", "EPYC-7763"),
    ],
)
def test_spellings(spelling: str, name: str) -> None:
    assert find(spelling, DEVICES).name == name


def test_no_two_devices_share_a_spelling() -> None:
    for device in DEVICES:
        for spelling in (device.name, *device.aliases):
            assert find(spelling, DEVICES) is device


@pytest.mark.parametrize("spelling", ["h100", "A100", "A100-SXM4"])
def test_a_name_that_fits_several_devices_lists_them(spelling: str) -> None:
    with pytest.raises(ConfigError, match="can be .* or "):
        find(spelling, DEVICES)


@pytest.mark.parametrize(
    ("spelling", "nearest"), [("H2O0", "H200"), ("H200 NVL", "H200"), ("RTX-5O90", "RTX")]
)
def test_an_unknown_name_is_refused_with_the_nearest(spelling: str, nearest: str) -> None:
    """The H200 NVL is another card than the H200, with lower rates."""
    with pytest.raises(ConfigError, match=f"did you mean .*{nearest}"):
        find(spelling, DEVICES)


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="not known"):
        find("NVIDIA", DEVICES)


def test_numbers_without_a_rate_of_their_own_are_computed_wider() -> None:
    assert find("T4", DEVICES).rate("bf16") == ("fp32", 8.1e12)
    assert find("A100-80GB", DEVICES).rate("fp8") == ("bf16", 312e12)
    assert find("H200", DEVICES).rate("int4") == ("int8", 1978.9e12)
    for device in DEVICES:
        assert all(device.rate(kind)[1] > 0 for kind in ARITHMETIC)


def test_efficiencies_are_shares() -> None:
    assert all(set(shares) == set(STAGES) for shares in DEFAULT_EFFICIENCY.values())
    for device in DEVICES:
        assert all(0 < device.share(stage) <= 1 for stage in STAGES)
    assert find("MI300X", DEVICES).share("prefill") < find("H200", DEVICES).share("prefill")
    assert find("MI300X", DEVICES).share("decode") == DEFAULT_EFFICIENCY["gpu"]["decode"]


def test_a_file_of_the_user_has_the_fields_of_the_table(tmp_path: Path) -> None:
    text = (
        MINIMAL + 'devices = 2\nlink = "socket"\nlink_gb_s = 40\nefficiency = { decode = 0.9 }\ntdp_w = 100\n'
    )
    (box,) = read_hardware(written(tmp_path, text))
    assert (box.memory_bytes, box.bandwidth, box.peaks["fp32"]) == (64 * GIB, 50e9, 1.5e12)
    assert (box.usable_bytes, box.price, box.tdp, box.link_bandwidth) == (
        int(64 * GIB * 0.9),
        None,
        100,
        40e9,
    )
    assert (box.share("decode"), box.share("prefill")) == (0.9, DEFAULT_EFFICIENCY["cpu"]["prefill"])
    assert find("box", (*DEVICES, box)) is box


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("memory_gib = 64", "memory_gb = 64"), "unknown key 'memory_gb'; did you mean 'memory_gib'"),
        (('kind = "cpu"', 'kind = "tpu"'), "'box': kind is 'tpu'; accepted: gpu, cpu"),
        (("bandwidth_gb_s = 50", "bandwidth_gb_s = nan"), "bandwidth_gb_s is nan; accepted: 0.1 to"),
        (("bandwidth_gb_s = 50", "bandwidth_gb_s = true"), "bandwidth_gb_s is True"),
        (("bandwidth_gb_s = 50\n", ""), "bandwidth_gb_s is missing"),
        (("fp32 = 1.5", "fp31 = 1.5"), "did you mean 'fp32'"),
        (("fp32 = 1.5", "bf16 = 1.5"), "peaks has no fp32"),
        (("fp32 = 1.5", "fp32 = -1"), "fp32 is -1; accepted"),
        (('name = "box"', "name = 3"), "number 1: name is 3; accepted: a text"),
        (("kind =", "devices = 2\nkind ="), "devices is 2 and link is ''"),
        (("kind =", "efficiency = { decode = 1.2 }\nkind ="), "decode is 1.2; accepted: 0.001 to 1"),
        (("kind =", "efficiency = { decoding = 0.5 }\nkind ="), "did you mean 'decode'"),
        (("kind =", "devices = 1.5\nkind ="), "accepted: a whole number"),
        (("kind =", "aliases = [1]\nkind ="), "accepted: a list of texts"),
        (("[[hardware]]", "[hardware]"), r"accepted: \[\[hardware\]\]"),
        (("[[hardware]]", "[[hardwares]]"), "did you mean 'hardware'"),
        ((MINIMAL, ""), "has no device"),
        ((MINIMAL, MINIMAL + MINIMAL), "two devices have the name 'box'"),
        (("name =", "name"), "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    assert change[0] in MINIMAL
    path = written(tmp_path, MINIMAL.replace(*change))
    with pytest.raises(ConfigError, match=message) as error:
        read_hardware(path)
    assert str(path) in error.value.message


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('url = "https://x"\ndate = "2026"\nfigures = ["peaks"]', "accepted: a date"),
        ('url = "https://x"\ndate = 2026-01-02T00:00:00\nfigures = ["peaks"]', "accepted: a date"),
        (
            'url = "https://x"\ndate = 2026-01-02\nfigures = ["peak"]',
            "figures is 'peak'; accepted: memory_gib",
        ),
        ('url = ""\ndate = 2026-01-02\nfigures = ["peaks"]', "url is ''"),
    ],
)
def test_a_wrong_source_is_refused(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_hardware(written(tmp_path, f"{MINIMAL}\n[[hardware.source]]\n{source}\n"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_hardware(tmp_path / "missing.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_hardware(tmp_path / "binary.toml")
    (tmp_path / "large.toml").write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(ConfigError, match="larger than"):
        read_hardware(tmp_path / "large.toml")


def test_the_built_in_file_is_what_is_read() -> None:
    assert read_hardware(FILE) == DEVICES
    assert all(math.isfinite(device.bandwidth) for device in DEVICES)
