"""The Responses API: requests become chat requests, and answers the items and events of OpenAI's types."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter, ValidationError

from fovea.api.convert import chat_prompt, image_references
from fovea.api.reading import Answer, Reading
from fovea.api.responses_answer import ResponsesBodies
from fovea.api.responses_request import ResponsesRequest, chat_request, responses_names
from fovea.core.errors import InvalidRequest, PromptTooLong
from fovea.core.types import Delta, FinishReason, TokenLogprob, Usage
from tests.api.test_reading import ANSWERS, LOOK, READING, completion, deltas

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "name": "look", "parameters": SCHEMA, "strict": True, "description": "Looks."}


def request(given: Any = "hi", **fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"input": given, **fields})


def messages(given: Any, **fields: Any) -> list[dict[str, Any]]:
    """The messages of the chat request, as far as they are set."""
    chat, _ = chat_request(request(given, **fields), [])
    return [message.model_dump(exclude_unset=True) for message in chat.messages]


def test_a_string_is_a_message_of_the_user() -> None:
    assert messages("hi") == [{"role": "user", "content": "hi"}]


def test_instructions_come_first() -> None:
    assert messages("hi", instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]


def test_messages_with_and_without_a_type() -> None:
    given = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "yes", "annotations": [], "logprobs": []}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]  # fmt: skip
    assert messages(given) == [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "yes"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "no"}]},
    ]


def test_images() -> None:
    url = "data:image/png;base64,AAAA"
    parts = [
        {"type": "input_image", "image_url": url, "detail": "original"},
        {"type": "input_image", "image_url": url},
    ]
    chat, _ = chat_request(request([{"role": "user", "content": parts}]), [])
    assert len(image_references(chat.messages)) == 2
    [message] = [message.model_dump() for message in chat.messages]
    assert [part["image_url"]["detail"] for part in message["content"]] == ["high", "auto"]


def function_call(call_id: str, name: str = "look", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": "{}", **fields}


def output(call_id: str, text: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def test_the_items_of_one_answer_are_one_message() -> None:
    """The model thought, wrote text and made two calls, all in one turn."""
    given = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": "So:"},
        function_call("a"),
        function_call("b", "stop"),
        output("a", "sunny"),
        output("b", [{"type": "input_text", "text": "ok"}]),
        {"role": "user", "content": "thanks"},
    ]  # fmt: skip
    chat, conversation = chat_request(request(given), [])
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool", "tool", "user"]
    answer = chat.messages[1]
    assert (answer.content, answer.reasoning_content) == ("So:", "hm")
    assert [call.function.name for call in answer.tool_calls or []] == ["look", "stop"]
    assert [message.tool_call_id for message in chat.messages[2:4]] == ["a", "b"]
    assert conversation.places == ["input[0]", "input[1]", "input[5]", "input[6]", "input[7]"]


def test_two_answers_in_a_row_are_two_messages() -> None:
    given = [{"role": "assistant", "content": "one"}, {"role": "assistant", "content": "two"}]
    assert [message["content"] for message in messages(given)] == ["one", "two"]


def test_calls_after_a_result_begin_a_new_message() -> None:
    roles = [m["role"] for m in messages([function_call("a"), output("a", "x"), function_call("b")])]
    assert roles == ["assistant", "tool", "assistant"]


def test_an_answer_is_continued() -> None:
    """The messages of the answer come before the input, and instructions before both."""
    first, _ = chat_request(request("hi"), [])
    chat, conversation = chat_request(request("more", instructions="Be brief."), first.messages)
    assert [message.content for message in chat.messages] == ["Be brief.", "hi", "more"]
    assert conversation.places == ["previous_response_id", "input[0]"]


def test_an_item_after_an_earlier_answer_is_a_message_of_its_own() -> None:
    first, _ = chat_request(request([{"role": "assistant", "content": "x"}]), [])
    chat, _ = chat_request(request([function_call("a")]), first.messages)
    assert [message.role for message in chat.messages] == ["assistant", "assistant"]
    assert first.messages[0].tool_calls is None, "what is kept does not change"


def test_empty_reasoning_is_left_out() -> None:
    """OpenAI's own models send reasoning items without a text."""
    given = [{"type": "reasoning", "summary": [], "encrypted_content": "x"}, {"role": "user", "content": "a"}]
    assert [message["role"] for message in messages(given)] == ["user"]


def test_options() -> None:
    body = request(
        max_output_tokens=9, temperature=0.5, top_p=0.9, top_logprobs=2, stream=True, seed=3,
        reasoning={"effort": "low", "summary": "auto"}, parallel_tool_calls=False, tools=[TOOL],
        tool_choice={"type": "function", "name": "look"},
    )  # fmt: skip
    chat, _ = chat_request(body, [])
    assert (chat.max_completion_tokens, chat.temperature, chat.top_p) == (9, 0.5, 0.9)
    assert (chat.logprobs, chat.top_logprobs, chat.stream, chat.seed) == (True, 2, True, 3)
    assert (chat.reasoning_effort, chat.parallel_tool_calls) == ("low", False)
    assert chat.tools is not None
    assert chat.tools[0].function.model_dump() == {k: v for k, v in TOOL.items() if k != "type"}
    assert chat.model_dump()["tool_choice"]["function"]["name"] == "look"


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"type": "text"}, {"type": "text"}),
        ({"type": "json_object"}, {"type": "json_object"}),
        (
            {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        ),
    ],
)
def test_the_form_of_the_answer(form: dict[str, Any], expected: dict[str, Any]) -> None:
    chat, _ = chat_request(request(text={"format": form}), [])
    assert chat.response_format is not None
    assert chat.response_format.model_dump(by_alias=True, exclude_none=True) == expected


def test_log_probabilities_by_include() -> None:
    assert chat_request(request(include=["message.output_text.logprobs"]), [])[0].logprobs
    assert not chat_request(request(include=["reasoning.encrypted_content"]), [])[0].logprobs


@pytest.mark.parametrize(
    "fields",
    [
        {"input": []},
        {"input": [{"type": "computer_call"}]},
        {"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]},
        {"input": "x", "tools": [{"type": "web_search"}]},
        {"input": "x", "background": True},
        {"input": "x", "tool_choice": {"type": "file_search"}},
    ],
)
def test_what_this_server_cannot_do_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ResponsesRequest.model_validate(fields)


@pytest.mark.parametrize(
    ("param", "instructions", "expected"),
    [
        ("messages[0].content", False, "input[0].content"),
        ("messages[1].content[2].image_url.url", False, "input[3].content[2].image_url"),
        ("messages[0].content", True, "instructions.content"),
        ("messages[1].content", True, "input[0].content"),
        ("messages[7].content", False, "messages[7].content"),
        ("max_completion_tokens", False, "max_output_tokens"),
        ("max_tokens", False, "max_output_tokens"),
        ("response_format.json_schema.schema", False, "text.format.schema"),
        ("reasoning_effort", False, "reasoning.effort"),
        ("tools[3].function.parameters", False, "tools[3].parameters"),
        ("tools[3].function.name", False, "tools[3].name"),
        ("tool_choice.function.name", False, "tool_choice.name"),
        ("tool_choice", False, "tool_choice"),
        ("temperature", False, "temperature"),
    ],
)
def test_errors_name_the_clients_field(param: str, instructions: bool, expected: str) -> None:
    with pytest.raises(InvalidRequest) as caught, responses_names(["input[0]", "input[3]"], instructions):
        raise InvalidRequest(f"{param}: wrong", param=param)
    assert (caught.value.param, caught.value.message) == (expected, f"{expected}: wrong")


def test_an_unsupported_schema_of_a_tool_is_named_as_the_client_knows_it() -> None:
    """The grammar compiler names the schema in its message, and has no field but `tools`."""
    error = InvalidRequest('tools[0].function.parameters at /a: "not" is not supported', param="tools")
    with pytest.raises(InvalidRequest) as caught, responses_names(["input[0]"], False):
        raise error
    assert caught.value.message.startswith("tools[0].parameters at /a: ")


def test_other_errors_keep_their_words() -> None:
    with pytest.raises(PromptTooLong, match="all is wrong") as caught, responses_names([], False):
        raise PromptTooLong("all is wrong")
    assert caught.value.param is None


def test_an_error_of_a_real_request() -> None:
    given = [{"role": "user", "content": "a"}, {"role": "user", "content": []}]
    chat, conversation = chat_request(request(given, instructions="x"), [])
    with pytest.raises(InvalidRequest) as caught, responses_names(conversation.places, True):
        chat_prompt(chat, [])
    assert caught.value.param == "input[1].content"


def whole(text: str, reason: FinishReason = "stop") -> dict[str, Any]:
    return ResponsesBodies("m", request(), READING).complete([completion(text, reason=reason)])


def stream(text: str, size: int, reason: FinishReason = "stop") -> list[dict[str, Any]]:
    """The events of an answer as a client gets them, checked by OpenAI's types."""
    bodies = ResponsesBodies("m", request(), READING)
    lines: list[bytes] = []
    for delta in deltas(text, size, reason=reason):
        lines += [bodies.event(event) for event in bodies.chunks(delta)]
    lines += [bodies.event(event) for event in bodies.closing(Usage(5, 2), True)]
    events: list[dict[str, Any]] = []
    for line in lines:
        head, data = line.decode().strip().split("\n")
        payload = json.loads(data.removeprefix("data: "))
        assert head == f"event: {payload['type']}"
        parsed = EVENT.validate_python(payload)
        assert parsed.type == payload["type"], "the event is one that OpenAI's client knows"
        events.append(payload)
    return events


def outline(body: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Type, name and text of each item of an answer."""
    return [(item["type"], item.get("name", ""), text_of(item)) for item in body["output"]]


def text_of(item: dict[str, Any]) -> str:
    """The text of an item, or the arguments of a call."""
    arguments: str = item.get("arguments", "")
    return arguments + "".join(part["text"] for part in item.get("content", ()))


@pytest.mark.parametrize("name", ANSWERS)
def test_a_complete_answer_is_openais_type(name: str) -> None:
    given = request(tools=[TOOL], metadata={"a": "b"}, text={"format": {"type": "json_object"}})
    body = ResponsesBodies("m", given, READING).complete([completion(ANSWERS[name])])
    parsed = Response.model_validate(body)
    assert parsed.status == "completed"
    assert parsed.usage is not None
    assert parsed.usage.total_tokens == 7
    assert parsed.tools[0].type == "function"
    divided = READING.divide(ANSWERS[name], False)
    assert parsed.output_text == divided.content
    calls = [item for item in parsed.output if item.type == "function_call"]
    assert [(call.name, call.arguments) for call in calls] == [(c.name, c.arguments) for c in divided.calls]


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_the_last_event_is_the_complete_answer(name: str, size: int, reason: FinishReason) -> None:
    """Items, texts and status of a stream are those of the answer without one."""
    complete = whole(ANSWERS[name], reason)
    last = stream(ANSWERS[name], size, reason)[-1]
    assert last["type"] == ("response.completed" if reason == "stop" else "response.incomplete")
    assert outline(last["response"]) == outline(complete)
    differing = {"id", "output", "created_at", "fovea"}
    assert {k: v for k, v in last["response"].items() if k not in differing} == {
        k: v for k, v in complete.items() if k not in differing
    }


def test_text_after_a_call_stays_after_it() -> None:
    """The complete answer had all text before all calls, and the stream had the order of the model."""
    text = f"So:\n{LOOK}\nDone."
    assert outline(whole(text)) == outline(stream(text, 7)[-1]["response"])


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_events_of_a_stream_add_up(name: str, size: int) -> None:
    """Each item is added, grows by deltas, and is done with the text that the deltas joined to."""
    events = stream(ANSWERS[name], size)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["status"] == "in_progress"
    open_item: dict[str, Any] | None = None
    done: list[dict[str, Any]] = []
    text = ""
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert open_item is None
            assert event["output_index"] == len(done)
            assert event["item"]["status"] == "in_progress"
            open_item, text = event["item"], ""
            continue
        assert open_item is not None
        assert event["output_index"] == len(done)
        if kind == "output_item.done":
            assert event["item"]["id"] == open_item["id"]
            assert text == text_of(event["item"])
            done.append(event["item"])
            open_item = None
            continue
        assert event["item_id"] == open_item["id"]
        if kind.endswith(".delta"):
            assert event["delta"]
            text += event["delta"]
        elif kind.endswith(("text.done", "arguments.done")):
            assert text == event.get("text", event.get("arguments"))
    assert open_item is None
    assert events[-1]["response"]["output"] == done


def test_log_probabilities_of_a_stream_are_those_of_the_answer() -> None:
    """Also those of tokens whose text is held back, because a call might begin there."""
    words = ["A", " < ", "b", " ", "\n", "<tool", "_time", ">", "."]
    entries = tuple(TokenLogprob(number, word, -0.5) for number, word in enumerate(words))
    text = "".join(words)
    complete = ResponsesBodies("m", request(), READING).complete([completion(text, logprobs=(entries,))])
    bodies = ResponsesBodies("m", request(), READING)
    joined: list[str] = []
    for entry in entries:
        end: FinishReason | None = "stop" if entry is entries[-1] else None
        for event in bodies.chunks(Delta(0, entry.text, (1,), (entry,), end)):
            joined += [part["token"] for part in event.get("logprobs", ())]
    last = bodies.closing(Usage(5, 2), True)[-1]["response"]
    expected = [part["token"] for part in complete["output"][0]["content"][0]["logprobs"]]
    assert expected == words
    assert [part["token"] for part in last["output"][0]["content"][0]["logprobs"]] == words
    assert joined == words


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_may_be_sent_back_as_input(name: str, streamed: bool) -> None:
    """Clients without stored answers send all items of the output back, and the conversation goes on."""
    body = stream(ANSWERS[name], 7)[-1]["response"] if streamed else whole(ANSWERS[name])
    results = [output(item["call_id"], "ok") for item in body["output"] if item["type"] == "function_call"]
    given = [
        {"role": "user", "content": "hi"},
        *body["output"],
        *results,
        {"role": "user", "content": "go on"},
    ]
    chat, _ = chat_request(request(given), [])
    divided = READING.divide(ANSWERS[name], False)
    prompt = chat_prompt(chat, []).messages
    assert [message.role for message in prompt if message.role != "tool"] == ["user", "assistant", "user"]
    assert prompt[1].reasoning == divided.reasoning
    assert [(c.name, c.arguments) for c in prompt[1].calls] == [(c.name, c.arguments) for c in divided.calls]


def test_the_answer_is_kept_once_it_is_complete() -> None:
    kept: list[tuple[dict[str, Any], Answer]] = []

    def keep(body: dict[str, Any], answer: Answer) -> None:
        kept.append((body, answer))

    bodies = ResponsesBodies("m", request(), READING, keep)
    for delta in deltas(ANSWERS["all"], 9):
        bodies.chunks(delta)
    assert not kept
    last = bodies.closing(Usage(1, 1), True)[-1]["response"]
    [(body, answer)] = kept
    assert body == last
    assert (answer.content, answer.reasoning, len(answer.calls)) == ("So:", "hm", 2)
    assert [call.id for call in answer.calls] == [
        i["call_id"] for i in body["output"] if i["type"] == "function_call"
    ]


def test_an_error_in_a_stream_is_openais_event() -> None:
    bodies = ResponsesBodies("m", request(), Reading())
    line = bodies.event(bodies.failure(InvalidRequest("no", param="input"))).decode()
    parsed = EVENT.validate_python(json.loads(line.split("data: ")[1]))
    assert (parsed.type, parsed.message, parsed.param) == ("error", "no", "input")


def test_tool_calls_need_tools() -> None:
    body = ResponsesBodies("m", request(), Reading()).complete([completion(LOOK)])
    assert outline(body) == [("message", "", LOOK)]
