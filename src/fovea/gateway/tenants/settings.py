"""Settings of the accounts of tenants: where they are kept, and what happens if that place fails."""

from __future__ import annotations

from dataclasses import dataclass

from fovea.core.settings import check_settings, setting

ON_FAILURE = ("refuse", "local")
SCHEMES = ("redis://", "rediss://", "unix://")


def check_accounts(text: str) -> str:
    """Return an empty text if a place for accounts is accepted, otherwise the accepted ones in words."""
    if text == "memory" or text.startswith(SCHEMES) or (text.startswith("sqlite:") and len(text) > 7):
        return ""
    return "memory, sqlite:PATH, redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix://PATH"


@dataclass(frozen=True, slots=True)
class AccountSettings:
    """Settings of the tenants' accounts: their store, and its failures."""

    accounts: str = setting(
        "memory",
        "Where the accounts of tenants are kept. memory: in this process, for one gateway with one worker; "
        "sqlite:PATH: in a file, for all processes of one machine; redis://HOST:PORT/DB: in Redis, for any "
        "number of gateways.",
        check=check_accounts,
    )
    accounts_on_failure: str = setting(
        "refuse",
        "What happens to requests of tenants with limits while the store of the accounts fails. refuse: "
        "status 503; local: every worker admits its part of each limit.",
        choices=ON_FAILURE,
    )
    accounts_sharers: int = setting(
        1,
        "Workers of all gateways that share the store. While it fails, each admits the limit divided by "
        "this number.",
        low=1,
        high=10_000,
    )
    accounts_timeout_s: float = setting(
        0.2, "Seconds that a request waits for the store of the accounts.", low=0.01, high=10
    )
    accounts_lease_s: float = setting(
        3600.0,
        "Seconds after which a reservation that was not settled ends with the amounts that it had reserved. "
        "Longer than the longest request.",
        low=1,
        high=604_800,
    )
    accounts_pending: int = setting(
        10_000,
        "Changes that one worker keeps while the store fails, about 1 KB each. The oldest are dropped beyond "
        "that.",
        low=1,
        high=10_000_000,
    )

    def __post_init__(self) -> None:
        check_settings(self)
