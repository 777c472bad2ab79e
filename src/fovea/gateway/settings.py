"""Settings of the gateway, by subject. Backends, models, prices and experiments are tables of its file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fovea.core.errors import ConfigError
from fovea.core.settings import check_settings, setting
from fovea.gateway.usage.log import UsageSettings
from fovea.http.settings import HttpSettings
from fovea.media.limits import MediaLimits
from fovea.observe.logs import LogSettings
from fovea.observe.tracer import TraceSettings

MIB = 1024 * 1024
KIB = 1024
ON_FAILURE = ("refuse", "local")
SCHEMES = ("redis://", "rediss://", "unix://")
POLICIES = ("cache-affine", "least-busy", "lod-cost", "round-robin", "priority")
REMOTE = ("resolve", "fetch", "refuse")


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
    idle_s: float = setting(30.0, "Seconds between two parts of a stream.", low=0.01, high=3600)
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
    """Settings of the choice of a backend."""

    policy: str = setting(
        "cache-affine",
        "cache-affine: the backend that knows the image or the conversation, unless it is too busy; "
        "least-busy: fewest outstanding tokens; lod-cost: least work before the first token, by the "
        "cost of visual tokens; round-robin; priority: the backends of the smallest priority, others when "
        "they are full.",
        choices=POLICIES,
    )
    balance: float = setting(
        1.5,
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
    page: str = setting(
        "on",
        "Pages in the browser: / to chat, and /admin for operators. off: neither.",
        choices=("on", "off"),
    )
    workers: int = setting(1, "Processes that serve.", low=1, high=256)
    audit_log: str = setting(
        "false", "A line of JSON per request, without content. true: to the log; a path: to that file."
    )
    redis: str = setting(
        "",
        "Redis in which all workers and gateways share cached answers, as redis://HOST:PORT/DB. Empty: none.",
    )
    cache_all: bool = setting(
        False, "Cache the answers of requests that are not deterministic (temperature above 0), too."
    )
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
    queue: QueueSettings = field(default_factory=QueueSettings)
    accounts: AccountSettings = field(default_factory=AccountSettings)
    response_cache: ResponseCacheSettings = field(default_factory=ResponseCacheSettings)
    usage: UsageSettings = field(default_factory=UsageSettings)
    media: MediaLimits = field(default_factory=MediaLimits)
    logs: LogSettings = field(default_factory=LogSettings)
    traces: TraceSettings = field(default_factory=TraceSettings)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.max_bodies_mib < self.max_body_mib:
            raise ConfigError(
                f"max_bodies_mib is {self.max_bodies_mib}; accepted: at least max_body_mib "
                f"({self.max_body_mib})",
                param="max_bodies_mib",
            )
        if self.workers > 1 and self.accounts.accounts == "memory" and self.keys_file is not None:
            raise ConfigError(
                f"workers is {self.workers} and accounts is 'memory', which each worker would count alone; "
                "accepted: sqlite:PATH or redis://HOST:PORT/DB for accounts, or one worker",
                param="accounts",
            )
