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
from typing import Any

from fovea.cluster.ray import board
from fovea.cluster.ray.build import options, plan
from fovea.cluster.ray.ingress import environment
from fovea.cluster.ray.placement import Bundle, bundles, needs, place
from fovea.cluster.ray.spec import ClusterSpec, Model
from fovea.core.errors import ConfigError, EngineError
from fovea.core.names import install_command
from fovea.planner.shape import ModelShape

ShapeOf = Callable[[str], ModelShape]
"""Returns the shape of a model by its name. Raises ConfigError if it is not known."""
KEYS = ("FOVEA_API_KEY", "FOVEA_ADMIN_KEY", "FOVEA_METRICS_KEY")
"""Variables with keys of `fovea serve`. `up` passes its own ones on to all engines."""
NAMESPACE = "serve"
QUIET = ("ray._private.authentication.authentication_token_setup",)
"""Ray's loggers that say the same at each start."""
POLL_S = 0.5


def check_installed() -> None:
    """Raise ConfigError if Ray is not installed."""
    try:
        import ray  # noqa: F401
        from ray import serve  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"Ray is not installed ({error}); `fovea cluster` needs it: {install_command('cluster')}",
            param="cluster",
        ) from error


def connect(address: str, variables: Mapping[str, str]) -> None:
    """Connect to a running Ray, or start one for the address "". Raises EngineError if none runs there.

    variables: environment of Ray Serve, which has to be set before it is imported.
    """
    os.environ.update(variables)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)
    check_installed()
    import ray

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # its import sets another level
    shared: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "WARNING"}
    if not address:
        ray.init(include_dashboard=False, **shared)
        return
    try:
        ray.init(address=address, **shared)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = "on this machine" if address == "auto" else f"at {address}"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise EngineError(
            f"no Ray can be reached {where}: {reason}; start one with `ray start --head`, or leave address "
            "out, so that `fovea cluster up` starts one"
        ) from error


def up(spec: ClusterSpec, shape_of: ShapeOf, say: Callable[[str], None]) -> None:
    """Deploy a spec, and wait until all replicas answer. The caller has connected.

    say: shows a line of progress.
    Raises ConfigError for replicas that fit nowhere, and EngineError for those that do not start.
    """
    import ray
    from ray import serve

    resources = _resources(spec, shape_of)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for one in place(spec, resources, nodes):
        say(f"model {one.model}, role {one.role}: waits for a node: {one.reason}")
    variables = environment(spec)
    _start_serve(spec, variables)
    peer_key = _peer_key()
    keys = {name: os.environ[name] for name in KEYS if os.environ.get(name)}
    _remove_models(spec, say)
    for model in spec.models:
        application = _application(spec, model, resources, variables, peer_key, keys)
        say(f"model {model.name}: starts")
        try:
            serve.run(application, name=model.name, route_prefix=spec.prefix(model))
        except (RuntimeError, TimeoutError) as error:
            raise EngineError(f"model {model.name} did not start: {_reason(model.name) or error}") from error
        say(f"model {model.name}: answers at {address_of(spec, model)}")


def address_of(spec: ClusterSpec, model: Model) -> str:
    """Return the URL of a model's API at one of the proxies."""
    import ray

    host = ray.util.get_node_ip_address() if spec.ingress.host in ("0.0.0.0", "::") else spec.ingress.host
    return f"http://{host}:{spec.ingress.port}{spec.prefix(model).rstrip('/')}/v1"


def _resources(spec: ClusterSpec, shape_of: ShapeOf) -> dict[tuple[str, str], list[Bundle]]:
    found = {}
    for model in spec.models:
        shape = None if model.simulate else shape_of(model.model)
        for role in model.roles:
            found[model.name, role.role] = bundles(model, role, needs(model, role, shape))
    return found


def _start_serve(spec: ClusterSpec, variables: Mapping[str, str]) -> None:
    """Start Ray Serve, or check that it runs as this spec wants it."""
    from ray import serve

    ingress = spec.ingress
    wanted = {**variables, "host": ingress.host, "port": str(ingress.port), "location": ingress.location}
    running = board.get(board.SPEC, "ingress")
    if running is not None:
        different = sorted(name for name, value in wanted.items() if running.get(name) != value)
        if different:
            raise ConfigError(
                f"[ingress] and drain_s cannot change while the cluster is up ({', '.join(different)}); "
                "accepted: `fovea cluster down` first",
                param="ingress",
            )
        return
    _check_port(ingress.host, ingress.port)
    try:
        serve.start(
            proxy_location={"head": "HeadOnly", "every-node": "EveryNode"}[ingress.location],
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
                f"[ingress]: {host}:{port} cannot be listened on: {error.strerror}; accepted: a free port",
                param="port",
            ) from error


def _peer_key() -> str:
    """Return the secret of all peers of this cluster, which the first `up` makes."""
    found = board.get(board.SECRET, "peers")
    if found is None:
        found = {"key": secrets.token_hex(16)}
        board.put(board.SECRET, "peers", found)
    return str(found["key"])


def _remove_models(spec: ClusterSpec, say: Callable[[str], None]) -> None:
    """Remove the models that an earlier spec had."""
    from ray import serve

    for name in set(serve.status().applications) - {model.name for model in spec.models}:
        say(f"model {name}: is removed")
        serve.delete(name)


def _application(
    spec: ClusterSpec,
    model: Model,
    resources: Mapping[tuple[str, str], list[Bundle]],
    variables: Mapping[str, str],
    peer_key: str,
    keys: Mapping[str, str],
) -> Any:
    from ray import serve

    from fovea.cluster.ray.replica import AnsweringReplica, WorkingReplica

    others, answering = [], None
    for role in sorted(model.roles, key=lambda role: role.answers):
        chosen = options(spec, model, role, resources[model.name, role.role], variables)
        made = serve.deployment(AnsweringReplica if role.answers else WorkingReplica, **chosen)
        engine = plan(model, role, peer_key=peer_key, keys=keys)
        if role.answers:
            answering = made.bind(engine, *others)
        else:
            others.append(made.bind(engine))
    return answering


def _reason(model: str) -> str:
    """Return what Ray Serve says of the deployments of a model that do not run."""
    from ray import serve

    found = serve.status().applications.get(model)
    if found is None:
        return ""
    said = [one.message for one in found.deployments.values() if one.message] or [found.message]
    return " | ".join(" ".join(text.split())[-600:] for text in said)


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
