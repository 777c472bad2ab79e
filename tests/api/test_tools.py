"""Tools of requests, calls in messages, and the order of their results."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from fovea.api.content import tool_calls, tool_use
from fovea.api.convert import chat_prompt
from fovea.api.schema import ChatRequest
from fovea.core.constraints import ToolCall, ToolUse
from fovea.core.errors import InvalidRequest
from fovea.core.types import Message, TextPart, in_order_of_calls

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def chat(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": messages or [{"role": "user", "content": "hi"}], **fields})


def call(name: str, call_id: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(call_id: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content, **fields}


def test_the_definition_is_what_templates_get() -> None:
    body = chat(tools=[function("look", description="Looks.", parameters=PARAMETERS, strict=True)])
    [tool] = tool_use(body).tools
    assert (tool.name, tool.strict, tool.parameters) == ("look", True, PARAMETERS)
    assert tool.definition == function("look", description="Looks.", parameters=PARAMETERS)


@pytest.mark.parametrize("fields", [{}, {"parameters": None}, {"parameters": {}}])
def test_a_tool_without_parameters(fields: dict[str, Any]) -> None:
    """Templates read the properties of every tool, so a definition always has parameters."""
    [tool] = tool_use(chat(tools=[function("stop", **fields)])).tools
    assert tool.parameters == {}
    assert isinstance(tool.definition["function"]["parameters"], dict)


@pytest.mark.parametrize(
    ("fields", "mode", "several", "only"),
    [
        ({}, "auto", True, ""),
        ({"tool_choice": None, "parallel_tool_calls": None}, "auto", True, ""),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, "auto", False, ""),
        ({"tool_choice": "required"}, "required", True, ""),
        ({"tool_choice": "none"}, "none", True, ""),
        ({"tool_choice": function("b")}, "required", False, "b"),
    ],
)
def test_tool_choice(fields: dict[str, Any], mode: str, several: bool, only: str) -> None:
    use = tool_use(chat(tools=[function("a"), function("b")], **fields))
    assert (use.mode, use.several, use.only) == (mode, several, only)
    assert [tool.name for tool, _ in use.callable] == ([only] if only else ["a", "b"] * (mode != "none"))


def test_a_named_tool_has_its_number_in_the_request() -> None:
    use = tool_use(chat(tools=[function("a"), function("b")], tool_choice=function("b")))
    assert [(tool.name, number) for tool, number in use.callable] == [("b", 1)]
    assert len(use.offered) == 2, "the model sees all of them"


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": None}, {"tools": [], "tool_choice": "none"}])
def test_no_tools(fields: dict[str, Any]) -> None:
    assert tool_use(chat(**fields)) == ToolUse()


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [function("a"), function("b"), function("a")]}, "tools[0].function.name", "'a'"),
        ({"tool_choice": "required"}, "tool_choice", "there are none"),
        ({"tool_choice": function("a")}, "tool_choice", "there are none"),
        ({"tools": [function("a")], "tool_choice": function("b")}, "tool_choice.function.name", "'a'"),
        (
            {"tools": [function("a"), function("b", parameters={"type": "array"})]},
            "tools[1].function.parameters",
            "'array'",
        ),
        ({"tools": [function("a", parameters={"type": ["object"]})]}, "tools[0].function.parameters", "type"),
    ],
)
def test_contradictions_name_the_field(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says.replace("[", r"\[")) as caught:
        tool_use(chat(**fields))
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["", "two words", "a" * 129, 'a"', "a\n", "<|im_end|>", "ä"])
def test_names_that_could_end_a_call_are_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        chat(tools=[function(name)])


def test_calls_of_messages() -> None:
    body = chat({"role": "assistant", "content": None, "tool_calls": [call("a", "x", '{"b": 1}')]})
    assert tool_calls(body.messages[0].tool_calls) == (ToolCall("a", '{"b": 1}', "x"),)
    assert tool_calls(None) == ()


def test_a_conversation_with_calls() -> None:
    body = chat(
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call("a", "1")], "reasoning_content": "hm"},
        result("1", "sunny"),
        {"role": "assistant", "content": "It is sunny.", "reasoning": "so", "tool_calls": []},
    )
    assert chat_prompt(body, []).messages == (
        Message("user", (TextPart("hi"),)),
        Message("assistant", (), (ToolCall("a", "{}", "1"),), reasoning="hm"),
        Message("tool", (TextPart("sunny"),), call_id="1", name="a"),
        Message("assistant", (TextPart("It is sunny."),), reasoning="so"),
    )


def test_a_stream_that_is_sent_back() -> None:
    """Clients that join chunks keep `index` in the calls, and content of "" beside them."""
    sent = {"role": "assistant", "content": "", "tool_calls": [{"index": 0, **call("a", "1")}]}
    message = chat_prompt(chat({"role": "user", "content": "x"}, sent, result("1", "")), []).messages[1]
    assert message.calls == (ToolCall("a", "{}", "1"),)


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_calls_are_accepted_from_the_assistant_only(role: str) -> None:
    body = chat({"role": role, "content": "x", "tool_calls": [call("a", "1")]})
    with pytest.raises(InvalidRequest, match=f"not in those of {role}") as caught:
        chat_prompt(body, [])
    assert caught.value.param == "messages[0].tool_calls"


def turn(*ids: str) -> Message:
    return Message("assistant", (), tuple(ToolCall(f"tool_{name}", "{}", name) for name in ids))


def reply(name: str, tool: str = "") -> Message:
    return Message("tool", (TextPart(name),), call_id=name, name=tool)


def ids(messages: tuple[Message, ...]) -> list[str]:
    return [message.call_id or message.role for message in messages]


@pytest.mark.parametrize(
    "order", [("a", "b", "c"), ("c", "b", "a"), ("b", "c", "a"), ("a", "c", "b"), ("c", "a", "b")]
)
def test_results_are_in_the_order_of_their_calls(order: tuple[str, ...]) -> None:
    """A client ran the calls at once and sent the results as they came. The model knows them by order."""
    messages = in_order_of_calls([turn("a", "b", "c"), *map(reply, order), Message("user", ())])
    assert ids(messages) == ["assistant", "a", "b", "c", "user"]
    assert [message.name for message in messages[1:4]] == ["tool_a", "tool_b", "tool_c"]


def test_only_the_results_that_follow_are_ordered() -> None:
    messages = in_order_of_calls([turn("a", "b"), reply("b"), Message("user", ()), reply("a"), turn("a")])
    assert ids(messages) == ["assistant", "b", "user", "a", "assistant"]


def test_ids_may_repeat_in_later_turns() -> None:
    """Some models number their calls from 0 in every turn."""
    second = Message("assistant", (), (ToolCall("other", "{}", "b"), ToolCall("first", "{}", "a")))
    messages = in_order_of_calls([turn("a", "b"), reply("b"), reply("a"), second, reply("a"), reply("b")])
    assert ids(messages) == ["assistant", "a", "b", "assistant", "b", "a"]
    assert [message.name for message in messages] == ["", "tool_a", "tool_b", "", "other", "first"]


def test_results_of_unknown_calls_stay_where_they_are() -> None:
    messages = in_order_of_calls([turn("a", "b"), reply("b"), reply("x"), reply("a")])
    assert sorted(ids(messages)) == ["a", "assistant", "b", "x"]
    assert [message.name for message in messages if message.call_id == "x"] == [""]


def test_a_name_that_the_client_sent_stays() -> None:
    assert in_order_of_calls([turn("a"), reply("a", "mine")])[1].name == "mine"


def test_calls_without_ids() -> None:
    """Their results are in the order in which they were sent."""
    bare = Message("assistant", (), (ToolCall("f", "{}"), ToolCall("g", "{}")))
    results = [Message("tool", (TextPart("1"),)), Message("tool", (TextPart("2"),))]
    assert in_order_of_calls([bare, *results]) == (bare, *results)
