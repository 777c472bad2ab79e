"""A server in a thread of its own: open when the block begins, gone when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI

from fovea.core.errors import EngineError
from fovea.server.background import serving


def test_open_within_the_block_and_the_application_ends_with_it() -> None:
    told: list[str] = []

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        told.append("begun")
        yield
        told.append("ended")

    app = FastAPI(lifespan=lifespan)
    app.get("/")(lambda: "here")
    with serving(app, asyncio.SelectorEventLoop) as url:
        assert told == ["begun"]
        assert httpx.get(url, trust_env=False).json() == "here"
    assert told == ["begun", "ended"]
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)


def test_it_ends_however_the_block_ends() -> None:
    with pytest.raises(KeyError), serving(FastAPI(), asyncio.SelectorEventLoop) as url:
        raise KeyError
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)


def test_an_application_that_does_not_start() -> None:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        raise RuntimeError("no")
        yield

    with (
        pytest.raises(EngineError, match="did not start"),
        serving(FastAPI(lifespan=lifespan), asyncio.SelectorEventLoop),
    ):
        pass
