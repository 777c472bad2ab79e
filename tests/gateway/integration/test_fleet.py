"""Backends that die, are drained, come and go while the gateway runs; and the places where they are found."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import ssl
import subprocess
import tomllib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from fovea.core.errors import ConfigError
from fovea.gateway.backends import fleet
from fovea.gateway.config import DiscoverConfig, Tables, read_tables
from tests.gateway.support import FakeEngine, Plan, Running, resilience, running, soon, words
from tests.support.programs import program


async def names(gateway: Running) -> set[str]:
    listed = (await gateway.client.get("/admin/backends")).json()["backends"]
    return {one["name"] for one in listed}


async def answering(gateway: Running, requests: int = 12) -> set[str]:
    """The backends that answer some different requests."""
    answers = await asyncio.gather(*(gateway.ask(str(number)) for number in range(requests)))
    assert {answer.status_code for answer in answers} == {200}
    return {answer.headers["x-fovea-backend"] for answer in answers}


def has(gateway: Running, name: str, **state: Any) -> Callable[[], Any]:
    """A condition: the state of a backend holds these values."""

    async def holds() -> bool:
        shown = await gateway.backend(name)
        return bool(shown) and all(shown[key] == value for key, value in state.items())

    return holds


async def test_a_backend_that_dies_is_taken_out_and_comes_back_slowly() -> None:
    one, two = FakeEngine("a"), FakeEngine("b")
    settings = resilience(probe_every_s=0.1, probe_timeout_s=0.5, unhealthy_after=2, breaker_open_s=0.1)
    async with one, two, running(one, two, resilience=settings) as gateway:
        assert await answering(gateway) == {"a", "b"}
        await one.die()
        await soon(has(gateway, "a", healthy=False))
        assert await answering(gateway) == {"b"}
        assert await gateway.metric("backend_up", backend="a") == 0
        await one.start()
        await soon(has(gateway, "a", healthy=True))
        assert (await gateway.backend("a"))["weight"] < 1  # it takes its share again, little by little
        await soon(lambda: _answers(gateway, "a"))


async def _answers(gateway: Running, name: str) -> bool:
    return name in await answering(gateway)


async def test_a_backend_that_drains_itself_is_let_alone_and_one_that_is_ill_is_taken_out() -> None:
    one, two = FakeEngine("a"), FakeEngine("b")
    async with one, two, running(one, two, resilience=resilience(probe_every_s=0.1)) as gateway:
        one.health = 500
        await soon(has(gateway, "a", healthy=False))
        one.health = 200
        await soon(has(gateway, "a", healthy=True))
        one.health = 404  # an engine without such a route
        await asyncio.sleep(0.3)
        assert (await gateway.backend("a"))["healthy"]


async def test_the_gateway_is_ready_while_a_backend_is() -> None:
    async with FakeEngine("a") as one, running(one, resilience=resilience(probe_every_s=0.1)) as gateway:
        assert (await gateway.client.get("/ready")).json() == {"status": "ready", "backends": 1}
        await one.die()
        await soon(has(gateway, "a", healthy=False))
        ready = await gateway.client.get("/ready")
        assert (ready.status_code, ready.json()["error"]["code"]) == (503, "no_backend")
        assert (await gateway.client.get("/health")).status_code == 200
        refused = await gateway.ask()
        assert refused.status_code == 503
        assert "a: unhealthy" in refused.json()["error"]["message"]
        await one.start()
        await soon(lambda: _is_ready(gateway))


async def _is_ready(gateway: Running) -> bool:
    return (await gateway.client.get("/ready")).status_code == 200


async def test_all_backends_begin_with_their_full_share() -> None:
    """A slow start is for one that joins others that are warm, not for the first ones."""
    async with FakeEngine("a") as one, FakeEngine("b") as two, running(one, two) as gateway:
        for name in ("a", "b"):
            assert (await gateway.backend(name))["weight"] == 1


async def test_a_drained_backend_ends_its_stream_and_gets_nothing_new() -> None:
    one, two = FakeEngine("a"), FakeEngine("b")
    async with one, two, running(one, two) as gateway:
        for engine in (one, two):
            engine.plans.append(Plan(events=8, gap_s=0.1))
        stream = asyncio.create_task(gateway.ask(stream=True))
        await soon(lambda: one.received or two.received)
        drained, other = (one, two) if one.received else (two, one)
        other.plans.clear()
        answer = await gateway.client.post(f"/admin/backends/{drained.name}/drain")
        assert answer.json()["accepts"] == {"text": "draining", "images": "draining"}
        assert await answering(gateway) == {other.name}
        done = await stream
        assert words(done.text) == [drained.name] * 8
        assert "[DONE]" in done.text
        assert len(drained.received) == 1
        await gateway.client.post(f"/admin/backends/{drained.name}/undrain")
        shown = await gateway.backend(drained.name)
        assert (shown["draining"], shown["accepts"]["text"]) == (False, "yes")


class Configured:
    """A TOML file of backends, and the setup of a gateway that reads it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "gateway.toml"

    def write(self, *engines: FakeEngine, extra: str = "") -> None:
        """Replace the file as a whole, as an editor does."""
        backends = "".join(
            f'[[backend]]\nname = "{engine.name}"\nurl = "{engine.url}"\n'
            f"models = {json.dumps(engine.models)}\n"
            for engine in engines
        )
        new = self.path.with_suffix(".new")
        new.write_text(backends + extra)
        new.replace(self.path)

    def read(self) -> Tables:
        try:
            return read_tables(tomllib.loads(self.path.read_text()), self.path.parent)
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(str(error)) from error

    def setup(self) -> dict[str, Any]:
        return {"tables": self.read(), "setup": {"read_tables": self.read, "path": self.path}}


async def test_a_changed_file_changes_the_backends_and_no_running_stream_notices(tmp_path: Path) -> None:
    file = Configured(tmp_path)
    async with FakeEngine("a", plan=Plan(events=25, gap_s=0.1)) as one, FakeEngine("b") as two:
        file.write(one)
        async with running(**file.setup()) as gateway:
            stream = asyncio.create_task(gateway.ask(stream=True))
            await soon(lambda: one.received)
            file.write(two, extra='[[model]]\nname = "other"\nserved = "m"\n')
            await soon(lambda: _has_names(gateway, {"b"}))
            assert await gateway_model(gateway, "other") == "b"

            file.path.write_text("[[backend]\nurl = ")
            await asyncio.sleep(1.2)
            assert await names(gateway) == {"b"}
            broken = await gateway.client.post("/admin/reload")
            assert (broken.status_code, broken.json()["error"]["code"]) == (400, "bad_config")
            file.path.write_text(
                '[[backend]]\nurl = "http://127.0.0.1:1"\napi_key_file = "missing"\nname = "c"\n'
            )
            again = await gateway.client.post("/admin/reload")
            assert "missing" in again.json()["error"]["message"]
            assert await names(gateway) == {"b"}
            assert await gateway_model(gateway, "other") == "b", "the models are those of before, too"

            done = await stream
            assert (len(words(done.text)), "[DONE]" in done.text) == (25, True)
            file.write(one, two)
            assert (
                (await gateway.client.post("/admin/reload")).json()["reloaded"].startswith("backends: a came")
            )


async def gateway_model(gateway: Running, model: str) -> str:
    answer = await gateway.ask(model=model)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-fovea-backend"]


async def _has_names(gateway: Running, wanted: set[str]) -> bool:
    return await names(gateway) == wanted


async def test_a_backend_that_comes_is_asked_for_its_models_also_without_health_checks(
    tmp_path: Path,
) -> None:
    file = Configured(tmp_path)
    async with FakeEngine("a", "m1") as one, FakeEngine("b", "m2") as two:
        file.path.write_text(f'[[backend]]\nurl = "{one.url}"\n')
        async with running(**file.setup()) as gateway:
            file.path.write_text(f'[[backend]]\nurl = "{one.url}"\n[[backend]]\nurl = "{two.url}"\n')
            await gateway.client.post("/admin/reload")
            await soon(lambda: _serves(gateway, "m2"))
            assert await _serves(gateway, "m1")


async def _serves(gateway: Running, model: str) -> bool:
    return (await gateway.ask(model=model)).status_code == 200


def replace_text(path: Path, text: str) -> None:
    """Replace a file as a whole, so that nobody reads half of it."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


async def test_backends_are_found_in_a_file_and_stay_while_it_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is wrong with the source, those that look after it go on."""
    monkeypatch.setattr("fovea.gateway.build.EVERY_S", 0.0)
    monkeypatch.setattr("fovea.gateway.build.RELOAD_S", 0.05)
    listed = tmp_path / "engines"
    key = tmp_path / "key"
    async with FakeEngine("a") as one, FakeEngine("b") as two:
        replace_text(listed, f"# engines\n{one.url}\n")
        tables = Tables(discover=(DiscoverConfig(f"file:{listed}", {"models": ["m"]}),))
        file = Configured(tmp_path)
        file.path.write_text("")
        setup = {"read_tables": lambda: tables, "path": file.path}
        first, second = (engine.url.removeprefix("http://") for engine in (one, two))
        async with running(tables=tables, setup=setup) as gateway:
            assert await names(gateway) == {first}
            replace_text(listed, f"{one.url}\n\n{two.url}  # new\n")
            await soon(lambda: _has_names(gateway, {first, second}))
            for text in (
                "http://",
                "[[backend]",
                "# [[backend]]\nx = 1",
                "[[backend]]\nurl = 5",
                f'[[backend]]\nurl = "{one.url}"\napi_key_file = "{key}"',
                "backend = 5 # [[backend]]",
            ):
                replace_text(listed, text)
                await asyncio.sleep(0.15)
                assert await names(gateway) == {first, second}, text
            listed.unlink()
            reloaded = await gateway.client.post("/admin/reload")
            assert reloaded.status_code == 200
            assert await names(gateway) == {first, second}, (
                "a reload must not forget what a source has listed"
            )
            replace_text(listed, f"{two.url}\n")
            await soon(lambda: _has_names(gateway, {second}))
            assert (await gateway.ask()).status_code == 200


async def test_backends_are_found_by_dns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fovea.gateway.build.EVERY_S", 0.0)
    monkeypatch.setattr("fovea.gateway.build.RELOAD_S", 0.05)
    addresses: list[str] | OSError = ["127.0.0.1"]

    async def resolve(self: object, host: str, port: int) -> list[str]:
        assert host == "engines.internal"
        if isinstance(addresses, OSError):
            raise addresses
        return addresses

    monkeypatch.setattr("fovea.media.fetch.resolve.Resolver.resolve", resolve)
    async with FakeEngine("a") as one:
        tables = Tables(discover=(DiscoverConfig(f"dns:engines.internal:{one.port}", {"models": ["m"]}),))
        async with running(tables=tables) as gateway:
            local = f"127.0.0.1:{one.port}"
            assert await names(gateway) == {local}
            assert (await gateway.ask()).headers["x-fovea-backend"] == local
            addresses = ["127.0.0.1", "127.0.0.2", "::1"]
            wanted = {local, f"127.0.0.2:{one.port}", f"[::1]:{one.port}"}
            await soon(lambda: _has_names(gateway, wanted))
            addresses = OSError("the name server is away")
            await asyncio.sleep(0.15)
            assert await names(gateway) == wanted
            addresses = ["127.0.0.1"]
            await soon(lambda: _has_names(gateway, {local}))


class Cluster:
    """The API of a Kubernetes cluster, with TLS, which knows one service.

    token: the token that it accepts. answer: the answer, or a status. paths: the paths that were asked for.
    """

    def __init__(self) -> None:
        self.token = "first"
        self.answer: Any = {}
        self.paths: list[str] = []

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.paths.append(head.split(" ")[1])
        status = 200 if f"Bearer {self.token}\r\n" in head else 401
        body = json.dumps(self.answer).encode()
        writer.write(
            b"HTTP/1.1 %d x\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (status, len(body)) + body
        )
        await writer.drain()
        writer.close()
        with contextlib.suppress(OSError, ssl.SSLError):
            await writer.wait_closed()

    def list(self, *endpoints: tuple[str, dict[str, bool]]) -> None:
        """List endpoints: address and conditions."""
        listed = [{"addresses": [address], "conditions": state} for address, state in endpoints]
        self.answer = {"items": [{"endpoints": listed[:1]}, {"endpoints": listed[1:]}, {"endpoints": None}]}


@contextlib.asynccontextmanager
async def cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    """A cluster in which this process is a pod, as environment and account folder tell."""
    words_ = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=api"
    files = ["-keyout", str(folder / "key"), "-out", str(folder / "ca.crt")]
    subprocess.run(
        [program("openssl"), *words_.split(), "-addext", "subjectAltName=IP:127.0.0.1", *files],
        check=True,
        capture_output=True,
    )
    (folder / "token").write_text("first\n")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "ca.crt", folder / "key")
    fake = Cluster()
    server = await asyncio.start_server(fake.connected, "127.0.0.1", 0, ssl=context)
    monkeypatch.setattr(fleet, "ACCOUNT", folder)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.sockets[0].getsockname()[1]))
    try:
        yield fake
    finally:
        server.close()
        await asyncio.sleep(0.05)  # closed TLS connections say goodbye


async def test_backends_are_found_in_kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods that are ready and do not terminate. The token is replaced while the gateway runs."""
    monkeypatch.setattr("fovea.gateway.build.EVERY_S", 0.0)
    monkeypatch.setattr("fovea.gateway.build.RELOAD_S", 0.05)
    async with FakeEngine("a") as one, cluster(tmp_path, monkeypatch) as api:
        api.list(("127.0.0.1", {"ready": True}), ("127.0.0.9", {"ready": False}))
        source = DiscoverConfig(f"kubernetes:models/engines:{one.port}", {"models": ["m"]})
        async with running(tables=Tables(discover=(source,))) as gateway:
            local, second = f"127.0.0.1:{one.port}", f"127.0.0.2:{one.port}"
            assert await names(gateway) == {local}
            assert (await gateway.ask()).status_code == 200
            path = "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices"
            assert api.paths[0] == f"{path}?labelSelector=kubernetes.io/service-name%3Dengines"

            terminating = {"ready": True, "terminating": True}
            api.list(("127.0.0.1", {"ready": True}), ("127.0.0.2", {}), ("127.0.0.3", terminating))
            await soon(lambda: _has_names(gateway, {local, second}))

            api.token, asked = "second", len(api.paths)
            api.list(("127.0.0.1", {"ready": True}))
            await soon(lambda: len(api.paths) > asked)
            assert await names(gateway) == {local, second}
            (tmp_path / "token").write_text("second")
            await soon(lambda: _has_names(gateway, {local}))

            for odd in ([], 5, {"items": 5}, {"items": [{"endpoints": [{"addresses": None}]}]}, None):
                api.answer, asked = odd, len(api.paths)
                await soon(lambda seen=asked: len(api.paths) > seen + 1)
                assert await names(gateway) == {local}, odd
            api.list(("127.0.0.2", {"ready": True}))
            await soon(lambda: _has_names(gateway, {second}))


async def test_a_removed_backend_is_not_asked_again_after_it_broke(tmp_path: Path) -> None:
    """A request is in flight while its backend is removed. The retry goes to one that is there."""
    file = Configured(tmp_path)
    async with FakeEngine("a", plan=Plan(500, wait_s=0.5)) as one, FakeEngine("b") as two:
        file.write(one)
        async with running(**file.setup()) as gateway:
            sent = asyncio.create_task(gateway.ask())
            await soon(lambda: one.received)
            file.write(two)
            await gateway.client.post("/admin/reload")
            answer = await sent
            assert (answer.status_code, answer.headers["x-fovea-backend"]) == (200, "b")


async def test_slow_backends_are_ejected_and_the_metrics_tell() -> None:
    engines = [FakeEngine("a"), FakeEngine("b"), FakeEngine("c", plan=Plan(wait_s=0.5))]
    settings = resilience(outlier_factor=2.0, outlier_eject_s=60)
    async with engines[0], engines[1], engines[2], running(*engines, resilience=settings) as gateway:
        numbers = itertools.count()

        async def ejected() -> bool:
            await asyncio.gather(*(gateway.ask(f"q {next(numbers)}", stream=True) for _ in range(18)))
            return bool((await gateway.backend("c"))["accepts"]["text"] == "ejected")

        await soon(ejected)
        assert await answering(gateway) <= {"a", "b"}
        assert await gateway.metric("ejections_total", backend="c") == 1
