"""Memory, load, temperature and energy of the machine's NVIDIA GPUs, read by NVML (package nvidia-ml-py).

They are read when the metrics are scraped, in a thread, and at most once a second. Without the package or a
driver there are no such metrics, and the log says so once.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fovea.core.names import install_command
from fovea.observe.table import DEVICE_COUNTERS, DEVICE_GAUGES, DEVICE_LABEL

FRESH_S = 1.0
"""Seconds for which a reading serves all scrapes."""
MOST_DEVICES = 64
log = logging.getLogger("fovea.observe")

Reading = dict[str, dict[str, float]]
"""Figures by the number of the GPU, then by the names of `observe.table`."""


def load_nvml() -> Any | None:
    """Return the module pynvml, ready for use; None if it is not installed, or if there is no driver."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        log.info("there are no metrics of GPUs: nvidia-ml-py is not installed (%s)", install_command("nvml"))
        return None
    except Exception as error:  # noqa: BLE001 - NVML's errors are known only if the module is
        log.info("there are no metrics of GPUs: %s", error)
        return None
    return nvml


class Devices:
    """The GPUs that this process may use.

    load: returns the module pynvml; None: there are no GPUs. It is called with the first reading.
    visible: as CUDA_VISIBLE_DEVICES; None: all GPUs.
    clock: returns seconds.
    """

    def __init__(
        self,
        load: Callable[[], Any | None] = load_nvml,
        visible: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._visible = visible
        self._clock = clock
        self._nvml: Any | None = None
        self._handles: dict[str, Any] | None = None
        self._reading: Reading = {}
        self._read_at = float("-inf")
        self._lock = threading.Lock()

    @classmethod
    def of_process(cls) -> Devices:
        """Return the GPUs that CUDA_VISIBLE_DEVICES allows."""
        return cls(visible=os.environ.get("CUDA_VISIBLE_DEVICES"))

    @property
    def stale(self) -> bool:
        """Whether `read` would look at the GPUs again. Without GPUs it looks once."""
        return self._handles != {} and self._clock() - self._read_at >= FRESH_S

    def read(self) -> None:
        """Read the figures of all GPUs. It blocks: the first call loads the driver's library."""
        with self._lock:
            if not self.stale:
                return
            if self._handles is None:
                self._nvml = self._load()
                self._handles = self._find()
            self._reading = {gpu: figures(self._nvml, handle) for gpu, handle in self._handles.items()}
            self._read_at = self._clock()

    def _find(self) -> dict[str, Any]:
        """Find the GPUs once. A failure must not make scrapes fail: the other metrics do not need NVML."""
        nvml = self._nvml
        if nvml is None:
            return {}
        try:
            return find_devices(nvml, self._visible)
        except nvml.NVMLError as error:
            log.warning("there are no metrics of GPUs: %s", error)
            return {}

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of the last reading. A figure that no GPU reports is absent."""
        families: list[Metric] = []
        for kind, rows in ((GaugeMetricFamily, DEVICE_GAUGES), (CounterMetricFamily, DEVICE_COUNTERS)):
            for name, text in rows.items():
                values = {gpu: row[name] for gpu, row in self._reading.items() if name in row}
                family = kind(f"fovea:{name}", text, labels=[DEVICE_LABEL])
                for gpu, value in values.items():
                    family.add_metric([gpu], value)
                families += [family] if values else []
        return families


def find_devices(nvml: Any, visible: str | None) -> dict[str, Any]:
    """Return the handles of the visible GPUs by their numbers.

    visible: numbers or the beginnings of UUIDs, with commas between; None: all.
    """
    wanted = None if visible is None else {name.strip() for name in visible.split(",")} - {""}
    found = {}
    for number in range(min(nvml.nvmlDeviceGetCount(), MOST_DEVICES)):
        handle = nvml.nvmlDeviceGetHandleByIndex(number)
        uuid = nvml.nvmlDeviceGetUUID(handle)
        if wanted is None or any(name == str(number) or _is_uuid(name, uuid) for name in wanted):
            found[str(number)] = handle
    return found


def _is_uuid(name: str, uuid: str) -> bool:
    return name.startswith("GPU-") and uuid.startswith(name)


def figures(nvml: Any, handle: Any) -> dict[str, float]:
    """Return what a GPU reports about itself now, by the names of `observe.table` and in their units."""
    readers: dict[str, Callable[[], float]] = {
        "device_memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        "device_memory_total_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total,
        "device_utilization_share": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "device_temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(
            handle, nvml.NVML_TEMPERATURE_GPU
        ),
        "device_power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "device_energy_joules": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000,
    }
    values = {}
    for name, reader in readers.items():
        try:
            values[name] = float(reader())
        except nvml.NVMLError:  # this GPU does not report it, as with MIG, or it is lost
            continue
    return values
