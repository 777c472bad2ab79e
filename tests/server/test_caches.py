"""Operators look into the caches and empty them, over HTTP and from the command line."""

from __future__ import annotations

import json

import pytest

from fovea.cli.main import main
from tests.server.support import Server, chat, data_url, image, picture, user


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
    assert set(before) == {"images", "encoder", "kv"}, "there are no slower tiers here"
    for stage in before.values():
        assert 0 < stage["bytes"] <= stage["capacity_bytes"]
    assert clear(server, "all")["cleared"] == ["images", "kv", "encoder", "host", "disk"]
    assert [stages(server)[name]["bytes"] for name in ("images", "encoder", "kv")] == [0, 0, 0]
    assert ask(server, 401) == said


def test_one_stage_alone(server: Server) -> None:
    ask(server, 403)
    before = stages(server)["kv"]["bytes"]
    clear(server, "encoder")
    assert stages(server)["encoder"]["bytes"] == 0
    assert stages(server)["kv"]["bytes"] == before > 0


def test_a_stage_that_is_not_there(server: Server) -> None:
    error = clear(server, "attic")["error"]
    assert isinstance(error, dict)
    assert error["code"] == "no_such_cache"
    assert "there are images, kv, encoder, host, disk, and all" in error["message"]


def test_from_the_command_line(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    ask(server, 404)
    assert main(["caches", "--url", server.url]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[1:4]] == ["images", "encoder", "kv"]
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
