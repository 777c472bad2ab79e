"""The class `ChatOpenAI` of the package `langchain-openai`."""

from __future__ import annotations

import re
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI

from tests.clients.support import (
    BLUE_STAR,
    BY_NAME,
    CASES,
    COUNT,
    COUNT_SHAPES,
    ITEM,
    MODEL,
    POINT_AT,
    READ_SIGN,
    ROOT,
    TOOLS,
    TRIANGLES,
    Case,
    Count,
    Item,
    Server,
    ToolCase,
    user,
)

each_tool = pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)


def model(server: Server, **extra: Any) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=server.v1, api_key="none", temperature=0, max_retries=0, **extra)


@pytest.fixture
def chat(server: Server) -> ChatOpenAI:
    return model(server)


def human(text: str, *pictures: str) -> HumanMessage:
    return HumanMessage(content=user(text, *pictures)["content"])


def asks(case: Case) -> HumanMessage:
    return human(case.question, *case.pictures)


@pytest.mark.parametrize("name", ["shapes", "sign", "colours"])
def test_invoke(chat: ChatOpenAI, name: str) -> None:
    """`invoke` with an image gives the right answer and its usage"""
    answer = chat.invoke([asks(CASES[name])])
    assert isinstance(answer, AIMessage)
    assert answer.content in CASES[name].answers
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0


def test_stream(chat: ChatOpenAI) -> None:
    """`stream` joined is the answer of `invoke`"""
    whole = chat.invoke([asks(COUNT_SHAPES)])
    chunks = list(chat.stream([asks(COUNT_SHAPES)], stream_usage=True))
    assert "".join(str(chunk.content) for chunk in chunks) == whole.content
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) == (
        whole.usage_metadata or {}
    ).get("output_tokens")


def test_conversation(chat: ChatOpenAI) -> None:
    """an answer is sent back unchanged after a system message, and the next question is answered"""
    turns: list[Any] = [SystemMessage("Be brief."), human("How many circles are there?", "shapes.png")]
    turns += [chat.invoke(turns), HumanMessage("How many crosses are there?")]
    assert "2" in str(chat.invoke(turns).content)


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
@pytest.mark.parametrize(("case", "form", "value"), [(COUNT, Count, TRIANGLES), (ITEM, Item, BLUE_STAR)])
def test_structured_output(chat: ChatOpenAI, method: Any, case: Case, form: type[Any], value: Any) -> None:
    """`with_structured_output` gives the right object of a pydantic model"""
    assert chat.with_structured_output(form, method=method).invoke([asks(case)]) == value


@pytest.mark.parametrize(("case", "form"), [(COUNT, Count), (ITEM, Item)])
def test_structured_output_by_call(chat: ChatOpenAI, case: Case, form: type[Any]) -> None:
    """`with_structured_output` by function_calling gives an object of a pydantic model"""
    structured = chat.with_structured_output(form, method="function_calling")
    assert isinstance(structured.invoke([asks(case)]), form)


@each_tool
def test_bind_tools(chat: ChatOpenAI, tool: ToolCase) -> None:
    """`bind_tools` offers tools, and the answer is a text or valid calls"""
    answer = chat.bind_tools([each.chat for each in TOOLS]).invoke([human(tool.question, tool.picture)])
    assert not answer.invalid_tool_calls
    assert bool(answer.tool_calls) != bool(answer.content)
    for call in answer.tool_calls:
        BY_NAME[call["name"]].check(call["name"], call["args"])


@pytest.mark.parametrize("choice", ["required", "any", "point_at"])
def test_tool_choice(chat: ChatOpenAI, choice: str) -> None:
    """`bind_tools` with `tool_choice` gives a valid call"""
    bound = chat.bind_tools([POINT_AT.chat], tool_choice=choice, parallel_tool_calls=False)
    [call] = bound.invoke([human(POINT_AT.question, POINT_AT.picture)]).tool_calls
    POINT_AT.check(call["name"], call["args"])
    assert call["id"]


def test_stream_of_a_call(chat: ChatOpenAI) -> None:
    """the joined stream of a call is the complete call"""
    bound = chat.bind_tools([POINT_AT.chat], tool_choice="required", parallel_tool_calls=False)
    question = [human(POINT_AT.question, POINT_AT.picture)]
    first, *others = bound.stream(question)
    joined = sum(others, start=first)
    calls = [(call["name"], call["args"]) for call in joined.tool_calls]
    assert calls == [(call["name"], call["args"]) for call in bound.invoke(question).tool_calls]


def test_tool_message(chat: ChatOpenAI) -> None:
    """a call is sent back with a ToolMessage, and the answer is a text"""
    turns: list[Any] = [human(POINT_AT.question, POINT_AT.picture)]
    called = chat.bind_tools([POINT_AT.chat], tool_choice="point_at").invoke(turns)
    turns += [called, ToolMessage('{"ok": true}', tool_call_id=called.tool_calls[0]["id"])]
    answer = chat.bind_tools([POINT_AT.chat], tool_choice="none").invoke(turns)
    assert answer.content
    assert not answer.tool_calls


def test_responses_api(server: Server) -> None:
    """`use_responses_api` gets the right answer about an image from the responses"""
    answer = model(server, use_responses_api=True).invoke([asks(READ_SIGN)])
    assert answer.text in READ_SIGN.answers


def test_errors(server: Server) -> None:
    """a wrong field raises BadRequestError"""
    with pytest.raises(openai.BadRequestError, match="top_p"):
        model(server, top_p=-1).invoke([asks(READ_SIGN)])


def test_the_recipe(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """the program in docs/integrations.md streams a right answer and prints a number"""
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(program.replace("http://127.0.0.1:8000/v1", server.v1), {"__name__": "recipe"})
    assert capsys.readouterr().out == "There are 3 triangles.3\n"
