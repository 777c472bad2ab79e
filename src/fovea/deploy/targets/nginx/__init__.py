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
    return (check(PATH, tls=spec.tls),)


def check(path: str, *, tls: bool) -> Check:
    """Return the check of a configuration of NGINX. It leaves no file behind.

    path: its path under the output folder.
    tls: whether it names a certificate.
    """
    arguments = ("-t", "-q", "-p", "{dir}", "-c", f"{{dir}}/{path}")
    words = (*arguments, "-g", "pid /dev/null;")
    return Check("nginx", words, f"NGINX reads {path}", certificate=path if tls else "")


def configuration(front: Front, *, temporary: str = "", log: str = "stderr", http2_line: bool = False) -> str:
    """Return nginx.conf.

    temporary: beginning of the paths of folders for temporary files; "": those that NGINX was built with.
    log: file of errors, or stderr.
    http2_line: HTTP/2 has a line of its own, as since NGINX 1.25.1; before, it was a word of `listen`.
    """
    return fill_template(
        "nginx/nginx.conf.j2",
        front=front,
        limits=fronts,
        temporary=temporary,
        log=log,
        http2_line=http2_line,
        public=[*(f"= {path}" for path in fronts.EXACT), *(f"~ ^{path}(/|$)" for path in fronts.FOLDERS)],
        zone_kib=max(64, 2 * len(front.servers)),
        tries=min(3, len(front.servers)),
    )
