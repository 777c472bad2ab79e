"""NGINX in front of gateways or engines.

The open-source NGINX has passive health checks only: it finds out with a request that a server is away, and
sends this request to another one. To do that it must have the request's body, so it takes in bodies before it
passes them on. Answers are not buffered.
"""

from __future__ import annotations

from fovea.deploy import front as fronts
from fovea.deploy.formats import fill_template
from fovea.deploy.front import Front, front_of
from fovea.deploy.machine import behind_proxy
from fovea.deploy.spec import DeploySpec
from fovea.deploy.target import Check, Files

PATH = "nginx.conf"


def render(spec: DeploySpec) -> Files:
    """Return nginx.conf for the machine of the servers, to be used as /etc/nginx/nginx.conf."""
    return {PATH: configuration(front_of(spec, behind_proxy(spec)))}


def checks(spec: DeploySpec) -> tuple[Check, ...]:
    """Return the commands that check the rendered files."""
    return (check(PATH),)


def check(path: str) -> Check:
    """Return the check of a configuration of NGINX. It leaves no file behind.

    path: its path under the output folder.
    """
    arguments = ("-t", "-q", "-p", "{dir}", "-c", f"{{dir}}/{path}")
    return Check("nginx", (*arguments, "-g", "pid /dev/null;"), f"NGINX reads {path}")


def configuration(front: Front, *, temporary: str = "", log: str = "stderr") -> str:
    """Return nginx.conf.

    temporary: beginning of the paths of folders for temporary files; "": those that NGINX was built with.
    log: file of errors, or stderr.
    """
    return fill_template(
        "nginx/nginx.conf.j2",
        front=front,
        limits=fronts,
        temporary=temporary,
        log=log,
        zone_kib=max(64, 2 * len(front.servers)),
        tries=min(3, len(front.servers)),
    )
