"""A replica of Ray Serve: one engine as a child process, and what Ray needs to know of it.

Replicas of a role that answers clients are the ingress of their application: Ray Serve gives each an HTTP
port, and HAProxy sends requests there. Replicas of the other roles get work from engines alone, at the
address of their node, with the key that all peers share.

An engine that is divided among N ranks has N bundles of a placement group. The replica is in the first one
and runs rank 0; a small actor in each of the others runs another rank, as torchrun would.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray import serve
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fovea.cluster.ray import board
from fovea.cluster.ray.build import Plan
from fovea.cluster.ray.engine import EngineProcess, free_port
from fovea.cluster.ray.peers import PeerPorts
from fovea.cluster.ray.relay import Relay
from fovea.cluster.ray.signals import Goodput, first_tokens, gauges, report, work_of
from fovea.cluster.scaling import Signals
from fovea.core.errors import EngineError

log = logging.getLogger("fovea.cluster")
WATCH_S = 1.0
"""Seconds between two looks at the engine's signals, and at the board."""
ASK_S = 5.0
"""Seconds that the engine has to answer such a question."""
RANK_S = 30.0


@ray.remote(num_cpus=0, max_concurrency=2)
class Rank:
    """Runs one rank of an engine, beside rank 0."""

    async def start(self, settings: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        """Start it."""
        self._engine = EngineProcess(settings, environment=environment)
        await self._engine.start()

    async def stop(self) -> None:
        """End it."""
        await self._engine.stop(0.0)


class Replica:
    """One engine, started and watched. The ingress and the other replicas are made of it."""

    def __init__(self, plan: Plan) -> None:
        context = serve.get_replica_context()
        self._plan = plan
        self.name = context.replica_id.unique_id
        self._metrics_key = ""
        self._key = f"{plan.application}/{plan.role}/{self.name}"
        self._ports: dict[str, PeerPorts] = {}
        self._ranks: list[Any] = []
        self._engine: EngineProcess | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._goodput = Goodput(plan.target_s)
        self._signals = Signals()
        self.relay: Relay | None = None

    async def start(self) -> None:
        """Start the engine, and return when it is ready. Raises EngineError if it ends before."""
        plan, host = self._plan, ray.util.get_node_ip_address()
        settings, environment = dict(plan.settings), {}
        if plan.has_peers:
            settings |= {"role": plan.role, "transfer_host": host}
        for name, (_, most) in plan.peers.items():
            self._ports[name] = PeerPorts(most)
            settings[name] = await self._ports[name].start()
        await self._look_for_peers()
        if plan.ranks > 1:
            environment = await self._start_ranks(settings, host)
        keys, self._metrics_key = await self._keys()
        self._engine = EngineProcess(
            settings,
            host="127.0.0.1" if plan.answers else host,
            secrets=keys,
            environment=environment,
        )
        await self._engine.start()
        self.relay = Relay(self._engine.address, self.name)
        try:
            await self._engine.wait_until(self._is_ready)
        except EngineError:
            await self.stop()
            raise
        self._tasks = [
            asyncio.create_task(self._watch_forever()),
            asyncio.create_task(self._end_with_engine()),
        ]

    async def _keys(self) -> tuple[dict[str, str], str]:
        """Return the engine's secrets, and the key with which this replica reads /metrics; "": none."""
        known, own = await asyncio.to_thread(board.get, board.SECRET, "keys") or {}, ""
        found = {name: known.get(name) or os.environ.get(name, "") for name in (*board.KEYS, board.PEER_KEY)}
        peer_key = found.pop(board.PEER_KEY)
        keys = {name: value for name, value in found.items() if value}
        if keys:
            own = secrets.token_hex(16)
            keys["FOVEA_METRICS_KEY"] = ",".join(filter(None, (keys.get("FOVEA_METRICS_KEY", ""), own)))
        if self._plan.has_peers:
            keys[board.PEER_KEY] = peer_key
        return keys, own

    async def _start_ranks(self, settings: Mapping[str, Any], host: str) -> dict[str, str]:
        """Start all ranks but rank 0. Return the variables of rank 0."""
        plan, group = self._plan, ray.util.get_current_placement_group()
        shared = {
            "WORLD_SIZE": str(plan.ranks),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(free_port(host)),
            "LOCAL_RANK": "0",  # Ray shows each rank its own GPU alone
        }
        for rank in range(1, plan.ranks):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            bundle = dict(group.bundle_specs[rank])
            actor = Rank.options(  # type: ignore[attr-defined]
                scheduling_strategy=place,
                num_cpus=bundle.pop("CPU", 0),
                num_gpus=bundle.pop("GPU", 0),
                memory=bundle.pop("memory", 0) or None,
                resources=bundle,
            ).remote()
            self._ranks.append(actor)
        await asyncio.gather(
            *(
                actor.start.remote(settings, {**shared, "RANK": str(rank)})
                for rank, actor in enumerate(self._ranks, 1)
            )
        )
        return {**shared, "RANK": "0"}

    async def _is_ready(self, address: str) -> bool:
        return (await self._ask("/ready"))[0] == 200

    async def _ask(self, path: str) -> tuple[int, str]:
        """Ask the engine. Return status and text; (0, "") if it does not answer."""
        assert self.relay is not None
        assert self._engine is not None
        headers = {"authorization": f"Bearer {self._metrics_key}"} if self._metrics_key else {}
        with suppress(TimeoutError, OSError):
            async with (
                asyncio.timeout(ASK_S),
                self.relay.session.get(self._engine.address + path, headers=headers) as answer,
            ):
                return answer.status, await answer.text()
        return 0, ""

    async def _end_with_engine(self) -> None:
        """End this process if the engine ends by itself.

        Proxies then cannot connect, and try another replica at once; a replica without an engine would answer
        with errors until its health is checked. Ray Serve starts another one.
        """
        assert self._engine is not None
        await self._engine.wait()
        log.error("the engine has ended, and so does its replica: %s", self._engine.ended)
        logging.shutdown()
        os._exit(1)

    async def _watch_forever(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            status, text = await self._ask("/metrics")
            if status == 200:
                good = self._goodput.share(time.monotonic(), first_tokens(text))
                self._signals = Signals.of_stats(gauges(text), work_of(self._plan.role), good)
            try:
                await self._look_for_peers()
                await asyncio.to_thread(board.put, board.REPLICA, self._key, self._entry())
            except Exception:
                log.warning("the board of the cluster cannot be used now", exc_info=True)

    def _entry(self) -> dict[str, Any]:
        assert self._engine is not None
        return {
            "address": "" if self._plan.answers else self._engine.address,
            "node": ray.get_runtime_context().get_node_id(),
            "host": ray.util.get_node_ip_address(),
            "pid": self._engine.pid,
            "signals": report(self._signals),
        }

    async def _look_for_peers(self) -> None:
        for name, ports in self._ports.items():
            role = self._plan.peers[name][0]
            start = f"{self._plan.application}/{role}/"
            found = board.fresh(await asyncio.to_thread(board.entries, board.REPLICA, start), time.time())
            ports.update({key: entry["address"] for key, entry in found.items()})

    def signals(self) -> dict[str, float]:
        """The last signals, for scaling."""
        return report(self._signals)

    def check(self) -> None:
        """Raise EngineError if the engine has ended."""
        if self._engine is None or self._engine.ended:
            raise EngineError(self._engine.ended if self._engine is not None else "there is no engine")

    async def stop(self) -> None:
        """End the engine and everything around it. Ray Serve has waited for its answers before."""
        for task in self._tasks:
            task.cancel()
        with suppress(Exception):
            await asyncio.to_thread(board.remove, board.REPLICA, self._key)
        if self._engine is not None:
            await self._engine.stop(self._plan.drain_s)
        for rank in self._ranks:
            with suppress(Exception):
                await asyncio.wait_for(rank.stop.remote(), RANK_S)
        for ports in self._ports.values():
            ports.close()
        if self.relay is not None:
            await self.relay.close()


class _Watched:
    """The questions that Ray Serve asks a replica."""

    _replica: Replica

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Report the signals of the engine to the controller."""
        return self._replica.signals()

    def check_health(self) -> None:
        """Raise an error if the replica has to be replaced."""
        self._replica.check()


@serve.ingress()
class AnsweringReplica(_Watched):
    """A replica that answers clients."""

    async def __init__(self, plan: Plan, *others: Any) -> None:  # type: ignore[misc]
        """others: handles of the application's other deployments, which makes them a part of it."""
        self._replica = Replica(plan)
        await self._replica.start()

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application that answers requests."""
        return self._replica.relay

    async def __del__(self) -> None:
        await self._replica.stop()


class WorkingReplica(_Watched):
    """A replica that works for other engines alone."""

    async def __init__(self, plan: Plan) -> None:  # type: ignore[misc]
        self._replica = Replica(plan)
        await self._replica.start()

    async def __del__(self) -> None:
        await self._replica.stop()


def build(args: Mapping[str, Any]) -> Any:
    """Return the application of one model. args: its plans, see `build.configuration`."""
    plans = [Plan(**values) for values in args["plans"]]
    others = [
        serve.deployment(WorkingReplica, name=plan.role).bind(plan) for plan in plans if not plan.answers
    ]
    answering = next(plan for plan in plans if plan.answers)
    return serve.deployment(AnsweringReplica, name=answering.role).bind(answering, *others)
