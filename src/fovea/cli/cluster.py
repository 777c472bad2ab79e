"""fovea cluster: engines on a cluster of Ray, from one spec."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fovea.cli import options
from fovea.cli.fleet import add_simulate
from fovea.cli.text import aligned, fitted
from fovea.cluster.ray import cluster
from fovea.cluster.ray.guard import start_guard
from fovea.cluster.ray.ingress import environment
from fovea.cluster.ray.spec import ClusterSpec, read_spec
from fovea.core.errors import ConfigError, EngineError
from fovea.core.private_files import private_folder

if TYPE_CHECKING:
    from fovea.cluster.ray.status import ClusterState, ReplicaState
    from fovea.planner.shape import ModelShape


AUTH_MODE = "RAY_AUTH_MODE"
"""Ray's variable that says whether a token is needed. A Ray that starts sets it for its own process."""


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "cluster",
        description=f"{__doc__} docs/cluster.md describes the spec. It needs the extra `cluster`.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, run, text in (
        ("up", run_up, "start the models of a spec, or update running ones"),
        ("status", run_status, "show models, roles, replicas, their signals, and why there are so many"),
        ("down", run_down, "stop all models and Ray Serve"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("--spec", required=True, metavar="FILE", help="TOML file of the cluster")
        if name == "status":
            action.add_argument("--json", action="store_true", help="print JSON instead of tables")
        action.set_defaults(run=run)
    add_simulate(actions)


def run_up(args: argparse.Namespace) -> int:
    """Start or change a cluster. If it starts Ray itself, it stays until it is interrupted. Returns 0."""
    spec = _spec(args)
    if spec.address:
        cluster.connect(spec.address, environment(spec))
        cluster.up(spec, _shape, _say)
        return 0
    cluster.check_installed()
    guard = start_guard()
    cluster.connect("", environment(spec))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        cluster.up(spec, _shape, _say)
        _stay(_note(args))
    finally:
        cluster.down()
        cluster.end_ray()
        guard.communicate()
    return 0


def _stay(note: Path) -> None:
    """Stay until this process is interrupted, or the cluster is down. note: file for the address of Ray."""
    note.write_text(f"{cluster.ray_address()} {os.environ.get(AUTH_MODE, 'disabled')}")
    try:
        _say("up; it ends with this command (Ctrl-C), or by `fovea cluster down`")
        with suppress(KeyboardInterrupt):
            cluster.wait_until_down()
    finally:
        note.unlink(missing_ok=True)


def _note(args: argparse.Namespace) -> Path:
    """Return the file with the address of the Ray that `up` has started for a spec.

    A machine may have several, so Ray's own search would find any of them.
    """
    folder = Path(tempfile.gettempdir()) / f"fovea-cluster-{os.getuid()}"
    if reason := private_folder(folder):
        raise ConfigError(f"{folder} cannot be used: {reason}; accepted: a folder of this user alone")
    name = hashlib.blake2b(str(Path(args.spec).resolve()).encode(), digest_size=8).hexdigest()
    return folder / name


def _address(args: argparse.Namespace, spec: ClusterSpec) -> str:
    """Return the address of the Ray of a spec, for the commands that do not start it. Raises EngineError."""
    if spec.address:
        return spec.address
    try:
        address, mode = _note(args).read_text().split()
    except FileNotFoundError as error:
        raise EngineError(f"no `fovea cluster up` runs for {args.spec} on this machine") from error
    os.environ.setdefault(AUTH_MODE, mode)
    return address


def run_status(args: argparse.Namespace) -> int:
    """Show a cluster. Returns 1 if it is not up."""
    spec = _spec(args)
    cluster.connect(_address(args, spec), environment(spec))
    from fovea.cluster.ray.status import read_status

    state = read_status()
    if args.json:
        print(json.dumps(state.as_json(), indent=2))
    else:
        _show(state)
    return 0 if state.models else 1


def run_down(args: argparse.Namespace) -> int:
    """Stop a cluster. Returns 1 if it was not up."""
    spec = _spec(args)
    cluster.connect(_address(args, spec), environment(spec))
    if not cluster.down():
        print("fovea: the cluster was not up", file=sys.stderr)
        return 1
    _say("down")
    return 0


def _spec(args: argparse.Namespace) -> ClusterSpec:
    return read_spec(Path(args.spec), known_settings())


def known_settings() -> list[str]:
    """Return the names of all settings that a spec may hold for engines."""
    from fovea.cli.serve import ServeSettings
    from fovea.engine.config import EngineConfig
    from fovea.server.settings import ServerSettings

    return [*options.setting_names(ServeSettings, EngineConfig, ServerSettings), "log_level"]


def _shape(name: str) -> ModelShape:
    from fovea.cli.plan.inputs import find_model

    return find_model(name).shape


def _say(text: str) -> None:
    print(text, flush=True)


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _show(state: ClusterState) -> None:
    """Print a line for each role, a table of replicas, and the nodes."""
    replicas: list[tuple[str, ...]] = [
        ("replica", "model", "role", "state", "node", "pid", "work waits", "oldest", "in flight", "good")
    ]
    for model in state.models:
        for role in model.roles:
            why = "; ".join(filter(None, (role.message or role.reason, role.change)))
            count = f"{len(role.replicas)} of {role.target} replicas"
            _say(fitted(f"{model.name} {role.role}: {role.state}, {count}{f'; {why}' if why else ''}"))
            replicas += [_cells(model.name, role.role, one) for one in role.replicas]
    if state.models:
        _say(f"\n{aligned(replicas)}\n")
    else:
        _say("no model is up")
    nodes = ", ".join(f"{node} ({count} replicas)" for node, count in state.nodes.items()) or "none"
    _say(fitted(f"nodes: {nodes}"))


def _cells(model: str, role: str, one: ReplicaState) -> tuple[str, ...]:
    return (
        one.name, model, role, one.state, one.node, str(one.pid or ""),
        "" if one.queued_s is None else f"{one.queued_s:.2f} s",
        "" if one.oldest_s is None else f"{one.oldest_s:.2f} s",
        "" if one.in_flight is None else str(one.in_flight),
        "" if one.good is None else f"{one.good:.0%}",
    )  # fmt: skip
