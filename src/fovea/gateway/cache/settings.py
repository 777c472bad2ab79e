"""Settings of the response cache."""

from __future__ import annotations

from dataclasses import dataclass

from fovea.core.settings import check_settings, setting

MIB = 1024 * 1024
KIB = 1024


@dataclass(frozen=True, slots=True)
class ResponseCacheSettings:
    """Ceilings and times of the response cache. Every worker process has a memory of its own."""

    response_cache_mib: int = setting(
        64,
        "Ceiling of the answers in each worker's memory, in MiB. 0 turns the cache off.",
        low=0,
        high=1 << 20,
    )
    response_cache_ttl_s: float = setting(
        3600.0, "Seconds for which a stored answer is used.", low=1, high=30 * 86_400
    )
    response_cache_stale_s: float = setting(
        3600.0,
        "Seconds after that for which an answer is kept, for the case that no backend can answer.",
        low=0,
        high=30 * 86_400,
    )
    response_cache_scope: str = setting(
        "tenant",
        "Who shares answers: tenant keeps every tenant's answers apart, shared gives them to all tenants.",
        choices=("tenant", "shared"),
    )
    response_cache_share: float = setting(
        0.5, "Part of each worker's memory that the answers of one tenant may fill.", low=0.001, high=1
    )
    response_cache_answer_kib: int = setting(
        1024, "Largest answer that is stored, in KiB of its JSON.", low=1, high=64 * 1024
    )
    response_cache_recording_mib: int = setting(
        64,
        "Ceiling of the bytes of all answers that a worker is recording, in MiB. Beyond it, new answers are "
        "forwarded and not stored.",
        low=1,
        high=1 << 20,
    )
    response_cache_wait_s: float = setting(
        30.0,
        "Seconds for which a request waits for the answer to an equal request that came before. Then it is "
        "sent to a backend itself. 0: it never waits.",
        low=0,
        high=86_400,
    )
    response_cache_redis_timeout_ms: float = setting(
        100.0, "Milliseconds after which Redis counts as failed.", low=1, high=10_000
    )
    response_cache_redis_mib: int = setting(
        0,
        "Nothing more is stored in Redis while the server uses this much memory, in MiB, for all purposes "
        "together. 0: only Redis's own maxmemory bounds it.",
        low=0,
        high=1 << 30,
    )
    response_cache_near_ttl_s: float = setting(
        60.0,
        "Seconds for which a worker's memory has a copy of an answer in Redis. An answer that was cleared "
        "can be found in the memory of other workers for so long.",
        low=0.1,
        high=86_400,
    )

    def __post_init__(self) -> None:
        check_settings(self)
