"""The stack of a chaos day: two engines, a gateway with two workers, Redis, and the proxies between them.

clients -> proxy -> (front) -> gateway -> proxy -> engine one
                                  |   `-> Envoy -> engine two
                                  `----> proxy -> Redis (cache); Redis (limits) without a proxy
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

from tests.chaos import envoy
from tests.chaos.client import send
from tests.chaos.front import rendered_front
from tests.chaos.levels import Level, descendants, level_of
from tests.chaos.proxy import FaultProxy
from tests.chaos.supervisor import Process, StackError
from tests.chaos.surroundings import Clock, MemoryGroup, SmallDisk
from tests.support.servers import free_port

WORKERS = 2
TENANTS = tuple(f"tenant{number}" for number in range(6))
FLOOD, QUIET = "flood", "quiet"
TOTAL_S, IDLE_S, FIRST_BYTE_S = 25.0, 8.0, 15.0
"""Times after which the gateway gives up a request, a silent stream, and a stream without a first byte."""
CLIENT_S = TOTAL_S + 12.0
"""Seconds after which a client counts a request as hanging: the body's arrival and the queue come before."""
ENGINE = """
threads = 1
kv_cache_mib = 128
embed_cache_mib = 8
pixel_pool_mib = 64
pixel_cache_mib = 4
decoded_cache_mib = 8
fetch_cache_mib = 4
region_cache_mib = 4
image_store_mib = 4
response_store_mib = 4
image_workers = 1
video_workers = 1
max_running = 16
max_queue = 64
request_timeout = 30
lame_duck_s = 0
drain_seconds = 2
keep_alive_s = 6
fetch_timeout_s = 4
batch_store_mib = 24
embed_disk_mib = 4
body_timeout_s = 6
write_timeout_s = 6
header_timeout_s = 5
"""
"""Small pools and caches, so that they are full after the warm-up."""
GATEWAY = f"""
workers = {WORKERS}
total_s = {TOTAL_S}
idle_s = {IDLE_S}
first_byte_s = {FIRST_BYTE_S}
connect_s = 3.0
breaker_open_s = 3.0
slow_start_s = 2.0
probe_every_s = 1.0
requests_per_backend = 24
outlier_eject_s = 5.0
lame_duck_s = 0.0
drain_seconds = 2.0
keep_alive_s = 6.0
body_timeout_s = 6.0
write_timeout_s = 6.0
header_timeout_s = 5.0
response_cache_mib = 2
response_cache_wait_s = 5.0
accounts_on_failure = "local"
accounts_sharers = {WORKERS}
"""


class Stack:
    """All programs, and the proxies between them.

    port: where clients send their requests. keys: of the tenants.
    front_proxy, engine_proxy, cache_proxy: our proxies.
    """

    def __init__(self, folder: Path, seed: int, *, private_hosts: bool) -> None:
        """private_hosts: the media host has a private address, because the run has no network of its own."""
        self.folder, self._seed, self._private_hosts = folder, seed, private_hosts
        self.keys = {name: f"fovea-{name}-{hashlib.sha256(name.encode()).hexdigest()}" for name in
                     (*TENANTS, FLOOD, QUIET)}  # fmt: skip
        self.clock = Clock(folder)
        self.disk = SmallDisk(folder / "disk", 64)
        self.cache_disk = SmallDisk(folder / "cache", 16)
        self.memory = MemoryGroup(f"fovea-chaos-{os.getpid()}")
        self.engine_ports = (free_port(), free_port())
        self.envoy_port, self.envoy_admin = free_port(), free_port()
        self.redis_port, self.gateway_port, self.front_port = free_port(), free_port(), free_port()
        self.processes: dict[str, Process] = {}
        self.engine_proxy = FaultProxy("127.0.0.1", self.engine_ports[0], seed + 1)
        self.cache_proxy = FaultProxy("127.0.0.1", self.redis_port, seed + 2)
        self.front_proxy: FaultProxy
        self.front_name = ""
        self.worker_kills: list[float] = []
        self._exit = AsyncExitStack()

    @property
    def port(self) -> int:
        return self.front_proxy.port

    @property
    def audit_log(self) -> Path:
        return self.folder / "audit.log"

    @property
    def usage_file(self) -> Path:
        return self.disk.folder / "usage.db"

    async def start(self) -> None:
        """Start everything. Raises StackError."""
        self._exit.callback(self.disk.unmount)
        self._exit.callback(self.cache_disk.unmount)
        self._exit.callback(self.memory.remove)
        await self._redis()
        await asyncio.gather(self._engine(0), self._engine(1))
        for proxy in (self.engine_proxy, self.cache_proxy):
            await proxy.start()
            self._exit.push_async_callback(proxy.stop)
        await self._envoy()
        await self._gateway()
        front = rendered_front(self.folder, self.front_port, self.gateway_port)
        target = self.gateway_port
        if front is not None:
            self.front_name, target = front.name, front.port
            await self._run("front", list(front.command), _listens(front.port))
        self.front_proxy = FaultProxy("127.0.0.1", target, self._seed)
        await self.front_proxy.start()
        self._exit.push_async_callback(self.front_proxy.stop)

    async def stop(self) -> None:
        await self._exit.aclose()

    async def _run(
        self, name: str, command: list[str], ready: Callable[[], Awaitable[bool]],
        env: dict[str, str] | None = None, group: Path | None = None,
    ) -> None:  # fmt: skip
        process = Process(name, command, self.folder / f"{name}.log", ready, env, group)
        self.processes[name] = process
        self._exit.push_async_callback(process.stop)
        await process.start()

    async def _redis(self) -> None:
        options = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--maxmemory", "16mb"]
        command = [
            _program("redis-server"),
            "--port",
            str(self.redis_port),
            "--dir",
            str(self.folder),
            *options,
        ]
        await self._run("redis", command, _listens(self.redis_port))

    async def _engine(self, number: int) -> None:
        name, port = ("engine-one", "engine-two")[number], self.engine_ports[number]
        batches = self.disk.folder / name
        batches.mkdir(parents=True, exist_ok=True)
        config = self.folder / f"{name}.toml"
        config.write_text(
            f'port = {port}\nbatch_dir = "{batches}"\nembed_disk_dir = "{self.cache_disk.folder}/embeds"\n'
            f"allow_private_hosts = {str(self._private_hosts).lower()}\n{ENGINE}"
        )
        command = [sys.executable, "-m", "fovea.cli.main", "serve", "--config", str(config)]
        env = {"OMP_NUM_THREADS": "1"} | (self.clock.env if number == 0 else {})
        await self._run(name, command, _answers(port, "/ready"), env, self.memory.procs if number else None)

    async def _envoy(self) -> None:
        file = self.folder / "envoy.json"
        file.write_text(json.dumps(envoy.config(self.envoy_port, self.envoy_admin, self.engine_ports[1])))
        options = ["--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warning"]
        command = [_program("envoy"), "--config-path", str(file), *options]
        await self._run("envoy", command, _listens(self.envoy_port))

    async def _gateway(self) -> None:
        keys, config = self.folder / "keys.toml", self.folder / "gateway.toml"
        limits = dict.fromkeys((*TENANTS, QUIET), "max_in_flight = 32\nrequests_per_minute = 100000")
        limits[FLOOD] = "max_in_flight = 4\nrequests_per_minute = 240"
        keys.write_text(
            'cache_secret = "0123456789abcdef0123456789abcdef"\n'
            + "".join(
                f'[[key]]\nname = "{name}"\nhash = "sha256:{hashlib.sha256(key.encode()).hexdigest()}"\n'
                f"{limits[name]}\n"
                for name, key in self.keys.items()
            )
        )
        keys.chmod(0o600)
        config.write_text(
            f'host = "127.0.0.1"\nport = {self.gateway_port}\n{GATEWAY}keys_file = "{keys}"\n'
            f'redis = "redis://127.0.0.1:{self.cache_proxy.port}/0"\n'
            f'accounts = "redis://127.0.0.1:{self.redis_port}/1"\n'
            f'usage_file = "{self.usage_file}"\naudit_log = "{self.audit_log}"\n'
            f"allow_private_hosts = {str(self._private_hosts).lower()}\n"
            f'[[backend]]\nname = "one"\nurl = "http://127.0.0.1:{self.engine_proxy.port}"\n'
            f'models = ["fovea-tiny"]\ndegrade = "detail"\n'
            f'[[backend]]\nname = "two"\nurl = "http://127.0.0.1:{self.envoy_port}"\n'
            f'models = ["fovea-tiny"]\ndegrade = "detail"\n[[model]]\nname = "fovea-tiny"\n'
        )
        command = [sys.executable, "-m", "fovea.cli.main", "gateway", "--config", str(config)]
        await self._run("gateway", command, _answers(self.gateway_port, "/ready"), self.clock.env)

    def workers(self) -> list[int]:
        """Return the processes of the gateway that serve."""
        found = []
        for pid in descendants(self.processes["gateway"].pid)[1:]:
            try:
                if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
            except OSError:
                continue
        return found

    def levels(self) -> dict[str, Level]:
        """Return memory and descriptors of every program."""
        return {name: level_of(process.pid) for name, process in self.processes.items()}


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
