"""JSON Schemas over the keywords that structured output claims: a fixed list, and random compositions.

Every schema bounds its strings and lists, so that a model which writes at random still comes to an end.
"""

from __future__ import annotations

from random import Random
from typing import Any

Schema = dict[str, Any]
FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "hostname", "duration")
PATTERNS = ("^[a-z]{1,8}$", "^[A-Z]{2}-[0-9]{3,5}$", "^(red|green|blue)( light)?$", "[0-9]{2}", "^\\w+@\\w+$")
WORDS = ("shape", "color", "size of it", "ünï", 'a"b', "x/y", "count", "id")

SINGLE: list[Schema] = [
    {"type": "boolean"},
    {"type": "null"},
    {"type": "integer", "minimum": -5, "maximum": 12},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": 25},
    {"type": "number", "minimum": 0.5, "maximum": 2.25},
    {"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 1},
    {"type": "string", "maxLength": 0},
    {"type": "string", "minLength": 3, "maxLength": 3},
    {"type": "string", "minLength": 1, "maxLength": 12},
    {"const": "exactly this"},
    {"const": 7},
    {"const": {"a": [1, None, True]}},
    {"enum": ["circle", "square", 3, None, False]},
    {"type": ["string", "null"], "maxLength": 4},
    {"type": ["integer", "boolean"], "minimum": 1, "maximum": 9},
    *({"type": "string", "format": name, "maxLength": 40} for name in FORMATS),
    *({"type": "string", "pattern": pattern, "maxLength": 20} for pattern in PATTERNS),
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"const": 1}, {"type": "boolean"}], "items": False, "minItems": 2},
    {
        "type": "array",
        "prefixItems": [{"const": "a"}],
        "items": {"type": "null"},
        "minItems": 1,
        "maxItems": 3,
    },
    {"type": "object", "additionalProperties": False},
    {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}},
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a", "b"],
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 5},
        "maxProperties": 3,
    },
    {
        "type": "object",
        "patternProperties": {"^[ab]$": {"type": "integer", "minimum": 0, "maximum": 9}},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    {
        "$defs": {
            "point": {
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": 99},
                "minItems": 2,
                "maxItems": 2,
            }
        },
        "type": "object",
        "properties": {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}},
        "required": ["from", "to"],
        "additionalProperties": False,
    },  # fmt: skip
    {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "leaf": {"type": "boolean"},
                    "sons": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1},
                },
                "required": ["leaf"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },  # fmt: skip
    {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "string", "maxLength": 5}]},
    {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 4}]},
    {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": "a"}},
                "required": ["kind"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "properties": {"kind": {"const": "b"}, "n": {"type": "boolean"}},
                "required": ["kind", "n"],
                "additionalProperties": False,
            },
        ]
    },  # fmt: skip
]
"""One schema per keyword and combination."""


def schemas(count: int, seed: int = 0) -> list[Schema]:
    """The fixed schemas, and random ones after them."""
    rng = Random(seed)
    return [*SINGLE, *(_object(rng, 3) for _ in range(count - len(SINGLE)))][:count]


def _any(rng: Random, depth: int) -> Schema:
    if depth <= 0 or rng.random() < 0.45:
        return dict(rng.choice([schema for schema in SINGLE if "$defs" not in schema]))
    kind = rng.choice(("object", "array", "anyOf", "nullable"))
    if kind == "object":
        return _object(rng, depth - 1)
    if kind == "array":
        least = rng.randint(0, 2)
        items = _any(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(0, 2)}
    if kind == "anyOf":
        return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(2, 3))]}
    return {"anyOf": [_any(rng, depth - 1), {"type": "null"}]}


def _object(rng: Random, depth: int) -> Schema:
    names = rng.sample(WORDS, rng.randint(1, 4))
    required = [name for name in names if rng.random() < 0.7]
    return {
        "type": "object",
        "title": "ignored",
        "description": "ignored, too",
        "properties": {name: _any(rng, depth - 1) for name in names},
        "required": required,
        "additionalProperties": False,
    }
