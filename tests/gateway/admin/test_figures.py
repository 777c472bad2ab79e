"""The figures of /admin: what is told of load, tenants, usage and experiments, and to which questions."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fovea.access.keys import digest
from fovea.gateway.admin.figures import used_values
from fovea.gateway.experiments.config import Experiment, ExperimentConfig, ExperimentSettings, Variant
from fovea.gateway.experiments.report import shares_of
from fovea.gateway.experiments.store import PROMOTED, ROLLED_BACK, State
from fovea.gateway.metrics import TOTALS
from fovea.gateway.settings import AccountSettings
from fovea.gateway.tenants.account import Counters
from fovea.gateway.tenants.keys import TenantLimits
from fovea.gateway.usage.log import UsageSettings
from tests.gateway.support import FakeEngine, Plan, running

ARMS = (Variant("old", "a", 3.0), Variant("new", "b", 1.0), Variant("copy", "c", 1.0))


async def test_load_is_that_of_now_and_sums_are_those_of_all_requests() -> None:
    async with FakeEngine("a") as engine, running(engine) as on:
        engine.plans.extend([Plan(), Plan(status=400)])
        for _ in range(2):
            await on.ask()
        live = (await on.client.get("/admin/live")).json()
        assert live["totals"].keys() == set(TOTALS)
        sums = live["totals"]
        assert (sums["answered"], sums["refused"], sums["failed"], sums["request_count"]) == (1, 1, 0, 2)
        assert (sums["prompt_tokens"], sums["completion_tokens"]) == (7, 3)
        assert (live["running"], live["waiting"], live["workers"], live["draining"]) == (0, 0, 1, False)
        assert [(one["name"], one["accepts"]["text"]) for one in live["backends"]] == [("a", "yes")]


async def test_usage_is_asked_for_by_groups_and_days(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "usage.db"
    async with FakeEngine("a") as engine, running(engine, usage=UsageSettings(usage_file=str(file))) as on:
        await on.ask()
        report = (await on.client.get("/admin/usage?by=model,backend&days=1")).json()
        (row,) = report["rows"]
        assert (row["model"], row["backend"], row["requests"], row["prompt_tokens"]) == ("m", "a", 1, 7)
        assert report["total"]["completion_tokens"] == 3
        for query, message in (
            ("by=colour", "by is 'colour'; accepted: tenant, model, backend, served_from, day, hour"),
            ("by=day,day", "by is 'day,day'; accepted: "),
            ("days=0", "days is '0'; accepted: 1 to 400"),
            ("days=401", "days is '401'"),
            ("days=9999999999", "days is '9999999999'"),
            ("days=²", "days is"),
        ):
            answer = await on.client.get(f"/admin/usage?{query}")
            assert answer.status_code == 400
            assert message in answer.json()["error"]["message"]
        monkeypatch.setattr("fovea.gateway.admin.figures.MOST_ROWS", 0)
        answer = await on.client.get("/admin/usage")
        assert answer.status_code == 400
        assert "the usage has 1 rows; accepted: " in answer.json()["error"]["message"]
        for path in tmp_path.iterdir():
            path.unlink()
        file.write_bytes(b"no database at all, but some bytes" * 100)
        assert (await on.client.get("/admin/usage")).status_code == 503
    async with FakeEngine("a") as engine, running(engine) as on:
        assert (await on.client.get("/admin/usage")).json()["recorded"] is False
        assert (await on.client.get("/admin/experiments")).json() == {"experiments": []}


async def test_tenants_are_listed_while_their_accounts_cannot_be_read(tmp_path: Path) -> None:
    keys, accounts = tmp_path / "keys.toml", tmp_path / "accounts.db"
    tables = [("ops", "roles = ['admin']"), ("alice", "requests_per_day = 10"), ("bob", "weight = 2.0")]
    keys.write_text(
        "".join(
            f'[[key]]\nname = "{name}"\nhash = "sha256:{digest(name.encode()).hex()}"\n{line}\n'
            for name, line in tables
        )
    )
    keys.chmod(0o600)
    given: Any = {
        "keys_file": keys,
        "accounts": AccountSettings(accounts=f"sqlite:{accounts}", accounts_timeout_s=0.05),
    }
    headers = {"authorization": "Bearer ops"}
    async with FakeEngine("a") as engine, running(engine, **given) as on:
        with closing(sqlite3.connect(accounts, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            told = (await on.client.get("/admin/tenants", headers=headers)).json()
            other.execute("ROLLBACK")
        assert [(row["name"], row["limits"]) for row in told["tenants"]] == [
            ("alice", {"requests_per_day": 10}), ("bob", {"weight": 2.0})
        ]  # fmt: skip
        assert told["tenants"][0]["used"] is None
        assert "accounts cannot be read at present" in told["problem"]


def test_only_limits_that_there_are_have_a_use() -> None:
    limits = TenantLimits(cost_per_month=2.5, text_tokens_per_minute=100, max_in_flight=4)
    used = Counters(minute=(9, 40.0000004, 0, 0), month_cost=1_250_000, in_flight=1)
    assert used_values(limits.bounds, used) == [
        {"name": "text_tokens_per_minute", "used": 40.0, "limit": 100},
        {"name": "cost_per_month", "used": 1.25, "limit": 2.5},
        {"name": "max_in_flight", "used": 1, "limit": 4},
    ]


@pytest.mark.parametrize(
    ("state", "shares"),
    [
        (State(), {"old": 0.6, "new": 0.2, "copy": 0.2}),
        (State(removed=("new",)), {"old": 0.75, "copy": 0.25}),
        (State(PROMOTED, "new"), {"new": 1.0}),
        (State(ROLLED_BACK), {"old": 1.0}),
    ],
)
def test_shares_are_those_of_now(state: State, shares: dict[str, float]) -> None:
    assert shares_of(Experiment(name="e", model="m", variants=ARMS), state) == pytest.approx(shares)


async def test_results_of_arms_are_told(tmp_path: Path) -> None:
    experiment = Experiment(name="e", model="m", variants=ARMS[:2], sticky_by="request")
    config = ExperimentConfig(ExperimentSettings(folder=tmp_path, flush_s=0.05), (experiment,))
    async with (
        FakeEngine("a", "a") as first,
        FakeEngine("b", "b") as second,
        running(first, second, experiments=config) as on,
    ):
        assert on.gateway.services.experiments is not None
        (told,) = (await on.client.get("/admin/experiments")).json()["experiments"]
        assert (told["name"], told["state"], [arm["share"] for arm in told["variants"]]) == (
            "e", "active", [0.75, 0.25]
        )  # fmt: skip
        assert [each["decision"] for each in told["verdicts"]] == ["continue"]


async def test_models_tell_what_they_take_if_their_backends_agree() -> None:
    """A page offers no images for a model for text alone."""
    async with FakeEngine("a") as one, FakeEngine("b") as two, running(one, two) as on:
        first, second = on.gateway.services.fleet
        assert "input_modalities" not in (await on.client.get("/v1/models/m")).json()
        first.modalities = second.modalities = {"m": frozenset(("text",))}
        assert (await on.client.get("/v1/models")).json()["data"][0]["input_modalities"] == ["text"]
        second.modalities = {"m": frozenset(("text", "image"))}
        assert "input_modalities" not in (await on.client.get("/v1/models/m")).json()
