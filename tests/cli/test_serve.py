"""fovea serve as a process: it starts, serves the openai client, and reports errors in one line."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fovea import Engine
from fovea.cli.serve import keys_in_words
from fovea.server.settings import ServerSettings
from tests.cli.support import Caller, finish, start, until, write_lines
from tests.support.forks import Fork
from tests.support.servers import free_port


@dataclass(frozen=True)
class Server:
    process: Fork
    url: str

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def status(self, path: str, key: str | None = None) -> int:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.get(f"{self.url}{path}", headers=headers).status_code

    def ready(self) -> bool:
        assert self.process.poll() is None, self.process.communicate()
        try:
            return self.status("/ready") == 200
        except httpx.TransportError:
            return False


@contextlib.contextmanager
def serving(*words: object, whole_end: bool = False, **variables: str) -> Iterator[Server]:
    port = free_port()
    process = start("serve", *words, "--port", port, whole_end=whole_end, **variables)
    server = Server(process, f"http://127.0.0.1:{port}")
    try:
        until(server.ready)
        yield server
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def ask(client: openai.OpenAI, model: str, picture: Path, **extra: Any) -> Any:
    url = f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    content: Any = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
    return client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": content}], max_tokens=6, **extra
    )


def test_a_named_and_locked_server(tiny: Path, folder: Path, engine: Engine) -> None:
    """--served-model-name, --api-key twice and over FOVEA_API_KEY, a stream, SIGTERM."""
    words = (tiny, "--served-model-name", "eyes", "--api-key", "first", "--api-key", "second")
    with serving(*words, whole_end=True, FOVEA_API_KEY="third") as server:
        expected = engine.generate("what?", images=[folder / "a.png"], max_tokens=6).text
        for key in ("first", "second"):
            with server.client(key) as client:
                assert [model.id for model in client.models.list()] == ["eyes"]
                answer = ask(client, "eyes", folder / "a.png")
                assert answer.choices[0].message.content == expected
                assert answer.model == "eyes"
                chunks = ask(client, "eyes", folder / "a.png", stream=True)
                parts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
                assert "".join(parts) == expected
        with server.client("third") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with server.client("first") as client, pytest.raises(openai.NotFoundError, match="served: eyes"):
            ask(client, "tiny", folder / "a.png")
        assert server.status("/health") == 200
        server.process.send_signal(signal.SIGTERM)
        ended = finish(server.process)
    assert (ended.code, ended.out) == (0, "")
    assert "Traceback" not in ended.err
    assert f"{server.url}  API: /v1  keys: 2" in ended.err
    assert "ready: eyes (Qwen3-VL, " in ended.err
    assert not any(key in ended.err for key in ("first", "second", "third"))


def test_a_server_set_up_by_file_and_variables(tiny: Path, folder: Path) -> None:
    """The model and a limit from the file, the keys from FOVEA_API_KEY, no log by FOVEA_LOG_LEVEL, Ctrl-C."""
    config = folder / "fovea.toml"
    config.write_text(f'model = "{tiny}"\nmax_images = 1\nlog_level = "debug"\napi_key = "unused"\n')
    variables = {"FOVEA_API_KEY": "one, two", "FOVEA_LOG_LEVEL": "warning", "FOVEA_CONFIG": str(config)}
    variables |= {"FOVEA_ADMIN_KEY": "boss", "FOVEA_CACHE_SCOPE": "key", "FOVEA_METRICS_KEY": "watch"}
    keys_file = folder / "keys.toml"
    keys_file.write_text(f'[[key]]\nname = "alice"\nhash = "sha256:{hashlib.sha256(b"three").hexdigest()}"\n')
    keys_file.chmod(0o600)
    variables["FOVEA_KEYS_FILE"] = str(keys_file)
    with serving(**variables) as server:
        keys = ("one", "two", "three", "unused", None)
        assert [server.status("/v1/models", key) for key in keys] == [200, 200, 200, 401, 401]
        assert [server.status("/metrics", key) for key in ("watch", "boss", "one")] == [200, 200, 401]
        assert [server.status("/admin/caches", key) for key in ("boss", "one", None)] == [200, 401, 401]
        with server.client("two") as client:
            assert ask(client, "tiny", folder / "a.png").usage.completion_tokens == 6
            part: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
            with pytest.raises(openai.BadRequestError, match="1"):
                client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": [part, part]}]
                )
        server.process.send_signal(signal.SIGINT)
        ended = finish(server.process)
    assert (ended.code, ended.out) == (0, "")
    assert ["fovea.audit refused" in line for line in ended.err.splitlines()] == [True] * 5


def test_a_taken_port_is_an_error_before_a_model_is_loaded(fovea: Caller, folder: Path) -> None:
    """The folder has no model, so a later error would be another one."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        outcome = fovea("serve", folder, "--port", port)
    assert outcome.code == 2
    assert outcome.error_line == f"fovea: 127.0.0.1:{port} cannot be listened on: Address already in use"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--host", "192.0.2.1"), "192.0.2.1:8000 cannot be listened on: "),
        (("--host", "x" * 300), f"{'x' * 300}:8000 cannot be listened on: "),
        (("--port", "65536"), "--port: port is 65536; accepted: 0 to 65535"),
        (("--max-queue", "many"), "--max-queue is 'many'; accepted: a whole number"),
        (("--max-running", "0"), "--max-running: max_running is 0; accepted: 1 to 4096"),
        (("--max-images", "0"), "--max-images: max_images is 0; accepted: 1 to 1024"),
        (("--drain-seconds", "-1"), "--drain-seconds: drain_seconds is -1.0; accepted: 0 to 3600"),
        (("--file-root", "/no/such"), "--file-root: file_root is '/no/such'; accepted: the absolute path"),
        (("--allow-remote", "perhaps"), "--allow-remote is 'perhaps'; accepted: true or false"),
        (("--api-key", ""), "--api-key holds an empty key or none"),
        (("--admin-key", ""), "--admin-key holds an empty key or none"),
        (
            ("--cache-scope", "key"),
            "--cache-scope: cache_scope is 'key', which separates the caches of API keys",
        ),
        (("--cache-scope", "keys"), "--cache-scope: cache_scope is 'keys'; accepted: shared, key"),
        (("--chat-template", "/no/such"), "--chat-template: /no/such cannot be read: No such file"),
        (("--config", "/no/such"), "/no/such cannot be read: No such file or directory"),
        (
            ("./none",),
            "'./none' is neither a folder, a GGUF file (*.gguf), a hub id (owner/name) nor 'fovea-tiny'",
        ),
        (("none",), "'none' is neither a folder, a GGUF file (*.gguf), a hub id (owner/name) nor 'fovea-"),
    ],
)
def test_the_error_for_a_wrong_setting_is_one_line(
    words: tuple[str, ...], message: str, fovea: Caller
) -> None:
    outcome = fovea("serve", *words)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.error_line.startswith(f"fovea: {message}")


@pytest.mark.parametrize(
    ("model", "flags", "message"),
    [
        pytest.param(model, flags, message, marks=[] if model == quick else pytest.mark.slow)
        for flags, message, quick in (
            (("--keys-file", "/no/such"), "keys file /no/such cannot be read", "fovea-tiny"),
            (("--tls-cert", "/no/such", "--tls-key", "/no/such"), "/no/such", "--simulate"),
            (("--access-log", "/no/such/log"), "/no/such/log", "--simulate"),
        )
        for model in ("fovea-tiny", "--simulate")
    ],
)
def test_a_server_that_does_not_start_announces_no_address(
    model: str, flags: tuple[str, ...], message: str
) -> None:
    """The log named an address before the keys file and the certificate were looked at."""
    ended = finish(start("serve", model, "--port", 0, *flags))
    assert (ended.code, ended.out) == (2, "")
    assert "://" not in ended.err
    assert message in ended.err.splitlines()[-1]
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "none, open to all"),
        ({"api_keys": ("a", "b")}, "2"),
        ({"api_keys": ("a",), "keys_file": "/k"}, "1 and those of /k"),
        ({"keys_file": "/k"}, "those of /k"),
        ({"admin_keys": ("a",)}, "none, open to all except /admin and /metrics"),
        ({"metrics_keys": ("a",)}, "none, open to all except /metrics"),
        ({"metrics_keys": ("a",), "open_metrics": True}, "none, open to all"),
        ({"admin_keys": ("a",), "open_metrics": True}, "none, open to all except /admin"),
    ],
)
def test_the_log_says_who_may_use_the_server(settings: dict[str, Any], words: str) -> None:
    """With keys for operators only, it said that everything is open to all."""
    if "keys_file" in settings:
        settings = settings | {"keys_file": Path(settings["keys_file"])}
    assert keys_in_words(ServerSettings.of(**settings)) == words


def test_a_revision_of_a_folder_is_an_error_before_the_port_opens(
    tiny: Path, fovea: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port opened, and the server ended when it began to load. A relative folder looks like a hub id."""
    monkeypatch.chdir(tiny.parent.parent)
    for model in (str(tiny), f"{tiny.parent.name}/{tiny.name}", "fovea-tiny"):
        outcome = fovea("serve", model, "--revision", "v1", "--port", "0")
        assert outcome.code == 2
        assert outcome.error_line.startswith(f"fovea: revision is 'v1', but {model!r} is a folder")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "PORT",
            "tcp://10.0.0.1:80",
            "FOVEA_PORT is 'tcp://10.0.0.1:80'; accepted: a whole number, 0 to 65535",
        ),
        ("API_KEY", ",", "FOVEA_API_KEY holds an empty key or none"),
        ("API_KEY", "one,", "FOVEA_API_KEY holds an empty key or none"),
        ("MAX_QUEUE", "-1", "FOVEA_MAX_QUEUE: max_queue is -1; accepted: 0 to 1048576"),
        ("MODEL", "./none", "'./none' is neither a folder"),
        ("CONFIG", "/no/such", "/no/such cannot be read: "),
    ],
)
def test_the_error_for_a_wrong_variable_is_one_line(
    name: str, value: str, message: str, fovea: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"FOVEA_{name}", value)
    outcome = fovea("serve")
    assert outcome.code == 2
    assert outcome.error_line.startswith(f"fovea: {message}")


@pytest.mark.parametrize("value", ['""', "[]", '["one", ""]', "7", '[" "]', "false"])
@pytest.mark.parametrize("name", ["api_key", "admin_key", "metrics_key"])
def test_a_server_with_an_empty_key_does_not_start(
    name: str, value: str, fovea: Caller, folder: Path
) -> None:
    (folder / "fovea.toml").write_text(f"{name} = {value}")
    outcome = fovea("serve", "--config", folder / "fovea.toml")
    assert outcome.code == 2
    place = f"{folder / 'fovea.toml'}:1: {name}"
    assert outcome.error_line.startswith(f"fovea: {place} holds an empty key or none")


@pytest.mark.parametrize("value", ["true", "1.5", '"http"', "-1", "[80]"])
def test_a_wrong_port_in_the_file(value: str, fovea: Caller, folder: Path) -> None:
    (folder / "fovea.toml").write_text(f"port = {value}")
    outcome = fovea("serve", "--config", folder / "fovea.toml")
    assert outcome.code == 2
    assert outcome.error_line.startswith(f"fovea: {folder / 'fovea.toml'}:1: port is ")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_ending_while_the_model_loads(number: signal.Signals, tiny: Path) -> None:
    port = free_port()
    process = start("serve", tiny, "--port", port, whole_end=True)
    until(lambda: process.poll() is not None or _answers(port))
    process.send_signal(number)
    ended = finish(process)
    assert (ended.code, ended.out) == (0, "")
    assert "terminate called" not in ended.err
    assert "Traceback" not in ended.err


def _answers(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    return False


def test_a_checkpoint_that_cannot_run_ends_the_server(folder: Path) -> None:
    """The error occurs when the port is already open. The process ends, and its last line says why."""
    write_lines(folder / "config.json", {"model_type": "bert"})
    ended = finish(start("serve", folder, "--port", free_port()))
    assert (ended.code, ended.out) == (2, "")
    assert "Traceback" not in ended.err
    assert ended.err.splitlines()[-1].startswith("fovea: model_type 'bert' is not supported; supported: ")
