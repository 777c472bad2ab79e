"""Open WebUI in front of a server: `make test-recipes` installs and starts it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.support import (
    CASES,
    COUNT_SHAPES,
    MODEL,
    READ_SIGN,
    ROOT,
    SAVE_COUNT,
    free_port,
    serve,
    user_asks,
)

PROGRAM = os.environ.get("FOVEA_TEST_OPEN_WEBUI", "")
START_SECONDS = 900
"""Its first start makes a database, which takes a minute, and much longer on a busy machine."""

pytestmark = pytest.mark.skipif(
    not PROGRAM, reason="FOVEA_TEST_OPEN_WEBUI names no program: make test-recipes"
)


@pytest.fixture(scope="module")
def webui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of Open WebUI's own API, signed in, as its page uses it."""
    folder, port = tmp_path_factory.mktemp("webui"), free_port()
    with serve() as server:
        environment = {
            "HOME": str(folder), "DATA_DIR": str(folder), "PATH": os.environ["PATH"],
            "OPENAI_API_BASE_URL": server.v1, "OPENAI_API_KEY": "none", "ENABLE_OLLAMA_API": "false",
            "WEBUI_AUTH": "False", "WEBUI_SECRET_KEY": "test", "OFFLINE_MODE": "true",
            "RAG_EMBEDDING_ENGINE": "openai",
        }  # fmt: skip
        command = [PROGRAM, "serve", "--host", "127.0.0.1", "--port", str(port)]
        with open(folder / "log.txt", "wb") as log:
            process = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
                wait(client, process, folder / "log.txt")
                account = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()
                client.headers["Authorization"] = f"Bearer {account['token']}"
                yield client
        finally:
            process.terminate()
            process.wait(60)


def wait(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert process.poll() is None, log.read_text(errors="replace")[-2000:]
        assert time.monotonic() < deadline, "Open WebUI did not start"
        try:
            if client.get("/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(1)


def ask(webui: httpx.Client, **fields: Any) -> Any:
    answer = webui.post("/api/chat/completions", json={"model": MODEL, "stream": False, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def test_it_lists_the_model(webui: httpx.Client) -> None:
    models = webui.get("/api/models").json()["data"]
    assert MODEL in [each["id"] for each in models]


@pytest.mark.parametrize("name", ["shapes", "sign", "pair"])
def test_it_answers_about_images(webui: httpx.Client, name: str) -> None:
    assert ask(webui, messages=[user_asks(CASES[name])])["content"] in CASES[name].answers


def test_an_uploaded_image_reaches_the_model(webui: httpx.Client) -> None:
    picture = (ROOT / "examples" / READ_SIGN.pictures[0]).read_bytes()
    files = {"file": ("sign.png", picture, "image/png")}
    name = webui.post("/api/v1/files/?process=false", files=files).json()["id"]
    content = [
        {"type": "text", "text": READ_SIGN.question},
        {"type": "image_url", "image_url": {"url": name}},
    ]
    assert ask(webui, messages=[{"role": "user", "content": content}])["content"] in READ_SIGN.answers


def test_the_answer_streams_with_its_usage(webui: httpx.Client) -> None:
    fields = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}}
    text, usage = "", {}
    with webui.stream(
        "POST", "/api/chat/completions", json={**fields, "messages": [user_asks(COUNT_SHAPES)]}
    ) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                usage = chunk.get("usage") or usage
    assert text in COUNT_SHAPES.answers
    assert usage["prompt_tokens_details"]["image_tokens"] > 0


def test_every_advanced_parameter_of_its_page_is_accepted(webui: httpx.Client) -> None:
    parameters = {
        "temperature": 0.0, "top_p": 0.9, "min_p": 0.0, "max_tokens": 64, "frequency_penalty": 0.0,
        "presence_penalty": 0.0, "reasoning_effort": "low", "seed": 7, "stop": ["END"], "logit_bias": {},
    }  # fmt: skip
    assert ask(webui, messages=[user_asks(COUNT_SHAPES)], **parameters)["content"] in COUNT_SHAPES.answers


def test_tools_of_its_own_are_offered(webui: httpx.Client) -> None:
    message = ask(webui, messages=[user_asks(COUNT_SHAPES)], tools=[SAVE_COUNT.chat], tool_choice="required")
    (call,) = message["tool_calls"]
    SAVE_COUNT.check(call["function"]["name"], call["function"]["arguments"])


@pytest.mark.parametrize("task", ["title", "tags", "follow_up"])
def test_its_tasks_in_the_background_are_answered(webui: httpx.Client, task: str) -> None:
    """It asks the model for a title, tags and further questions of each conversation."""
    talk = [user_asks(COUNT_SHAPES), {"role": "assistant", "content": COUNT_SHAPES.answers[0]}]
    answer = webui.post(
        f"/api/v1/tasks/{task}/completions", json={"model": MODEL, "messages": talk, "chat_id": "1"}
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length")
