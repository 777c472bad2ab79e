"""Calls of Lua scripts, sent to Redis together if they come in the same turn of the event loop.

A batch is one pipeline on one connection. It saves most of the client's processor time when many requests
come at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import redis.asyncio
from redis.exceptions import NoScriptError, RedisError


class Script(NamedTuple):
    """One Lua script.

    text: its source.
    sha: the hash by which Redis knows it.
    """

    text: str
    sha: str


class Call(NamedTuple):
    """One call that waits for its answer.

    keys: number of keys at the beginning of the arguments.
    """

    script: Script
    keys: int
    arguments: Sequence[str]
    answer: asyncio.Future[Any]


class Batches:
    """Sends calls in batches.

    timeout_s: longest time of a batch, connecting included.
    """

    def __init__(self, client: redis.asyncio.Redis, timeout_s: float) -> None:
        self._redis, self._timeout_s = client, timeout_s
        self._waiting: list[Call] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def call(self, script: Script, keys: int, arguments: Sequence[str]) -> Any:
        """Call a script and return its answer. Raises TimeoutError, RedisError or OSError."""
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(Call(script, keys, arguments, answer))
        if len(self._waiting) == 1:
            task = asyncio.create_task(self._send())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await answer

    async def aclose(self) -> None:
        """Wait for batches that were sent. They end within their timeout."""
        await asyncio.gather(*self._tasks)

    async def _send(self) -> None:
        calls, self._waiting = self._waiting, []
        try:
            async with asyncio.timeout(self._timeout_s):
                answers = await self._answers(calls)
                for i, call in enumerate(calls):
                    if isinstance(
                        answers[i], NoScriptError
                    ):  # Redis was started again, or forgot its scripts
                        answers[i] = await self._redis.eval(call.script.text, call.keys, *call.arguments)
        except (TimeoutError, RedisError, OSError) as error:
            answers = [error] * len(calls)
        for call, answer in zip(calls, answers, strict=True):
            if call.answer.done():  # its request was cancelled
                continue
            if isinstance(answer, Exception):
                call.answer.set_exception(answer)
            else:
                call.answer.set_result(answer)

    async def _answers(self, calls: Sequence[Call]) -> list[Any]:
        """Return one answer or exception per call. Raises an exception that concerns all of them."""
        if len(calls) == 1:
            only = calls[0]
            try:
                return [await self._redis.evalsha(only.script.sha, only.keys, *only.arguments)]
            except NoScriptError as error:
                return [error]
        async with self._redis.pipeline(transaction=False) as pipe:
            for call in calls:
                pipe.evalsha(call.script.sha, call.keys, *call.arguments)
            return list(await pipe.execute(raise_on_error=False))
