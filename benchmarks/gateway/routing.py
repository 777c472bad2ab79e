"""Measure what the gateway's routing is worth with real engines that have small caches.

    python benchmarks/gateway/routing.py [--rounds 3] [--page benchmarks/results/gateway_routing.md]
    python benchmarks/gateway/routing.py --images 16 --rounds 1 --kill-images 32   # a quick look

Four `fovea serve` with fovea-tiny run with one thread each, and caches for about a third of all images. One
gateway for each policy is in front of them. In each round, every policy plays the same requests, one policy
after the other: 64 images, each asked about four times in random order, then a second turn for each. All
caches are cleared in between. The parts:

  policies  which part of the requests about known images reached a backend that knows the image, what the
            engines' own counters say, processor time of the engines, and times
  added     time to the first text of a known image, directly and through the gateway, in turn
  kill      four simulated engines; one is killed under load: failed requests, and images that move

Counts are exact. Processor time is hardly affected by other programs. Times are of a machine that others may
use. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from routing_load import Ask, Client, Reply, first_phase, follow_ups, picture
from routing_page import Added, Kill, Round, page, tables
from running import Program, free_port

POLICIES = ("cache-affine", "least-busy", "round-robin", "lod-cost")
ENGINE = ("--threads", "1", "--image-workers", "1", "--video-workers", "0", "--pixel-pool-mib", "64",
          "--pixel-cache-mib", "0", "--decoded-cache-mib", "0", "--lame-duck-s", "0")  # fmt: skip
TINY, SIMULATED = "fovea-tiny", "fovea-simulated"
READY_S, POLL_S = 180.0, 0.1
COUNTERS = {
    "encoded": "fovea:images_encoded_total",
    "prompt": "fovea:prefix_query_tokens_total",
    "cached": "fovea:prefix_hit_tokens_total",
    "embed_hits": "fovea:embed_cache_hits_total",
    "embed_evictions": "fovea:embed_cache_evictions_total",
}
SMALL = (96, 64)
"""Width and height of the images for the simulated engines."""


@dataclass(frozen=True, slots=True)
class Servers:
    """Running engines, and a gateway for each policy.

    engines: URLs by name.
    gateways: URLs by policy.
    programs: the processes of both.
    """

    engines: dict[str, str]
    gateways: dict[str, str]
    programs: dict[str, Program]

    def engine_cpu_s(self) -> float:
        """Processor time of all engines until now, in seconds."""
        return sum(self.programs[name].usage().clock_s for name in self.engines)

    def gateway_cpu_s(self, policy: str) -> float:
        """Processor time of one gateway until now, in seconds."""
        return self.programs[policy].usage().clock_s


def call(url: str, path: str, method: str = "GET") -> tuple[int, str]:
    """Send a request without a body. Raises OSError or HTTPException."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def wait_until_ready(program: Program, url: str) -> None:
    """Wait until /ready says 200. Raises RuntimeError with the end of the log if it does not."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and program.process.poll() is None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if call(url, "/ready")[0] == 200:
                return
        time.sleep(POLL_S)
    raise RuntimeError(f"{url} is not ready; its log ends with: {program.log.read_text()[-1000:]}")


@contextlib.contextmanager
def started(commands: dict[str, list[str]], folder: Path) -> Iterator[dict[str, Program]]:
    """Run `fovea` with these arguments, each on a free port, until the end of the block.

    Yields programs by name. Their URLs are those of `url_of`.
    """
    with contextlib.ExitStack() as stack:
        programs = {}
        for name, arguments in commands.items():
            command = [sys.executable, "-m", "fovea.cli.main", *arguments]
            programs[name] = stack.enter_context(Program(command, (), folder / f"{name}.log"))
        for name, program in programs.items():
            wait_until_ready(program, url_of(commands[name]))
        yield programs
        for name, program in programs.items():
            for line in program.log.read_text(errors="replace").splitlines():
                if " W " in line or " E " in line:
                    print(f"{name}: {line}", file=sys.stderr)


def url_of(arguments: Sequence[str]) -> str:
    return f"http://127.0.0.1:{arguments[list(arguments).index('--port') + 1]}"


def engine_commands(count: int, *options: str) -> dict[str, list[str]]:
    return {f"engine-{n}": ["serve", "--port", str(free_port()), *options] for n in range(1, count + 1)}


def gateway_command(policy: str, engines: dict[str, str], folder: Path) -> list[str]:
    """The arguments of a gateway that stores no answers, so that every request reaches an engine."""
    lines = [f'policy = "{policy}"', "response_cache_mib = 0"]
    lines += [f'[[backend]]\nname = "{name}"\nurl = "{url}"' for name, url in engines.items()]
    path = folder / f"{policy}.toml"
    path.write_text("\n".join(lines))
    return ["gateway", "--config", str(path), "--port", str(free_port())]


@contextlib.contextmanager
def real_servers(options: argparse.Namespace, folder: Path) -> Iterator[Servers]:
    """Run the engines, and the gateways in front of them."""
    caches = ("--kv-cache-mib", str(options.kv_mib), "--embed-cache-mib", str(options.embed_mib))
    commands = engine_commands(options.engines, *ENGINE, *caches)
    with started(commands, folder) as programs:
        engines = {name: url_of(command) for name, command in commands.items()}
        fronts = {policy: gateway_command(policy, engines, folder) for policy in POLICIES}
        with started(fronts, folder) as more:
            gateways = {policy: url_of(command) for policy, command in fronts.items()}
            yield Servers(engines, gateways, {**programs, **more})


def counters(url: str) -> dict[str, float]:
    """The counters of one engine, from its /metrics."""
    lines = call(url, "/metrics")[1].splitlines()
    read = dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(read[metric]) for name, metric in COUNTERS.items()}


def total(engines: dict[str, str]) -> dict[str, float]:
    """The counters of all engines together."""
    each = [counters(url) for url in engines.values()]
    return {name: sum(one[name] for one in each) for name in COUNTERS}


async def play_round(servers: Servers, policy: str, asks: Sequence[Sequence[Ask]], pictures: Sequence[str],
                     concurrency: int) -> Round:  # fmt: skip
    """Play all requests through the gateway of one policy, with cold caches."""
    for url in servers.engines.values():
        call(url, "/admin/caches/all", "DELETE")
    before, cpu_s = total(servers.engines), servers.engine_cpu_s()
    began = time.perf_counter()
    replies: list[Reply] = []
    async with Client(servers.gateways[policy], TINY, pictures) as client:
        for phase in asks:
            replies += await client.play(phase, concurrency)
    seconds, cpu_s = time.perf_counter() - began, servers.engine_cpu_s() - cpu_s
    after = total(servers.engines)
    counted = {name: after[name] - before[name] for name in COUNTERS}
    return Round(policy, replies, seconds, cpu_s, counted)


async def measure_policies(servers: Servers, options: argparse.Namespace) -> list[Round]:
    """All rounds; in each one, the policies come in another order."""
    pictures = [picture(seed) for seed in range(options.images)]
    rounds = []
    for number in range(options.rounds):
        asks = [first_phase(options.images, options.times, number), follow_ups(options.images, number)]
        shift = number % len(POLICIES)
        for policy in (*POLICIES[shift:], *POLICIES[:shift]):
            done = await play_round(servers, policy, asks, pictures, options.concurrency)
            print(f"round {number + 1}, {policy}: {done.seconds:.1f} s", file=sys.stderr)
            rounds.append(done)
    return rounds


async def measure_added(servers: Servers, pairs: int) -> Added:
    """Ask about one known image directly and through the gateway, in turn, one request at a time."""
    policy = "cache-affine"
    pictures, ask = [picture(2)], Ask(0, "repeat")
    direct: list[float] = []
    through: list[float] = []
    cpu_s = servers.gateway_cpu_s(policy)
    async with Client(servers.gateways[policy], TINY, pictures) as gateway:
        home = (await gateway.send(ask)).backend
        async with Client(servers.engines[home], TINY, pictures) as engine:
            for number in range(pairs + 1):
                order = [(engine, direct), (gateway, through)]
                for client, times in order if number % 2 else reversed(order):
                    reply = await client.send(ask)
                    if reply.error:
                        raise RuntimeError(f"a request failed: {reply.error}")
                    if number:  # the first pair warms connections up
                        times.append(reply.ttft_s)
    cpu_s = servers.gateway_cpu_s(policy) - cpu_s
    return Added(direct, through, cpu_s / (pairs + 2), len(pictures[0]))


async def measure_kill(options: argparse.Namespace, folder: Path) -> Kill:
    """Ask about every image, kill an engine while all are asked about again, and ask a third time."""
    commands = engine_commands(4, "--simulate", "--image-workers", "1", "--video-workers", "0")
    pictures = [picture(1000 + seed, SMALL) for seed in range(options.kill_images)]
    asks = [Ask(image, "repeat") for image in range(options.kill_images)]
    with started(commands, folder) as programs:
        engines = {name: url_of(command) for name, command in commands.items()}
        front = {"gateway": gateway_command("cache-affine", engines, folder)}
        with started(front, folder):
            url = url_of(front["gateway"])
            async with Client(url, SIMULATED, pictures, stream=False) as client:
                before = await client.play(asks, options.concurrency)
                again = await client.play(asks, options.concurrency)

                def kill(answers: int) -> None:
                    if answers == len(asks) // 4:
                        programs["engine-2"].process.kill()

                during = await client.play(asks, options.concurrency, kill)
                after = await client.play(asks, options.concurrency)
    return Kill("engine-2", before, again, during, after)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=4, help="real engines (default: 4)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all policies (default: 3)")
    parser.add_argument("--images", type=int, default=64, help="different images (default: 64)")
    parser.add_argument("--times", type=int, default=4, help="first questions about each (default: 4)")
    parser.add_argument("--concurrency", type=int, default=8, help="requests in flight (default: 8)")
    parser.add_argument("--kv-mib", type=int, default=7, help="KV of each engine in MiB (default: 7)")
    parser.add_argument(
        "--embed-mib", type=int, default=3, help="encoder outputs of each engine in MiB (default: 3)"
    )
    parser.add_argument("--pairs", type=int, default=60, help="pairs of the part `added` (default: 60)")
    parser.add_argument("--kill-images", type=int, default=256, help="images of the part `kill`")
    parser.add_argument("--page", metavar="FILE", help="write the tables to this page, too")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory(prefix="gateway-routing-") as name:
        folder = Path(name)
        with real_servers(options, folder) as servers:
            rounds = asyncio.run(measure_policies(servers, options))
            added = asyncio.run(measure_added(servers, options.pairs))
        kill = asyncio.run(measure_kill(options, folder))
    text, figures = tables(rounds, added, kill)
    print(text)
    if options.page:
        Path(options.page).write_text(page(text, options))
    print(json.dumps({**figures, "settings": {k: v for k, v in vars(options).items() if k != "page"}}))


if __name__ == "__main__":
    main()
