"""Limits of one client, as the keys file states them for its keys."""

from __future__ import annotations

from dataclasses import dataclass

from fovea.core.settings import check_settings, setting


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that all keys of one client share. The defaults are no limits."""

    requests_per_minute: int = setting(
        0, "Requests per minute. As many may come at once. 0: no limit.", low=0, high=10_000_000
    )
    tokens_per_minute: int = setting(
        0,
        "Tokens of prompts and answers per minute, visual tokens included. As many may come at once. "
        "0: no limit.",
        low=0,
        high=1_000_000_000,
    )
    places: int = setting(
        0,
        "Choices that load their images, wait or run at one time. 0: as max_places_per_key says.",
        low=0,
        high=1_000_000,
    )
    cache_share: float = setting(
        1.0,
        "Part of each cache of images that the client's entries may fill. Below 1 the server needs "
        "cache_scope key.",
        low=0,
        high=1,
    )
    min_priority: int = setting(
        -1000,
        "Smallest priority that a request may name; smaller ones are served first.",
        low=-1000,
        high=1000,
    )
    max_n: int = setting(
        0, "Most choices of one request, all its prompts together. 0: no limit.", low=0, high=4096
    )
    max_timeout_s: float = setting(
        0.0, "Longest timeout of a request in seconds, also of one that names none. 0: no limit.",
        low=0, high=86400,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_settings(self)


NO_LIMITS = Limits()
