"""HAProxy in front of gateways or engines, with active health checks on /ready.

Bodies that are larger than HAProxy's buffer pass through. So only a request whose head and body fit into
the buffer can be sent to another server after the first one refused it. If the head of a request cannot be
read, HAProxy's answer is its own page and not OpenAI's form.
"""

from __future__ import annotations

from fovea.deploy import front as fronts
from fovea.deploy.formats import fill_template
from fovea.deploy.front import Front, front_of
from fovea.deploy.machine import behind_proxy
from fovea.deploy.spec import DeploySpec
from fovea.deploy.target import Check, Files

PATH = "haproxy.cfg"
SOCKET = "/run/haproxy/admin.sock"
"""Socket of administration, where Debian's package has it."""


def render(spec: DeploySpec) -> Files:
    """Return haproxy.cfg for the machine of the servers, to be used as /etc/haproxy/haproxy.cfg."""
    return {PATH: configuration(front_of(spec, behind_proxy(spec)))}


def checks(spec: DeploySpec) -> tuple[Check, ...]:
    """Return the commands that check the rendered files."""
    arguments = ("-c", "-f", f"{{dir}}/{PATH}")
    return (Check("haproxy", arguments, f"HAProxy reads {PATH}", certificate=PATH if spec.tls else ""),)


def configuration(front: Front, *, socket: str = SOCKET) -> str:
    """Return haproxy.cfg.

    socket: path of the socket of administration.
    """
    # These have no http-error of their own in HAProxy; rules of the frontend return them.
    own = {status: body for status, body in front.errors.items() if status not in (404, 413, 429, 431)}
    return fill_template("haproxy/haproxy.cfg.j2", front=front, limits=fronts, socket=socket, own_errors=own)
