"""The figures that operators see: the load of this worker, tenants, usage and experiments.

Sums are those of all workers. Load and queues are those of the worker that answers, which is told.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any

from fovea import __version__
from fovea.core.errors import ConfigError, InvalidRequest, Unavailable
from fovea.gateway.admin.keys import own_limits
from fovea.gateway.backends.backend import Backend
from fovea.gateway.experiments.report import read_reports
from fovea.gateway.generate.request import Services
from fovea.gateway.tenants.account import METRICS, MILLIONTHS, Bounds, Counters
from fovea.gateway.tenants.keys import TenantLimits
from fovea.gateway.usage.log import GROUPS, fields_of, read_usage

MOST_TENANTS = 500
"""Tenants that are listed at most."""
_AT_ONCE = 50
"""Accounts that are read at a time."""
MOST_DAYS = 400
MOST_ROWS = 10_000
"""Rows of usage that an answer has at most: all hours of MOST_DAYS."""
HOUR_S = 3600


async def live(services: Services) -> dict[str, Any]:
    """Return what the gateway does now."""
    now, settings = time.time(), services.settings
    queues = [(name, each.queue) for name, each in services.queues]
    return {
        "time": now,
        "uptime_seconds": max(0.0, now - services.began),
        "version": __version__,
        "worker": os.getpid(),
        "workers": settings.workers,
        "draining": services.draining,
        "models": sorted(model.name for model in services.fleet.models()),
        "running": len(services.running),
        "waiting": sum(queue.waiting for _, queue in queues),
        "queues": [
            {"model": name, "waiting": queue.waiting, "running": queue.running} for name, queue in queues
        ],
        "totals": await asyncio.to_thread(services.metrics.totals),
        "currency": "" if services.prices is None else services.prices.currency,
        "accounts_failing": bool(services.accounts.stats()["failing"]),
        "keys_file_broken": bool(services.tenants.stats()["keys_file_broken"]),
        "backends": [backend_values(one, services.clock()) for one in services.fleet],
    }


def backend_values(backend: Backend, now: float) -> dict[str, Any]:
    """Return the state of a backend. now: the clock in seconds."""
    return {
        "name": backend.name,
        "url": backend.config.url,
        "engine": "Fovea" if backend.is_fovea else "other",
        "models": sorted(backend.models),
        "accepts": {
            "text": backend.why_not(now, vision=False) or "yes",
            "images": backend.why_not(now, vision=True) or "yes",
        },
        "healthy": backend.healthy,
        "draining": backend.draining or backend.drains_itself,
        "drained_here": backend.draining,
        "weight": round(backend.weight(now), 3),
        "requests": backend.requests,
        "text_tokens": backend.text,
        "visual_tokens": backend.visual,
        "breakers": {stage: str(breaker.state(now)) for stage, breaker in backend.breakers.items()},
        "ejections": backend.ejections,
    }


async def tenants(services: Services) -> dict[str, Any]:
    """Return the tenants with their limits, and what they have used of them."""
    found: dict[str, TenantLimits] = {}
    keys: dict[str, int] = {}
    for key in services.tenants.keys:
        if "api" in key.roles:
            found[key.name] = key.limits
            keys[key.name] = keys.get(key.name, 0) + 1
    names = list(found)[:MOST_TENANTS]
    used, problem = await _used(services, {name: found[name] for name in names})
    rows = [
        {
            "name": name,
            "keys": keys[name],
            "limits": own_limits(found[name]),
            "used": used_values(found[name].bounds, used[name]) if name in used else None,
        }
        for name in names
    ]
    return {"tenants": rows, "total": len(found), "problem": problem}


async def _used(
    services: Services, limits: Mapping[str, TenantLimits]
) -> tuple[dict[str, Counters], str | None]:
    """Return what tenants have used, and what is wrong with the store. After a failure no more are read."""
    used: dict[str, Counters] = {}
    names = list(limits)
    for start in range(0, len(names), _AT_ONCE):
        some = names[start : start + _AT_ONCE]
        answers = await asyncio.gather(
            *(services.accounts.usage(name, limits[name]) for name in some), return_exceptions=True
        )
        for name, answer in zip(some, answers, strict=True):
            if isinstance(answer, Unavailable):
                return used, answer.message
            if isinstance(answer, BaseException):
                raise answer
            used[name] = answer
    return used, None


def used_values(bounds: Bounds, used: Counters) -> list[dict[str, Any]]:
    """Return each limit that there is, with what is used of it. Costs are in units of the currency."""
    rows: list[tuple[str, float, float]] = []
    for place, metric in enumerate(METRICS):
        unit = MILLIONTHS if metric == "cost" else 1
        rows.append((f"{metric}_per_minute", used.minute[place] / unit, bounds.minute[place] / unit))
        rows.append((f"{metric}_per_day", used.day_used[place] / unit, bounds.day[place] / unit))
    rows.append(("cost_per_month", used.month_cost / MILLIONTHS, bounds.month_cost / MILLIONTHS))
    rows.append(("max_in_flight", used.in_flight, bounds.in_flight))
    return [{"name": name, "used": round(amount, 6), "limit": limit} for name, amount, limit in rows if limit]


async def usage(services: Services, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the usage of some days. query: by (names with commas) and days.

    Raises InvalidRequest for a wrong query, and Unavailable if the usage file cannot be read.
    """
    by = query.get("by", "day").split(",")
    if any(name not in GROUPS or by.count(name) > 1 for name in by):
        raise InvalidRequest(
            f"by is {query['by'][:100]!r}; accepted: {', '.join(GROUPS)}, each once, as tenant,day",
            param="by",
        )
    days = query.get("days", "30")
    if not (days.isascii() and days.isdigit() and 1 <= int(days[:4]) <= MOST_DAYS and len(days) < 4):
        raise InvalidRequest(f"days is {days[:40]!r}; accepted: 1 to {MOST_DAYS}", param="days")
    file, log = services.settings.usage.path, services.records.usage
    if file is None or log is None:
        return {"recorded": False, "by": by, "days": int(days), "rows": [], "total": None, "currency": ""}

    def read() -> dict[str, Any]:
        log.flush(1.0)
        today = int(time.time() // (24 * HOUR_S))
        report = read_usage(file, by, (today - int(days) + 1) * 24, (today + 1) * 24)
        if len(report.rows) > MOST_ROWS:
            raise InvalidRequest(
                f"the usage has {len(report.rows):,} rows; accepted: days and groups of at most "
                f"{MOST_ROWS:,}, or the command `fovea usage`",
                param="by",
            )
        rows = [fields_of(row, by) for row in report.rows]
        return {"rows": rows, "total": fields_of(report.total, ()), "currency": report.currency}

    try:
        return {"recorded": True, "by": by, "days": int(days), **await asyncio.to_thread(read)}
    except ConfigError as error:
        raise Unavailable(error.message) from error


async def experiments(services: Services) -> dict[str, Any]:
    """Return the experiments: their arms with shares and results, and the verdicts."""
    if services.experiments is None:
        return {"experiments": []}
    try:
        return {"experiments": await asyncio.to_thread(read_reports, services.experiments.path)}
    except ConfigError as error:
        raise Unavailable(error.message) from error
