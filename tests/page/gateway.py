"""A gateway in a thread of its own, before a real engine and two scripted ones, for tests of its pages."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from fovea.access.keys import digest
from fovea.gateway.config import BackendConfig, ModelConfig, Tables
from fovea.gateway.experiments.config import Experiment, ExperimentConfig, ExperimentSettings, Variant
from fovea.gateway.usage.log import UsageSettings
from tests.gateway.support import CHAT, FakeEngine, chat, running

ADMIN, ALICE = "the-admin-key", "the-key-of-alice"
KEYS = f"""
[[key]]
name = "ops"
hash = "sha256:{digest(ADMIN.encode()).hex()}"
roles = ["admin"]

[[key]]
name = "alice"
hash = "sha256:{digest(ALICE.encode()).hex()}"
requests_per_day = 1000
cost_per_month = 25
models = ["fovea-tiny", "m"]
"""
PRICES = 'currency = "EUR"\n[default]\ntext_input = 400\noutput = 1600\n'


@dataclass(frozen=True)
class RunningGateway:
    """A running gateway. keys: its keys file."""

    url: str
    keys: Path

    def get(self, path: str) -> Any:
        """The answer to an operator's question."""
        answer = httpx.get(self.url + path, headers={"authorization": f"Bearer {ADMIN}"})
        return answer.raise_for_status().json()


@contextlib.contextmanager
def gateway(engine_url: str, folder: Path, **settings: Any) -> Iterator[RunningGateway]:
    """Serve until the block ends.

    engine_url: of a real engine with the bundled model.
    folder: for the files of keys, prices, usage and experiments.
    """
    keys, prices = folder / "keys.toml", folder / "prices.toml"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    prices.write_text(PRICES)
    arms = (Variant("old", "ma", 3.0), Variant("new", "mb", 1.0))
    experiment = Experiment(name="v2", model="m", variants=arms, sticky_by="user")
    given: dict[str, Any] = {
        "keys_file": keys, "prices": prices, "usage": UsageSettings(usage_file=str(folder / "usage.db")),
        "experiments": ExperimentConfig(ExperimentSettings(folder=folder), (experiment,)),
    }  # fmt: skip
    started, ending = threading.Event(), asyncio.Event()
    found: list[str] = []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with (
            FakeEngine("a", "ma") as first,
            FakeEngine("b", "mb") as second,
            running(
                tables=Tables(
                    (BackendConfig(engine_url, "tiny"), first.config, second.config),
                    models=(ModelConfig("m"),),
                ),
                **(given | settings),
            ) as on,
        ):  # fmt: skip
            headers = {"authorization": f"Bearer {ALICE}"}
            for number in range(4):
                body = chat(f"question {number}", user=str(number))
                (await on.client.post(CHAT, json=body, headers=headers)).raise_for_status()
            found.append(on.url)
            started.set()
            await ending.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        finally:
            started.set()

    thread = threading.Thread(target=run, name="gateway", daemon=True)
    thread.start()
    started.wait()
    assert found, "the gateway did not start"
    try:
        yield RunningGateway(found[0], keys)
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join()
        loop.close()
