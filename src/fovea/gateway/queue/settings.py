"""Settings of the fair queue."""

from __future__ import annotations

from dataclasses import dataclass

from fovea.core.settings import check_settings, setting


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Bounds of the queue, and the form of its fairness."""

    queue_length: int = setting(4096, "Most requests that wait, of all tenants.", low=1, high=10**6)
    queue_length_per_tenant: int = setting(512, "Most requests of one tenant that wait.", low=1, high=10**6)
    queue_quantum: int = setting(
        8192,
        "Tokens that a tenant of weight 1 sends per round of the fair queue. A tenant that was idle sends "
        "this many at once, before the tenants that wait already.",
        low=256,
        high=10**7,
    )
    queue_headroom: float = setting(
        0.125,
        "Share of the capacity that is kept free, for tenants that come back, while others wait. "
        "0 turns it off. A request larger than that must leave as much free as it takes, up to a quarter of "
        "the capacity. Nothing is kept free while all recent tenants wait, or if there is only one.",
        low=0.0,
        high=0.5,
    )
    queue_class_share: float = setting(
        0.1,
        "Share of the tokens that less urgent requests get while more urgent ones wait.",
        low=0.001,
        high=0.5,
    )
    queue_recent_s: float = setting(
        60.0, "Seconds after its last request in which a tenant counts as recent.", low=0.1, high=86_400
    )

    def __post_init__(self) -> None:
        check_settings(self)
