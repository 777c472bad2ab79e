"""Operators look into the caches and empty them, over HTTP and from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fovea import Engine
from fovea.cli.main import main
from fovea.media.limits import MediaLimits
from fovea.server.settings import ServerSettings
from tests.server.conftest import REMOTE, Web
from tests.server.support import Server, chat, data_url, image, picture, running, user


def ask(server: Server, seed: int) -> str:
    body = chat(user(image(data_url(picture(seed=seed))), "what is it?"))
    return str(server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"])


def stages(server: Server) -> dict[str, dict[str, float]]:
    return server.get("/admin/caches").json()["stages"]  # type: ignore[no-any-return]


def clear(server: Server, stage: str) -> dict[str, object]:
    with server.client() as client:
        return client.delete(f"/admin/caches/{stage}").json()  # type: ignore[no-any-return]


def test_what_the_caches_hold_and_that_it_can_be_forgotten(server: Server) -> None:
    said = ask(server, 401)
    server.post("/v1/images", {"url": data_url(picture(seed=402))})
    before = stages(server)
    assert list(before) == ["fetched", "decoded", "images", "pixels", "encoder", "regions", "kv"], (
        "there are no slower tiers here"
    )
    for unused in ("fetched", "regions"):
        assert before.pop(unused)["capacity_bytes"] > 0
    for stage in before.values():
        assert 0 < stage["bytes"] <= stage["capacity_bytes"]
    assert clear(server, "all")["cleared"] == [
        "fetched",
        "decoded",
        "images",
        "kv",
        "pixels",
        "encoder",
        "regions",
        "host",
        "disk",
    ]
    assert [stage["bytes"] for stage in stages(server).values()] == [0] * 7
    assert ask(server, 401) == said


def test_one_stage_alone(server: Server) -> None:
    ask(server, 403)
    before = stages(server)["kv"]["bytes"]
    clear(server, "encoder")
    assert stages(server)["encoder"]["bytes"] == 0
    assert stages(server)["kv"]["bytes"] == before > 0


def test_images_are_fetched_and_decoded_once(engine: Engine, files: Path, web: Web) -> None:
    web.headers = {"Cache-Control": "max-age=60"}
    settings = ServerSettings(media=MediaLimits(allow_private_hosts=True))
    body = chat(user(image(f"{web.url}/a"), image(data_url(REMOTE)), "the same?"))
    with running(engine, settings, files) as server:
        for _ in range(2):
            assert server.post("/v1/chat/completions", body).status_code == 200
        assert web.count == 1
        found = stages(server)
        for name, hits, misses in (("fetched", 1, 1), ("decoded", 3, 1)):
            assert (found[name]["entries"], found[name]["hits"], found[name]["misses"]) == (1, hits, misses)
            assert 0 < found[name]["bytes"] <= found[name]["capacity_bytes"]
        told = server.metrics()
        assert told["fovea:fetch_cache_hits_total"] == told["fovea:decoded_cache_misses_total"] == 1
        assert told["fovea:fetch_cache_bytes"] == found["fetched"]["bytes"]
        clear(server, "decoded")
        assert [stages(server)[name]["entries"] for name in ("fetched", "decoded")] == [1, 0]
        clear(server, "fetched")
        assert stages(server)["fetched"]["entries"] == 0
        assert server.post("/v1/chat/completions", body).status_code == 200
        assert web.count == 2


def test_caches_of_no_size_keep_nothing(engine: Engine, files: Path, web: Web) -> None:
    web.headers = {"Cache-Control": "max-age=60"}
    limits = MediaLimits(allow_private_hosts=True)
    settings = ServerSettings(media=limits, fetch_cache_mib=0, decoded_cache_mib=0)
    with running(engine, settings, files) as server:
        for _ in range(2):
            answer = server.post("/v1/chat/completions", chat(user(image(f"{web.url}/a"))))
            assert answer.status_code == 200
        assert web.count == 2
        assert [stages(server)[name]["bytes"] for name in ("fetched", "decoded")] == [0, 0]


def test_a_stage_that_is_not_there(server: Server) -> None:
    error = clear(server, "attic")["error"]
    assert isinstance(error, dict)
    assert error["code"] == "no_such_cache"
    assert (
        "there are fetched, decoded, images, kv, pixels, encoder, regions, host, disk, and all"
        in error["message"]
    )


def test_from_the_command_line(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    ask(server, 404)
    assert main(["caches", "--url", server.url]) == 0
    shown = capsys.readouterr().out
    rows = ["fetched", "decoded", "images", "pixels", "encoder", "regions", "kv"]
    assert [line.split()[0] for line in shown.splitlines()[1:8]] == rows
    assert "prefix hits:" in shown
    assert main(["caches", "--url", server.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"]["encoder"]["entries"] >= 1
    assert main(["caches", "--url", server.url, "--clear", "encoder"]) == 0
    assert capsys.readouterr().out == "cleared: encoder\n"
    assert stages(server)["encoder"]["entries"] == 0


def test_no_server_or_another(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["caches", "--url", "http://127.0.0.1:9"]) == 2
    assert "no Fovea server answers at http://127.0.0.1:9" in capsys.readouterr().err
    assert main(["caches", "--url", f"{server.url}/elsewhere"]) == 2
    assert "refused" in capsys.readouterr().err
