"""Forms that structured output refuses: the message says what is not supported, and where in the schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

import fovea
from fovea.core.constraints import MAX_CHOICES, MAX_DEFINITION, MAX_DEPTH, AnswerFormat
from fovea.core.errors import InvalidRequest
from fovea.engine.grammar.definition import MAX_GBNF, compile_format

TOKENIZER = Path(fovea.__file__).parent / "assets" / "fovea-tiny" / "tokenizer.json"


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    eos = json.loads((TOKENIZER.parent / "generation_config.json").read_text())["eos_token_id"]
    return LLTokenizer(TOKENIZER.read_text(), eos_token=eos)


def accepts(form: AnswerFormat, vocabulary: LLTokenizer, text: str) -> bool:
    matcher = compile_format(form, vocabulary)
    tokens = vocabulary.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "where", "what"),
    [
        ({"properties": {"a": {"type": "array", "items": {"not": {}}}}}, "/properties/a/items", '"not"'),
        ({"properties": {"x/y": {"uniqueItems": True}}}, "/properties/x~1y", '"uniqueItems"'),
        ({"$defs": {"d": {"type": "string", "format": "shape"}}, "properties": {"a": {"$ref": "#/$defs/d"}}},
         "/properties/a", "Unknown format: shape"),
        ({"anyOf": [{"type": "string"}, {"type": "string", "pattern": "(?=a)b"}]}, "/anyOf/1", "look-around"),
        ({"items": {"properties": {"a": {"type": "shape"}}}}, "/items/properties/a", "Invalid type: shape"),
        ({"items": {"if": {}, "then": {}}}, "/items", '"if", "then"'),
        ({"items": {"dependentRequired": {"a": ["b"]}}}, "/items", '"dependentRequired"'),
        ({"contains": {}}, "", '"contains"'),
        ({"$ref": "#/$defs/none"}, "", "does not exist"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "", "Unsatisfiable"),
        ({"items": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, "/items", "anyOf"),
        ({"items": {"minProperties": 2, "required": ["a"]}}, "/items", "minProperties"),
        ({"not": {}, "x-guidance": {"lenient": True}}, "", '"not"'),
    ],
)  # fmt: skip
def test_a_refused_keyword_is_named_with_its_place(
    vocabulary: LLTokenizer, schema: dict[str, Any], where: str, what: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compile_format(AnswerFormat.json_schema(schema), vocabulary)
    message = caught.value.message
    assert message.startswith(f"json at {where}: " if where else "json: ")
    assert what in message
    assert "\n" not in message
    assert "x-guidance" not in message
    assert caught.value.code == "unsupported_format"


@pytest.mark.parametrize(
    ("form", "what"),
    [
        (AnswerFormat.regex("("), "regex: .*unclosed group"),
        (AnswerFormat.regex("(?=a)b"), "regex: .*look-around"),
        (AnswerFormat.regex(r"(a)\1"), "regex: .*backreferences"),
        (AnswerFormat.grammar("start: nothing"), 'grammar: .*unknown name: "nothing"'),
        (AnswerFormat.grammar('root ::= "a" ('), "grammar: it is not GBNF"),
        (AnswerFormat.grammar("root ::= " + '"a" ' * MAX_GBNF), "at most 16384 in GBNF"),
        (AnswerFormat.json_schema({}, whitespace="("), "json: .*unclosed group"),
    ],
)  # fmt: skip
def test_other_refused_forms(vocabulary: LLTokenizer, form: AnswerFormat, what: str) -> None:
    with pytest.raises(InvalidRequest, match=what):
        compile_format(form, vocabulary)


def test_json_is_on_one_line_with_spaces_or_without(vocabulary: LLTokenizer) -> None:
    form = AnswerFormat.json_schema({"type": "object"})
    for text in ('{"a": 1, "b": [1, 2]}', '{"a":1,"b":[1,2]}', "{}"):
        assert accepts(form, vocabulary, text)
    for text in ('{"a": 1,"b": 2}', '{"a":1, "b":2}', '{\n"a":1}', '{ "a":1}', '{"a":  1}', "[1]"):
        assert not accepts(form, vocabulary, text)
    wide = AnswerFormat.json_schema({"type": "object"}, whitespace=r"[ \n]{0,3}")
    assert accepts(wide, vocabulary, '{\n  "a": 1\n}')
    assert not accepts(wide, vocabulary, '{    "a": 1}')


def test_a_property_cannot_be_written_under_another_spelling(vocabulary: LLTokenizer) -> None:
    """Its schema would not hold: the library compares names as written, readers of JSON as read."""
    form = AnswerFormat.json_schema(
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "additionalProperties": {"type": "boolean"},
        }
    )
    assert accepts(form, vocabulary, '{"a":1,"b":true}')
    assert not accepts(form, vocabulary, '{"\\u0061":true}')
    assert not accepts(form, vocabulary, '{"a":1,"a":true}')


def test_choices_are_taken_literally(vocabulary: LLTokenizer) -> None:
    choices = ["yes", "no.*", 'a "quoted" one', "two\nlines", "ünïcode", "back\\slash", "/slash/"]
    form = AnswerFormat.choice(choices)
    for text in choices:
        assert accepts(form, vocabulary, text)
    assert not accepts(form, vocabulary, "no one")


def test_a_grammar_in_lark_and_in_gbnf(vocabulary: LLTokenizer) -> None:
    for text in ('start: "a" b\nb: /[0-9]+/', 'root ::= "a" [0-9]+'):
        assert accepts(AnswerFormat.grammar(text), vocabulary, "a12")
        assert not accepts(AnswerFormat.grammar(text), vocabulary, "a")


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels // 2):
        schema = {"properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: AnswerFormat.json_schema(nested(MAX_DEPTH + 4)), f"more than {MAX_DEPTH} levels"),
        (lambda: AnswerFormat.json_schema("{"), "not JSON"),
        (lambda: AnswerFormat.json_schema("[" * 100_000), "not JSON|levels"),
        (lambda: AnswerFormat.json_schema("x" * (MAX_DEFINITION + 1)), f"at most {MAX_DEFINITION}"),
        (lambda: AnswerFormat.json_schema(False), "is an object, got false"),
        (lambda: AnswerFormat.json_schema("3"), "is an object, got 3"),
        (lambda: AnswerFormat.json_schema({}, whitespace=" " * 300), "pattern of white space"),
        (lambda: AnswerFormat.regex(""), "is empty"),
        (lambda: AnswerFormat.choice([]), f"1 to {MAX_CHOICES}"),
        (lambda: AnswerFormat.choice(["a", ""]), "non-empty"),
        (lambda: AnswerFormat.choice("yes"), "non-empty texts"),
        (lambda: AnswerFormat.choice(["a"] * (MAX_CHOICES + 1)), f"1 to {MAX_CHOICES}"),
    ],
)
def test_forms_that_are_refused_before_they_are_compiled(make: Any, what: str) -> None:
    with pytest.raises(InvalidRequest, match=what):
        make()


def test_errors_name_the_field_of_the_request() -> None:
    with pytest.raises(InvalidRequest, match="guided_regex: the regex is empty") as caught:
        AnswerFormat.regex("", param="guided_regex")
    assert caught.value.param == "guided_regex"
    assert AnswerFormat.regex("a", param="one") == AnswerFormat.regex("a", param="two"), "one compilation"


@pytest.mark.parametrize("name", ["day", "const", "enum", "format", "properties"])
def test_dates_are_checked_under_any_name(vocabulary: LLTokenizer, name: str) -> None:
    schema = {"type": "object", "properties": {name: {"type": "string", "format": "date"}}}
    form = AnswerFormat.json_schema({**schema, "required": [name], "additionalProperties": False})
    assert accepts(form, vocabulary, f'{{"{name}":"2024-02-29"}}')
    assert not accepts(form, vocabulary, f'{{"{name}":"2023-02-29"}}')
