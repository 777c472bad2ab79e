"""A server in a thread of its own: it is open when the block begins, and ends with the block."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from fovea.server.app import App, create_app
from fovea.server.run import serving
from tests.server.scripted import Script


class Noting(App):
    """An application that notes when it begins and ends."""

    events: list[str]

    async def start(self) -> None:
        self.events.append("begun")
        await super().start()

    async def stop(self) -> None:
        await super().stop()
        self.events.append("ended")


class Broken(App):
    """An application that does not start."""

    async def start(self) -> None:
        raise RuntimeError("no")


def app_of(kind: type[App]) -> App:
    app = create_app(Script())
    app.__class__ = kind
    return app


def test_port_and_application_live_as_long_as_the_block() -> None:
    app = app_of(Noting)
    assert isinstance(app, Noting)
    app.events = []
    with serving(app, asyncio.SelectorEventLoop) as url:
        assert app.events == ["begun"]
        assert httpx.get(f"{url}/health", trust_env=False).json() == {"status": "ok"}
    assert app.events == ["begun", "ended"]
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)


def test_server_ends_after_an_error_in_the_block() -> None:
    with pytest.raises(KeyError), serving(create_app(Script()), asyncio.SelectorEventLoop) as url:
        raise KeyError
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)


def test_application_that_does_not_start() -> None:
    with pytest.raises(RuntimeError, match="no"), serving(app_of(Broken), asyncio.SelectorEventLoop):
        pass
