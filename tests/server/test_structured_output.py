"""Structured output over HTTP: the fields of OpenAI and of other engines, with a model that knows no JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.server.support import Server, data_url, image, picture, user

MODEL = "tiny"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "shape": {"enum": ["circle", "square"]},
        "count": {"type": "integer", "maximum": 9, "minimum": 0},
    },
    "required": ["shape", "count"],
    "additionalProperties": False,
}


class Item(BaseModel):
    name: str = Field(max_length=6)
    kind: Literal["circle", "square"]


class Listing(BaseModel):
    items: list[Item] = Field(max_length=2)
    total: int = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, **extra: Any) -> Any:
    fields: dict[str, Any] = {"model": MODEL, "messages": [user("what?")], "max_tokens": 400, "seed": 1}
    return client.chat.completions.create(**{**fields, **extra})


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def test_a_schema_with_an_image(client: openai.OpenAI) -> None:
    message = user(image(data_url(picture())), "what is it?")
    for temperature in (0, 1, 2):
        answer = ask(client, messages=[message], response_format=json_schema(SCHEMA), temperature=temperature)
        assert answer.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)


def test_parse_of_the_public_client(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=[user("what?")], response_format=Listing, max_tokens=400, seed=3
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Listing)
    assert len(parsed.items) <= 2


def test_json_is_cut_at_max_tokens_and_says_so(client: openai.OpenAI) -> None:
    answer = ask(client, response_format=json_schema({"type": "string", "minLength": 90}), max_tokens=5)
    assert answer.choices[0].message.content.startswith('"')
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 5


def test_every_choice_and_every_token_has_what_was_asked(client: openai.OpenAI) -> None:
    answer = ask(
        client, response_format=json_schema(SCHEMA), n=4, temperature=1.5, logprobs=True, top_logprobs=2
    )
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        written = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
        assert written.decode().startswith(choice.message.content)
        assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    assert answer.usage.completion_tokens == sum(len(c.logprobs.content) for c in answer.choices)


def test_a_stream_is_the_whole_answer(client: openai.OpenAI) -> None:
    fields = {"response_format": json_schema(SCHEMA), "temperature": 1}
    whole = ask(client, **fields).choices[0].message.content
    chunks = [chunk.choices[0] for chunk in ask(client, **fields, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole
    assert chunks[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}, "[a-c]{3}-[0-9]{2}"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]{4}/'}}, "x[0-9]{4}"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9] [0-9]'}}, "x[0-9]{2}"),
        ({"structured_outputs": {"json": {"type": "integer", "minimum": 5, "maximum": 7}}}, "[567]"),
        ({"structured_outputs": {"json": '{"const": "a"}', "disable_any_whitespace": True}}, '"a"'),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"guided_grammar": 'start: "x" "y"'}, "xy"),
        ({"guided_json": {"const": [1, 2]}}, r"\[1, ?2\]"),
        ({"guided_json": {"const": [1, 2]}, "guided_whitespace_pattern": "_"}, r"\[1,_2\]|\[_?1_?,_?2_?\]"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}}, r"\{[^\0]*"),
        ({"response_format": {"type": "text"}, "max_tokens": 3}, r"[^\0]*"),
    ],
    ids=str,
)  # fmt: skip
def test_the_names_of_other_engines(client: openai.OpenAI, extra: dict[str, Any], pattern: str) -> None:
    limit = {"max_tokens": extra.pop("max_tokens", 60)}
    answer = ask(client, extra_body=extra, temperature=1, **limit).choices[0].message.content
    assert re.fullmatch(pattern, answer), answer


def test_text_completions_take_the_same_fields(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["a", "b"], max_tokens=40, extra_body={"guided_regex": "[xyz]{5}"}
    )
    assert all(re.fullmatch("[xyz]{5}", choice.text) for choice in answer.choices)


def test_an_answer_ends_although_its_end_token_is_to_be_ignored(client: openai.OpenAI) -> None:
    """With ignore_eos the grammar would allow the end token alone, for ever."""
    answer = ask(client, extra_body={"guided_choice": ["yes"], "ignore_eos": True, "min_tokens": 30})
    assert answer.choices[0].message.content == "yes"
    assert answer.choices[0].finish_reason == "stop"


def test_a_stop_string_ends_an_answer_before_it_is_complete(client: openai.OpenAI) -> None:
    answer = ask(client, response_format=json_schema({"const": "one two three"}), stop=["two"])
    assert answer.choices[0].message.content == '"one '
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("extra", "param", "what"),
    [
        ({"response_format": json_schema({"properties": {"a": {"not": {}}}})},
         "response_format.json_schema.schema", "json at /properties/a: .*not"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex", "look-around"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "exclude"),
        ({"structured_outputs": {}}, "structured_outputs", "is required"),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json", "exclude"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'json_object' or 'json_schema'"),
        ({"guided_choice": []}, "guided_choice", "non-empty"),
        ({"structured_outputs": {"choices": []}}, "structured_outputs.choices", "did you mean 'choice'"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_formats_are_refused_with_their_place(
    client: openai.OpenAI, extra: dict[str, Any], param: str, what: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body=extra)
    assert caught.value.param == param
    assert re.search(what, caught.value.message)


def test_a_schema_may_contain_data_urls(client: openai.OpenAI) -> None:
    """A long one under the name `url` became an image, and the request an error 500."""
    url = "data:text/plain," + "x" * 300
    schema = {"const": {"url": url}}
    answer = ask(client, extra_body={"guided_json": schema}, max_tokens=600)
    assert json.loads(answer.choices[0].message.content) == {"url": url}


def test_the_end_token_is_never_shown(client: openai.OpenAI) -> None:
    wish = {"guided_choice": ["yes"], "ignore_eos": True, "skip_special_tokens": False, "min_tokens": 30}
    assert ask(client, extra_body=wish).choices[0].message.content == "yes"
