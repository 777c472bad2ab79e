"""A server in a thread of its own: it is open when the block begins, and ends with the block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI

from fovea.core.errors import EngineError
from fovea.server.run import serving


def test_port_and_application_live_as_long_as_the_block() -> None:
    events: list[str] = []

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        events.append("begun")
        yield
        events.append("ended")

    app = FastAPI(lifespan=lifespan)
    app.get("/")(lambda: "here")
    with serving(app, asyncio.SelectorEventLoop) as url:
        assert events == ["begun"]
        assert httpx.get(url, trust_env=False).json() == "here"
    assert events == ["begun", "ended"]
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)


def test_server_ends_after_an_error_in_the_block() -> None:
    with pytest.raises(KeyError), serving(FastAPI(), asyncio.SelectorEventLoop) as url:
        raise KeyError
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)


def test_application_that_does_not_start() -> None:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        raise RuntimeError("no")
        yield

    with (
        pytest.raises(EngineError, match="did not start"),
        serving(FastAPI(lifespan=lifespan), asyncio.SelectorEventLoop),
    ):
        pass
