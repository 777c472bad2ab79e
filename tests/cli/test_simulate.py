"""fovea simulate and fovea serve --simulate: tables, errors, and a server for tests of clients."""

from __future__ import annotations

import base64
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.cli.support import TIMEOUT_S, Caller, start, until, write_lines
from tests.support.servers import free_port

SMALL = ("--requests", 60, "--rate", 20, "--output-tokens", 8)
LINE: dict[str, Any] = {"at": 0.0, "text": 5, "output": 3}


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FOVEA_THREADS")


def test_a_column_per_policy(fovea: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that do not fit the terminal are in a second table."""
    words = ("simulate", "--policy", "dual", "--policy", "fcfs", *SMALL)
    narrow = fovea(*words)
    assert max(map(len, narrow.out.splitlines())) <= 80
    assert [part.split()[0] for part in narrow.out.split("\n\n")[1:]] == ["dual", "fcfs"]
    monkeypatch.setenv("COLUMNS", "120")
    outcome = fovea(*words)
    assert (outcome.code, outcome.err) == (0, "")
    summary, _, table = outcome.out.partition("\n\n")
    head, *rows = table.splitlines()
    assert summary.startswith("60 requests over ")
    assert head.split() == ["dual", "fcfs"]
    names = {row.split("  ")[0] for row in rows}
    assert {
        "output tokens/s",
        "preemptions",
        "all: requests",
        "text: requests",
        "new image: requests",
    } <= names


def test_json(fovea: Caller) -> None:
    body = fovea("simulate", "--policy", "priority", *SMALL, "--json").json
    assert body["requests"] == 60
    report = body["policies"]["priority"]
    assert report["classes"]["all"]["finished"] == 60
    assert report["classes"]["all"]["ttft"]["p50"] > 0


def test_a_saved_trace_gives_the_report_of_its_load(fovea: Caller, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    report = fovea("simulate", *SMALL, "--seed", 5, "--save-trace", path, "--json").json
    assert fovea("simulate", "--trace", path, "--json").json == report


def test_costs_and_targets_matter(fovea: Caller, tmp_path: Path) -> None:
    cost = write_lines(tmp_path / "cost.json", {"step_s": 0.1, "made_from": "a slow machine"})
    slow = fovea("simulate", *SMALL, "--cost", cost, "--itl-ms", 50)
    assert "costs: a slow machine" in slow.out
    good = next(line for line in slow.out.splitlines() if line.startswith("good answers/s"))
    assert float(good.split()[-1]) < 5


def test_the_batch_rule_has_a_target(fovea: Caller) -> None:
    assert fovea("simulate", *SMALL, "--batch-rule", "--target-itl-ms", 5).code == 0
    assert "--batch-rule needs a target: --target-itl-ms N" in fovea("simulate", "--batch-rule").error_line
    assert "--target-itl-ms is 0" in fovea(
        "simulate", "--batch-rule", "--target-itl-ms", 0
    ).error_line.replace("'0'", "0")


def test_encoders_apart_have_a_column_beside_as_many_integrated_engines(
    fovea: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    words = ("simulate", "--policy", "dual", *SMALL, "--encoders", 1, "--replicas", 2, "--transfer-ms", 4)
    outcome = fovea(*words)
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.partition("\n\n")[2].splitlines()
    names = ["dual, 3 integrated", "dual, 1 encode + 2 answer"]
    assert re.split("  +", lines[0].strip()) == names
    assert re.fullmatch(
        r"dual, 1 encode \+ 2 answer: encoders busy [\d.]+%; \d+ outputs handed over, "
        r"each [\d.]+ MB in [\d.]+ ms",
        lines[-1],
    )
    body = fovea(*words, "--json").json["policies"]
    assert [*body] == names
    assert body[names[0]]["transfers"] == 0 < body[names[1]]["transfers"]
    assert body[names[1]]["classes"]["all"]["finished"] == 60


def test_replicas_alone_are_integrated(fovea: Caller) -> None:
    outcome = fovea("simulate", "--policy", "dual", *SMALL, "--replicas", 3)
    assert outcome.out.partition("\n\n")[2].splitlines()[0].split() == ["dual"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--replicas", 0), "--replicas: replicas is 0; accepted: 1 to 1000"),
        (("--encoders", "x"), "--encoders is 'x'; accepted: a whole number, 0 to 1000"),
        (
            ("--transfer-ms", 3),
            "--transfer-ms is about hand-overs from encoders; accepted beside --encoders N",
        ),
        (["--policy", "fast"], "--policy is 'fast'; accepted: dual, fcfs, priority, detail"),
        (["--rate", "0"], "--rate: rate is 0.0; accepted: 1e-06 to 1000000"),
        (["--rate", "many"], "--rate is 'many'; accepted: a number"),
        (["--text", "2"], "--text: text is 2.0; accepted: 0 to 1"),
        (["--arrivals", "flood"], "accepted: poisson, ramp, burst"),
        (["--visual-tokens", "a"], "--visual-tokens is 'a'; accepted: whole numbers, as A,B"),
        (["--pace", "0.5"], "--pace: pace is 0.5; accepted: 0, or 1 to 1000"),
        (["--ttft-ms", "0"], "--ttft-ms is 0; accepted: milliseconds above 0"),
        (["--itl-ms", "nan"], "--itl-ms is nan"),
        (["--trace", "none.jsonl"], "none.jsonl cannot be read: No such file or directory"),
        (["--cost", "none.json"], "none.json cannot be read: No such file or directory"),
        (["--trace", "x", "--rate", "3"], "either --trace or a load, not both: --rate is given too"),
        (["--requests", "5", "--save-trace", "/none/at/all"], "/none/at/all cannot be written"),
        (
            ["--quantization", "int8"],
            "--quantization: not simulated; simulated settings of the engine: --block-size",
        ),
        (["--kv-host-mib", "64"], "--kv-host-mib: not simulated; "),
        (["--compile", "default"], "--compile: not simulated; "),
        (["--encoder-engines", "auto"], "--encoder-engines: not simulated; "),
    ],
)
def test_errors_name_the_flag_the_value_and_the_accepted_values(
    fovea: Caller, words: list[str], message: str
) -> None:
    outcome = fovea("simulate", *words)
    assert outcome.code == 2
    assert message in outcome.error_line


def test_the_error_for_a_wrong_line_of_a_trace_names_it(fovea: Caller, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", LINE, LINE | {"imags": []})
    assert (
        f"{path}:2: unknown field 'imags'; did you mean 'images'?"
        in fovea("simulate", "--trace", path).error_line
    )


def test_help_names_every_policy_and_load(fovea: Caller) -> None:
    text = " ".join(fovea("simulate", "--help").out.split())
    for words in (
        "dual, fcfs, priority, detail",
        "--zipf",
        "--kv-blocks",
        "--target-itl-ms",
        "(default: 64,256,1024; accepted: 1 to 1000000)",
    ):
        assert words in text
    assert "--kernels" not in text, "a setting that is not simulated has no flag"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cost", "x.json"], "a cost model is for --simulate, which is not given"),
        (["--simulate", "--cost", "x.json"], "x.json cannot be read"),
        (["--simulate", "some-model"], "--simulate serves no model, but --model is 'some-model'"),
        (["--simulate", "--max-running", "0"], "--max-running: max_running is 0; accepted: 1 to 4096"),
        (
            ["--simulate", "--quantization", "int8"],
            "--quantization is not simulated; accepted with --simulate: ",
        ),
    ],
)
def test_a_simulated_server_reports_why_it_does_not_start(
    fovea: Caller, words: list[str], message: str
) -> None:
    outcome = fovea("serve", *words)
    assert outcome.code == 2
    assert message in outcome.error_line


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    process = start("serve", "--simulate", "--port", port, "--served-model-name", "made-up")
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        assert process.poll() is None, process.communicate()
        try:
            return httpx.get(f"{url}/ready").status_code == 200
        except httpx.TransportError:
            return False

    try:
        until(ready)
        yield url
    finally:
        process.terminate()
        assert process.wait(60) == 0
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stderr.close()


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def metric(url: str, name: str) -> float:
    body = re.search(rf"^fovea[:_]{name} (\S+)$", httpx.get(f"{url}/metrics").text, flags=re.M)
    assert body
    return float(body[1])


def test_the_openai_client_works_with_the_simulated_server(client: openai.OpenAI, folder: Path) -> None:
    assert [model.id for model in client.models.list()] == ["made-up"]
    data = base64.b64encode((folder / "a.png").read_bytes()).decode()
    content: Any = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "text", "text": "what is it?"},
    ]
    messages: Any = [{"role": "user", "content": content}]
    whole = client.chat.completions.create(model="made-up", messages=messages, max_tokens=7, seed=3)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 7
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.to_dict()["image_tokens"] == 6
    options: Any = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model="made-up", messages=messages, max_tokens=7, seed=3, stream=True, stream_options=options
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]) == 7
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 7


def test_leaving_a_stream_frees_its_request(client: openai.OpenAI, url: str) -> None:
    messages: Any = [{"role": "user", "content": "go on and on"}]
    stream = client.chat.completions.create(model="made-up", messages=messages, max_tokens=8000, stream=True)
    for _, _chunk in zip(range(5), stream, strict=False):
        pass
    assert metric(url, "requests_running") == 1
    stream.close()
    until(lambda: metric(url, "requests_running") == 0)
    assert metric(url, "kv_blocks_used") == 0


def test_errors_are_those_of_a_real_server(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    with pytest.raises(openai.NotFoundError, match="served: made-up"):
        client.chat.completions.create(model="other", messages=messages)
    with pytest.raises(openai.BadRequestError, match="the context of 8192 has room for 8181"):
        client.chat.completions.create(model="made-up", messages=messages, max_tokens=9000)
    with pytest.raises(openai.APIStatusError) as raised:
        client.chat.completions.create(
            model="made-up", messages=messages, max_tokens=8000, extra_body={"timeout": 0.05}
        )
    assert raised.value.status_code == 408


SERVE = """
import sys
from fovea.cli.main import main
code = main(["serve", "--simulate", "--port", sys.argv[1]])
print("torch" in sys.modules, "transformers" in sys.modules)
sys.exit(code)
"""


def test_the_simulated_server_starts_at_once() -> None:
    """It starts in less than a second, because it imports neither torch nor transformers."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(port)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"FOVEA_LAME_DUCK_S": "0"},
    )
    try:
        until(lambda: _answers(port))
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=TIMEOUT_S)[0].split() == ["False", "False"]
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
    except httpx.TransportError:
        return False
