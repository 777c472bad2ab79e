"""The real command with two workers: signals, dead workers, drains, limits that all workers share."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.gateway.support import CHAT, PATIENCE_S, FakeEngine, Plan, chat, error_of, soon, words
from tests.support.servers import free_port

KEY = "fovea-key-of-a-test-that-is-long-enough"
ADMIN = "admin-key-of-a-test-that-is-long-enough"


class Command:
    """`fovea gateway` in a process group of its own.

    url: its address. process: the first process. log: what it has printed.
    client: opens a connection for each request, so that any worker may get it.
    """

    def __init__(self, folder: Path, engines: Sequence[FakeEngine], settings: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.file = folder / "gateway.toml"
        self.log = folder / "log"
        self._settings = f'host = "127.0.0.1"\nport = {self.port}\nworkers = 2\n{settings}\n'
        self.write(*engines)
        self.process: asyncio.subprocess.Process
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.client = httpx.AsyncClient(
            base_url=self.url, timeout=PATIENCE_S, trust_env=False, verify=False, limits=limits
        )

    def write(self, *engines: FakeEngine) -> None:
        """Replace the configuration by one with these backends."""
        tables = "".join(
            f'[[backend]]\nurl = "{engine.url}"\nname = "{engine.name}"\nmodels = ["m"]\n'
            for engine in engines
        )
        new = self.file.with_suffix(".new")
        new.write_text(self._settings + tables)
        new.replace(self.file)

    async def __aenter__(self) -> Command:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FOVEA_")}
        with self.log.open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "fovea.cli.main", "gateway", "--config", str(self.file),
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=environment,
            )  # fmt: skip
        try:
            async with asyncio.timeout(60):
                while len(children(self.process.pid)) < 2 or len(await self.pids()) < 2:
                    assert self.process.returncode is None, self.log.read_text()
                    await asyncio.sleep(0.1)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()
        await self.client.aclose()

    async def pids(self) -> set[int]:
        """The workers that answer, found by what listens: each new connection goes to one of them."""
        found = {pid for pid in children(self.process.pid) if _is_worker(pid)}
        return found if await self._all_answer(len(found)) else set()

    async def _all_answer(self, count: int) -> bool:
        if not count:
            return False
        return all([await self.status("/health") == 200 for _ in range(4 * count)])

    async def status(self, path: str) -> int:
        """The status of a GET; 0: it cannot be connected to."""
        try:
            return (await self.client.get(path)).status_code
        except httpx.TransportError:
            return 0

    async def ask(self, text: str = "hello", **body: Any) -> httpx.Response:
        """Send a chat request."""
        return await self.client.post(
            CHAT, json=chat(text, **body), headers={"authorization": f"Bearer {KEY}"}
        )

    async def backends_of(self, requests: int) -> set[str]:
        """The backends that answer some requests."""
        answers = await asyncio.gather(*(self.ask(str(number)) for number in range(requests)))
        assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
        return {answer.headers["x-fovea-backend"] for answer in answers}


def children(pid: int) -> list[int]:
    """The child processes of a process."""
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _is_worker(pid: int) -> bool:
    """Whether a process serves, and does not only look after the resources of others."""
    with contextlib.suppress(OSError):
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def test_two_workers_from_their_start_to_their_end(tmp_path: Path) -> None:
    """One long story, because processes start slowly: a drain, a reload, a death, and the end."""
    one, two = FakeEngine("a"), FakeEngine("b")
    settings = "lame_duck_s = 1.0\ndrain_seconds = 3.0\nprobe_every_s = 0.3"
    async with one, two, Command(tmp_path, (one, two), settings) as gateway:
        assert await gateway.backends_of(16) == {"a", "b"}

        # A drain at one worker holds for both.
        assert (await gateway.client.post("/admin/backends/a/drain")).status_code == 200
        await asyncio.sleep(1.5)
        assert await gateway.backends_of(24) == {"b"}
        assert (await gateway.client.post("/admin/backends/a/undrain")).status_code == 200
        await soon(lambda: _reaches(gateway, {"a", "b"}))

        # A changed file holds for both.
        gateway.write(two)
        await soon(lambda: _reaches(gateway, {"b"}))
        await asyncio.sleep(1.1)
        assert await gateway.backends_of(24) == {"b"}

        # A killed worker is replaced. A stream of the other one goes on.
        workers = await gateway.pids()
        two.plans.extend([Plan(events=25, gap_s=0.1)] * 4)
        streams = [asyncio.create_task(gateway.ask(f"s {number}", stream=True)) for number in range(4)]
        await soon(lambda: not two.plans)
        victim = min(workers)
        os.kill(victim, signal.SIGKILL)
        await soon(lambda: _replaced(gateway, workers))
        assert victim not in await gateway.pids()
        done = list(await asyncio.gather(*streams, return_exceptions=True))
        whole = [answer for answer in done if isinstance(answer, httpx.Response)]
        assert all(len(words(answer.text)) == 25 and "[DONE]" in answer.text for answer in whole)
        assert len(whole) + sum(isinstance(answer, httpx.TransportError) for answer in done) == 4
        assert await gateway.backends_of(8) == {"b"}

        # The end: refusals for load balancers, a stream that finishes, and one that is cut with an error.
        workers = await gateway.pids()
        two.plans.extend([Plan(events=20, gap_s=0.1), Plan(events=1000, gap_s=0.1)])
        short = asyncio.create_task(gateway.ask("short", stream=True))
        await soon(lambda: len(two.plans) == 1)
        long = asyncio.create_task(gateway.ask("long", stream=True))
        await soon(lambda: not two.plans)
        os.kill(gateway.process.pid, signal.SIGTERM)
        await asyncio.sleep(0.3)
        assert await gateway.status("/ready") == 503
        finished, cut = await short, await long
        assert (len(words(finished.text)), "[DONE]" in finished.text) == (20, True)
        assert "[DONE]" not in cut.text
        assert "shutting down" in error_of(cut.text)["message"]
        async with asyncio.timeout(PATIENCE_S):
            assert await gateway.process.wait() == 0, gateway.log.read_text()
        assert not any(lives(pid) for pid in workers)
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", gateway.port)) != 0


async def _reaches(gateway: Command, wanted: set[str]) -> bool:
    return await gateway.backends_of(8) == wanted


async def _replaced(gateway: Command, before: set[int]) -> bool:
    """Whether both workers live and answer, not all of them those of before."""
    found = {pid for pid in children(gateway.process.pid) if _is_worker(pid)}
    return len(found) == 2 and found != before and await gateway.pids() == found


async def _all_answer(gateway: Command, headers: dict[str, str], wanted: int) -> bool:
    """Whether all of many requests, each over a connection of its own, are answered with a status."""
    asked = [gateway.client.get("/v1/models", headers=headers) for _ in range(16)]
    return {answer.status_code for answer in await asyncio.gather(*asked)} == {wanted}


async def test_workers_share_a_tenants_day_and_end_with_their_parent(tmp_path: Path) -> None:
    """64 requests of 100 tokens at once against 1,000 a day: exactly ten are admitted.

    A key that an operator makes at one of the workers is accepted by both, until it is revoked. Then the
    first process is killed, which can tell its workers nothing. They end all the same.
    """
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    keys = tmp_path / "keys.toml"
    admin = hashlib.sha256(ADMIN.encode()).hexdigest()
    keys.write_text(
        f'[[key]]\nname = "alice"\nhash = "sha256:{digest}"\ntext_tokens_per_day = 1000\n'
        f'[[key]]\nname = "ops"\nhash = "sha256:{admin}"\nroles = ["admin"]\n'
    )
    keys.chmod(0o600)
    settings = (
        f'keys_file = "{keys}"\naccounts = "sqlite:{tmp_path}/accounts.sqlite"\naccounts_timeout_s = 10.0\n'
        "response_cache_mib = 0\nlame_duck_s = 0.0"
    )
    # 32 bytes of prompt, the role among them, are 8 tokens; the answer has 92. The engine reports both.
    body = chat("x" * 28, max_tokens=92)
    async with FakeEngine("a", plan=Plan(events=92, wait_s=0.2)) as engine:
        engine.prompt_tokens = 8
        async with Command(tmp_path, (engine,), settings) as gateway:
            answers = await asyncio.gather(*(gateway.ask("x" * 28, max_tokens=92) for _ in range(64)))
            statuses = [answer.status_code for answer in answers]
            assert (statuses.count(200), statuses.count(429)) == (10, 54), json.dumps(body)
            assert len(engine.received) == 10
            again = await gateway.ask("x" * 28, max_tokens=92)
            assert again.status_code == 429
            assert int(again.headers["retry-after"]) >= 1

            operator = {"authorization": f"Bearer {ADMIN}"}
            made = (await gateway.client.post("/admin/keys", json={"name": "bob"}, headers=operator)).json()
            own = {"authorization": f"Bearer {made['key']}"}
            await soon(lambda: _all_answer(gateway, own, 200))
            await gateway.client.delete(f"/admin/keys/{made['fingerprint']}", headers=operator)
            await soon(lambda: _all_answer(gateway, own, 401))
            told = [(await gateway.client.get("/admin/live", headers=operator)).json() for _ in range(8)]
            assert {each["totals"]["answered"] for each in told} == {10}, "sums of both workers"

            workers = await gateway.pids()
            os.kill(gateway.process.pid, signal.SIGKILL)
            await soon(lambda: not any(lives(pid) for pid in workers))
