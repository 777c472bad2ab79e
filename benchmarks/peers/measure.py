"""Run the workloads of `fovea bench` with all servers in turn, one engine awake at a time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from process import Server
from sampling import Samples, Seen

from fovea.bench.client import Client
from fovea.bench.context import WorkloadContext
from fovea.bench.measure import Round
from fovea.bench.settings import Shape, Target
from fovea.bench.workloads import SUITE

SETTLE_S = 0.5
"""Pause between a round and the freeze, so that the server can end a stream that the client left."""
BIG_IMAGE_TOKENS = 1024
"""Visual tokens of the image that disturbs a stream: 896x896 pixels."""


@dataclass(frozen=True)
class Plan:
    """The rounds of a comparison.

    workloads: names, in their order.
    shape: sizes of prompts and answers.
    repeats: rounds of each workload that count.
    warmups: rounds of each workload before those.
    lacks: for (engine, workload) pairs that are not measured, the reason.
    """

    workloads: Sequence[str]
    shape: Shape
    repeats: int
    warmups: int
    lacks: Mapping[tuple[str, str], str]

    def shape_of(self, workload: str) -> Shape:
        return replace(self.shape, visual_tokens=(BIG_IMAGE_TOKENS,)) if workload == "stall" else self.shape


Rounds = dict[str, dict[str, list[dict[str, Any]]]]
"""Engine to workload to the measured rounds."""


@dataclass(frozen=True)
class Measured:
    """The outcome of a comparison.

    rounds: rounds of each engine.
    errors: the error of each engine that does not answer.
    instructions: kinds of instructions that each engine executed in the warm-up rounds.
    """

    rounds: Rounds
    errors: Mapping[str, str]
    instructions: Mapping[str, Seen]


async def measure(servers: Mapping[str, Server], plan: Plan) -> Measured:
    """Run all rounds. All servers are frozen afterwards.

    Instructions are sampled in the warm-up rounds, because that slows the server down. Without warm-ups they
    are sampled in all rounds.
    """
    samples = {name: Samples() for name in servers}
    errors: dict[str, str] = {}
    rounds: Rounds = {name: {} for name in servers}
    async with AsyncExitStack() as stack:
        clients = {}
        for name, server in servers.items():
            client = await stack.enter_async_context(Client(Target(server.url)))
            with server.awake():
                try:
                    await client.connect()
                except Exception as error:  # noqa: BLE001 - the page reports any error
                    errors[name] = f"{type(error).__name__}: {error}"
                    print(f"{name} does not answer: {errors[name]}", flush=True)
                    continue
            clients[name] = client
        for repeat in range(-plan.warmups, plan.repeats):
            for number, workload in enumerate(plan.workloads):
                for name in _rotate(list(clients), repeat):
                    if (name, workload) in plan.lacks:
                        continue
                    nonce = f"{'w' if repeat < 0 else 'r'}{abs(repeat)}{number}"
                    watched = repeat < 0 or not plan.warmups
                    with servers[name].awake():
                        async with servers[name].sampled(samples[name]) if watched else nullcontext():
                            record = await _play(clients[name], plan.shape_of(workload), workload, nonce)
                    print(f"{repeat:3} {workload:10} {name:13} {_summary(record)}", flush=True)
                    if repeat >= 0:
                        rounds[name].setdefault(workload, []).append(record)
    return Measured(rounds, errors, {name: part.seen() for name, part in samples.items()})


def _rotate(names: list[str], repeat: int) -> list[str]:
    """The names in another order for each repeat, so that each engine is first in turn."""
    first = repeat % len(names) if names else 0
    return names[first:] + names[:first]


async def _play(client: Client, shape: Shape, workload: str, nonce: str) -> dict[str, Any]:
    result = await SUITE[workload].play(WorkloadContext(client, shape, nonce))
    await asyncio.sleep(SETTLE_S)
    return round_record(result)


def round_record(result: Round) -> dict[str, Any]:
    """The JSON object of a round. Medians are over its requests.

    failed: number of failed requests; `why` is the reason of the first one.
    short: number of answers with another number of tokens than requested.
    """
    whole = [sample for sample in result.samples if sample.succeeded]
    failures = [sample.failure for sample in result.samples if sample.failure is not None]
    rates = [1 / sample.tpot for sample in whole if not math.isnan(sample.tpot)]
    return {
        "failed": len(failures),
        "why": f"{failures[0].kind}: {failures[0].text}" if failures else None,
        "short": sum(sample.output_tokens != sample.requested_tokens for sample in whole),
        "prompt_tokens": [sample.prompt_tokens for sample in whole],
        "ttft_ms": median([sample.ttft * 1e3 for sample in whole]) if whole else None,
        "decode_per_s": median(rates) if rates else None,
        "tokens_per_s": result.tokens_per_s,
        "stall_ms": result.values.get("stall_ms"),
    }


def _summary(record: Mapping[str, Any]) -> str:
    if record["failed"]:
        return f"failed: {record['why']}"
    figures = [f"{record['ttft_ms']:.0f} ms to the first token", f"{record['tokens_per_s']:.1f} tok/s"]
    if record["stall_ms"] is not None:
        figures.append(f"longest gap {record['stall_ms']:.0f} ms")
    return ", ".join(figures)
