"""Settings of the gateway, by subject. Backends, models, prices and experiments are tables of its file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fovea.core.errors import ConfigError
from fovea.core.settings import check_settings, setting
from fovea.http.settings import HttpSettings
from fovea.media.limits import MediaLimits

POLICIES = ("cache-affine", "least-busy", "lod-cost", "round-robin", "priority")
REMOTE = ("resolve", "fetch", "refuse")


@dataclass(frozen=True, slots=True)
class TimeoutSettings:
    """Times after which a request gives up on a backend."""

    connect_s: float = setting(10.0, "Seconds to connect to a backend.", low=0.01, high=600)
    first_byte_s: float = setting(
        60.0,
        "Seconds until a stream's first byte. A complete answer has no byte before its end, so total_s "
        "bounds it.",
        low=0.01,
        high=3600,
    )
    idle_s: float = setting(30.0, "Seconds between two pieces of a stream.", low=0.01, high=3600)
    total_s: float = setting(
        120.0, "Seconds for a request with all its attempts, waiting included.", low=0.01, high=86400
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True)
class ResilienceSettings:
    """Retries, hedging, circuit breakers, and the health of backends."""

    max_attempts: int = setting(
        3, "Backends that one request is sent to, one after another, for each model.", low=1, high=16
    )
    retry_share: float = setting(
        0.2, "Retries and hedges per request in the long run, so that they cannot double a load.",
        low=0, high=1,
    )  # fmt: skip
    hedge_after_s: float = setting(
        0.0,
        "Seconds without a first byte after which a second backend gets the request, too; the first that "
        "answers is taken. 0: never.",
        low=0,
        high=3600,
    )
    breaker_failures: int = setting(
        5, "Failures in a row that open the circuit breaker of a backend's stage.", low=1, high=1000
    )
    breaker_open_s: float = setting(
        30.0, "Seconds that a breaker stays open before one request may probe.", low=0.01, high=3600
    )
    probe_every_s: float = setting(
        5.0, "Seconds between two health checks of a backend; 0: none.", low=0, high=3600
    )
    probe_timeout_s: float = setting(2.0, "Seconds for one health check.", low=0.01, high=600)
    unhealthy_after: int = setting(2, "Failed checks in a row that take a backend out.", low=1, high=100)
    slow_start_s: float = setting(
        30.0, "Seconds in which a backend that came back grows to its full share.", low=0, high=3600
    )
    outlier_factor: float = setting(
        3.0,
        "A backend is ejected if its median time to the first byte is so many times that of the others. "
        "0: never.",
        low=0,
        high=1000,
    )
    outlier_eject_s: float = setting(
        30.0, "Seconds of a first ejection; a repeated one lasts longer.", low=0.1, high=3600
    )
    max_ejected: float = setting(
        0.5, "Largest part of a model's backends that may be ejected as outliers.", low=0, high=1
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True)
class RouteSettings:
    """How a backend is chosen."""

    policy: str = setting(
        "cache-affine",
        "cache-affine: the backend that knows the image or the conversation, unless it is too busy; "
        "least-busy: fewest outstanding tokens; lod-cost: earliest predicted end, by the cost of visual "
        "tokens; round-robin; priority: the backends of the smallest priority, others when they are full.",
        choices=POLICIES,
    )
    balance: float = setting(
        1.25,
        "Most outstanding tokens of a backend under cache-affine, as a multiple of the average.",
        low=1,
        high=100,
    )
    visual_cost: float = setting(
        2.0, "Cost of a visual token under lod-cost, in tokens of text.", low=0.01, high=1000
    )
    busy_requests: int = setting(
        8,
        "Outstanding requests up to which a backend is never too busy for cache-affine.",
        low=0,
        high=10_000,
    )
    tokens_per_backend: int = setting(
        0,
        "Outstanding tokens of a backend that states none, beyond which requests wait in the fair queue. "
        "0: no limit.",
        low=0,
        high=1 << 40,
    )
    requests_per_backend: int = setting(
        256, "Outstanding requests of a backend that states none. 0: no limit.", low=0, high=1 << 20
    )
    degrade_at: float = setting(
        0.9,
        "Part of the capacity in use from which images without a detail of their own are asked for with "
        "fewer visual tokens, before requests are refused. 0: never.",
        low=0,
        high=1,
    )
    max_waiting: int = setting(
        1024, "Requests that may wait for a backend; further ones are refused with 429.", low=0, high=1 << 20
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Where limits, cached answers, usage and experiments are kept."""

    limits: str = setting(
        "memory",
        "Where the use of limits is counted: memory (one worker), sqlite:PATH (workers of one machine), "
        "redis://HOST:PORT/DB (several machines).",
    )
    limits_on_failure: str = setting(
        "local",
        "If that store fails. local: each worker admits its part of the limits; refuse: requests of tenants "
        "with limits get 503.",
        choices=("local", "refuse"),
    )
    sharers: int = setting(
        0,
        "Workers of all gateways that share the limits, for limits_on_failure local. 0: those of this one.",
        low=0,
        high=10_000,
    )
    cache: str = setting("memory", "Where answers are cached: memory, redis://HOST:PORT/DB, or off.")
    cache_mib: int = setting(64, "Ceiling of cached answers in memory, per worker.", low=1, high=1 << 20)
    cache_ttl_s: float = setting(3600.0, "Life of a cached answer in seconds.", low=1, high=2592000)
    cache_nondeterministic: bool = setting(
        False, "Cache answers of requests with a temperature above 0, too."
    )
    usage: Path | None = setting(None, "SQLite file of usage records, for `fovea usage`; none: no records.")
    usage_days: int = setting(90, "Days for which usage records are kept.", low=1, high=3650)
    experiments: Path | None = setting(
        None, "SQLite file of experiments; needed if the configuration has any."
    )
    audit_log: str = setting(
        "false", "A line of JSON per request, without content. true: to the log; a path: to that file."
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Keys, images and bodies at the gateway."""

    api_keys: tuple[str, ...] = setting((), "Keys for /v1, without limits.", internal=True)
    admin_keys: tuple[str, ...] = setting((), "Keys for /admin and /metrics.", internal=True)
    keys_file: Path | None = setting(
        None,
        "TOML file of tenants' hashed keys with their limits; read again when it changes. none: no file.",
    )
    prices: Path | None = setting(None, "TOML file of prices by model; none: requests cost nothing.")
    workers: int = setting(1, "Processes that serve.", low=1, high=256)
    remote_images: str = setting(
        "resolve",
        "URLs of images. resolve: forwarded if their hosts have no private address; fetch: downloaded here, "
        "and forwarded as data: URLs; refuse: only data: URLs are accepted.",
        choices=REMOTE,
    )
    max_body_mib: int = setting(64, "Largest request body, data URLs included.", low=1, high=4096)
    max_bodies_mib: int = setting(
        512, "MiB of all request bodies together that are in flight, per worker.", low=1, high=1 << 20
    )
    drain_seconds: float = setting(
        30.0, "Seconds that running requests have to finish after SIGTERM.", low=0, high=3600
    )
    http: HttpSettings = field(default_factory=HttpSettings)
    timeouts: TimeoutSettings = field(default_factory=TimeoutSettings)
    resilience: ResilienceSettings = field(default_factory=ResilienceSettings)
    route: RouteSettings = field(default_factory=RouteSettings)
    stores: StoreSettings = field(default_factory=StoreSettings)
    media: MediaLimits = field(default_factory=MediaLimits)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.max_bodies_mib < self.max_body_mib:
            raise ConfigError(
                f"max_bodies_mib is {self.max_bodies_mib}; accepted: at least max_body_mib "
                f"({self.max_body_mib})",
                param="max_bodies_mib",
            )
        if self.workers > 1 and self.stores.limits == "memory" and self.keys_file is not None:
            raise ConfigError(
                f"workers is {self.workers} and limits is 'memory', which each worker would count alone; "
                "accepted: sqlite:PATH or redis://HOST:PORT/DB for limits, or one worker",
                param="limits",
            )
