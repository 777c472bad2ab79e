"""Files that change while a rendered stack runs: the mounts of every target show the change."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from fovea.deploy.spec import DeploySpec, Gateway, Pool
from fovea.deploy.target import render
from tests.deploy.specs import FULL
from tests.support.servers import free_port


def load(text: str) -> Any:
    """Return the values of YAML."""
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def mounts(stack: dict[str, Any], service: str) -> dict[str, str]:
    """The files beside docker-compose.yaml that a service sees: sources by their targets."""
    values = stack["services"][service]
    secrets = values.get("secrets", ())
    named = {f"/run/secrets/{name}": stack["secrets"][name]["file"] for name in secrets}
    binds = {each["target"]: each["source"] for each in values["volumes"] if each["type"] == "bind"}
    return {**named, **binds}


READ_ONCE = ("redis.conf", "grafana-password", *(f"pool-{pool.name}.toml" for pool in FULL.pools))
"""Files that are read when a service starts. Their mounts are made again then."""


def test_files_that_change_in_a_running_stack_are_in_mounted_folders() -> None:
    """A revoked key still answered 200: Compose mounted the single file, and `fovea keys` renames a new one.

    Only files that no program reads again may be mounted by themselves.
    """
    files = render(replace(FULL, tls=True), ["compose"])
    stack = load(files["docker-compose.yaml"])
    written = {"./secrets/keys", "./secrets/tls", "./secrets/metrics"}
    written |= {f"./{path.rpartition('/')[0]}" for path in files if "/" in path}
    for service in stack["services"]:
        for target, source in mounts(stack, service).items():
            folder = any(each == source or each.startswith(f"{source}/") for each in written)
            assert folder or source.rpartition("/")[2] in READ_ONCE, (service, target)
    gateway = mounts(stack, "gateway-0")
    assert gateway == {"/etc/fovea/gateway": "./gateway", "/etc/fovea/keys": "./secrets/keys"}
    assert mounts(stack, "nginx")["/etc/fovea/tls"] == "./secrets/tls"


@pytest.mark.parametrize("target", ["kubernetes", "kserve", "leaderworkerset"])
def test_no_subpath_hides_a_change_in_kubernetes(target: str) -> None:
    """A mount with subPath is never updated, so only scratch space has one."""
    for path, text in render(FULL, [target]).items():
        for document in yaml.safe_load_all(text) if path.endswith(".yaml") else ():
            for pod in pods_of(document):
                volumes = {each["name"]: each for each in pod.get("volumes", ())}
                for container in (*pod["containers"], *pod.get("initContainers", ())):
                    for mount in container.get("volumeMounts", ()):
                        assert "subPath" not in mount or "emptyDir" in volumes[mount["name"]], (path, mount)


def pods_of(value: Any) -> Iterator[dict[str, Any]]:
    """Every description of a pod in a manifest."""
    if isinstance(value, dict):
        if isinstance(value.get("containers"), list):
            yield value
        for each in value.values():
            yield from pods_of(each)
    elif isinstance(value, list):
        for each in value:
            yield from pods_of(each)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_changes_reach_a_running_gateway_through_the_mounts_of_compose(tmp_path: Path) -> None:
    """The gateway of a rendered stack, with the same mounts, sees a revoked key and a new alias."""
    spec, inside = DeploySpec(pools=(Pool(name="tiny"),), gateway=Gateway()), tmp_path / "container"
    for path, text in render(spec, ["compose"]).items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text.replace("/etc/fovea", str(inside)))
    keys, fovea = tmp_path / "secrets" / "keys" / "keys.toml", [sys.executable, "-m", "fovea.cli.main"]
    keys.parent.mkdir(parents=True)
    change = ["--for", "gateway", "--file", str(keys)]
    alice, bob = (
        subprocess.check_output([*fovea, "keys", "new", *change, "--name", name], text=True).strip()
        for name in ("alice", "bob")
    )
    stack, port = load((tmp_path / "docker-compose.yaml").read_text()), free_port()
    lines = []
    for target, source in mounts(stack, "gateway-0").items():
        place = Path(target)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.mkdir() if (tmp_path / source).is_dir() else place.touch()
        lines.append(f"mount --bind {tmp_path / source} {target}")
    command = " ".join([*fovea, *stack["services"]["gateway-0"]["command"]])
    lines.append(f"exec {command} --host 127.0.0.1 --port {port}")
    shell = ["unshare", "--mount", "sh", "-ec", "\n".join(lines)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(shell, stderr=log)

    def status(key: str, path: str = "/v1/models") -> int:
        headers = {"Authorization": f"Bearer {key}"}
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}{path}", headers=headers, trust_env=False).status_code
        return 0

    try:
        until(lambda: status(alice) == 200, 60)
        subprocess.check_output([*fovea, "keys", "revoke", *change, "alice"])
        until(lambda: status(alice) == 401, 20)
        assert status(bob) == 200
        config = tmp_path / "gateway" / "gateway.toml"
        edited = config.with_suffix(".new")
        edited.write_text(config.read_text() + '\n[[model]]\nname = "fovea-tiny"\naliases = ["latest"]\n')
        edited.replace(config)
        until(lambda: status(bob, "/v1/models/latest") == 200, 20)
    finally:
        process.terminate()
        process.wait(30)


def until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the change never arrived"
        time.sleep(0.1)
