"""The targets of a service: how fast and how reliable it has to be.

A target of time is a bound of the histogram's buckets, because Prometheus counts requests by bucket: the
share of requests within a bound is then exact, and needs no interpolation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fovea.core.errors import ConfigError
from fovea.core.settings import check_settings, setting
from fovea.observe.table import SECONDS


class Objective(NamedTuple):
    """One objective, and the share of requests or of time that may miss it.

    slo: name; the value of the label `slo`.
    budget: share that may miss it, above 0 and below 1.
    seconds: target of time; 0: the objective has none.
    text: the objective as a sentence.
    """

    slo: str
    budget: float
    seconds: float
    text: str


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets from which recording rules and alerts are written."""

    availability: float = setting(
        0.999, "Share of the time in which at least one server of a job is ready.", low=0.5, high=0.99999
    )
    success: float = setting(
        0.999, "Share of requests that do not end with a status of 500 or more.", low=0.5, high=0.99999
    )
    p50_s: float = setting(0.2, "Seconds within which half of the requests end.", low=0.005, high=120)
    p95_s: float = setting(0.5, "Seconds within which 95% of the requests end.", low=0.005, high=120)
    p99_s: float = setting(1.0, "Seconds within which 99% of the requests end.", low=0.005, high=120)
    ttft_s: float = setting(
        1.0, "Seconds within which 95% of the first tokens come. Only servers measure it.",
        low=0.005, high=120,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("p50_s", "p95_s", "p99_s", "ttft_s"):
            seconds = getattr(self, name)
            if seconds not in SECONDS:
                bounds = ", ".join(f"{bound:g}" for bound in SECONDS)
                raise ConfigError(
                    f"{name} is {seconds:g}; accepted: a bound of the histograms' buckets ({bounds})",
                    param=name,
                )

    def objectives(self) -> Iterator[Objective]:
        """Yield all objectives. Their names do not depend on the targets."""
        yield Objective(
            "availability",
            _rest(self.availability),
            0.0,
            f"at least one server is ready in {self.availability:.6g} of the time",
        )
        yield Objective(
            "errors",
            _rest(self.success),
            0.0,
            f"{self.success:.6g} of the requests end without a status of 500 or more",
        )
        for name, share, seconds in (
            ("latency_p50", 0.5, self.p50_s),
            ("latency_p95", 0.95, self.p95_s),
            ("latency_p99", 0.99, self.p99_s),
        ):
            text = f"{share:g} of the requests end within {seconds:g} s"
            yield Objective(name, _rest(share), seconds, text)
        text = f"0.95 of the first tokens come within {self.ttft_s:g} s"
        yield Objective("ttft", _rest(0.95), self.ttft_s, text)


def _rest(share: float) -> float:
    """Return 1 - share without the noise of binary fractions."""
    return round(1 - share, 9)
