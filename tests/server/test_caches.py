"""Reporting and clearing of the caches, over HTTP and from the command line."""

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


def test_report_and_clear_all_caches(server: Server) -> None:
    answer = ask(server, 401)
    server.post("/v1/images", {"url": data_url(picture(seed=402))})
    before = stages(server)
    assert list(before) == ["fetched", "decoded", "images", "pixels", "encoder", "regions", "kv"], (
        "this server has no host or disk tier"
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
        "answers",
    ]
    assert [stage["bytes"] for stage in stages(server).values()] == [0] * 7
    assert ask(server, 401) == answer


def test_clear_one_cache(server: Server) -> None:
    ask(server, 403)
    before = stages(server)["kv"]["bytes"]
    clear(server, "encoder")
    assert stages(server)["encoder"]["bytes"] == 0
    assert stages(server)["kv"]["bytes"] == before > 0


def test_images_are_fetched_and_decoded_once(engine: Engine, files: Path, web: Web) -> None:
    web.headers = {"Cache-Control": "max-age=60"}
    settings = ServerSettings(media=MediaLimits(allow_private_hosts=True))
    body = chat(user(image(f"{web.url}/a"), image(data_url(REMOTE)), "the same?"))
    engine.clear_caches()  # an image whose encoder output is known is not decoded
    with running(engine, settings, files) as server:
        for _ in range(2):
            assert server.post("/v1/chat/completions", body).status_code == 200
        assert web.count == 1
        caches = stages(server)
        for name, hits, misses in (("fetched", 1, 1), ("decoded", 0, 1)):
            assert (caches[name]["entries"], caches[name]["hits"], caches[name]["misses"]) == (
                1,
                hits,
                misses,
            )
            assert 0 < caches[name]["bytes"] <= caches[name]["capacity_bytes"]
        metrics = server.metrics()
        assert metrics["fovea:fetch_cache_hits_total"] == metrics["fovea:decoded_cache_misses_total"] == 1
        assert metrics["fovea:fetch_cache_bytes"] == caches["fetched"]["bytes"]
        clear(server, "decoded")
        assert [stages(server)[name]["entries"] for name in ("fetched", "decoded")] == [1, 0]
        clear(server, "fetched")
        assert stages(server)["fetched"]["entries"] == 0
        assert server.post("/v1/chat/completions", body).status_code == 200
        assert web.count == 2


def test_caches_of_size_zero_store_nothing(engine: Engine, files: Path, web: Web) -> None:
    web.headers = {"Cache-Control": "max-age=60"}
    limits = MediaLimits(allow_private_hosts=True)
    settings = ServerSettings(media=limits, fetch_cache_mib=0, decoded_cache_mib=0)
    with running(engine, settings, files) as server:
        for _ in range(2):
            answer = server.post("/v1/chat/completions", chat(user(image(f"{web.url}/a"))))
            assert answer.status_code == 200
        assert web.count == 2
        assert [stages(server)[name]["bytes"] for name in ("fetched", "decoded")] == [0, 0]


def test_unknown_cache(server: Server) -> None:
    error = clear(server, "attic")["error"]
    assert isinstance(error, dict)
    assert error["code"] == "no_such_cache"
    assert (
        "accepted: fetched, decoded, images, kv, pixels, encoder, regions, host, disk, answers, all"
        in error["message"]
    )


def test_caches_command(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    ask(server, 404)
    assert main(["caches", "--url", server.url]) == 0
    output = capsys.readouterr().out
    rows = ["fetched", "decoded", "images", "pixels", "encoder", "regions", "kv"]
    assert [line.split()[0] for line in output.splitlines()[1:8]] == rows
    assert "prefix hits:" in output
    assert main(["caches", "--url", server.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"]["encoder"]["entries"] >= 1
    assert main(["caches", "--url", server.url, "--clear", "encoder"]) == 0
    assert capsys.readouterr().out == "cleared: encoder\n"
    assert stages(server)["encoder"]["entries"] == 0


def test_caches_command_without_a_fovea_server(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["caches", "--url", "http://127.0.0.1:9"]) == 2
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err
    assert main(["caches", "--url", f"{server.url}/elsewhere"]) == 2
    assert "refused" in capsys.readouterr().err
