"""The attacker as a process of its own. Its priority is low, so that it does not starve the server."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

NICE = 10
GRACE_S = 30.0
SPAWN = multiprocessing.get_context("spawn")


class Attacker:
    """A process that carries out one attack. It prepares its payload first, and waits for `begin`."""

    def __init__(self, name: str, seconds: float) -> None:
        self._pipe, far = SPAWN.Pipe()
        self._seconds = seconds
        self._process = SPAWN.Process(target=_main, args=(name, seconds, far), daemon=True)
        self._process.start()
        far.close()

    def prepare(self, patience: float = 120.0) -> None:
        """Wait until the payload is there. Raises RuntimeError if the process fails."""
        if not self._pipe.poll(patience) or self._received() != "ready":
            raise RuntimeError("the attacker could not prepare its payload")

    def begin(self, port: int) -> None:
        self._pipe.send(port)

    def end(self) -> Counter[str]:
        """Wait for the end of the attack. Returns what became of its connections, by kind."""
        tally = self._received() if self._pipe.poll(self._seconds + GRACE_S) else None
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
        return Counter(tally) if isinstance(tally, dict) else Counter({"attacker failed": 1})

    def _received(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            return None


def _main(name: str, seconds: float, pipe: Connection) -> None:
    from catalogue import ATTACKS
    from wire import Battle

    os.nice(NICE)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    attack = ATTACKS[name]
    payload = attack.prepare()
    pipe.send("ready")
    battle = Battle(pipe.recv(), seconds, payload)

    async def act() -> None:
        battle.start()
        task = asyncio.ensure_future(attack.run(battle))
        await asyncio.wait({task}, timeout=seconds + 5)
        if task.done():
            task.result()
        else:
            task.cancel()
            await asyncio.wait({task}, timeout=5)

    asyncio.run(act())
    pipe.send(dict(battle.tally))
