"""The table of container images: what a spec changes, which are old, and digests from a registry."""

from __future__ import annotations

import datetime
import re
import tomllib
from pathlib import Path

import pytest

from fovea.cli.main import main
from fovea.core.errors import ConfigError
from fovea.deploy.images import MOST_DAYS, RESOLVERS, images, old, used, with_digest
from fovea.deploy.spec import DeploySpec, Gateway, Pool, Redis
from fovea.deploy.tables import Images, Tracing
from fovea.deploy.target import render
from tests.deploy.specs import FULL

DIGEST = "sha256:" + "0123456789abcdef" * 4


def test_an_image_is_old_only_after_its_days() -> None:
    redis = images()["redis"]
    last = redis.released + datetime.timedelta(days=MOST_DAYS)
    assert old([redis], last) == []
    (text,) = old([redis], last + datetime.timedelta(days=1))
    assert redis.reference in text
    assert f"{MOST_DAYS + 1} days ago" in text
    assert "[images] redis" in text


def test_a_rendered_stack_uses_images_of_the_table_and_of_the_spec() -> None:
    mine = DeploySpec(
        pools=(Pool(name="a"),), gateway=Gateway(), redis=Redis(), tracing=Tracing(),
        images=Images(redis="registry.example.com/redis:9"),
    )  # fmt: skip
    for target in ("compose", "kubernetes"):
        texts = render(mine, [target]).values()
        names = {each.name for each in used(texts)}
        assert "redis" not in names
        assert {"collector", "jaeger"} <= names
        assert any("registry.example.com/redis:9" in text for text in texts)
    assert {each.name for each in used(render(FULL, ["compose"]).values())} == set(images()) - {
        "collector",
        "jaeger",
    }


def test_no_image_of_a_service_is_written_into_the_code() -> None:
    folder = Path(__file__).parents[2] / "src" / "fovea" / "deploy"
    names = "|".join(re.escape(each.repository) for each in images().values())
    for path in folder.rglob("*"):
        if path.suffix in (".py", ".j2"):
            assert not re.search(rf"({names}):v?\d+\.\d", path.read_text(encoding="utf-8")), path


def test_a_digest_comes_from_the_first_program_that_answers() -> None:
    asked = []

    def run(command: tuple[str, ...]) -> str:
        asked.append(command)
        return DIGEST if command[0] == "crane" else ""

    assert with_digest("redis:8", run) == f"redis:8@{DIGEST}"
    assert asked[-1] == ("crane", "digest", "redis:8")
    with pytest.raises(ConfigError, match="accepted: one of skopeo, crane, docker"):
        with_digest("redis:8", lambda _: "")
    with pytest.raises(ConfigError, match="accepted: a digest"):
        with_digest("redis:8", lambda _: "latest")


def test_digests_become_a_table_of_a_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / RESOLVERS[0][0]
    program.write_text(f"#!/bin/sh\necho {DIGEST}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert main(["deploy", "versions", "--digests"]) == 0

    table = tomllib.loads(capsys.readouterr().out)["images"]
    assert Images(**table).of("nginx") == f"{images()['nginx'].reference}@{DIGEST}"


def test_the_check_warns_of_old_images_of_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fovea.deploy.images.MOST_DAYS", -1)
    monkeypatch.setattr("fovea.deploy.target.find_program", lambda name: None)
    spec = tmp_path / "deploy.toml"
    spec.write_text('[[pool]]\nname = "a"\n')
    for target, warned in (("compose", True), ("systemd", False)):
        assert main(["deploy", "check", "--target", target, "--spec", str(spec), str(tmp_path)]) == 1
        assert (f"warning: {images()['nginx'].reference}" in capsys.readouterr().err) is warned
    assert main(["deploy", "versions"]) == 0
    assert images()["redis"].reference in capsys.readouterr().out
