"""Attack a running server in every known way, and measure what innocent clients see meanwhile.

    python benchmarks/attack/run.py [--only NAME ...] [--seconds 6] [--list] [--json FILE] [--page FILE]

Each attack gets a fresh `fovea serve` on a loopback port. The last output is a table with one row per attack.
The exit status is 1 if any attack broke a promise. benchmarks/results/attack.md lists the promises.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import lame_duck
import other_site
import taken_over
from attack_page import commit, table, write
from attacker import Attacker
from catalogue import ATTACKS
from catalogue.base import Attack
from innocent import Innocent, Log, ask, measure, picture
from load import OtherLoad
from result import Result
from serving import INNOCENT_KEYS, MemoryWatch, Server

CHECKS: dict[str, tuple[str, str, Callable[[], tuple[Counter[str], list[str]]]]] = {
    "decoder": (
        "a file", "a decoder that a file has taken over tries to reach the server, files and the network",
        taken_over.check,
    ),
    "other-site": (
        "a page", "a web page in a user's browser sends cross-site requests and rebinds its name; no keys",
        other_site.check,
    ),
    "sigterm": (
        "no key", "no attack: SIGTERM under load; new clients get 503 with Retry-After, streams end properly",
        lame_duck.check,
    ),
}  # fmt: skip
"""Rows without innocent clients: what the attacker needs, the story, and what checks it."""
QUIET_S, WARM_UP, AFTER_S, RECOVERY_S = 6.0, 3, 1.0, 20.0
KNOWN_QUESTION = "What is two and one?"


def main() -> int:
    args = _arguments()
    if args.list:
        for name, story in _stories().items():
            print(f"{name:20} {story}")
        return 0
    names = args.only or list(_stories())
    started = time.monotonic()
    quiet = _quiet()
    results = []
    for name in names:
        if name in CHECKS:
            needs, story, check = CHECKS[name]
            seen, problems = check()
            result = Result(name, needs, story, attacker=seen, problems=problems)
        else:
            result = _attack(ATTACKS[name], args.seconds, quiet, args.ceiling_mib, args.kill_mib)
        results.append(result)
        print(f"{name:20} {result.verdict}", flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        rows = {"commit": commit(), "seconds": args.seconds, "results": [row.as_json() for row in results]}
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.page:
        write(args.page, results, quiet, args.seconds, args.before)
    print(f"\n{table(results)}\n\n{time.monotonic() - started:.0f} s")
    return 1 if any(result.problems for result in results) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", choices=list(_stories()), metavar="NAME", help="may be repeated"
    )
    parser.add_argument("--seconds", type=float, default=6.0, help="length of each attack (default: 6)")
    parser.add_argument("--list", action="store_true", help="list the attacks and end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the page of results")
    parser.add_argument("--before", type=Path, metavar="FILE", help="JSON of an earlier run, for the page")
    parser.add_argument(
        "--ceiling-mib", type=float, default=0.0,
        help="most memory of the server's processes in MiB (default: 2048 above its start)",
    )  # fmt: skip
    parser.add_argument(
        "--kill-mib", type=float, default=10_240.0,
        help="kill a server that takes more memory, to protect the machine (default: 10240)",
    )  # fmt: skip
    return parser.parse_args()


def _stories() -> dict[str, str]:
    return {name: attack.story for name, attack in ATTACKS.items()} | {
        name: story for name, (_, story, _) in CHECKS.items()
    }


def _quiet() -> dict[str, Log]:
    """The innocent clients' logs on a server that nobody attacks."""
    server = Server()
    try:
        server.wait_ready()
        _warm_up(server)
        return measure(server.port, QUIET_S)
    finally:
        server.stop()


def _warm_up(server: Server) -> object:
    """Ask a few questions of both kinds, and return the answer that must be the same after the attack."""
    for number in range(WARM_UP):
        part = {"type": "image_url", "image_url": {"url": picture(-1 - number)}}
        ask(server.port, INNOCENT_KEYS[1], [part, {"type": "text", "text": "What?"}])
        answer = _known_answer(server)
    return answer


def _known_answer(server: Server) -> object:
    try:
        status, body = ask(server.port, INNOCENT_KEYS[0], KNOWN_QUESTION, tokens=16)
    except Exception as error:  # noqa: BLE001 - any failure to answer is a result here
        return type(error).__name__
    return body.get("choices", status)


def _attack(
    attack: Attack, seconds: float, quiet: dict[str, Log], ceiling_mib: float, kill_mib: float
) -> Result:
    """Carry out one attack against a fresh server."""
    result = Result(attack.name, attack.needs, attack.story)
    if attack.setup.nameserver and os.geteuid() != 0:
        result.skipped = "it needs root, to give the server a DNS server of its own"
        return result
    attacker = Attacker(attack.name, seconds)
    server = Server(attack.setup)
    try:
        server.wait_ready()
        answer = _warm_up(server)
        attacker.prepare()
        with MemoryWatch(server.pid, kill_mib) as memory:
            clients = [Innocent(server.port, kind) for kind in ("text", "image")]
            for client in clients:
                client.start()
            others = OtherLoad([os.getpid()])  # server and attacker are its descendants
            attacker.begin(server.port)
            result.attacker = attacker.end()
            time.sleep(AFTER_S)
            result.innocents = {client.kind: client.finish() for client in clients}
            result.other_load = others.share()
            after = _recovered(server, answer)
        result.baseline_mib, result.peak_mib = memory.baseline_mib, memory.peak_mib
        result.judge(quiet, ceiling_mib)
        if memory.killed:
            result.problems.insert(0, f"killed at {memory.peak_mib:.0f} MiB to protect the machine")
        elif not server.alive():
            result.problems.insert(0, f"the server died: {server.last_words()[-200:]}")
        elif after:
            result.problems.append(after)
    except RuntimeError as error:
        result.problems.append(str(error))
    finally:
        server.stop()
    return result


def _recovered(server: Server, expected: object) -> str:
    """Ask the known question again. Returns the problem, empty if the answer is that of before."""
    end = time.monotonic() + RECOVERY_S
    got: object = "nothing"
    while time.monotonic() < end and server.alive():
        got = _known_answer(server)
        if got == expected:
            return ""
        time.sleep(0.5)
    return f"afterwards it answers {str(got)[:80]!r}"


if __name__ == "__main__":
    sys.exit(main())
