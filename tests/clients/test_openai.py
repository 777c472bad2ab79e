"""The package `openai`: chat completions, responses, files, batches and errors."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion

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
    SAVE_COUNT,
    TOOLS,
    TRIANGLES,
    Case,
    Count,
    Item,
    Server,
    ToolCase,
    data_url,
    user,
    user_asks,
)

BATCH_SECONDS = 60
each_tool = pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.v1, api_key="none", max_retries=0) as client:
        yield client


# Chat completions


def chat(client: OpenAI, *messages: Any, **extra: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=list(messages), temperature=0, **extra)


def streamed_text(chunks: list[Any]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


@pytest.mark.parametrize("name", ["shapes", "sign", "colours", "nothing"])
def test_chat_image(client: OpenAI, name: str) -> None:
    """chat: a question about an image gets the right answer"""
    answer = chat(client, user_asks(CASES[name]))
    assert isinstance(answer, ChatCompletion)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content in CASES[name].answers
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == MODEL
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_text(client: OpenAI) -> None:
    """chat: a question without an image, as plain text, gets an answer"""
    answer = chat(client, {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"})
    assert answer.choices[0].message.content


def test_chat_stream(client: OpenAI) -> None:
    """chat: the joined stream is the complete answer, and its last chunk has the usage"""
    whole = chat(client, user_asks(COUNT_SHAPES))
    chunks = list(chat(client, user_asks(COUNT_SHAPES), stream=True, stream_options={"include_usage": True}))
    assert streamed_text(chunks) == whole.choices[0].message.content
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == ["stop"]
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_chat_stream_helper(client: OpenAI) -> None:
    """chat: the helper `chat.completions.stream` gathers the complete answer"""
    messages = [user_asks(READ_SIGN)]
    with client.chat.completions.stream(model=MODEL, messages=messages, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text
    assert text in READ_SIGN.answers


async def ask_async(server: Server) -> tuple[Any, str]:
    async with openai.AsyncOpenAI(base_url=server.v1, api_key="none", max_retries=0) as client:
        request: dict[str, Any] = {"model": MODEL, "messages": [user_asks(READ_SIGN)], "temperature": 0}
        whole = await client.chat.completions.create(**request)
        stream = await client.chat.completions.create(**request, stream=True)
        return whole, streamed_text([chunk async for chunk in stream])


def test_chat_async(server: Server) -> None:
    """chat: the asynchronous client gets the same answer complete and as a stream"""
    whole, text = asyncio.run(ask_async(server))
    assert whole.choices[0].message.content == text
    assert text in READ_SIGN.answers


def test_chat_choices(client: OpenAI) -> None:
    """chat: `n` gives several choices"""
    answer = chat(client, user_asks(COUNT_SHAPES), n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} <= set(COUNT_SHAPES.answers)


def test_chat_logprobs(client: OpenAI) -> None:
    """chat: `logprobs` and `top_logprobs` give each token with its alternatives, the end token, too"""
    answer = chat(client, user_asks(COUNT_SHAPES), logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    tokens = "".join(entry.token for entry in entries)
    assert tokens == answer.choices[0].message.content + "<|im_end|>"
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs) <= 0


def test_chat_limits(client: OpenAI) -> None:
    """chat: `max_completion_tokens` ends an answer with the reason length, and `stop` before the text"""
    short = chat(client, user_asks(COUNT_SHAPES), max_completion_tokens=2)
    assert short.choices[0].finish_reason == "length"
    assert short.usage.completion_tokens == 2
    stopped = chat(client, user_asks(READ_SIGN), stop=["is"])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content == "The text "


def test_chat_message_sent_back(client: OpenAI) -> None:
    """chat: the message of an answer is sent back unchanged, and the next question is answered"""
    first = user("How many circles are there?", "shapes.png")
    message = chat(client, first).choices[0].message
    second = chat(client, first, message, {"role": "user", "content": "How many crosses are there?"})
    assert second.choices[0].message.content == "There are 2 crosses."


@pytest.mark.parametrize(("case", "form", "value"), [(COUNT, Count, TRIANGLES), (ITEM, Item, BLUE_STAR)])
def test_chat_parse(client: OpenAI, case: Case, form: type[Any], value: Any) -> None:
    """chat: `parse` gives an object of a pydantic model"""
    answer = client.chat.completions.parse(
        model=MODEL, messages=[user_asks(case)], temperature=0, response_format=form
    )
    assert answer.choices[0].message.parsed == value


def test_chat_parse_stream(client: OpenAI) -> None:
    """chat: the stream helper parses a pydantic model"""
    with client.chat.completions.stream(
        model=MODEL, messages=[user_asks(COUNT)], temperature=0, response_format=Count
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == TRIANGLES


def test_chat_json_object(client: OpenAI) -> None:
    """chat: `response_format` json_object gives a JSON object"""
    answer = chat(client, user_asks(COUNT), response_format={"type": "json_object"})
    assert json.loads(answer.choices[0].message.content) == {"count": 3}


def request_of(tool: ToolCase, **extra: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [user(tool.question, tool.picture)],
        "tools": [each.chat for each in TOOLS],
        "temperature": 0,
        **extra,
    }


def named(tool: ToolCase) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name}}


def only_call(answer: Any) -> Any:
    """The only call of an answer, which consists of this call."""
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert call.id
    return call


@each_tool
def test_chat_tools_auto(client: OpenAI, tool: ToolCase) -> None:
    """chat: tools are offered, and the answer is a text or a valid call"""
    choice = client.chat.completions.create(**request_of(tool)).choices[0]
    calls = choice.message.tool_calls or []
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    assert bool(calls) != bool(choice.message.content)
    for call in calls:
        BY_NAME[call.function.name].check(call.function.name, call.function.arguments)


@each_tool
def test_chat_tools_named(client: OpenAI, tool: ToolCase) -> None:
    """chat: `tool_choice` names a tool, and the answer is one valid call of it"""
    answer = client.chat.completions.create(**request_of(tool, tool_choice=named(tool)))
    [call] = answer.choices[0].message.tool_calls or []
    tool.check(call.function.name, call.function.arguments)
    assert answer.choices[0].finish_reason in ("stop", "tool_calls")


@pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "one at a time"])
def test_chat_tools_required(client: OpenAI, parallel: bool) -> None:
    """chat: `tool_choice` required gives valid calls, and only one without `parallel_tool_calls`"""
    answer = client.chat.completions.create(
        **request_of(SAVE_COUNT, tool_choice="required", parallel_tool_calls=parallel)
    )
    calls = answer.choices[0].message.tool_calls or []
    assert answer.choices[0].finish_reason == "tool_calls"
    assert calls
    assert parallel or len(calls) == 1
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        BY_NAME[call.function.name].check(call.function.name, call.function.arguments)


def test_chat_tools_none(client: OpenAI) -> None:
    """chat: `tool_choice` none gives no call"""
    choice = client.chat.completions.create(**request_of(SAVE_COUNT, tool_choice="none")).choices[0]
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"


@each_tool
def test_chat_tools_stream(client: OpenAI, tool: ToolCase) -> None:
    """chat: the joined stream of a call is the complete call"""
    request = request_of(tool, tool_choice="required", parallel_tool_calls=False)
    whole = only_call(client.chat.completions.create(**request))
    chunks = list(client.chat.completions.create(**request, stream=True))
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert {delta.index for delta in deltas} == {0}
    assert deltas[0].id
    assert [delta.function.name for delta in deltas if delta.function.name] == [whole.function.name]
    assert "".join(delta.function.arguments or "" for delta in deltas) == whole.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_chat_tools_stream_helper(client: OpenAI) -> None:
    """chat: the stream helper gathers a call"""
    with client.chat.completions.stream(**request_of(POINT_AT, tool_choice="required")) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    calls = final.choices[0].message.tool_calls
    assert [event.name for event in done] == [call.function.name for call in calls]
    assert [event.arguments for event in done] == [call.function.arguments for call in calls]


def test_chat_tools_parse(client: OpenAI) -> None:
    """chat: `parse` gives the arguments of a call as an object of a pydantic model"""
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[user_asks(ITEM)],
        temperature=0,
        tools=[openai.pydantic_function_tool(Item, name="item")],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    assert isinstance(only_call(answer).function.parsed_arguments, Item)


@each_tool
def test_chat_tool_result(client: OpenAI, tool: ToolCase) -> None:
    """chat: the call is sent back with the result of the tool, and the answer is a text"""
    request = request_of(tool)
    first = client.chat.completions.create(**request, tool_choice=named(tool))
    [call] = first.choices[0].message.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"ok": True})}
    request["messages"] += [first.choices[0].message, result]
    second = client.chat.completions.create(**request, tool_choice="none")
    assert second.choices[0].message.content
    assert second.choices[0].finish_reason == "stop"


def test_completions(client: OpenAI) -> None:
    """completions: the joined stream is the complete text"""
    request: dict[str, Any] = {"model": MODEL, "prompt": "There are", "temperature": 0, "max_tokens": 8}
    whole = client.completions.create(**request)
    pieces = client.completions.create(**request, stream=True)
    assert whole.choices[0].text
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text


# Responses


def asked(case: Case) -> list[Any]:
    """The case as the input of `responses.create`."""
    images = [{"type": "input_image", "image_url": data_url(name)} for name in case.pictures]
    return [{"role": "user", "content": [*images, {"type": "input_text", "text": case.question}]}]


def respond(client: OpenAI, what: Any, **extra: Any) -> Any:
    return client.responses.create(model=MODEL, input=what, temperature=0, **extra)


def test_responses_text(client: OpenAI) -> None:
    """responses: a text with instructions gets an answer"""
    answer = respond(client, "How many circles are there?", instructions="Be brief.")
    assert answer.status == "completed"
    assert answer.output[0].type == "message"
    assert answer.output[0].role == "assistant"
    assert answer.output_text


@pytest.mark.parametrize("name", ["shapes", "sign"])
def test_responses_image(client: OpenAI, name: str) -> None:
    """responses: a question about an image gets the right answer"""
    answer = respond(client, asked(CASES[name]))
    assert answer.object == "response"
    assert answer.status == "completed"
    assert answer.output_text in CASES[name].answers
    assert answer.model == MODEL
    assert answer.error is None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_responses_limit(client: OpenAI) -> None:
    """responses: `max_output_tokens` leaves an answer incomplete and says why"""
    answer = respond(client, asked(COUNT_SHAPES), max_output_tokens=2)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_responses_stream(client: OpenAI) -> None:
    """responses: the joined stream is the complete answer, and its events are numbered"""
    whole = respond(client, asked(COUNT_SHAPES))
    events = list(respond(client, asked(COUNT_SHAPES), stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_responses_stream_helper(client: OpenAI) -> None:
    """responses: the helper `responses.stream` gathers the complete answer"""
    with client.responses.stream(model=MODEL, input=asked(READ_SIGN), temperature=0) as stream:
        final = stream.get_final_response()
    assert final.output_text in READ_SIGN.answers


def test_responses_json_schema(client: OpenAI) -> None:
    """responses: `text.format` json_schema gives JSON of this schema"""
    form = {"type": "json_schema", "name": "count", "schema": Count.model_json_schema(), "strict": True}
    answer = respond(client, asked(COUNT), text={"format": form})
    assert json.loads(answer.output_text) == {"count": 3}


@pytest.mark.parametrize(("case", "form", "value"), [(COUNT, Count, TRIANGLES), (ITEM, Item, BLUE_STAR)])
def test_responses_parse(client: OpenAI, case: Case, form: type[Any], value: Any) -> None:
    """responses: `parse` gives an object of a pydantic model"""
    answer = client.responses.parse(model=MODEL, input=asked(case), temperature=0, text_format=form)
    assert answer.output_parsed == value


def calls_of(answer: Any) -> list[Any]:
    return [item for item in answer.output if item.type == "function_call"]


def respond_with_tools(client: OpenAI, tool: ToolCase, **extra: Any) -> Any:
    question = Case((tool.picture,), tool.question, ())
    return respond(client, asked(question), tools=[each.responses for each in TOOLS], **extra)


@each_tool
def test_responses_tools_named(client: OpenAI, tool: ToolCase) -> None:
    """responses: `tool_choice` names a tool, and the answer is one valid call of it"""
    answer = respond_with_tools(client, tool, tool_choice={"type": "function", "name": tool.name})
    [call] = calls_of(answer)
    assert answer.status == "completed"
    assert call.call_id
    tool.check(call.name, call.arguments)


def test_responses_tools_auto(client: OpenAI) -> None:
    """responses: tools are offered, and the answer is a text or a valid call"""
    answer = respond_with_tools(client, SAVE_COUNT)
    assert bool(calls_of(answer)) != bool(answer.output_text)
    for call in calls_of(answer):
        BY_NAME[call.name].check(call.name, call.arguments)


def test_responses_tools_stream(client: OpenAI) -> None:
    """responses: the joined stream of a call is the complete call"""
    request: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    [whole] = calls_of(respond_with_tools(client, POINT_AT, **request))
    events = list(respond_with_tools(client, POINT_AT, **request, stream=True))
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(event.delta for event in deltas) == whole.arguments
    [call] = calls_of(events[-1].response)
    assert (call.name, call.arguments) == (whole.name, whole.arguments)


def test_responses_tool_result(client: OpenAI) -> None:
    """responses: the call is sent back with the result of the tool, and the answer is a text"""
    question = asked(Case((POINT_AT.picture,), POINT_AT.question, ()))
    tools = [POINT_AT.responses]
    first = respond(client, question, tools=tools, tool_choice="required", parallel_tool_calls=False)
    [call] = calls_of(first)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"ok": true}'}
    second = respond(client, [*question, *first.output, result], tools=tools, tool_choice="none")
    assert second.output_text


@pytest.mark.not_at_gateway("stored conversations need one engine, so they are refused")
def test_responses_previous(client: OpenAI) -> None:
    """responses: `previous_response_id` continues a conversation"""
    first = respond(client, asked(Case(("shapes.png",), "How many circles are there?", ())))
    second = respond(client, "How many crosses are there?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.output_text == "There are 2 crosses."


# Files, batches and the rest


def batch_line(name: str, body: dict[str, Any]) -> str:
    request = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(request) + "\n"


@pytest.fixture
def uploaded(client: OpenAI) -> Iterator[Any]:
    """A file of two requests; one is wrong."""
    body = {"model": MODEL, "messages": [user_asks(READ_SIGN)], "temperature": 0}
    lines = batch_line("right", body) + batch_line("wrong", {**body, "temperature": -1})
    file = client.files.create(file=("questions.jsonl", lines.encode()), purpose="batch")
    yield file
    client.files.delete(file.id)


@pytest.mark.not_at_gateway("files are not routed")
def test_files(client: OpenAI, uploaded: Any) -> None:
    """files: a file is uploaded, listed, described, read and deleted"""
    assert uploaded.purpose == "batch"
    assert uploaded.filename == "questions.jsonl"
    assert uploaded.id in [file.id for file in client.files.list()]
    assert client.files.retrieve(uploaded.id).bytes == uploaded.bytes
    assert len(client.files.content(uploaded.id).read()) == uploaded.bytes
    other = client.files.create(file=("empty.jsonl", batch_line("a", {}).encode()), purpose="batch")
    assert client.files.delete(other.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(other.id)


def finished(client: OpenAI, batch: Any) -> Any:
    """The batch when it has ended."""
    deadline = time.monotonic() + BATCH_SECONDS
    while batch.status in ("validating", "in_progress", "finalizing") and time.monotonic() < deadline:
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    return batch


def lines_of(client: OpenAI, file_id: str) -> dict[str, Any]:
    lines = client.files.content(file_id).text.splitlines()
    return {line["custom_id"]: line["response"] for line in map(json.loads, lines)}


@pytest.mark.not_at_gateway("batches are not routed")
def test_batches(client: OpenAI, uploaded: Any) -> None:
    """batches: a file of requests is answered, and a wrong request is reported"""
    batch = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    assert batch.id in [each.id for each in client.batches.list()]
    batch = finished(client, batch)
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (
        2,
        1,
        1,
    )
    right = lines_of(client, batch.output_file_id)["right"]
    assert right["status_code"] == 200
    assert right["body"]["choices"][0]["message"]["content"] in READ_SIGN.answers
    wrong = lines_of(client, batch.error_file_id)["wrong"]
    assert wrong["status_code"] == 400
    assert wrong["body"]["error"]["param"] == "temperature"


def test_embeddings(client: OpenAI) -> None:
    """embeddings: a text gets a vector"""
    try:
        answer = client.embeddings.create(model=MODEL, input="a red circle")
    except openai.APIStatusError as error:
        if error.code not in ("unknown_url", "unsupported_route"):
            raise
        pytest.skip(f"fovea-tiny makes no embeddings: {error.status_code} {error.code}")
    assert answer.data[0].embedding


def test_models(client: OpenAI) -> None:
    """models: the list names the model, and the model is described"""
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"


NO_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
BAD_CHATS: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"temperature": -1}, "temperature"),
    "role": ({"messages": [{"role": "king", "content": "?"}]}, "messages"),
    "image": ({"messages": [{"role": "user", "content": [NO_IMAGE]}]}, "messages"),
    "tool_choice": ({"tool_choice": "required"}, "tool_choice"),
    "response_format": ({"response_format": {"type": "xml"}}, "response_format"),
}


@pytest.mark.parametrize("name", BAD_CHATS)
def test_chat_errors(client: OpenAI, name: str) -> None:
    """errors: a wrong field of a chat raises BadRequestError, which names the field"""
    extra, param = BAD_CHATS[name]
    request: dict[str, Any] = {"model": MODEL, "messages": [user_asks(READ_SIGN)], **extra}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**request)
    assert caught.value.status_code == 400
    assert (caught.value.param or "").startswith(param)
    assert caught.value.type == "invalid_request_error"


def test_responses_errors(client: OpenAI) -> None:
    """errors: a wrong field of a response raises BadRequestError, which names the field"""
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="?", temperature=-1)
    assert caught.value.param == "temperature"


def test_not_found(client: OpenAI) -> None:
    """errors: an unknown model, file or batch raises NotFoundError"""
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=[user("?")])
    assert caught.value.code == "model_not_found"
    for retrieve in (client.models.retrieve, client.files.retrieve, client.batches.retrieve):
        with pytest.raises(openai.NotFoundError):
            retrieve("unknown")


@pytest.mark.not_at_gateway("stored conversations need one engine, so they are refused")
def test_response_not_found(client: OpenAI) -> None:
    """errors: an unknown response raises NotFoundError"""
    with pytest.raises(openai.NotFoundError):
        respond(client, "?", previous_response_id="resp_unknown")
