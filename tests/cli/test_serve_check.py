"""fovea serve --check and fovea gateway --check: all errors at once, or what would run; nothing starts."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from tests.cli.support import Caller
from tests.http.test_tls import make
from tests.support.programs import needs
from tests.support.servers import free_port

KEYS = """
[[key]]
name = "alice"
hash = "sha256:short"
[[key]]
name = "bob"
hash = "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
roles = ["apy"]
requests_per_minut = 3
"""


@pytest.fixture(autouse=True)
def _starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("fovea.engine.engine.load_model", refuse)


def errors(fovea: Caller, *words: object) -> list[str]:
    outcome = fovea(*words)
    assert (outcome.code, outcome.out) == (2, "")
    return outcome.err.splitlines()


def test_what_a_server_would_run(fovea: Caller, tiny: Path) -> None:
    threads, port = threading.active_count(), free_port()
    outcome = fovea("serve", tiny, "--check", "--port", port, "--api-key", "k", "--kv-cache-mib", 64)
    assert (outcome.code, outcome.err) == (0, "")
    assert max(map(len, outcome.out.splitlines())) <= 80 + len(str(tiny))
    for words in (
        f"http://127.0.0.1:{port}/v1", "keys        1", f"{tiny}, Qwen3-VL", "KV 64.0 MiB", "No error was"
    ):  # fmt: skip
        assert words in outcome.out
    assert threading.active_count() == threads


def test_what_a_simulation_would_run(fovea: Caller) -> None:
    out = fovea("serve", "--simulate", "--check", "--port", 0).out
    assert "port 0: any free one" in out
    assert "none, simulated; costs: built in: fovea-tiny" in " ".join(out.split())


@needs("openssl")
def test_all_errors_of_a_server_at_once(
    fovea: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, config, none = tmp_path / "keys.toml", tmp_path / "fovea.toml", tmp_path / "none"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    (cert, _), (_, key) = make(tmp_path, "a"), make(tmp_path, "b")
    config.write_text(
        f'max_queu = 3\nlog_level = "loud"\n\nkeys_file = "{keys}"\ntls_cert = "{cert}"\ntls_key = "{key}"\n'
        f'chat_template = "{none}"\n'
    )
    monkeypatch.setenv("FOVEA_DTYPE", "int3")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = errors(
            fovea, "serve", none, "--check", "--config", config, "--port", port, "--max-running", 0
        )
    expected = (
        f"{config}:1: unknown key 'max_queu'; did you mean 'max_queue'?",
        f"{config}:2: log_level is 'loud'; accepted: debug, ",
        f"{config}:7: chat_template: {none} cannot be read",
        "FOVEA_DTYPE: dtype is 'int3'; accepted: auto, ",
        "--max-running: max_running is 0; accepted: 1 to 4096",
        f"127.0.0.1:{port} cannot be listened on: ",
        f"keys file {keys}:4: key 'alice': hash is not sha256: and 64 hex digits",
        f"keys file {keys}:8: key 'bob': roles is ['apy']; accepted: ",
        f"keys file {keys}:9: key 'bob': unknown field 'requests_per_minut'; did you mean",
        f"{key} is not the key of the certificate {cert}",
        f"{str(none)!r} is neither a folder, ",
    )
    assert len(found) == len(expected)
    for line, beginning in zip(found, expected, strict=True):
        assert line.startswith(f"fovea: {beginning}")


def test_a_start_reports_the_same_errors(fovea: Caller) -> None:
    words = ("--max-running", 0, "--drain-seconds", -1, "--port", 99999)
    assert len(errors(fovea, "serve", *words)) == 3


def test_sizes_are_compared_with_the_memory(fovea: Caller, tiny: Path) -> None:
    (line,) = errors(fovea, "serve", tiny, "--check", "--port", 0, "--kv-cache-mib", 1 << 24)
    assert "weights and KV do not fit (fix: --kv-cache-mib 0, or a smaller one)" in line


def test_types_that_the_device_cannot_run(fovea: Caller, tiny: Path) -> None:
    words = ("serve", tiny, "--check", "--port", 0, "--device", "cpu")
    (line,) = errors(fovea, *words, "--quantization", "fp8")
    assert "quantization is 'fp8', which cannot run here: fp8 needs compute capability 9.0" in line
    assert fovea(*words, "--quantization", "int8").code == 0


def test_a_checkpoint_without_a_shard(fovea: Caller, tiny: Path, tmp_path: Path) -> None:
    for file in tiny.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert "weights: " in errors(fovea, "serve", tmp_path, "--check", "--port", 0)[0]


def test_a_model_that_would_be_downloaded(fovea: Caller) -> None:
    outcome = fovea("serve", "owner/name", "--check", "--port", 0)
    assert outcome.code == 0
    assert "owner/name, which would be downloaded" in " ".join(outcome.out.split())


GATEWAY = """
port = "x"
keys_file = "{none}"
[[backend]]
url = "http://a:1"
wieght = 3
[[backend]]
url = "ftp://x"
weight = 0
[[model]]
name = "vlm"
policy = "best"
[[experiment]]
name = "v2"
model = "vlm"
variants = [{{ name = "old", model = "vlm-1" }}, {{ name = "new", model = "vlm-2", wieght = 10 }}]
[experiment.guard]
error_rate = 7
"""


def test_all_errors_of_a_gateway_at_once(fovea: Caller, tmp_path: Path) -> None:
    config, none = tmp_path / "gateway.toml", tmp_path / "none.toml"
    config.write_text(GATEWAY.format(none=none))
    expected = (
        f"{config}:2: port is 'x'; accepted: a whole number",
        f"{config}:6: [[backend]] number 1: unknown key 'wieght'; did you mean 'weight'?",
        f"{config}:8: [[backend]] number 2: url is 'ftp://x'; accepted: ",
        f"{config}:9: [[backend]] number 2: weight is 0.0; accepted: 0.001 to 1000",
        f"{config}:12: [[model]] number 1: policy has 'best'; accepted: ",
        f"{config}:16: experiment 'v2', variant 2: unknown field 'wieght'; did you mean 'weight'?",
        f"{config}:18: experiment 'v2', [experiment.guard]: error_rate is 7; accepted: 0 to 1",
        f"keys file {none} cannot be read",
    )
    found = errors(fovea, "gateway", "--check", "--config", config)
    assert len(found) == len(expected)
    for line, beginning in zip(found, expected, strict=True):
        assert line.startswith(f"fovea: {beginning}")


@pytest.mark.parametrize("command", ["serve", "gateway"])
def test_a_file_that_cannot_be_read_is_the_only_error(fovea: Caller, tmp_path: Path, command: str) -> None:
    """A gateway was told that it has no backend, too, because the file that names them was not read."""
    config = tmp_path / "fovea.toml"
    config.write_text("port = [")
    (line,) = errors(fovea, command, "--check", "--config", config)
    assert line.startswith(f"fovea: {config} is not TOML: ")


def test_what_a_gateway_would_run(fovea: Caller, tmp_path: Path) -> None:
    """Its backend does not exist: nothing is asked."""
    config = tmp_path / "gateway.toml"
    config.write_text('[[backend]]\nurl = "http://192.0.2.1:8000"\nname = "a"\n[[model]]\nname = "vlm"\n')
    outcome = fovea("gateway", "--check", "--config", config, "--port", free_port())
    assert (outcome.code, outcome.err) == (0, "")
    assert "backend     a http://192.0.2.1:8000" in outcome.out
    assert "model       vlm" in outcome.out
    assert list(tmp_path.iterdir()) == [config]
