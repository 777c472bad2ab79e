"""All checks, in the order in which they run."""

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
)

CHECKS: tuple[Check, ...] = (
    *machine.CHECKS,
    *model.CHECKS,
    *engine.CHECKS,
    *answers.CHECKS,
    *caches.CHECKS,
    *limits.CHECKS,
    *exposure.CHECKS,
    *monitoring.CHECKS,
    *load.CHECKS,
    *faults.CHECKS,
)
