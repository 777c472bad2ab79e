"""up, status and down: a spec becomes applications of Ray Serve, a model each.

Ray is imported within functions: `fovea cluster` must say what is missing where it is not installed, and
Ray Serve reads its environment when it is imported.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from fovea.cluster.ray import board
from fovea.cluster.ray.build import PROXIES, Resources, configuration
from fovea.cluster.ray.ingress import environment
from fovea.cluster.ray.placement import Bundle, bundles, fill, needs, place
from fovea.cluster.ray.spec import ClusterSpec, Model
from fovea.core.errors import ConfigError, EngineError
from fovea.core.names import install_command
from fovea.planner.shape import ModelShape

ShapeOf = Callable[[str], ModelShape]
"""Returns the shape of a model by its name. Raises ConfigError if it is not known."""
NAMESPACE = "serve"
QUIET = ("ray._private.authentication.authentication_token_setup",)
"""Ray's loggers that say the same at each start."""
CONNECT_S = 5.0
POLL_S = 0.5
SAY_S = 20.0
"""Seconds between two lines about a model that does not run yet."""
LONGEST = 600
"""Characters of a reason of Ray Serve: its end says what happened."""
FAILED = ("DEPLOY_FAILED", "UNHEALTHY")


def check_installed() -> None:
    """Raise ConfigError if Ray is not installed. It imports nothing: Ray Serve would read its environment."""
    if find_spec("ray") is None:
        raise _missing("there is no package ray")


def _missing(reason: str) -> ConfigError:
    return ConfigError(
        f"Ray Serve cannot be imported ({reason}); `fovea cluster` needs it: {install_command('cluster')}",
        param="cluster",
    )


def connect(address: str, variables: Mapping[str, str]) -> None:
    """Connect to a running Ray, or start one for the address "". Raises EngineError if none runs there.

    variables: environment of Ray Serve, which has to be set before it is imported.
    """
    check_installed()
    os.environ.update(variables)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        import ray
        from ray import serve  # noqa: F401
    except ImportError as error:  # ray without its extra `serve`
        raise _missing(str(error)) from error
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # its import sets another level
    shared: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "WARNING"}
    if not address:
        ray.init(address="local", include_dashboard=False, **shared)
        return
    where = "on this machine" if address == "auto" else f"at {address}"
    try:
        if address != "auto":  # Ray would try for a minute
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), CONNECT_S).close()
        ray.init(address=address, **shared)
    except (OSError, RuntimeError, ValueError, OverflowError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise EngineError(
            f"no Ray can be reached {where}: {reason}; start one with `ray start --head`, or leave address "
            "out, so that `fovea cluster up` starts one"
        ) from error


def ray_address() -> str:
    """Return the address of Ray, for the spec's `address`. The caller has connected."""
    import ray

    return str(ray.get_runtime_context().gcs_address)


def end_ray() -> None:
    """End the Ray that this process has started."""
    import ray

    ray.shutdown()


def up(spec: ClusterSpec, shape_of: ShapeOf, say: Callable[[str], None]) -> None:
    """Deploy a spec, and wait until all replicas answer. The caller has connected.

    say: shows a line of progress.
    Raises ConfigError for replicas that fit nowhere, and EngineError for those that do not start.
    """
    import ray
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    resources = replica_resources(spec, shape_of)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    waiting = place(spec, resources, nodes)
    _start_serve(spec)
    _put_keys()
    for one in waiting:
        say(f"model {one.model}, role {one.role}: waits for a node: {one.reason}")
    surging = _surging(spec, resources, say)
    client = _get_global_client()
    client.deploy_apps(ServeDeploySchema.model_validate(configuration(spec, resources, surging)))
    _wait(spec, say)
    for model in spec.models:
        say(f"model {model.name}: answers at {address_of(spec, model)}")


def _surging(spec: ClusterSpec, resources: Resources, say: Callable[[str], None]) -> set[str]:
    """Return the models for which there is room to start new replicas before old ones stop."""
    from ray import serve
    from ray._private.state import available_resources_per_node

    running = set(serve.status().applications)
    found = set()
    for model in spec.models:
        free = [dict(node) for node in available_resources_per_node().values()]
        room = all(fill(resources[model.name, role.role], free) is None for role in model.roles)
        if model.surge and (room or model.name not in running):
            found.add(model.name)
        elif model.surge:
            say(f"model {model.name}: no room for one more replica, so an update stops old ones first")
    return found


def _wait(spec: ClusterSpec, say: Callable[[str], None]) -> None:
    """Wait until all models of a spec run, and no others. Raises EngineError if one does not start."""
    from ray import serve

    said_at = time.monotonic()
    while True:
        found = serve.status().applications
        states = {name: str(one.status.value) for name, one in found.items()}
        for name, state in states.items():
            if state in FAILED:
                raise EngineError(f"model {name} did not start: {_reason(found[name])}")
        if states == {model.name: "RUNNING" for model in spec.models}:
            return
        if time.monotonic() - said_at > SAY_S:
            said_at = time.monotonic()
            for name, state in states.items():
                if state != "RUNNING":
                    say(f"model {name}: {state.lower()} {_reason(found[name])}".rstrip())
        time.sleep(POLL_S)


def _reason(application: Any) -> str:
    """Return what Ray Serve says of the deployments of a model that do not run."""
    said = [one.message for one in application.deployments.values() if one.message] or [application.message]
    return " | ".join(" ".join(text.split())[-LONGEST:] for text in said)


def address_of(spec: ClusterSpec, model: Model) -> str:
    """Return the URL of a model's API at one of the proxies."""
    import ray

    host = ray.util.get_node_ip_address() if spec.ingress.host in ("0.0.0.0", "::") else spec.ingress.host
    return f"http://{host}:{spec.ingress.port}{spec.prefix(model).rstrip('/')}/v1"


def replica_resources(spec: ClusterSpec, shape_of: ShapeOf) -> dict[tuple[str, str], list[Bundle]]:
    """Return the bundles of a replica by model and role. Raises ConfigError."""
    found = {}
    for model in spec.models:
        shape = None if model.simulate else shape_of(model.model)
        for role in model.roles:
            found[model.name, role.role] = bundles(model, role, needs(model, role, shape))
    return found


def _start_serve(spec: ClusterSpec) -> None:
    """Start Ray Serve, or check that it runs as this spec wants it."""
    from ray import serve

    ingress, variables = spec.ingress, environment(spec)
    wanted = {**variables, "host": ingress.host, "port": str(ingress.port), "location": ingress.location}
    running = board.get(board.SPEC, "ingress")
    if running is not None:
        different = sorted(name for name, value in wanted.items() if running.get(name) != value)
        if different:
            raise ConfigError(
                f"[ingress] and the longest drain_s cannot change while the cluster is up (changed: "
                f"{', '.join(different)}); accepted: `fovea cluster down` first",
                param="ingress",
            )
        return
    _check_port(ingress.host, ingress.port)
    try:
        serve.start(
            proxy_location=PROXIES[ingress.location],
            http_options={"host": ingress.host, "port": ingress.port},
            controller_options={"runtime_env": {"env_vars": dict(variables)}},
        )
    except (RuntimeError, TimeoutError) as error:
        last = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        raise EngineError(f"Ray Serve did not start: {last[0]}") from error
    board.put(board.SPEC, "ingress", wanted)


def _check_port(host: str, port: int) -> None:
    """Refuse a port that is taken here, because Ray would only wait for its proxy. Raises ConfigError."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"[ingress]: {host}:{port} cannot be listened on: {error.strerror}; accepted: a free "
                "port, or `address`, if another `fovea cluster up` of this machine has it",
                param="port",
            ) from error


def _put_keys() -> None:
    """Put the keys of this process's environment on the board. A secret of peers stays once there is one."""
    before = board.get(board.SECRET, "keys") or {}
    keys = {name: os.environ[name] for name in board.KEYS if os.environ.get(name)}
    peer_key = os.environ.get(board.PEER_KEY) or before.get(board.PEER_KEY) or secrets.token_hex(16)
    board.put(board.SECRET, "keys", {**keys, board.PEER_KEY: peer_key})


def is_up() -> bool:
    """Whether a cluster is up: `down` ends that."""
    return board.get(board.SPEC, "ingress") is not None


def down() -> bool:
    """Remove everything that `up` has made, but not Ray. Return whether there was anything."""
    from ray import serve

    was = is_up()
    with suppress(TimeoutError):
        serve.shutdown()
    for kind in (board.REPLICA, board.DECISION, board.SECRET, board.SPEC):
        board.remove(kind)
    return was


def wait_until_down() -> None:
    """Wait until another process has called `down`."""
    while is_up():
        time.sleep(POLL_S)
