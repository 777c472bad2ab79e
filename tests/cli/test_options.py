"""Precedence of flags, FOVEA_* variables, file and defaults; an error names the source of the value."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fovea.bench.settings import Price, Shape, Traffic
from fovea.cli import main as cli
from fovea.cli import options
from fovea.cli.common import ALL_KEYS, check_writable
from fovea.cli.profile import ProfileSettings
from fovea.cli.serve import FIRST, ServeSettings
from fovea.core.errors import ConfigError
from fovea.core.settings import check_value, flat_values, settings_of
from fovea.core.trace import Workload
from fovea.engine.config import EngineConfig
from fovea.media.limits import MediaLimits
from fovea.server.settings import ServerSettings
from tests.cli.support import Caller

CLASSES = (
    EngineConfig,
    MediaLimits,
    ServerSettings,
    ServeSettings,
    Workload,
    Shape,
    Traffic,
    Price,
    ProfileSettings,
)
SERVED = [
    entry for cls in (EngineConfig, ServerSettings) for entry in settings_of(cls) if not entry.rule.internal
]


@dataclass(frozen=True)
class Kind:
    """A field, its text in each source, and the resulting values, default first."""

    cls: type
    name: str
    file: str
    variable: str
    flag: str
    values: tuple[Any, Any, Any, Any]


KINDS = [
    Kind(EngineConfig, "max_running", "3", "5", "7", (64, 3, 5, 7)),
    Kind(EngineConfig, "threads", "3", "5", "0", (0, 3, 5, 0)),
    Kind(
        EngineConfig, "dtype", '"float16"', "bfloat16", "float32", ("auto", "float16", "bfloat16", "float32")
    ),
    Kind(EngineConfig, "quantization", '"int4"', "int8", "none", ("none", "int4", "int8", "none")),
    Kind(EngineConfig, "prefix_cache", "false", "Yes", "off", (True, False, True, False)),
    Kind(MediaLimits, "allow_remote", "false", "1", "FALSE", (True, False, True, False)),
    Kind(ServerSettings, "drain_seconds", "2", "2.5", "0", (30.0, 2.0, 2.5, 0.0)),
    Kind(MediaLimits, "allowed_ports", "[81, 82]", "83", "84, 85", ((80, 443), (81, 82), (83,), (84, 85))),
    Kind(
        MediaLimits, "allowed_schemes", '["data"]', "data,https", "file",
        (("data", "http", "https", "file"), ("data",), ("data", "https"), ("file",)),
    ),
    Kind(
        MediaLimits, "allowed_hosts", '["a.example", "*.b.example"]', "c.example", "none",
        (None, ("a.example", "*.b.example"), ("c.example",), None),
    ),
    Kind(
        MediaLimits, "file_root", '"/usr"', "/etc", "/",
        (None, Path("/usr"), Path("/etc"), Path("/")),
    ),
]  # fmt: skip


def parse(cls: type, *argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    options.add_options(parser, "settings", cls)
    return parser.parse_args(argv)


def read(cls: type, *argv: str) -> Any:
    args = parse(cls, *argv)
    return options.settings(cls, args, options.read_file(args.config, ALL_KEYS))


def toml(folder: Path, text: str) -> str:
    path = folder / "fovea.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_source_of_highest_precedence_wins(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FOVEA_THREADS")
    default, in_file, in_variable, in_flag = kind.values
    config = ("--config", toml(tmp_path, f"{kind.name} = {kind.file}"))

    def value(*argv: str) -> Any:
        return flat_values(read(kind.cls, *argv))[kind.name]

    assert value() == default
    assert value(*config) == in_file
    monkeypatch.setenv(f"FOVEA_{kind.name.upper()}", kind.variable)
    assert value(*config) == in_variable
    assert value(*config, options.flag(kind.name), kind.flag) == in_flag
    assert type(value(*config, options.flag(kind.name), kind.flag)) is type(in_flag)


def test_a_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pictures").mkdir()
    monkeypatch.chdir(tmp_path)
    assert read(MediaLimits, "--file-root", "pictures").file_root == tmp_path / "pictures"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read(MediaLimits, "--file-root", "~/pictures").file_root == tmp_path / "pictures"


def test_an_empty_variable_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOVEA_MAX_RUNNING", "")
    assert read(EngineConfig).schedule.max_running == 64


def test_the_file_may_be_named_by_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOVEA_CONFIG", toml(tmp_path, "max_running = 9"))
    assert read(EngineConfig).schedule.max_running == 9


WRONG = [
    (EngineConfig, "max_running", "many", "a whole number"),
    (EngineConfig, "max_running", "1.5", "a whole number"),
    (EngineConfig, "max_running", "0", "1 to 4096"),
    (EngineConfig, "dtype", "int8", "auto, float32, bfloat16, float16"),
    (EngineConfig, "quantization", "int3", "none, int8, int4, fp8"),
    (EngineConfig, "device", "tpu", "auto, cpu, cuda, cuda:N"),
    (EngineConfig, "prefix_cache", "maybe", "true or false"),
    (ServerSettings, "drain_seconds", "soon", "a number"),
    (ServerSettings, "drain_seconds", "nan", "0 to 3600"),
    (ServerSettings, "drain_seconds", "-1", "0 to 3600"),
    (MediaLimits, "allowed_ports", "80,https", "whole numbers, as A,B"),
    (MediaLimits, "allowed_ports", "80,0", "1 to 65535"),
    (MediaLimits, "allowed_schemes", "ftp", "data, http, https, file"),
    (MediaLimits, "allowed_hosts", "HTTP://x", "a lower-case name"),
    (MediaLimits, "file_root", "/no/such/folder", "the absolute path of a folder"),
]


@pytest.mark.parametrize(("cls", "name", "value", "accepted"), WRONG)
def test_the_error_for_a_wrong_value_names_its_source(
    cls: type, name: str, value: str, accepted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ("--config", toml(tmp_path, f'{name} = "{value}"'))
    if name not in (
        "max_running",
        "drain_seconds",
    ):  # a number in quotes is parsed; another test covers that
        assert_error(cls, config, f"{config[1]}:1: {name} ", name, accepted)
    monkeypatch.setenv(f"FOVEA_{name.upper()}", value)
    assert_error(cls, config, f"FOVEA_{name.upper()}", name, accepted)
    assert_error(cls, (*config, f"{options.flag(name)}={value}"), options.flag(name), name, accepted)


def assert_error(cls: type, argv: tuple[str, ...], source: str, name: str, accepted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(cls, *argv)
    assert caught.value.message.startswith(source)
    assert f"accepted: {accepted}" in caught.value.message
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("cls", "line"),
    [
        (EngineConfig, "max_running = 1.0"),
        (EngineConfig, "max_running = true"),
        (EngineConfig, "max_running = [1]"),
        (EngineConfig, "dtype = 32"),
        (EngineConfig, "prefix_cache = 2"),
        (ServerSettings, "drain_seconds = false"),
        (MediaLimits, "allowed_ports = 80"),
        (MediaLimits, "allowed_ports = [80.5]"),
        (MediaLimits, "allowed_ports = [true]"),
        (MediaLimits, "allowed_hosts = [1]"),
        (MediaLimits, "file_root = 1"),
        (MediaLimits, 'file_root = "~nobody-of-this-name/x"'),
    ],
)
def test_values_of_the_file_are_not_converted_to_another_type(cls: type, line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fovea.toml:1: \w+ is .*; accepted: "):
        read(cls, "--config", toml(tmp_path, line))


def test_an_error_about_a_default_names_no_source() -> None:
    with pytest.raises(ConfigError, match="^min_side is 20000; accepted: at most max_side"):
        options.settings(MediaLimits, parse(MediaLimits), {}, min_side=20000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_queu = 3", "unknown key 'max_queu'; did you mean 'max_queue'?"),
        ('api_keys = ["a"]', "unknown key 'api_keys'; did you mean 'api_key'?"),
        ("zzzz = 3", "unknown key 'zzzz'"),
        ("[engine]\nmax_queue = 3", "unknown key 'engine'"),
        ("media = 1", "unknown key 'media'"),
        ("max_queue = = 3", "is not TOML: "),
        ("max_queue = 3\nmax_queue = 4", "is not TOML: "),
        ("max_queue = " + "[" * 3000, "is not TOML: its values are nested too deeply"),
    ],
)
def test_the_error_for_a_wrong_file_names_its_path(text: str, message: str, tmp_path: Path) -> None:
    path = toml(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        options.read_file(path, ALL_KEYS)
    assert caught.value.message.startswith(path)
    assert message in caught.value.message


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'model = "caf\xe9"')
    for path, reason in (
        (tmp_path / "none.toml", "cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / "latin.toml", "is not UTF-8 text"),
    ):
        with pytest.raises(ConfigError, match=reason):
            options.read_file(str(path), ALL_KEYS)


def test_a_misspelt_variable_is_reported(fovea: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOVEA_MAX_QUEU", "3")
    monkeypatch.setenv(
        "FOVEA_SERVICE_HOST", "10.0.0.1"
    )  # Kubernetes sets this variable for a service of that name
    outcome = fovea("ask", "--model", "./none", "what?")
    assert outcome.err.splitlines()[0] == (
        "fovea: FOVEA_MAX_QUEU is not a setting; did you mean FOVEA_MAX_QUEUE?"
    )
    assert "FOVEA_SERVICE_HOST" not in outcome.err


def test_a_wrong_log_level_is_an_error(
    fovea: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = toml(tmp_path, 'log_level = "quiet"')
    message = fovea("serve", "--config", config).error_line
    assert message == (f"fovea: {config}:1: log_level is 'quiet'; accepted: debug, info, warning, error")
    monkeypatch.setenv("FOVEA_LOG_LEVEL", "loud")
    assert fovea("serve", "--config", config).error_line.startswith("fovea: FOVEA_LOG_LEVEL is 'loud'")


@pytest.mark.parametrize("cls", CLASSES)
def test_every_setting_is_explained_and_has_a_default_that_it_accepts(cls: type) -> None:
    for entry in settings_of(cls):
        assert len(entry.rule.help.split()) >= 2, entry.name
        assert entry.rule.help[0].isupper() or entry.rule.help[0].islower(), entry.name
        assert entry.rule.help.endswith("."), entry.name
        check_value(entry, entry.default)


def test_help_shows_range_and_default() -> None:
    parser = argparse.ArgumentParser()
    options.add_options(parser, "engine:", EngineConfig)
    words = " ".join(parser.format_help().split())
    assert "--max-running N Sequences that share a step. (default: 64; accepted: 1 to 4096)" in words
    assert "engine: kv:" in words


def test_help_of_serve_shows_the_flags_that_people_set(fovea: Caller) -> None:
    """It once printed 145 flags, which nobody reads."""
    text = fovea("serve", "--help").out
    shown = re.findall(r"^  (?:-h, )?(--[a-z-]+)", text, re.MULTILINE)
    assert sorted(shown) == sorted(["--help", "--help-all", "--check", *map(options.flag, FIRST)])
    assert set(FIRST) - {"config"} <= set(ALL_KEYS)
    assert "engine: schedule:\n" in text
    assert "server batches:\n" in text
    assert "server traces:\n" in text


def test_every_setting_is_a_flag_of_serve(fovea: Caller) -> None:
    text = fovea("serve", "--help-all").out
    for entry in SERVED:
        assert f" {options.flag(entry.name)} " in text
        assert "".join(entry.rule.help.split()) in "".join(text.split())  # lines may break at hyphens


def test_no_arguments_at_all(fovea: Caller) -> None:
    outcome = fovea()
    assert (outcome.code, outcome.out) == (2, "")
    assert "start the OpenAI-compatible server" in outcome.err


def test_an_unknown_command(fovea: Caller) -> None:
    outcome = fovea("asks", "what?")
    assert outcome.code == 2
    assert "invalid choice: 'asks'" in outcome.err


def test_version(fovea: Caller) -> None:
    from fovea import __version__

    assert fovea("--version").out == f"fovea {__version__}\n"


def test_the_check_whether_a_file_can_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    """Once, the check left an empty file behind, and removed a link without a target."""
    link, target, kept = (tmp_path / name for name in ("link.png", "target.png", "kept.png"))
    link.symlink_to(target)
    kept.write_text("of an earlier run")
    for path in (link, target, kept):
        check_writable(path)
    assert link.is_symlink()
    assert not target.exists()
    assert kept.read_text() == "of an earlier run"
    with pytest.raises(ConfigError, match="cannot be written"):
        check_writable(tmp_path / "none" / "a.png")


def test_a_command_imports_no_other_command() -> None:
    """Every command once imported the modules of all, the gateway's among them: 0.6 seconds at each start.

    Later `--help` and `--version` alone did, which took 1.5 seconds of processor time.
    """
    code = (
        "import sys, fovea.cli.main as cli; cli.build_parser('caches').parse_args(['caches']); "
        "cli.build_parser().format_help(); "
        "print(sorted(name for name in sys.modules if name.startswith('fovea.cli.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    names = ("caches", "common", "loading", "main", "options", "text")
    loaded = str([f"fovea.cli.{name}" for name in names])
    assert (done.stdout.strip(), done.stderr) == (loaded, "")


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_is_in_a_module_that_registers_it(command: str) -> None:
    (listed,) = [
        action
        for action in cli.build_parser(command)._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    assert listed.choices[command].get_default("run") or listed.choices[command]._subparsers
