"""fovea ui: open the page of a server in the browser. Without --url, the server is started for it."""

from __future__ import annotations

import argparse
import re
import threading
import webbrowser
from typing import Any

from fovea.cli import options
from fovea.cli.common import DEFAULT_MODEL, LOG_LEVELS, call_server
from fovea.cli.serve import run_server
from fovea.core.errors import ConfigError
from fovea.engine.config import EngineConfig

HOST = "127.0.0.1"
OWN = ("command", "run", "url", "port", "browser", "admin")
"""Arguments that are not settings of the server."""
ENGINE_FLAGS = ("device", "threads", "quantization", "visual_tokens")


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "ui",
        description=f"{__doc__} That server listens on {HOST} only and ends with Ctrl-C. "
        "All other settings of `fovea serve` come from --config or from variables FOVEA_*.",
        usage="fovea ui [--url URL | --model MODEL] [OPTIONS]",
    )
    parser.add_argument("--url", help="URL of a running server (default: start one)")
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        metavar="N",
        help="port of the started server; 0: any free port (default). A browser keeps the history of the "
        "page per port, so name one to find the history again",
    )
    parser.add_argument("--admin", action="store_true", help="open the page for operators, /admin")
    parser.add_argument(
        "--no-browser", dest="browser", action="store_false", help="only print the page's address"
    )
    parser.add_argument("--model", help=f"a folder, a hub id, or {DEFAULT_MODEL} (default)")
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings; flags override it")
    parser.add_argument(
        "--log-level", choices=LOG_LEVELS, help="least severity that is logged (default: info)"
    )
    options.add_options(parser, "engine:", EngineConfig, only=ENGINE_FLAGS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    path = "/admin" if args.admin else "/"
    if args.url is None:
        return run_server(
            args, lambda url: show_later(url + path, browser=args.browser), host=HOST, port=args.port
        )
    for name, value in vars(args).items():
        if name not in OWN and value is not None or (name == "port" and value):
            raise ConfigError(
                f"{options.flag(name)} is for a server that this command starts, but --url names one",
                param=name,
            )
    show(page_of(args.url, path), browser=args.browser)
    return 0


def page_of(url: str, path: str) -> str:
    """Return the address of a running server's page.

    url: of the server. path: of the page.
    Raises ConfigError if the URL is wrong, or no Fovea server with a page answers there.
    """
    root = url.rstrip("/")
    if not re.match(r"https?://[^/]", root):
        raise ConfigError(f"--url is {url!r}; accepted: http://HOST:PORT or https://HOST:PORT", param="url")
    status, body = call_server(url, path)
    if status != 200 or b"Fovea" not in body:
        raise ConfigError(
            f"the server at {url} has no page at {path} (status {status}); accepted: the URL of "
            "`fovea serve`, whose pages are not turned off",
            param="url",
        )
    return root + path


def show(address: str, *, browser: bool) -> None:
    """Print the address of a page, and open it in the user's browser."""
    print(address, flush=True)
    if browser and not webbrowser.open(address):
        print("no browser was found; open this address in one", flush=True)


def show_later(address: str, *, browser: bool) -> None:
    """Show a page from a thread of its own: a browser in a terminal blocks until it ends."""
    threading.Thread(
        target=show, args=(address,), kwargs={"browser": browser}, name="fovea-browser", daemon=True
    ).start()
