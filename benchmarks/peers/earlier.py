"""Results of an earlier run that a new one adds to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SAME = ("instructions", "shape", "repeats", "checkpoint_mib")


def earlier(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The precisions of earlier results, each with the date and the commit that it was measured at.

    Exits with an error if the settings or the processor differ from those of the new results.
    """
    different = [name for name in SAME if old.get(name) != new[name]]
    different += [
        name for name in ("cpu", "cores") if list(old["machine"][name]) != list(new["machine"][name])
    ]
    if different:
        raise SystemExit(
            f"--add: the earlier results differ in {', '.join(different)}; run all precisions again"
        )
    return {
        precision: {"date": old["date"], "commit": old["machine"]["commit"], **part}
        for precision, part in old["precisions"].items()
    }


def _processor(results: Mapping[str, Any]) -> tuple[str, list[int]]:
    return results["machine"]["cpu"], list(results["machine"]["cores"])
