"""The amount of work of a test: small in the default run, all of it with Hypothesis' profile `thorough`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings

DEFAULT, THOROUGH = 40, 200
"""Examples of a Hypothesis test in each profile."""


def is_thorough() -> bool:
    """Whether the tests run with the profile `thorough`, as `make test-all` does."""
    return settings.default.max_examples >= THOROUGH


def examples(most: int) -> int:
    """Return `most` in the thorough run, and a third of it in the default run."""
    return most if is_thorough() else max(most // 3, 1)


def others_slow(cases: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """Return the cases of a parameter. The default run has the chosen ones, the others are marked slow."""
    cases = list(cases)
    assert all(case in cases for case in chosen), f"{chosen} are not all among {cases}"
    return [case if case in chosen else pytest.param(case, marks=pytest.mark.slow) for case in cases]
