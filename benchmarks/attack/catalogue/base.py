"""The form of an attack."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from serving import Setup
from wire import Battle


@dataclass(frozen=True)
class Attack:
    """One attack.

    name: for --only and for the table.
    needs: "key" or "no key": what the attacker must have.
    story: one sentence that says what the attacker does.
    run: acts until `Battle.end`.
    prepare: makes the payload before the clock starts; it becomes `Battle.payload`.
    setup: how the server differs from the default.
    """

    name: str
    needs: str
    story: str
    run: Callable[[Battle], Awaitable[Any]]
    prepare: Callable[[], Any] = lambda: None
    setup: Setup = Setup()
