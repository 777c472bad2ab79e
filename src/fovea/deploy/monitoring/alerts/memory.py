"""Alerts on memory of a machine and of a device."""

from __future__ import annotations

from fovea.deploy.monitoring.recording import JOBS
from fovea.deploy.monitoring.rule import Alert, Condition

WHERE = "{{ $labels.instance }}"
RESIDENT = f"process_resident_memory_bytes{{{JOBS}}}"
LIMIT = f"cgroup_memory_limit_bytes{{{JOBS}}}"


def memory_alerts() -> list[Alert]:
    """Return the alerts on memory.

    The use of a control group includes pages of files, which the kernel drops when it needs room, so the
    first alert compares the resident memory of the processes with the limit. Without a limit that is 0.
    """
    return [
        Alert(
            "FoveaMemoryNearLimit", "critical", "5m",
            (Condition(f"{RESIDENT} / {LIMIT}", "> 0.9"),),
            f"{WHERE} has nearly reached its limit of memory",
            f"The processes of {WHERE} hold {{{{ $value | humanizePercentage }}}} of the memory that their "
            "container may use. At 100% the system ends one of them.",
        ),
        Alert(
            "FoveaMemoryGrowing", "warning", "30m",
            (
                Condition(
                    f"min_over_time({RESIDENT}[1h]) / max_over_time({RESIDENT}[1h] offset 6h)", "> 1.2"
                ),
                Condition(f"deriv({RESIDENT}[2h])", "> 0"),
            ),
            f"The memory of {WHERE} grows",
            f'The resident memory of {WHERE} is {{{{ $value | printf "%.2f" }}}} times what it was 6 hours '
            "ago, and grows on.",
        ),
        Alert(
            "FoveaDeviceMemoryNearlyFull", "warning", "5m",
            (Condition("fovea:device_memory_used_bytes / fovea:device_memory_total_bytes", "> 0.97"),),
            f"GPU {{{{ $labels.gpu }}}} of {WHERE} has hardly any free memory",
            f"{{{{ $value | humanizePercentage }}}} of the memory of GPU {{{{ $labels.gpu }}}} of {WHERE} is "
            "in use. The next large image can fail for lack of it.",
        ),
    ]  # fmt: skip
