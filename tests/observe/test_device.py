"""Metrics of GPUs from a library that the test provides, and what is left without one."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fovea.observe.device import Devices, find_devices, load_nvml
from fovea.observe.metrics import Metrics
from tests.observe.test_metrics import MODEL, families, value

GIB = 2**30


class FakeError(Exception):
    """An error of NVML."""


class FakeNvml:
    """NVML with two GPUs. The second reports no energy, as older ones do, and no utilization, as with MIG."""

    NVMLError = FakeError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        self.readings = 0

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-aaaa000{handle}-77"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=(handle + 1) * GIB, total=80 * GIB)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self.readings += 1
        if handle == 1:
            raise FakeError("not supported")
        return SimpleNamespace(gpu=75, memory=10)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 60 + handle

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 350_500

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        if handle == 1:
            raise FakeError("not supported")
        return 9_000_500


async def test_figures_of_gpus_have_base_units_and_the_documents_names() -> None:
    metrics = Metrics(dict, "model", "1.2", Devices(FakeNvml))
    assert not any(name.startswith("fovea:device") for name in families(metrics)), "nothing was read yet"
    await metrics.refresh()
    assert value(metrics, "fovea:device_memory_used_bytes", gpu="1") == 2 * GIB
    assert value(metrics, "fovea:device_memory_total_bytes", gpu="0") == 80 * GIB
    assert value(metrics, "fovea:device_utilization_share", gpu="0") == 0.75
    assert value(metrics, "fovea:device_temperature_celsius", gpu="1") == 61
    assert value(metrics, "fovea:device_power_watts", gpu="0") == 350.5
    assert value(metrics, "fovea:device_energy_joules_total", gpu="0") == 9000.5
    assert len(families(metrics)["fovea:device_energy_joules"].samples) == 1
    assert len(families(metrics)["fovea:device_utilization_share"].samples) == 1
    assert value(metrics, "gpu_memory_used_bytes", gpu="0") == GIB
    assert value(metrics, "vllm_gpu_memory_usage_bytes", gpu="1", **MODEL) == 2 * GIB


async def test_a_gpu_that_cannot_be_opened_does_not_break_a_scrape(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(self: FakeNvml, index: int) -> int:
        raise FakeError("GPU is lost")

    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetHandleByIndex", lost)
    metrics = Metrics(dict, "model", "1.2", Devices(FakeNvml))
    for _ in range(2):
        await metrics.refresh()
    assert "fovea:requests" in families(metrics)
    assert [record.message for record in caplog.records] == ["there are no metrics of GPUs: GPU is lost"]


async def test_scrapes_within_a_second_share_a_reading() -> None:
    now, nvml = [5.0], FakeNvml()
    metrics = Metrics(dict, "model", "1.2", Devices(lambda: nvml, clock=lambda: now[0]))
    for at, readings in ((5.0, 2), (5.9, 2), (6.0, 4), (6.9, 4), (60.0, 6)):
        now[0] = at
        await metrics.refresh()
        families(metrics)
        assert nvml.readings == readings


@pytest.mark.parametrize(
    ("visible", "found"),
    [(None, "01"), ("", ""), ("1", "1"), ("0,1", "01"), ("GPU-aaaa0001", "1"), ("7", ""), ("-1", "")],
)
def test_only_visible_gpus_are_read(visible: str | None, found: str) -> None:
    assert "".join(find_devices(FakeNvml(), visible)) == found


async def test_without_a_driver_the_log_says_so_once_and_nothing_else_is_missing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise FakeError("Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=fail))
    metrics = Metrics(dict, "model", "1.2", Devices(load_nvml))
    with caplog.at_level(logging.INFO, "fovea.observe"):
        for _ in range(3):
            await metrics.refresh()
    assert [record.message for record in caplog.records] == [
        "there are no metrics of GPUs: Driver Not Loaded"
    ]
    assert "fovea:requests" in families(metrics)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with caplog.at_level(logging.INFO, "fovea.observe"):
        assert load_nvml() is None
    assert "not installed" in caplog.records[-1].message
