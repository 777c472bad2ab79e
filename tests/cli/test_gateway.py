"""fovea gateway: its flags and its file, before a port is opened."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from fovea.cli import gateway
from fovea.cli.main import build_parser, main
from fovea.core.errors import ConfigError
from fovea.gateway.build import Setup


def arguments(*words: str) -> argparse.Namespace:
    return build_parser("gateway").parse_args(["gateway", *words])


def setup_of(tmp_path: Path, text: str, *words: str) -> Setup:
    path = tmp_path / "gateway.toml"
    path.write_text(text)
    return gateway.read_setup(arguments("--config", str(path), *words), path)


def test_flags_alone_are_enough() -> None:
    setup = gateway.read_setup(arguments("--backend", "http://a:1/v1", "--backend", "https://b"), None)
    assert [backend.url for backend in setup.tables.backends] == ["http://a:1", "https://b"]
    assert [backend.name for backend in setup.tables.backends] == ["a:1", "b"]
    assert setup.read_tables is None


def test_the_file_holds_tables_and_settings_and_flags_override_it(tmp_path: Path) -> None:
    text = """
max_attempts = 5
policy = "least-busy"

[[backend]]
url = "http://a:1"
name = "a"
api_key_file = "key"

[[discover]]
from = "dns:engines.internal:8000"
weight = 2.0

[[model]]
name = "large"
aliases = ["big"]
served = "Qwen/Qwen3-VL-8B-Instruct"
fallback = ["small"]

[[model]]
name = "small"
"""
    setup = setup_of(tmp_path, text, "--policy", "round-robin", "--backend", "http://c:3")
    assert setup.settings.resilience.max_attempts == 5
    assert setup.settings.route.policy == "round-robin"
    assert [backend.name for backend in setup.tables.backends] == ["c:3", "a"]
    assert setup.tables.backends[1].api_key_file == str(tmp_path / "key")
    assert setup.tables.discover[0].backend == {"weight": 2.0}
    assert [model.name for model in setup.tables.models] == ["large", "small"]
    assert setup.find_rule("Qwen/Qwen3-VL-8B-Instruct") is not None


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    setup = setup_of(tmp_path, '[[backend]]\nurl = "http://a:1"\n')
    assert setup.path is not None
    setup.path.write_text('[[backend]]\nurl = "http://b:2"\n')
    assert setup.read_tables is not None
    assert [backend.name for backend in setup.read_tables().backends] == ["b:2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no backend is given; accepted: --backend URL, or [[backend]] or [[discover]] in the file"),
        ("max_attemts = 3", "unknown key 'max_attemts'; did you mean 'max_attempts'?"),
        ('[[backend]]\nurl = "a:1"', "[[backend]] number 1: url is 'a:1'; accepted: http://HOST:PORT"),
        ('[[backend]]\nname = "a"', "[[backend]] number 1: url is missing"),
        ('[[backend]]\nurl = "http://u:p@a"', "url holds a user name or password; accepted: api_key_file"),
        ('[[backend]]\nurl = "http://a"\nwieght = 1.0', "unknown key 'wieght'; did you mean 'weight'?"),
        ('[[backend]]\nurl = "http://a"\nweight = "1"', "weight is '1'; accepted: a number"),
        ('[[backend]]\nurl = "http://a"\napis = ["chart"]', "apis has 'chart'; accepted: chat"),
        ('[[backend]]\nurl = "http://a"\n[[backend]]\nurl = "http://a"', "the name 'a' is given twice"),
        ('[[discover]]\nfrom = "consul:x"', "from is 'consul:x'; accepted: dns:HOST:PORT, file:PATH"),
        ('[[model]]\nname = "a"\nfallback = ["b"]', "fallback names 'b'; accepted: names of models"),
        ('policy = "random"\n[[backend]]\nurl = "http://a"', "policy"),
        ('workers = 2\nkeys_file = "k"\n[[backend]]\nurl = "http://a"', "accounts is 'memory'"),
        ('[[experiment]]\nname = "x"\n[[backend]]\nurl = "http://a"', "x"),
    ],
)
def test_a_wrong_file_is_explained_and_nothing_starts(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text(text)
    assert main(["gateway", "--config", str(path), "--port", "0"]) == 2
    assert message in capsys.readouterr().err


def test_an_empty_key_does_not_open_the_gateway(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", "--backend", "http://a:1", "--api-key", " ", "--port", "0"]) == 2
    assert "holds an empty key" in capsys.readouterr().err


def test_a_model_names_backends_that_are_there(tmp_path: Path) -> None:
    """Backends of flags count. With [[discover]] names are known later. Wrong ones meant 503."""
    wrong = (
        '[[backend]]\nurl = "http://a:1"\nname = "one"\n\n[[model]]\nname = "m"\nbackends = ["oen", "c:3"]\n'
    )
    with pytest.raises(ConfigError, match=r"gateway.toml:5: .*unknown backend 'oen'; did you mean 'one'\?"):
        setup_of(tmp_path, wrong, "--backend", "http://c:3")
    setup_of(tmp_path, wrong.replace("oen", "one"), "--backend", "http://c:3")
    setup_of(tmp_path, wrong + '\n[[discover]]\nfrom = "dns:engines:8000"\n')
