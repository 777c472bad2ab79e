"""The checks, one file per group, and all of them in the order in which they run."""

from __future__ import annotations

from fovea.doctor.check import Check
from fovea.doctor.checks import (
    answers,
    caches,
    engine,
    exposure,
    faults,
    limits,
    load,
    machine,
    model,
    monitoring,
)  # fmt: skip

GROUPS = (machine, model, engine, answers, caches, limits, exposure, monitoring, load, faults)
CHECKS: tuple[Check, ...] = tuple(check for group in GROUPS for check in group.CHECKS)
