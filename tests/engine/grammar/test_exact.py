"""Schemas that the library would accept and not follow: they are followed exactly, or refused by place."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from llguidance import LLTokenizer

from fovea.core.constraints import AnswerFormat
from fovea.core.errors import InvalidRequest
from fovea.engine.grammar.definition import compile_format, writable
from fovea.engine.grammar.trial import byte_vocabulary
from tests.fuzz.targets.answer_format import check, schema_of


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return byte_vocabulary()


def allows(vocabulary: LLTokenizer, schema: dict[str, Any], text: str) -> bool:
    matcher = compile_format(AnswerFormat.json_schema(schema), vocabulary)
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "allowed", "not_allowed"),
    [
        # An amount above 0 and up to a half was answered with 0.
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "0.5 0.25 0.0000001", "0 0.0 -0 0.6"),
        ({"exclusiveMaximum": 0, "minimum": -0.5}, "-0.5 -0.25", "0 -0 -0.0"),
        ({"exclusiveMinimum": 1, "maximum": 1.5}, "1.5 1.1", "1 1.0"),
        ({"exclusiveMinimum": 0, "allOf": [{"maximum": 0.5}]}, "0.5", "0"),
        ({"exclusiveMinimum": 0}, "1 0.5", "0 0.0"),
        ({"exclusiveMinimum": 3, "minimum": 5}, "5 6", "4"),
        ({"exclusiveMinimum": 5, "minimum": 3}, "6 5.5", "5 4"),
        # Floats have no 2^53 + 1, so the library followed another bound.
        ({"type": "integer", "minimum": 2**53 + 1}, "9007199254750000", "9007199254740992"),
        ({"type": "integer", "maximum": 2**63 - 1}, "5 9223372036854000000", "9223372036854775808"),
        ({"type": "integer", "minimum": -(2**63)}, "-5 -9223372036854000000", "-9223372036854775809"),
        ({"maximum": 2**63 - 1}, "5 9223372036854000000", "9223372036854775808 9223372036854776000"),
        ({"maximum": 0.1 + 0.2}, "0.3 0.29", "0.31 0.300000000000001"),
        ({"minimum": 0.1, "maximum": 0.3}, "0.1 0.3", "0.09 0.31"),
    ],
)
def test_bounds_of_numbers(
    vocabulary: LLTokenizer, schema: dict[str, Any], allowed: str, not_allowed: str
) -> None:
    schema = {"type": "number", **schema}
    assert [text for text in allowed.split() if not allows(vocabulary, schema, text)] == []
    assert [text for text in not_allowed.split() if allows(vocabulary, schema, text)] == []


@pytest.mark.parametrize(
    ("pattern", "allowed", "not_allowed"),
    [
        # A pattern for text without quotes allowed quotes: with all control characters in a set, the library
        # also allows every escape.
        ('^[^"]+$', ["a", "\n", "\\", "é"], ['"', 'a"']),
        ("^[^\\\\]$", ["a", '"'], ["\\"]),
        ('^[^"\\n]$', ["a", "\t"], ['"', "\n"]),
        ("^[\\x00-\\x1f]$", ["\n", "\t"], ['"', "\\", ""]),
        # Single control characters were left out.
        ("^(a\\x01|b)c$", ["bc"], ["ac"]),
        ("^(a\\u0001b|b)$", ["b"], ["ab"]),
        ("^(a\x01|b)c$", ["bc"], ["ac"]),
        ("^a\\x62c$", ["abc"], ["ac"]),
        ("^\\p{L}[[:digit:]]$", ["é1"], ["1", "11"]),
        ("^[]a]$", ["]", "a"], ["b"]),
        ("^\\[[^\\]]\\]$", ["[a]"], ["[]]"]),
    ],
)
def test_patterns_and_characters_that_json_escapes(
    vocabulary: LLTokenizer, pattern: str, allowed: list[str], not_allowed: list[str]
) -> None:
    schema = {"type": "string", "pattern": pattern}
    names = {"type": "object", "additionalProperties": False, "patternProperties": {pattern: {"const": 1}}}
    for text in allowed + not_allowed:
        written = json.dumps(text, ensure_ascii=False)
        assert allows(vocabulary, schema, written) == (text in allowed), text
        assert allows(vocabulary, names, f"{{{written}:1}}") == (text in allowed), text


def test_sets_are_changed_and_nothing_else() -> None:
    assert writable("^a.b|\\w{2,3}(?:c)*\\]$") == "^a.b|\\w{2,3}(?:c)*\\]$"
    assert writable("[a[b]]").startswith("[[a[b]]&&[")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"const": "a\x01b"}, "json: const has the character U+0001"),
        ({"const": "\ud800"}, "json: const has the character U+D800"),
        ({"enum": ["a", ["\x7f"]]}, "json: enum has the character U+007F"),
        ({"items": {"const": {"a": "\x00"}}}, "json at /items: const has the character U+0000"),
        ({"type": "string", "pattern": "^a\\x01$"}, "json: no text that can be written matches"),
        ({"items": {"const": 2**53 + 1}}, "json at /items: const has the number 9007199254740993"),
        ({"enum": [1, -(2**63)]}, "json: enum has the number -9223372036854775808"),
        ({"const": 0.1 + 0.2}, "json: const has the number 0.30000000000000004"),
        ({"const": 10**400}, "json: const has the number 1000"),
        ({"minimum": 2**63}, "json: minimum is 9223372036854775808; accepted: up to 10^18"),
        ({"exclusiveMaximum": -(10**400)}, "json: exclusiveMaximum is -1000"),
        ({"multipleOf": 2**32 + 1}, "json: multipleOf is 4294967297; accepted"),
        ({"multipleOf": 0.1234567890123}, "json: multipleOf 0.1234567890123 has"),
        ({"allOf": [{"multipleOf": 65537}, {"multipleOf": 65536}]}, "json at /allOf/0: multipleOf 65537"),
        ({"x": {"const": "\x01"}, "$ref": "#/x"}, "json at /x: const"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_with_its_place(
    vocabulary: LLTokenizer, schema: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compile_format(AnswerFormat.json_schema(schema), vocabulary)
    assert caught.value.message.startswith(message)
    assert "accepted" in caught.value.message or "common multiple" in caught.value.message
    assert caught.value.code == "unsupported_format"


def test_constants_are_written_as_equal_values(vocabulary: LLTokenizer) -> None:
    for value in (
        0,
        -7,
        2**53,
        0.1,
        1e-7,
        123456.789,
        1e22,
        "tab\t line\n \b\f\r",
        {"a\x01\x7f": [1.5, None]},
    ):
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        text = (
            {1e-7: "0.0000001", 1e22: "1" + "0" * 22}.get(value, text) if isinstance(value, float) else text
        )
        assert allows(vocabulary, {"const": value}, text)


def test_choices_with_control_characters_are_written_exactly(vocabulary: LLTokenizer) -> None:
    """A choice is no JSON, so it can have any character."""
    for text in ("a\x01b", "\x7f", "\x00"):
        matcher = compile_format(AnswerFormat.choice([text, "other"]), vocabulary)
        assert matcher.try_consume_tokens(list(text.encode())) == len(text)
        assert matcher.is_accepting()


@pytest.mark.slow
def test_thousands_of_answers_by_random_schemas_are_valid() -> None:
    """And valid instances are allowed. Default tests of the fuzz target compare a few, `make fuzz` more."""
    pairs = valid = 0
    for number in range(1000):
        rng = Random(f"schema {number}")
        schema = schema_of(rng)
        try:
            found = check(schema, rng, 12)
        except InvalidRequest:
            continue
        pairs, valid = pairs + found[0], valid + found[1]
    assert pairs > 5_000
    assert valid > 2_500
