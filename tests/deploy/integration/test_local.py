"""The rendered stack of local processes: run.sh starts it, starts a killed service again, and stops it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from fovea.deploy.spec import DeploySpec, Gateway, Pool, Redis, Stop
from fovea.deploy.target import render
from fovea.deploy.write import write
from tests.deploy.integration.fleet import Load, soon
from tests.support.programs import program
from tests.support.servers import free_port


def stack(base: int) -> DeploySpec:
    """Return two simulated engines behind two gateways. base: first of their ports."""
    return DeploySpec(
        pools=(Pool(name="tiny", served_name="fovea-tiny", replicas=2, settings={"simulate": True}),),
        gateway=Gateway(replicas=2, settings={"probe_every_s": 0.5}),
        redis=Redis(),
        stop=Stop(pre_stop_s=0, lame_duck_s=1, drain_s=10, margin_s=5),
        proxy_port=base,
        engine_port=base + 1,
        gateway_port=base + 10,
    )


def pid(folder: Path, name: str) -> int:
    """Return the process id of a service; 0: it does not run."""
    try:
        return int((folder / "state" / "run" / f"{name}.pid").read_text())
    except (OSError, ValueError):
        return 0


@pytest.mark.slow
@pytest.mark.parametrize("proxy", ["nginx", "envoy"])
def test_the_stack_starts_survives_a_kill_and_stops_in_order(tmp_path: Path, proxy: str) -> None:
    for name in ("redis-server", proxy):
        program(name)
    base = min(free_port(), 60_000)
    spec = stack(base)
    write(render(spec, ["local"]), tmp_path)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PYTHON": sys.executable, "PATH": path, "READY_S": "60"}
    script = subprocess.Popen(
        [str(tmp_path / "run.sh"), proxy], env=environment, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        soon(lambda: (tmp_path / "state/run/ready").exists() or script.poll() is not None)
        first = pid(tmp_path, "engine-tiny-0")
        with Load(spec.proxy_port) as load:
            load.more(20)
            os.kill(first, signal.SIGKILL)
            soon(lambda: pid(tmp_path, "engine-tiny-0") not in (0, first))
            load.more(20)
        # A stream that had begun ends with an error. Everything else is tried at the other engine.
        assert all("the stream has no end" in failure for failure in load.failures)
        assert len(load.failures) <= 6
        urllib.request.urlopen(f"http://127.0.0.1:{spec.proxy_port}/ready", timeout=10).close()
        script.send_signal(signal.SIGTERM)
        script.wait(60)
        assert script.returncode == 0
        assert not list((tmp_path / "state" / "run").glob("*.pid"))
    finally:
        if script.poll() is None:
            script.send_signal(signal.SIGTERM)
            script.wait(60)
        assert script.stderr is not None
        script.stderr.close()
