"""Forms of answers as JSON Schemas: every answer that a form allows is valid by another library, jsonschema.

The bytes of an input only choose: they are the seed of a random schema over the supported keywords, of random
answers that the form allows, and of instances that the schema should allow. No model is needed, because a
vocabulary of single bytes shows everything that the masks allow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import Decimal, localcontext
from functools import cache
from random import Random
from typing import Any

import jsonschema
import numpy as np

from fovea.core.constraints import AnswerFormat
from fovea.core.errors import InvalidRequest
from fovea.engine.grammar.definition import compile_format
from fovea.engine.grammar.trial import END, attempt, byte_vocabulary
from tests.fuzz.refusals import note, refusals

Schema = dict[str, Any]
LONGEST = 64
WORDS = tuple(bytes([byte]) for byte in b"0123456789")
WALKS, LONGEST_ANSWER = 3, 600
NAMES = ("a", "b", "aa", "x y", "é", "e\u0301", 'q"', "back\\", "new\nline", "$ref", "~/", "", "\u2028")
TEXTS = (
    "", "a", "ab", "e\u0301", "\u1100\u1161", "\U0001f600", "a\nb\t", 'q"\\/', "\u007f", "a\u0001b", "null",
    "0", " ", "\u2028", "\u0085",
)  # fmt: skip
PATTERNS = (
    "^[a-z]{1,4}$", "^a", "b$", "a|b", "^(a|bc)+$", "[0-9]{2}", "^\\w+$", "^\\d+\\s\\S$", "^.$", "^.{2,3}$",
    "^$", "x*", "^[^a]*$", "^a.c$", "^\\u00e9+$", "^\\x41?$", "^[\\x00-\\x1f]$", "^\\n$", "^a\\u0001b$",
    "^\\\\$", '^"$', "^/$", "\\.", "^(?:a{2}|b)?$", "^[\\w.]+@x\\.y$", "^\U0001f600{2}$", "^a\\tb$",
    "^[^\\x00-\\x7f]$", '^[^"]+$', "^[^\\\\]+$", '^[^"\\n]{1,3}$', "^\\W$", "^\\S+$", "^[\\s\\S]$",
    "^(\\x01|b)c$", '^[^a-z"\\\\]$',
)  # fmt: skip
FORMATS = (
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "int64",
    "byte",
)  # fmt: skip
FORMAT_CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
HUGE = re.compile("[eE][+-]?[0-9]{4}")
NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 5, 10, -10, 12, 99, 100, -7, 255, 1000, 0.5, -0.5, 0.1, 0.25, 1.5, -1.5, 2.75, 0.05,
    0.001, 9.99, 1e-7, 123.456, 1e3, 1e15, 2**31, -(2**31), 2**53-1, 2**53, 2**53+1, -(2**53)-1, 2**63-1,
    -(2**63), 2**64, 10**30, 1e22, 1e300, -1e300,
)  # fmt: skip


def some(rng: Random, *options: Any) -> Any:
    return rng.choice(options)


def number(rng: Random) -> Any:
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(NUMBERS)
    if kind < 0.7:
        return rng.randint(-(10 ** rng.randint(0, 6)), 10 ** rng.randint(0, 6))
    return round(rng.uniform(-1, 1) * 10 ** rng.randint(-2, 4), rng.randint(0, 4)) or 0


def value(rng: Random, depth: int = 2) -> Any:
    """Any JSON."""
    kind = rng.randrange(8 if depth else 5)
    if kind < 2:
        return rng.choice(TEXTS)
    if kind < 4:
        return number(rng)
    if kind == 4:
        return some(rng, True, False, None)
    if kind < 7:
        return [value(rng, depth - 1) for _ in range(rng.randint(0, 2))]
    return {rng.choice(NAMES): value(rng, depth - 1) for _ in range(rng.randint(0, 2))}


def numeric(rng: Random) -> Schema:
    schema: Schema = {"type": some(rng, "number", "number", "integer", ["integer", "null"])}
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if rng.random() < 0.35:
            schema[keyword] = number(rng)
    if rng.random() < 0.2:
        schema["multipleOf"] = abs(number(rng)) or 1
    return schema


def textual(rng: Random) -> Schema:
    schema: Schema = {"type": some(rng, "string", "string", ["string", "boolean"])}
    for keyword in ("minLength", "maxLength"):
        if rng.random() < 0.4:
            schema[keyword] = rng.randint(0, 6)
    if rng.random() < 0.4:
        schema["pattern"] = rng.choice(PATTERNS)
    elif rng.random() < 0.3:
        schema["format"] = rng.choice(FORMATS)
    return schema


def array(rng: Random, depth: int) -> Schema:
    schema: Schema = {"type": "array"}
    if rng.random() < 0.4:
        schema["prefixItems"] = [any_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.8:
        schema["items"] = some(rng, False, True, any_schema(rng, depth - 1), any_schema(rng, depth - 1))
    for keyword in ("minItems", "maxItems"):
        if rng.random() < 0.4:
            schema[keyword] = rng.randint(0, 4)
    if rng.random() < 0.05:
        schema[some(rng, "uniqueItems", "contains", "minContains")] = some(rng, True, {"type": "null"}, 1)
    return schema


def mapping(rng: Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(0, 3))
    schema: Schema = {"type": "object", "properties": {name: any_schema(rng, depth - 1) for name in names}}
    if rng.random() < 0.7:
        schema["required"] = [name for name in [*names, rng.choice(NAMES)] if rng.random() < 0.6]
    if rng.random() < 0.7:
        schema["additionalProperties"] = some(rng, False, False, any_schema(rng, depth - 1), True)
    if rng.random() < 0.3:
        schema["patternProperties"] = {
            rng.choice(PATTERNS): any_schema(rng, depth - 1) for _ in range(rng.randint(1, 2))
        }
    for keyword in ("minProperties", "maxProperties"):
        if rng.random() < 0.15:
            schema[keyword] = rng.randint(0, 3)
    if rng.random() < 0.05:
        schema[some(rng, "dependentRequired", "propertyNames", "unevaluatedProperties")] = {"a": ["b"]}
    return schema


def any_schema(rng: Random, depth: int) -> Any:
    """A random schema over the supported keywords, and a few others."""
    kinds: list[Callable[[], Any]] = [
        lambda: numeric(rng),
        lambda: textual(rng),
        lambda: {"const": value(rng)},
        lambda: {"enum": [value(rng, 1) for _ in range(rng.randint(1, 4))]},
        lambda: {"type": some(rng, "null", "boolean", "integer", "string", "number")},
    ]
    if depth > 0:
        kinds += [
            lambda: array(rng, depth),
            lambda: array(rng, depth),
            lambda: mapping(rng, depth),
            lambda: mapping(rng, depth),
            lambda: combined(rng, depth),
            lambda: combined(rng, depth),
            lambda: {"$ref": some(rng, "#/$defs/one", "#/$defs/two", "#"), **beside(rng)},
        ]
    return rng.choice(kinds)()


def beside(rng: Random) -> Schema:
    """Keywords that stand beside $ref, anyOf and others, where all of them have to hold."""
    return rng.choice(
        (
            {},
            {},
            numeric(rng),
            textual(rng),
            {"type": "object", "required": ["a"]},
            {"maxItems": 1},
            {"const": "a"},
        )
    )


def combined(rng: Random, depth: int) -> Schema:
    keyword = some(rng, "anyOf", "anyOf", "allOf", "allOf", "oneOf")
    parts = [any_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    if keyword == "allOf" and rng.random() < 0.7:
        kind = some(rng, numeric, textual, lambda r: mapping(r, depth - 1), lambda r: array(r, depth - 1))
        parts = [kind(rng) for _ in range(rng.randint(1, 3))]
    return {keyword: parts, **beside(rng)}


def schema_of(rng: Random) -> Schema:
    schema = any_schema(rng, 3)
    if not isinstance(schema, dict):
        return {}
    return {"$defs": {"one": any_schema(rng, 1), "two": any_schema(rng, 1)}, **schema}


def walk(matcher: Any, rng: Random) -> bytes | None:
    """Follow a form with random bytes that its masks allow. None: the answer became too long."""
    written: list[int] = []
    eager = rng.choice((0.1, 0.5, 0.9))
    while len(written) < LONGEST_ANSWER and not matcher.is_stopped():
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.nonzero(mask[: END + 1])[0].tolist()
        if matcher.is_error() or not allowed:
            note("too complex")
            return None
        if END in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return bytes(written)
        allowed = [byte for byte in allowed if byte != END]
        closing = [byte for byte in allowed if byte in b'"}]'] if rng.random() < eager else []
        token = rng.choice(closing or allowed)
        written.append(token)
        matcher.consume_token(token)
    return bytes(written) if matcher.is_accepting() else None


@cache
def vocabulary() -> Any:
    return byte_vocabulary()


def errors_of(schema: Schema, text: str) -> list[str] | None:
    """The reasons why an answer is not valid, as a client reads it, and with numbers that are not rounded.

    None: jsonschema fails, as it does for a $ref to itself, and for numbers that are not floats.
    """
    try:
        return _errors_of(schema, text)
    except (RecursionError, OverflowError):
        return None


def _errors_of(schema: Schema, text: str) -> list[str]:
    found = []
    for read in (float, Decimal):
        rules = _as_in_the_standard(json.loads(json.dumps(schema), parse_float=read))
        validator = jsonschema.Draft202012Validator(rules, format_checker=FORMAT_CHECKER)
        if read is Decimal and HUGE.search(text):
            continue  # jsonschema multiplies
        with localcontext(prec=LONGEST_ANSWER):
            errors = [*validator.iter_errors(json.loads(text, parse_float=read))]
        # 0.3 is a multiple of 0.1, although the quotient of the two nearest floats is none.
        if read is Decimal or "multipleOf" not in str(schema):
            found += [f"{error.json_path}: {error.message:.300}" for error in errors]
    return found


def _as_in_the_standard(schema: Any) -> Any:
    """A schema whose patterns mean for jsonschema, which takes them as Python's, what the standard says."""
    if isinstance(schema, list):
        return [_as_in_the_standard(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    new = {key: _as_in_the_standard(value) for key, value in schema.items()}
    if isinstance(new.get("pattern"), str):
        new["pattern"] = _in_python(new["pattern"])
    if isinstance(new.get("patternProperties"), dict):
        new["patternProperties"] = {_in_python(key): part for key, part in new["patternProperties"].items()}
    return new


def _in_python(pattern: str) -> str:
    for theirs, ours in (("\\w", "a-zA-Z0-9_"), ("\\d", "0-9"), ("\\W", "^a-zA-Z0-9_")):
        pattern = pattern.replace(f"[{theirs}", f"[{ours}").replace(theirs, f"[{ours}]")
    return pattern[:-1] + "\\Z" if pattern.endswith("$") else pattern


def instance(schema: Any, rng: Random, root: Schema, depth: int = 5) -> Any:
    """A value that is likely to be valid."""
    if not isinstance(schema, dict) or not depth:
        return rng.choice(TEXTS)
    if "$ref" in schema:
        return instance(
            root["$defs"].get(schema["$ref"].removeprefix("#/$defs/"), root), rng, root, depth - 1
        )
    for keyword in ("enum", "anyOf", "oneOf", "allOf"):
        if keyword in schema:
            part = rng.choice(schema[keyword])
            return part if keyword == "enum" else instance(part, rng, root, depth - 1)
    if "const" in schema:
        return schema["const"]
    kinds = schema.get("type")
    kind = rng.choice(kinds) if isinstance(kinds, list) else kinds
    if kind == "array":
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        count = rng.randint(0, 2) + schema.get("minItems", 0)
        return [instance(part, rng, root, depth - 1) for part in [*first, *[rest] * count][:count]]
    if kind == "object":
        required, known = schema.get("required", []), schema["properties"]
        names = [name for name in known if name in required or rng.random() < 0.5]
        names += [name for name in dict.fromkeys((*required, "c")) if name not in known]
        other = schema.get("additionalProperties", True)
        return {name: instance(known.get(name, other), rng, root, depth - 1) for name in names}
    if kind in ("number", "integer"):
        near = [bound for key, bound in schema.items() if key.endswith("imum")]
        number = rng.choice([*near, *NUMBERS]) + rng.choice((0, 1, -1, 0.5))
        return int(number) if near else number  # below 0.95, 0.9 has to be written as 0.90
    return {"string": rng.choice(TEXTS), "boolean": True}.get(str(kind))


def text_of(instance: Any) -> str | None:
    """An instance as an answer writes it. None: answers cannot have it, as the documents say."""
    text = json.dumps(instance, ensure_ascii=False, separators=(",", ":"))
    text = re.sub(r"(?<=\d)\.0(?=[],}]|$)", "", text)
    unwritten = r"\\u|\x7f|\de[+-]?\d|\d{16}|\d\.\d{12}"
    return None if re.search(unwritten, text) else text


def check(schema: Schema, rng: Random, walks: int = WALKS) -> tuple[int, int]:
    """Compare answers by a schema with jsonschema.

    Returns how many answers that the form allows were compared, and how many valid ones it had to allow.

    Raises AssertionError for a difference, InvalidRequest if the schema is refused.
    """
    form = AnswerFormat.json_schema(schema)
    if not attempt(form, vocabulary()):  # as in the engine, a process of its own may be killed by it
        raise InvalidRequest("it takes too long to compile", code="unsupported_format")
    matcher = compile_format(form, vocabulary())
    pairs = valid = 0
    for _ in range(walks):
        answer = walk(matcher.deep_copy(), rng)
        if answer is not None:
            errors = errors_of(schema, answer.decode())
            assert not errors, f"{json.dumps(schema)} allows {answer.decode()}: {errors}"
            pairs += errors is not None
        text = text_of(instance(schema, rng, schema))
        if text is not None and errors_of(schema, text) == []:
            # What the library has learnt from the answers may be beyond its limits, so it is compiled again.
            follower, tokens = compile_format(form, vocabulary()), list(text.encode())
            read = follower.try_consume_tokens(tokens)
            assert read == len(tokens), f"{json.dumps(schema)} refuses {text} at {text.encode()[read:]!r}"
            assert follower.is_accepting(), f"{json.dumps(schema)} wants more than {text}"
            valid += 1
    return pairs, valid


def target(data: bytes) -> None:
    rng = Random(data)
    schema = schema_of(rng)
    with refusals():
        pairs, valid = check(schema, rng)
        note(f"{min(pairs, 1)} answers, {min(valid, 1)} instances")


def seeds() -> list[bytes]:
    return [str(number).encode() for number in range(5)]
