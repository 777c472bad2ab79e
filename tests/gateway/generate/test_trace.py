"""The stages of a request in a gateway, and what the log of slow requests says of one that failed."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

from fovea.gateway.config import Tables
from fovea.gateway.generate.records import STAGES, Trace
from fovea.observe.logs import LogSettings
from tests.gateway.support import FakeEngine, Plan, running, soon


def test_a_failure_ends_the_stage_that_had_begun() -> None:
    for done in range(len(STAGES)):
        trace = Trace(None, {}, 10.0)
        for number, stage in enumerate(STAGES[:done], 1):
            trace.mark(stage, 10.0 + number)
        trace.fail(20.0)
        if done < len(STAGES) - 1:
            assert (trace.marks[-1], len(trace.marks)) == ((STAGES[done], 20.0), done + 1)
        else:  # no backend was found, so there is no time of one
            assert len(trace.marks) == done


async def test_a_request_that_only_waited_is_slow_because_of_the_queue() -> None:
    async with FakeEngine(plan=Plan(wait_s=math.inf)) as engine:
        only_one = replace(engine.config, max_requests=1)
        async with running(tables=Tables((only_one,)), logs=LogSettings(slow_request_s=0.001)) as gateway:
            services = gateway.gateway.services
            first = asyncio.ensure_future(gateway.ask())
            await soon(lambda: engine.received)
            second = asyncio.ensure_future(gateway.ask())

            async def waits() -> bool:
                return await gateway.metric("queued") == 1

            await soon(waits)
            second.cancel()
            await soon(services.records.slow.rows)
            (row,) = services.records.slow.rows()
            assert (row["attempts"], list(row["stages"])[-1]) == (0, "queue")
            assert any(reason.startswith("queue took") for reason in row["reasons"])
            first.cancel()
            await soon(lambda: len(services.records.slow.rows()) == 2)
