"""The proxies that are compared, one file each."""

from __future__ import annotations

import importlib
import shlex

from proxies.base import Proxy, SetupError, Start

NAMES = ("bare", "gateway", "envoy", "nginx", "haproxy", "smg")
"""Names of the proxies in the order of the tables; each is a module of this folder."""

__all__ = ["NAMES", "Proxy", "SetupError", "Start", "load", "of_command"]


def load(name: str) -> Proxy:
    """The proxy with a name. Raises SetupError if there is none."""
    if name not in NAMES:
        raise SetupError(
            f"there is no proxy {name!r}; accepted are {', '.join(NAMES)}, or --plug NAME=COMMAND"
        )
    proxy: Proxy = importlib.import_module(f"proxies.{name}").PROXY
    return proxy


def of_command(text: str) -> Proxy:
    """A proxy of the user, as NAME=COMMAND. {port} is replaced, and {backends} by `--backend URL` for each.

    Raises SetupError if the text has no name, or the command no {port}.
    """
    name, _, command = text.partition("=")
    if not name or "{port}" not in command:
        raise SetupError(f"--plug is {text!r}; accepted is NAME=COMMAND, with {{port}} in the command")
    words = shlex.split(command)

    def start(place: Start) -> list[str]:
        backends = [part for url in place.backends for part in ("--backend", url)]
        filled = [[word.format(port=place.port)] if word != "{backends}" else backends for word in words]
        return [word for part in filled for word in part]

    return Proxy(name, name, start, lambda: "", command)
