"""The class `OpenAILike` of the package `llama-index-llms-openai-like`."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.llms import ChatMessage, ImageBlock, MessageRole, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from tests.clients.support import (
    BLUE_STAR,
    CASES,
    COUNT_SHAPES,
    ITEM,
    MODEL,
    POINT_AT,
    ROOT,
    Case,
    Item,
    Server,
)


def model(server: Server, **extra: Any) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=server.v1,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        max_retries=0,
        **extra,
    )


@pytest.fixture
def llm(server: Server) -> OpenAILike:
    return model(server)


def human(text: str, *pictures: str) -> ChatMessage:
    images = [ImageBlock(path=ROOT / "examples" / name) for name in pictures]
    return ChatMessage(role=MessageRole.USER, blocks=[*images, TextBlock(text=text)])


def asks(case: Case) -> ChatMessage:
    return human(case.question, *case.pictures)


@pytest.mark.parametrize("name", ["shapes", "sign", "colours"])
def test_chat(llm: OpenAILike, name: str) -> None:
    """`chat` with an image gives the right answer"""
    assert llm.chat([asks(CASES[name])]).message.content in CASES[name].answers


def test_stream_chat(llm: OpenAILike) -> None:
    """`stream_chat` joined is the answer of `chat`"""
    pieces = list(llm.stream_chat([asks(COUNT_SHAPES)]))
    assert "".join(piece.delta or "" for piece in pieces) == llm.chat([asks(COUNT_SHAPES)]).message.content
    assert pieces[-1].message.content in COUNT_SHAPES.answers


def test_complete(llm: OpenAILike) -> None:
    """`complete` and `stream_complete` give the same text"""
    whole = llm.complete("How many circles are there?").text
    pieces = list(llm.stream_complete("How many circles are there?"))
    assert "".join(piece.delta or "" for piece in pieces) == whole
    assert whole


def test_conversation(llm: OpenAILike) -> None:
    """an answer is sent back unchanged, and the next question is answered"""
    first = human("How many circles are there?", "shapes.png")
    said = llm.chat([first]).message
    second = llm.chat([first, said, human("How many crosses are there?")])
    assert second.message.content == "There are 2 crosses."


def test_structured_by_schema(server: Server) -> None:
    """`as_structured_llm` by a JSON schema gives the right object of a pydantic model"""
    structured = model(server, should_use_structured_outputs=True).as_structured_llm(Item)
    assert structured.chat([asks(ITEM)]).raw == BLUE_STAR


def test_structured_by_call(llm: OpenAILike) -> None:
    """`as_structured_llm` by a call gives an object of a pydantic model"""
    assert isinstance(llm.as_structured_llm(Item).chat([asks(ITEM)]).raw, Item)


def point_at(position: str) -> str:
    """Points at a place in the image."""
    return f"pointed at {position}"


def test_tool_required(llm: OpenAILike) -> None:
    """`chat_with_tools` with `tool_required` gives a call with arguments of its schema"""
    answer = llm.chat_with_tools(
        [FunctionTool.from_defaults(point_at)],
        chat_history=[human(POINT_AT.question, POINT_AT.picture)],
        tool_required=True,
    )
    [call] = llm.get_tool_calls_from_response(answer)
    assert call.tool_name == "point_at"
    assert isinstance(call.tool_kwargs["position"], str)


def test_tool_result(llm: OpenAILike) -> None:
    """a call is sent back with the result of the tool, and the answer is a text"""
    tools = [FunctionTool.from_defaults(point_at)]
    question = human(POINT_AT.question, POINT_AT.picture)
    called = llm.chat_with_tools(tools, chat_history=[question], tool_required=True)
    [call] = llm.get_tool_calls_from_response(called)
    result = ChatMessage(
        role=MessageRole.TOOL, content='{"ok": true}', additional_kwargs={"tool_call_id": call.tool_id}
    )
    answer = llm.chat_with_tools(tools, chat_history=[question, called.message, result], tool_choice="none")
    assert answer.message.content
