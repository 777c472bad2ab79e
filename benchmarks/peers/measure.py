"""Plays the workloads of `fovea bench` against all servers in turn: same pictures, same words, one engine awake at a time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from process import Server

from fovea.bench.client import Client
from fovea.bench.context import WorkloadContext
from fovea.bench.measure import Round
from fovea.bench.settings import Shape, Target
from fovea.bench.suite import SUITE

SETTLE_S = 0.5
"""Between a round and the freeze: a stream that was left has to end."""
BIG_IMAGE_TOKENS = 1024
"""Of the image that disturbs a stream: 896x896 pixels."""


@dataclass(frozen=True)
class Plan:
    """workloads: in their order. warmups: rounds of each before the first that counts. lacks: engine and workload to why
    it is not played."""

    workloads: Sequence[str]
    shape: Shape
    repeats: int
    warmups: int
    lacks: Mapping[tuple[str, str], str]

    def shape_of(self, workload: str) -> Shape:
        return replace(self.shape, visual_tokens=(BIG_IMAGE_TOKENS,)) if workload == "stall" else self.shape


Rounds = dict[str, dict[str, list[dict[str, Any]]]]
"""Engine to workload to its measured rounds."""


async def measure(servers: Mapping[str, Server], plan: Plan) -> tuple[Rounds, dict[str, str]]:
    """The rounds, and engines that do not answer at all to why. All servers are frozen afterwards."""
    refused: dict[str, str] = {}
    found: Rounds = {name: {} for name in servers}
    async with AsyncExitStack() as stack:
        clients = {}
        for name, server in servers.items():
            client = await stack.enter_async_context(Client(Target(server.url)))
            with server.awake():
                try:
                    await client.connect()
                except Exception as error:  # noqa: BLE001 - whatever it is, the page says it
                    refused[name] = f"{type(error).__name__}: {error}"
                    print(f"{name} does not answer: {refused[name]}", flush=True)
                    continue
            clients[name] = client
        for repeat in range(-plan.warmups, plan.repeats):
            for number, workload in enumerate(plan.workloads):
                for name in _turned(list(clients), repeat):
                    if (name, workload) in plan.lacks:
                        continue
                    nonce = f"{'w' if repeat < 0 else 'r'}{abs(repeat)}{number}"
                    with servers[name].awake():
                        played = await _play(clients[name], plan.shape_of(workload), workload, nonce)
                    print(f"{repeat:3} {workload:10} {name:13} {_short(played)}", flush=True)
                    if repeat >= 0:
                        found[name].setdefault(workload, []).append(played)
    return found, refused


def _turned(names: list[str], repeat: int) -> list[str]:
    """Another one begins each time."""
    first = repeat % len(names) if names else 0
    return names[first:] + names[:first]


async def _play(client: Client, shape: Shape, workload: str, nonce: str) -> dict[str, Any]:
    played = await SUITE[workload].play(WorkloadContext(client, shape, nonce))
    await asyncio.sleep(SETTLE_S)
    return described(played)


def described(played: Round) -> dict[str, Any]:
    """A round as JSON holds it. failed: requests, with the first one's reason in `why`. Medians are over its requests."""
    whole = [sample for sample in played.samples if sample.succeeded]
    failures = [sample.failure for sample in played.samples if sample.failure is not None]
    rates = [1 / sample.tpot for sample in whole if not math.isnan(sample.tpot)]
    return {
        "failed": len(failures),
        "why": f"{failures[0].kind}: {failures[0].text}" if failures else None,
        "short": sum(sample.output_tokens != sample.requested_tokens for sample in whole),
        "prompt_tokens": [sample.prompt_tokens for sample in whole],
        "ttft_ms": median([sample.ttft * 1e3 for sample in whole]) if whole else None,
        "decode_per_s": median(rates) if rates else None,
        "tokens_per_s": played.tokens_per_s,
        "stall_ms": played.values.get("stall_ms"),
    }


def _short(played: Mapping[str, Any]) -> str:
    if played["failed"]:
        return f"failed: {played['why']}"
    shown = [f"{played['ttft_ms']:.0f} ms to the first token", f"{played['tokens_per_s']:.1f} tok/s"]
    if played["stall_ms"] is not None:
        shown.append(f"longest gap {played['stall_ms']:.0f} ms")
    return ", ".join(shown)
