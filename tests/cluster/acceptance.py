"""The acceptance of `fovea cluster` on three raylets, with simulated engines and fovea-tiny.

    python -m tests.cluster.acceptance                all parts: 6 minutes on two cores
    python -m tests.cluster.acceptance ingress node   some of them
    ... --page FILE                                   also writes the figures as Markdown

It needs ray and the programs that Ray brings. It prints figures, and a line for each thing that must hold;
the exit status is 1 if one does not. Times are printed and not judged.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from fovea.bench.context import Content
from tests.cluster.load import REFUSED, SILENT, VISIBLE, WHOLE, Ends, at_once, body, picture, send
from tests.cluster.raylets import Raylets, raylets

ROOT = Path(__file__).parents[2]
PORT, GATEWAY_PORT = 18_300, 18_301
COST = ROOT / "benchmarks" / "costs" / "qwen2.5-vl-0.5b.json"
SPEC = """
address = "{address}"
[ingress]
host = "127.0.0.1"
port = {port}
location = "head"
deregister_s = 2
haproxy = {haproxy}
{models}
"""
SIMULATED = """
[[model]]
name = "sim"
simulate = true
drain_s = 120
settings = {{ cost = "{cost}", max_queue = {max_queue} }}
[[model.role]]
cpus = 0.5
resources = {{ slot = 1 }}
scale = {{ {scale} }}
"""
TINY = """
[[model]]
name = "tiny"
drain_s = 60
settings = { kv_cache_mib = 64 }
[[model.role]]
role = "encode"
cpus = 0.5
scale = { replicas_min = 1, replicas_max = 2 }
[[model.role]]
role = "prefill-decode"
cpus = 0.5
"""
DIVIDED = """
[[model]]
name = "divided"
drain_s = 60
settings = { kv_cache_mib = 64, tensor_parallel = 2 }
[[model.role]]
cpus = 0.5
resources = { slot = 1 }
"""


@dataclass
class Report:
    """The figures, and what did not hold."""

    figures: list[tuple[str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def figure(self, name: str, value: str) -> None:
        """Print a figure and remember it."""
        self.figures.append((name, value))
        print(f"  {name}: {value}", flush=True)

    def must(self, name: str, holds: bool, detail: object = "") -> None:
        """Print whether something holds."""
        print(f"  {'ok' if holds else 'FAILED'}: {name} {detail if not holds else ''}", flush=True)
        if not holds:
            self.failures.append(name)


class Bench:
    """The raylets with a cluster on them, and a gateway in front."""

    def __init__(self, nodes: Raylets, folder: Path, environment: dict[str, str]) -> None:
        self.nodes, self._folder, self.environment = nodes, folder, environment
        self.spec = folder / "cluster.toml"

    def write(self, *models: str, haproxy: bool = True) -> None:
        """Write the spec."""
        text = SPEC.format(
            address=self.nodes.address, port=PORT, haproxy=str(haproxy).lower(), models="".join(models)
        )
        self.spec.write_text(text)

    def fovea(self, action: str, *more: str) -> subprocess.Popen[str]:
        """Start `fovea cluster`."""
        command = [sys.executable, "-m", "fovea.cli.main", "cluster", action, "--spec", str(self.spec), *more]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.environment
        )

    def run(self, action: str, *more: str) -> str:
        """Run `fovea cluster`, and return what it prints. Raises RuntimeError."""
        process = self.fovea(action, *more)
        out, err = process.communicate(timeout=300)
        if process.returncode:
            raise RuntimeError(f"fovea cluster {action} ended with {process.returncode}: {out} {err}")
        return out

    def status(self, model: str = "sim", role: str = "all") -> dict[str, Any]:
        """Return the state of one role."""
        state = json.loads(self.run("status", "--json"))
        (found,) = (
            each for one in state["models"] if one["name"] == model for each in one["roles"]
            if each["role"] == role
        )  # fmt: skip
        return found  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def gateway(self, prefix: str = "") -> Iterator[str]:
        """Run a gateway in front. It knows the one ingress as two backends, so that it can try again."""
        file = self._folder / "gateway.toml"
        url = f"http://127.0.0.1:{PORT}{prefix}"
        # Faults are those of single replicas, which the ingress leaves out itself.
        file.write_text(
            "breaker_failures = 1000\nretry_share = 1.0\noutlier_factor = 0.0\n"
            + "".join(f'[[backend]]\nurl = "{url}"\nname = "{name}"\n' for name in ("first", "second"))
        )
        log = (self._folder / "gateway.log").open("w")
        process = subprocess.Popen(
            [sys.executable, "-m", "fovea.cli.main", "gateway", "--config", str(file), "--port",
             str(GATEWAY_PORT)],
            stdout=log, stderr=log, env=self.environment,
        )  # fmt: skip
        try:
            asyncio.run(until_ready(f"http://127.0.0.1:{GATEWAY_PORT}/ready"))
            yield f"http://127.0.0.1:{GATEWAY_PORT}"
        finally:
            process.terminate()
            process.wait(30)
            log.close()


async def until_ready(url: str, seconds: float = 60.0) -> None:
    """Wait until a URL answers with 200."""
    end = time.monotonic() + seconds
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < end:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.2)
    raise RuntimeError(f"{url} was not ready after {seconds:g} s")


def simulated(scale: str, max_queue: int = 4096) -> str:
    """Return the table of the simulated model."""
    return SIMULATED.format(cost=COST, scale=scale, max_queue=max_queue)


THREE = "replicas_min = 3, replicas_max = 3"


def ingress(bench: Bench, report: Report) -> None:
    """The time that the ingress adds, and image affinity through it and through a gateway."""
    bench.write(simulated(THREE))
    begun = time.monotonic()
    bench.run("up")
    report.figure("`up` of three simulated replicas", f"{time.monotonic() - begun:.0f} s")
    entry = bench.status()["replicas"][0]
    report.must("three nodes have a replica each", len(bench.status()["replicas"]) == 3)
    direct = engine_url(entry["pid"])
    asyncio.run(_added(direct, f"http://127.0.0.1:{PORT}", entry["name"], report, "HAProxy"))
    with bench.gateway() as url:
        ends = asyncio.run(_images(url))
    report.figure(
        "image affinity: 60 pictures, 6 times each in a random order, 12 at once, gateway and HAProxy",
        f"{ends.affinity:.1%} of repeats",
    )
    report.must("at least 90% of repeated images go to the same replica", ends.affinity >= 0.9, ends.counts)
    report.must("all were answered", set(ends.counts) == {WHOLE}, (ends.counts, ends.notes[:3]))
    used = {one for seen in ends.replicas.values() for one in seen}
    report.must("all three replicas were used", len(used) == 3, used)


def engine_url(pid: int) -> str:
    """Return the URL of an engine's process, from the sockets that it listens on."""
    found = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    (line,) = (line for line in found.splitlines() if f"pid={pid}," in line)
    return f"http://{line.split()[3]}"


async def _added(
    direct: str, through: str, replica: str, report: Report, name: str, pairs: int = 300
) -> None:
    """Send the same small request to an engine and through the ingress, in turns."""
    ends = Ends()
    async with aiohttp.ClientSession() as session:
        key = await _key_of(session, through, replica)
        times: tuple[list[float], list[float]] = ([], [])
        for number in range(pairs + 30):
            for side, url in enumerate((direct, through)):
                took = await send(session, url, body("sim"), ends, headers={"x-fovea-key": key})
                if number >= 30:
                    times[side].append(took)
    medians = [1000 * statistics.median(side) for side in times]
    p99 = [1000 * statistics.quantiles(side, n=100)[98] for side in times]
    report.figure(
        f"added by {name} and the relay, {pairs} requests one by one",
        f"p50 {medians[1] - medians[0]:.1f} ms, p99 {p99[1] - p99[0]:.1f} ms "
        f"(engine alone: p50 {medians[0]:.1f}, p99 {p99[0]:.1f})",
    )
    report.must("all were answered", set(ends.counts) == {WHOLE}, (ends.counts, ends.notes[:3]))


async def _key_of(session: aiohttp.ClientSession, url: str, replica: str) -> str:
    """Return a key whose requests one replica gets."""
    for number in range(1000):
        async with session.get(f"{url}/v1/models", headers={"x-fovea-key": f"key{number}"}) as answer:
            if answer.headers.get("x-fovea-replica") == replica:
                return f"key{number}"
    raise RuntimeError(f"no key leads to {replica}")


async def _images(url: str) -> Ends:
    ends, draw = Ends(), random.Random(1)
    async with aiohttp.ClientSession() as session:
        order = [number for number in range(60) for _ in range(6)]
        draw.shuffle(order)
        jobs = [
            send(session, url, body("sim", image=picture(number), text=f"Question {place}"), ends,
                 name=str(number))
            for place, number in enumerate(order)
        ]  # fmt: skip
        await at_once(jobs, 12)
    return ends


def node(bench: Bench, report: Report) -> None:
    """A node is removed under load, which comes through HAProxy alone and through a gateway before it."""
    bench.write(simulated(THREE))
    bench.run("up")
    with bench.gateway() as url:
        urls = {"HAProxy": f"http://127.0.0.1:{PORT}", "gateway": url}
        found = asyncio.run(_under_load(lambda: bench.nodes.say("remove"), urls, report))
    _judge("a node removed", found, report)
    begun = time.monotonic()
    bench.nodes.say("add")
    wait_for("three replicas again", lambda: _running(bench) == 3)
    report.figure("a new node has a replica", f"{time.monotonic() - begun:.0f} s after it came")


def engine(bench: Bench, report: Report) -> None:
    """An engine is killed under load. Its replica ends, and Ray Serve starts another one."""
    bench.write(simulated(THREE))
    bench.run("up")
    victim = bench.status()["replicas"][0]

    def kill() -> None:
        os.kill(victim["pid"], signal.SIGKILL)

    with bench.gateway() as url:
        urls = {"HAProxy": f"http://127.0.0.1:{PORT}", "gateway": url}
        found = asyncio.run(_under_load(kill, urls, report))
    _judge("an engine killed", found, report)
    wait_for("three replicas again", lambda: _running(bench) == 3)
    names = {one["name"] for one in bench.status()["replicas"]}
    report.must("the replica was replaced", victim["name"] not in names, names)


def _judge(what: str, found: dict[str, Ends], report: Report) -> None:
    for name, ends in found.items():
        counts = ", ".join(f"{count} {kind}" for kind, count in ends.counts.items())
        report.figure(f"{what}, 12 streams at once through {name}", counts)
        report.must(f"{name}: no error before the first byte", not ends.counts[REFUSED], ends.notes[:5])
        report.must(f"{name}: no stream was cut silently", not ends.counts[SILENT])
    visible = sum(ends.counts[VISIBLE] for ends in found.values())
    report.must("streams that were lost ended visibly", visible > 0)


def _running(bench: Bench) -> int:
    return sum(one["state"] == "RUNNING" for one in bench.status()["replicas"])


def wait_for(what: str, holds: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait until something holds. Raises RuntimeError."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise RuntimeError(f"{what}: not after {seconds:g} s")
        time.sleep(0.5)


async def _under_load(harm: Callable[[], object], urls: dict[str, str], report: Report) -> dict[str, Ends]:
    """Send streams to each URL for 40 s, and do harm after 10."""
    found, over = {name: Ends() for name in urls}, time.monotonic() + 40

    async def client(name: str, number: int) -> None:
        turn = 0
        while time.monotonic() < over:
            turn += 1
            picture_of = picture(number * 1000 + turn)
            wanted = body("sim", tokens=60, stream=True, image=picture_of)
            key = {"x-fovea-key": f"{number} {turn}"}
            await send(session, urls[name], wanted, found[name], headers=key)

    async with aiohttp.ClientSession() as session:
        clients = [asyncio.ensure_future(client(name, number)) for name in urls for number in range(12)]
        await asyncio.sleep(10)
        for name, ends in found.items():
            whole = set(ends.counts) == {WHOLE}
            report.must(f"{name}: streams were whole before", whole, (ends.counts, ends.notes[:3]))
        await asyncio.to_thread(harm)
        await asyncio.gather(*clients)
    return found


def update(bench: Bench, report: Report) -> None:
    """An update of the engines' settings under load."""
    bench.write(simulated("replicas_min = 2, replicas_max = 2"))
    bench.run("up")
    before = {one["name"] for one in bench.status()["replicas"]}
    with bench.gateway() as url:
        ends = asyncio.run(_update(bench, url))
    wait_for("old replicas end", lambda: not before & {one["name"] for one in bench.status()["replicas"]})
    report.figure("an update under 12 streams at once", ", ".join(f"{v} {k}" for k, v in ends.counts.items()))
    report.must("no stream was lost", set(ends.counts) == {WHOLE}, (ends.counts, ends.notes[:5]))


async def _update(bench: Bench, url: str) -> Ends:
    ends = Ends()
    async with aiohttp.ClientSession() as session:
        going = True

        async def client(number: int) -> None:
            turn = 0
            while going:
                turn += 1
                wanted = body("sim", tokens=200, stream=True, text=f"{number} {turn}")
                await send(session, url, wanted, ends)

        clients = [asyncio.ensure_future(client(number)) for number in range(12)]
        await asyncio.sleep(3)
        bench.write(simulated("replicas_min = 2, replicas_max = 2", max_queue=4095))
        await asyncio.to_thread(bench.run, "up")
        await asyncio.sleep(5)
        going = False
        await asyncio.gather(*clients)
    return ends


def scale(bench: Bench, report: Report) -> None:
    """A backlog brings replicas, and its end takes them away; streams in flight finish."""
    bench.write(
        simulated("replicas_min = 1, replicas_max = 3, target_queue_s = 2, scale_up_s = 2, scale_down_s = 4")
    )
    bench.run("up")
    wait_for("one replica", lambda: _running(bench) == 1, 180)
    ends, seen = asyncio.run(_backlog(bench))
    report.figure("replicas over time", " -> ".join(map(str, seen)))
    report.must("a backlog scales 1 -> 3 -> 1", seen[0] == 1 and max(seen) == 3 and seen[-1] == 1, seen)
    report.must("streams in flight finish", set(ends.counts) == {WHOLE}, (ends.counts, ends.notes[:5]))
    report.figure("streams meanwhile", ", ".join(f"{v} {k}" for k, v in ends.counts.items()))
    report.figure("the last decision", bench.status()["change"])


async def _backlog(bench: Bench) -> tuple[Ends, list[int]]:
    """Keep many requests with new images waiting until there are three replicas; two streams always run."""
    ends, seen, busy, over = Ends(), [1], True, False
    url = f"http://127.0.0.1:{PORT}"

    async def steady(number: int) -> None:
        turn = 0
        while not over:
            turn += 1
            await send(session, url, body("sim", tokens=150, stream=True, text=f"{number} {turn}"), ends)

    async def crowd(number: int) -> None:
        turn = 0
        while busy:
            turn += 1
            wanted = body("sim", image=picture(number * 1000 + turn, 448), tokens=4, stream=True)
            await send(session, url, wanted, ends, headers={"x-fovea-key": f"{number} {turn}"})

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        clients = [asyncio.ensure_future(steady(number)) for number in range(2)]
        clients += [asyncio.ensure_future(crowd(number)) for number in range(30)]
        end = time.monotonic() + 240
        while time.monotonic() < end and (busy or seen[-1] != 1):
            count = await asyncio.to_thread(_running, bench)
            if count != seen[-1]:
                seen.append(count)
            if max(seen) == 3:
                busy = False
        busy, over = False, True
        await asyncio.gather(*clients)
    return ends, seen


def tiny(bench: Bench, report: Report) -> None:
    """fovea-tiny with an encoder apart, and divided among two nodes, beside each other."""
    bench.write(TINY, DIVIDED)
    bench.run("up")
    answers = asyncio.run(_answers(f"http://127.0.0.1:{PORT}"))
    report.must("an encoder apart and two ranks answer alike", len(set(answers.values())) == 1, answers)
    report.must("the answer has words", all(answers.values()), answers)
    encoder = bench.status("tiny", "encode")
    report.must("the encoder has a deployment of its own", len(encoder["replicas"]) == 1, encoder)
    done = asyncio.run(_metric(f"http://127.0.0.1:{PORT}/tiny/metrics", "fovea:peer_encode_done_total"))
    report.must("the image was encoded by the peer", done >= 1, done)


async def _answers(url: str) -> dict[str, str]:
    found = {}
    async with aiohttp.ClientSession() as session:
        for name in ("tiny", "divided"):
            wanted = body(name, tokens=8, image=picture(3, 224), text="What colour is it?")
            async with session.post(f"{url}/{name}/v1/chat/completions", json=wanted) as answer:
                value = await answer.json()
                found[name] = (
                    value["choices"][0]["message"]["content"] if answer.status == 200 else str(value)
                )
    return found


async def _metric(url: str, name: str) -> float:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def plain(bench: Bench, report: Report) -> None:
    """Ray Serve's own proxy, with the router of this project, for comparison."""
    bench.write(simulated(THREE), haproxy=False)
    bench.run("up")
    entry = bench.status()["replicas"][0]
    direct = engine_url(entry["pid"])
    asyncio.run(_added(direct, f"http://127.0.0.1:{PORT}", entry["name"], report, "Ray Serve's proxy"))
    with bench.gateway() as url:
        ends = asyncio.run(_images(url))
    report.figure("image affinity, gateway and Ray Serve's proxy", f"{ends.affinity:.1%} of repeats")
    report.must("at least 90% of repeated images go to the same replica", ends.affinity >= 0.9, ends.counts)


PREDICTED_LOAD = (
    "--requests", "240", "--rate", "2.4", "--images", "60", "--visual-tokens", "256", "--output-tokens", "32",
    "--text", "0.3", "--embed-cache-mib", "1024", "--cost", str(COST),
)  # fmt: skip
WITHIN = 0.25
"""Largest difference between what a simulated fleet predicts and what the cluster does, as a share."""


def paper(bench: Bench, report: Report) -> None:
    """Send the requests of a fleet on paper to three replicas, through a gateway and HAProxy."""
    trace, counted, out = (
        bench.spec.with_name(name) for name in ("words.jsonl", "tokens.jsonl", "bench.json")
    )
    script = [sys.executable, "benchmarks/fleet.py", "--predict-cluster", "--replicas", "3", *PREDICTED_LOAD]
    _output([*script, "--save-trace", str(trace)], bench)
    bench.write(simulated(THREE))
    bench.run("up")
    engines = [engine_url(one["pid"]) for one in bench.status()["replicas"]]
    # The load generator counts words, and this model's tokenizer has several tokens for a word.
    few, many = (asyncio.run(_rendered(engines[0], Content(0, "", 28).text(words))) for words in (20, 220))
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    for row in rows:
        row["text"] = round(few + (row["text"] - 20) * (many - few) / 200)
    counted.write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = json.loads(_output([*script, "--trace", str(counted)], bench).splitlines()[-1])
    report.figure("tokens of a question of 20 and of 220 words", f"{few}, {many}")
    with bench.gateway() as url:
        command = [sys.executable, "-m", "fovea.cli.main", "bench", url, "trace", "--trace", str(trace)]
        _output([*command, "--out", str(out)], bench)
    rows = json.loads(out.read_text())["results"][0]["requests"]
    whole = [row for row in rows if row["error"] is None]
    report.must("all were answered", len(whole) == len(rows) == expected["requests"], len(whole))
    seconds = max(row["due_s"] + row["end_to_end_ms"] / 1e3 for row in whole)
    encoded = sum(asyncio.run(_metric(f"{one}/metrics", "fovea:embed_cache_misses_total")) for one in engines)
    per_token = [
        (row["end_to_end_ms"] - row["ttft_ms"]) / (row["tokens"] - 1) for row in whole if row["tokens"] > 1
    ]
    first = statistics.median(row["ttft_ms"] for row in whole)
    answers = expected["outcomes"]["good"] + expected["outcomes"]["late"]
    for name, predicted, measured in (
        ("answers per second", answers / expected["seconds"], len(whole) / seconds),
        ("output tokens per second", expected["tokens_per_s"], sum(row["tokens"] for row in whole) / seconds),
        ("first token p50, ms", 1e3 * expected["ttft_p50_s"], first),
        ("time per token p50, ms", 1e3 * expected["itl_p50_s"], statistics.median(per_token)),
        ("images encoded", expected["images_encoded"], encoded),
    ):
        report.figure(f"on paper and on the cluster: {name}", f"{predicted:.2f}, {measured:.2f}")
        report.must(f"{name}: within {WITHIN:.0%}", abs(measured - predicted) <= WITHIN * predicted)


async def _rendered(url: str, text: str) -> int:
    """Return the tokens of a question."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions/render", json=body("sim", text=text)) as answer,
    ):
        return len((await answer.json())["token_ids"])


def _output(command: list[str], bench: Bench) -> str:
    return subprocess.run(
        command, cwd=ROOT, env=bench.environment, capture_output=True, text=True, check=True, timeout=600
    ).stdout


def driver(bench: Bench, report: Report) -> None:
    """The command that has started Ray itself is killed."""
    bench.write(simulated("replicas_min = 1, replicas_max = 1").replace("resources = { slot = 1 }\n", ""))
    bench.spec.write_text(bench.spec.read_text().replace(f'address = "{bench.nodes.address}"', ""))
    process = bench.fovea("up")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("up;"):
            break
    marked = marked_processes()
    report.must("engine and HAProxy run", len(marked) >= 2, marked)
    process.send_signal(signal.SIGKILL)
    process.wait()
    begun = time.monotonic()
    with contextlib.suppress(RuntimeError):
        wait_for("no process is left", lambda: not marked_processes(), 120)
    left = marked_processes()
    report.must("the death of the driver leaves no engine and no HAProxy", not left, left)
    report.figure("engine and HAProxy have ended", f"{time.monotonic() - begun:.0f} s after its death")


MARK = "FOVEA_TEST_CLUSTER_RUN"


def marked_processes() -> dict[int, str]:
    """Return the processes that inherit from the local `up`: those with its port in their environment."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if f"{MARK}=local".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:90]
    return found


PARTS = {
    "ingress": ingress,
    "node": node,
    "engine": engine,
    "update": update,
    "scale": scale,
    "tiny": tiny,
    "paper": paper,
    "plain": plain,
}
"""Parts on the raylets."""
ALIKE = {"ingress", "node", "engine", "update", "scale"}
"""Parts with the same settings of the ingress. Between others the cluster goes down."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, "driver", []])
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    wanted = args.parts or [*PARTS, "driver"]
    report = Report()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with tempfile.TemporaryDirectory(prefix="fovea-cluster-") as text:
        folder = Path(text)
        if any(name in PARTS for name in wanted):
            _on_raylets(wanted, folder, environment, report)
        if "driver" in wanted:
            print("driver", flush=True)
            nowhere = type("Nowhere", (), {"address": "local"})()
            driver(Bench(nowhere, folder, {**environment, MARK: "local"}), report)
    if args.page:
        args.page.write_text(
            "\n".join(["| measured | figure |", "|---|---|", *(f"| {k} | {v} |" for k, v in report.figures)])
            + "\n"
        )
    for failure in report.failures:
        print(f"FAILED: {failure}")
    return 1 if report.failures else 0


def _on_raylets(wanted: list[str], folder: Path, environment: dict[str, str], report: Report) -> None:
    begun = time.monotonic()
    with (folder / "raylets.log").open("w") as log, raylets(environment, log) as nodes:
        report.figure("three raylets", f"{time.monotonic() - begun:.0f} s")
        bench = Bench(nodes, folder, environment)
        parts = [name for name in PARTS if name in wanted]
        for name, following in zip(parts, [*parts[1:], ""], strict=True):
            print(name, flush=True)
            PARTS[name](bench, report)
            if not {name, following} <= ALIKE:
                bench.run("down")


if __name__ == "__main__":
    sys.exit(main())
