"""Which emulated processor is chosen for which features."""

from __future__ import annotations

import pytest

from tests.arm.cpus import cpuinfo, features, least

AVAILABLE = {
    "plain": frozenset({"fp", "asimd"}),
    "dot": frozenset({"fp", "asimd", "asimddp"}),
    "all": frozenset({"fp", "asimd", "asimddp", "i8mm", "bf16"}),
}


def test_features_are_named_by_their_bits() -> None:
    assert features(0x100003, 0) == {"fp", "asimd", "asimddp"}
    assert features(0, 0x6000) == {"i8mm", "bf16"}
    assert features(0x887, 0) == {"fp", "asimd", "evtstrm", "crc32", "cpuid"}


def test_the_least_sufficient_processor_is_chosen() -> None:
    assert least(frozenset({"asimd"}), AVAILABLE) == "plain"
    assert least(frozenset({"asimddp"}), AVAILABLE) == "dot"
    assert least(frozenset({"asimddp", "bf16"}), AVAILABLE) == "all"
    with pytest.raises(ValueError, match="has asimd, sve; emulated are: plain, dot, all"):
        least(frozenset({"sve", "asimd"}), AVAILABLE)


def test_cpuinfo_lists_the_features_in_the_order_of_linux() -> None:
    lines = cpuinfo(frozenset({"bf16", "asimddp", "fp"})).splitlines()
    assert "Features\t: fp asimddp bf16" in lines
