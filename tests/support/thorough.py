"""The amount of work of a test: small in the default run, all of it with Hypothesis' profile `thorough`."""

from __future__ import annotations

from hypothesis import settings

DEFAULT, THOROUGH = 40, 200
"""Examples of a Hypothesis test in each profile."""


def is_thorough() -> bool:
    """Whether the tests run with the profile `thorough`, as `make test-all` does."""
    return settings.default.max_examples >= THOROUGH


def examples(most: int) -> int:
    """Return `most` in the thorough run, and a third of it in the default run."""
    return most if is_thorough() else max(most // 3, 1)
