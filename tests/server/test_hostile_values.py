"""Values inside of free JSON that a review used to cause errors of status 500."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.support import Server

DEEP = '{"a":' * 600 + "1" + "}" * 600
LONG = "data:text/plain," + "x" * 70_000
CALL: dict[str, Any] = {"type": "tool_use", "id": "t", "name": "f"}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "ok"}]}


@pytest.fixture(scope="module")
def server(bundled_server: Server) -> Server:
    return bundled_server


def test_arguments_may_be_deep(server: Server) -> None:
    call = {"id": "t", "function": {"name": "f", "arguments": DEEP}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t", "content": "ok"},
    ]
    answer = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "arguments", [{"url": LONG}, {"source": {"data": LONG}}, {"image_url": {"url": LONG}}]
)
def test_arguments_may_look_like_media(server: Server, arguments: dict[str, Any]) -> None:
    """Long texts of these names were taken for images, which nothing then could write as JSON."""
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{**CALL, "input": arguments}]},
        RESULT,
    ]
    answer = server.post("/v1/messages", {"messages": messages, "max_tokens": 1})
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert "context" in answer.text or "characters" in answer.text


@pytest.mark.parametrize("value", ["NaN", "1e999", '"\\ud800"'])
def test_parameters_are_json(server: Server, value: str) -> None:
    tool = f'{{"type":"function","name":"f","parameters":{{"x":{value}}}}}'
    body = f'{{"input":"a","max_output_tokens":1,"tool_choice":"none","tools":[{tool}]}}'
    with server.client() as client:
        kind = {"content-type": "application/json"}
        answer = client.post("/v1/responses", content=body.encode(), headers=kind)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith("tools[0].parameters")
