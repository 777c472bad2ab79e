"""The stack of a chaos day: the rendered local deployment, and the proxies between its programs.

    clients -> proxy -> NGINX -> gateway -> proxy -> engine one
                                    |   `-> Envoy -> engine two
                                    `-> proxy -> Redis

`run.sh` of the deployment starts the programs, and starts those again that die.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import fovea
from tests.chaos import envoy
from tests.chaos.client import send
from tests.chaos.deployment import (
    ENGINE_PORT,
    MOVED,
    PROXY_PORT,
    REDIS_PORT,
    TOTAL_S,
    WORKERS,
    spec,
    write_deployment,
)
from tests.chaos.levels import Level, descendants, level_of
from tests.chaos.proxy import FaultProxy
from tests.chaos.supervisor import Process, StackError
from tests.chaos.surroundings import Clock, MemoryGroup, SmallDisk
from tests.support.servers import free_port

TENANTS = tuple(f"tenant{number}" for number in range(6))
FLOOD, QUIET = "flood", "quiet"
CLIENT_S = TOTAL_S + 15.0
"""Seconds after which a client counts a request as hanging. NGINX waits 10 s longer than the gateway."""
ENGINES = ("engine-one-0", "engine-two-0")
SERVICES = (*ENGINES, "gateway-0", "redis", "nginx")
PORTS = {"engine-one-0": ENGINE_PORT + MOVED, "engine-two-0": ENGINE_PORT + 1 + MOVED}
POLL_S, AGAIN_S = 0.1, 90.0


class Stack:
    """All programs, and the proxies between them.

    port: where clients send their requests. keys: of the tenants.
    front_proxy, engine_proxy, cache_proxy: our proxies.
    worker_kills: when a worker of the gateway was killed, in seconds of the epoch.
    """

    def __init__(self, folder: Path, seed: int, *, private_hosts: bool) -> None:
        """private_hosts: the media host has a private address, because the run has no network of its own."""
        self.folder, self._private_hosts = folder, private_hosts
        self.deployment = folder / "deployment"
        names = (*TENANTS, FLOOD, QUIET)
        self.keys = {name: f"fovea-{name}-{hashlib.sha256(name.encode()).hexdigest()}" for name in names}
        self.clock = Clock(folder)
        self.disk = SmallDisk(folder / "disk", 64)
        self.cache_disk = SmallDisk(folder / "cache", 16)
        self.memory = MemoryGroup(f"fovea-chaos-{os.getpid()}")
        self.envoy_admin = free_port()
        self.front_proxy = FaultProxy("127.0.0.1", PROXY_PORT, seed)
        self.engine_proxy = FaultProxy("127.0.0.1", PORTS["engine-one-0"], seed + 1)
        self.cache_proxy = FaultProxy("127.0.0.1", REDIS_PORT + MOVED, seed + 2)
        self.worker_kills: list[float] = []
        self._exit = AsyncExitStack()

    @property
    def port(self) -> int:
        return self.front_proxy.port

    @property
    def engine_ports(self) -> tuple[int, ...]:
        """Ports of the engines themselves, without proxies."""
        return tuple(PORTS.values())

    @property
    def audit_log(self) -> Path:
        return self.folder / "audit.log"

    @property
    def usage_file(self) -> Path:
        return self.disk.folder / "usage.db"

    async def start(self) -> None:
        """Start everything. Raises StackError."""
        for remove in (self.disk.unmount, self.cache_disk.unmount, self.memory.remove):
            self._exit.callback(remove)
        keys = self._write_keys()
        deployed = spec(
            self.disk.folder, self.cache_disk.folder, keys, self.audit_log, private_hosts=self._private_hosts
        )
        for pool in deployed.pools:
            (self.disk.folder / pool.name).mkdir()
        write_deployment(self.deployment, deployed)
        ports = ((self.engine_proxy, ENGINE_PORT), (self.cache_proxy, REDIS_PORT), (self.front_proxy, 0))
        for proxy, port in ports:
            await proxy.start(port)
            self._exit.push_async_callback(proxy.stop)
        await self._start_envoy()
        await self._start_deployment()

    async def stop(self) -> None:
        await self._exit.aclose()

    def pid(self, service: str) -> int:
        """Return the process of a service; 0: it does not run now."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.deployment / "state/run" / f"{service}.pid").read_text())
        return 0

    def signal(self, service: str, number: signal.Signals) -> int:
        """Send a signal to all processes of a service, and return the process."""
        pid = self.pid(service)
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)
        return pid

    async def restarted(self, service: str, old: int) -> float:
        """Wait until a service that was killed serves again; return the seconds since the call.

        old: its process before. Raises StackError if it does not come back.
        """
        begun = time.monotonic()
        port = PORTS.get(service, REDIS_PORT + MOVED)
        ready = _answers(port, "/ready") if service in PORTS else _listens(port)
        while time.monotonic() - begun < AGAIN_S:
            if self.pid(service) not in (0, old) and await ready():
                return time.monotonic() - begun
            await asyncio.sleep(POLL_S)
        raise StackError(f"{service} did not come back within {AGAIN_S:.0f} s")

    def workers(self) -> list[int]:
        """Return the processes of the gateway that serve."""
        found = []
        for pid in descendants(self.pid("gateway-0"))[1:]:
            with contextlib.suppress(OSError):
                if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    async def levels(self) -> dict[str, Level]:
        """Empty Redis's cache of answers, and return memory and descriptors of every program.

        Connections in the gateway's pools to Redis are left out, at both ends: a pool grows with the most
        requests at a time, up to its own ceiling, and keeps its connections.
        """
        reader, writer = await asyncio.open_connection("127.0.0.1", REDIS_PORT + MOVED)
        writer.write(b"SELECT 0\r\nFLUSHDB\r\nMEMORY PURGE\r\nINFO clients\r\nQUIT\r\n")
        pooled = connected_clients(await reader.read()) - 1
        writer.close()
        found = {name: level_of(self.pid(name)) for name in SERVICES}
        for name in ("gateway-0", "redis"):
            found[name] = replace(found[name], descriptors=found[name].descriptors - pooled)
        return found

    def logs(self) -> list[Path]:
        """Return the files to which the programs wrote."""
        return sorted([*self.folder.glob("*.log"), *(self.deployment / "state/log").glob("*.log")])

    def _write_keys(self) -> Path:
        usual, few = (
            "max_in_flight = 32\nrequests_per_minute = 1200",
            "max_in_flight = 16\nrequests_per_minute = 600",
        )
        entries = [
            f'[[key]]\nname = "{name}"\nhash = "sha256:{hashlib.sha256(key.encode()).hexdigest()}"\n'
            f"{few if name == FLOOD else usual}\n"
            for name, key in self.keys.items()
        ]
        file = self.folder / "keys.toml"
        file.write_text("\n".join([f'cache_secret = "{"0123456789abcdef" * 2}"', *entries]))
        file.chmod(0o600)
        return file

    async def _start_envoy(self) -> None:
        file = self.folder / "envoy.json"
        config = envoy.config(ENGINE_PORT + 1, self.envoy_admin, PORTS["engine-two-0"])
        file.write_text(json.dumps(config))
        options = ["--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warning"]
        command = [_program("envoy"), "--config-path", str(file), *options]
        await self._run("envoy", command, _listens(ENGINE_PORT + 1), {})

    async def _start_deployment(self) -> None:
        for name in ("nginx", "redis-server"):
            _program(name)

        async def ready() -> bool:
            return (self.deployment / "state/run/ready").exists()

        source = str(Path(fovea.__file__).resolve().parents[1])  # run.sh works in another folder
        env = {"PYTHON": sys.executable, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "READY_S": "60"}
        await self._run("run", ["sh", str(self.deployment / "run.sh")], ready, env | self.clock.env)

    async def _run(
        self, name: str, command: list[str], ready: Callable[[], Awaitable[bool]], env: dict[str, str]
    ) -> None:
        process = Process(name, command, self.folder / f"{name}.log", env)
        self._exit.push_async_callback(process.stop)
        await process.start(ready)


def connected_clients(answer: bytes) -> int:
    """Return the number of connections in Redis's answer to INFO."""
    return int(answer.split(b"connected_clients:")[1].split()[0])


def _program(name: str) -> str:
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin"])
    found = shutil.which(name, path=places)
    if found is None:
        raise StackError(f"{name} is not installed")
    return found


def _answers(port: int, path: str) -> Callable[[], Awaitable[bool]]:
    async def ready() -> bool:
        return (await send(port, "GET", path, {}, b"", 2.0)).status == 200

    return ready


def _listens(port: int) -> Callable[[], Awaitable[bool]]:
    async def ready() -> bool:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), 2.0)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    return ready


__all__ = ["CLIENT_S", "ENGINES", "FLOOD", "QUIET", "TENANTS", "WORKERS", "Stack"]
