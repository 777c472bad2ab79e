"""Limits of one tenant, as the keys file of the gateway states them for its keys."""

from __future__ import annotations

from dataclasses import dataclass, field

from fovea.core.settings import check_settings, setting
from fovea.gateway.tenants.bounds import MILLIONTHS, NO_BOUNDS, Bounds

SCOPES = ("tenant", "shared")
_MOST = 100_000_000_000
_LEAST_COST = 0.000001
_MOST_COST = 1_000_000_000.0


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits and budgets that all keys of one tenant share. The defaults are no limits.

    bounds: the limits as numbers in the units of `Amounts`.
    """

    requests_per_minute: int = setting(
        0, "Requests per minute. As many may come at once. 0: no limit.", low=0, high=10_000_000
    )
    text_tokens_per_minute: int = setting(
        0,
        "Tokens of text, of prompts and answers together, per minute. As many may come at once. 0: no limit.",
        low=0,
        high=1_000_000_000,
    )
    visual_tokens_per_minute: int = setting(
        0,
        "Tokens of images and videos per minute. As many may come at once. 0: no limit.",
        low=0,
        high=1_000_000_000,
    )
    cost_per_minute: float = setting(
        0.0,
        "Cost per minute, in the currency of the price table, to the millionth. 0: no limit.",
        low=_LEAST_COST,
        high=_MOST_COST,
        or_zero=True,
    )
    requests_per_day: int = setting(0, "Requests of a UTC day. 0: no limit.", low=0, high=_MOST)
    text_tokens_per_day: int = setting(0, "Tokens of text of a UTC day. 0: no limit.", low=0, high=_MOST)
    visual_tokens_per_day: int = setting(
        0, "Tokens of images and videos of a UTC day. 0: no limit.", low=0, high=_MOST
    )
    cost_per_day: float = setting(
        0.0, "Cost of a UTC day. 0: no limit.", low=_LEAST_COST, high=_MOST_COST, or_zero=True
    )
    cost_per_month: float = setting(
        0.0, "Cost of a UTC month. 0: no limit.", low=_LEAST_COST, high=_MOST_COST, or_zero=True
    )
    max_in_flight: int = setting(0, "Requests in flight at one time. 0: no limit.", low=0, high=1_000_000)
    weight: float = setting(
        1.0, "Share in the fair queue, relative to the weights of other tenants.", low=0.01, high=100
    )
    priority: int = setting(
        0, "Priority of the tenant's requests; smaller ones are served first.", low=-1000, high=1000
    )
    models: tuple[str, ...] = setting((), "Models or aliases that the tenant may name. Empty: all.")
    response_cache: bool = setting(True, "Whether answers are kept in, and read from, the cache of answers.")
    cache_scope: str = setting(
        "tenant",
        "Who shares cached answers. tenant: only the keys of this tenant; shared: all tenants that say so.",
        choices=SCOPES,
    )
    max_visual_tokens: int = setting(
        0, "Tokens of images and videos of one request. 0: no limit.", low=0, high=1_000_000_000
    )
    answer_tokens: int = setting(
        1024,
        "Tokens. max_tokens that the gateway writes into a request without one, and reserves, if the tenant "
        "has a limit of text tokens or costs. At most 16 for /v1/completions.",
        low=1,
        high=1_000_000,
    )
    bounds: Bounds = field(default=NO_BOUNDS, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_settings(self)
        bounds = Bounds(
            (
                self.requests_per_minute,
                self.text_tokens_per_minute,
                self.visual_tokens_per_minute,
                round(self.cost_per_minute * MILLIONTHS),
            ),
            (
                self.requests_per_day,
                self.text_tokens_per_day,
                self.visual_tokens_per_day,
                round(self.cost_per_day * MILLIONTHS),
            ),
            round(self.cost_per_month * MILLIONTHS),
            self.max_in_flight,
        )
        object.__setattr__(self, "bounds", NO_BOUNDS if bounds == NO_BOUNDS else bounds)

    @property
    def counted(self) -> bool:
        """Whether an account has to be kept. Without one, a request costs nothing."""
        return self.bounds is not NO_BOUNDS

    @property
    def bounds_answers(self) -> bool:
        """Whether answers count: there is a limit of text tokens or of costs."""
        minute, day = self.bounds.minute, self.bounds.day
        return any((minute[1], minute[3], day[1], day[3], self.bounds.month_cost))

    @property
    def most_text(self) -> float:
        """Tokens of text that one request may have at most; 0: any number."""
        return min((limit for limit in (self.bounds.minute[1], self.bounds.day[1]) if limit), default=0)

    def allows(self, model: str) -> bool:
        """Whether the tenant may name a model or an alias."""
        return not self.models or model in self.models


NO_LIMITS = TenantLimits()
