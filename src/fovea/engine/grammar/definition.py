"""Turns the form of an answer into a grammar of the library, and explains what the library refuses.

JSON Schemas are changed first, so that the library allows no answer that is not valid, or they are refused.
The library refuses most keywords that it cannot follow. This module is for the rest, which were found by
comparing random answers with another library (`tests/fuzz/targets/answer_format.py`). The library knows
numbers only as floats, and reads those with many digits imprecisely. It leaves out control characters that it
cannot write, and writes others in place of them. Some formats and some bounds of numbers allow too much.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from math import isfinite, lcm
from typing import TYPE_CHECKING, Any, TypeGuard

from fovea.core.constraints import AnswerFormat
from fovea.core.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = f"({_YEAR}-(0[13-9]|1[0-2])-[0-9]{{2}}|{_YEAR}-02-([01][0-9]|2[0-8])|{_LEAP_YEAR}-02-29)"
PATTERNS = {
    "date": f"^{_DATE}$",
    "time": "^.{6}[0-5]",
    "date-time": f"^{_DATE}.{{7}}[0-5]",
    "hostname": "^.{1,253}$",
}
"""Patterns that are added to formats. Alone, the library allows 29 February in any year, 60 seconds, and host
names of any length.
"""
SUBSCHEMA = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
SUBSCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
NAMED_SUBSCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
VALUES = ("const", "enum", "default", "examples")
LARGEST_INTEGER = 2**53
"""A float cannot hold all integers beyond this one."""
LARGEST_MULTIPLE = 2**32
"""The library calculates with numbers below this one if a value has several divisors."""
DIGITS, PLACES = 15, 22
"""Digits, and decimal places, of a number that the library reads exactly."""
LARGEST_LIMIT, LARGEST_BOUND = 10**18, 10**22
"""The largest lower bound, and the largest upper bound that is not taken for none."""
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]")
_WRITABLE = r"[^\x00-\x07\x0b\x0e-\x1f\x7f]"
_CODE = r"[pPxuU]\{[^}]*\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[pP]."
_PIECE = re.compile(rf"\\(?:{_CODE}|.)|\[\^?\]?|.", re.DOTALL)
_CHARACTER = re.compile(r"\\[pPxuUav]|[\x00-\x1f\x7f]")
MAX_GBNF = 16 * 1024
"""Longest grammar in GBNF, in characters. It is translated in Python, which stops the other threads."""
MAX_SEARCH = 64
"""Most parts of a refused schema that are compiled to find the one that is to blame."""
LONGEST_REASON = 300
INITIAL_FUEL, STEP_FUEL, STEP_ITEMS, GRAMMAR_SIZE = 1_000_000, 200_000, 50_000, 100_000
"""Limits of a grammar: work of its compilation and of one mask, in the library's units, and its symbols."""
ROW_ITEMS, LEXER_STATES = 10_000, 20_000
"""Limits of an answer: alternatives at one place (an optional property has eight), and states of its strings.
A state takes one or two KB. The library's own limits are 2,000, which 260 optional properties exceed, and
250,000.
"""
REWORDED = {
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf": (
        "oneOf is supported only if no value can fit two of its schemas; use anyOf"
    )
}
_PLACE = re.compile(r"^at \d+\(\d+\): (?:invalid regex .*?\(in regex\): )?", re.DOTALL)
_EMPTY = re.compile(r"(?:Unsatisfiable schema: )?Regex is empty: .*", re.DOTALL)
_CITATION = re.compile(r"\n\s*\d+ \| .*", re.DOTALL)


def compile_format(form: AnswerFormat, vocabulary: LLTokenizer) -> LLMatcher:
    """Compile the form of an answer.

    Raises InvalidRequest that says what is not supported; for a schema also where, as a JSON pointer.
    """
    if form.kind == "calls":
        return _compile_calls(form, vocabulary)
    schema = json.loads(form.definition) if form.kind == "json" else None
    if schema is None:
        grammar = _text_grammar(form)
    else:
        check_schema(schema)
        grammar = (
            _one_line_grammar(schema) if form.whitespace is None else _json_grammar(schema, form.whitespace)
        )
    matcher = _compile(grammar, vocabulary)
    error = matcher.get_error()
    if not error:
        return matcher
    place = ""
    if schema is not None:
        error = _compile(_json_grammar(schema, form.whitespace or ""), vocabulary).get_error() or error
        where = _blame(schema, error, vocabulary)
        place = f" at {where}" if where else ""
    raise InvalidRequest(f"{form.kind}{place}: {explain_error(error, form.kind)}", code="unsupported_format")


def check_schema(schema: dict[str, Any]) -> None:
    """Raise InvalidRequest, which names the place, for what the library would accept and not follow."""
    left: list[tuple[str, Any]] = [("", schema)]
    divisors: set[Decimal] = set()
    while left:
        path, node = left.pop()
        if not isinstance(node, dict):
            continue
        reason = (
            _wrong_count(node) or _wrong_value(node) or _wrong_bound(node) or _wrong_divisor(node, divisors)
        )
        if reason:
            raise InvalidRequest(f"json{' at ' + path if path else ''}: {reason}", code="unsupported_format")
        left += [(f"{path}/{name}", part) for name, part in parts_of(node)]


def exact_schema(schema: Any) -> Any:
    """Return a schema with the additions and changes that make the library follow it exactly."""
    if not isinstance(schema, dict):
        return schema
    exact: dict[str, Any] = {}
    for key, value in schema.items():
        if key in SUBSCHEMAS and isinstance(value, list):
            exact[key] = [exact_schema(part) for part in value]
        elif key in NAMED_SUBSCHEMAS and isinstance(value, dict):
            names = map(writable, value) if key == "patternProperties" else value
            exact[key] = dict(zip(names, map(exact_schema, value.values()), strict=False))
        elif key == "pattern" and isinstance(value, str):
            exact[key] = writable(value)
        else:
            part = key in SUBSCHEMA or _is_unknown(key, value)
            exact[key] = exact_schema(value) if part else value
    _move_bounds(exact)
    pattern = PATTERNS.get(schema["format"]) if isinstance(schema.get("format"), str) else None
    if pattern is not None:
        also = exact.get("allOf")
        exact["allOf"] = [*(also if isinstance(also, list) else []), {"pattern": pattern}]
    return exact


def parts_of(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the direct parts of a schema that are schemas, with their place in it."""
    for key in SUBSCHEMA:
        if key in schema:
            yield key, schema[key]
    for key in SUBSCHEMAS:
        if isinstance(schema.get(key), list):
            yield from ((f"{key}/{index}", part) for index, part in enumerate(schema[key]))
    for key in NAMED_SUBSCHEMAS:
        if isinstance(schema.get(key), dict):
            yield from ((f"{key}/{_escaped(name)}", part) for name, part in schema[key].items())
    yield from ((_escaped(key), schema[key]) for key in schema if _is_unknown(key, schema[key]))


def _is_unknown(key: str, value: Any) -> bool:
    """Whether the value of an unknown keyword may be a schema, which a $ref may name."""
    return isinstance(value, dict) and key not in (*SUBSCHEMA, *SUBSCHEMAS, *NAMED_SUBSCHEMAS, *VALUES)


def _escaped(name: str) -> str:
    """A name as part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def writable(pattern: str) -> str:
    """Return a pattern without the characters that the library cannot write unless \\u is allowed.

    It would leave them out of a text, or, for a set of characters that has all of them, allow quotes and
    backslashes, too, even if the set excludes these. So they are taken out of each set, and a single one
    becomes a set, which is empty then.
    """
    pieces: list[str] = []
    depth = 0
    for match in _PIECE.finditer(pattern):
        piece = match[0]
        if piece.startswith("["):
            pieces.append(piece if depth else f"[{piece}")
            depth += 1
        elif piece == "]" and depth:
            depth -= 1
            pieces.append(piece if depth else f"]&&{_WRITABLE}]")
        elif not depth and _CHARACTER.match(piece):
            pieces.append(f"[{piece}&&{_WRITABLE}]")
        else:
            pieces.append(piece)
    return "".join(pieces)


def _wrong_count(node: dict[str, Any]) -> str | None:
    """The reason to refuse `minProperties` that one name twice would satisfy; readers keep only one."""
    least, required = node.get("minProperties"), node.get("required")
    names = len({name for name in required if isinstance(name, str)}) if isinstance(required, list) else 0
    if isinstance(least, int) and least > max(1, names):
        return (
            "minProperties above the number of required properties cannot be followed, because a name might "
            "be repeated; name the properties in required"
        )
    return None


def _wrong_value(node: dict[str, Any]) -> str | None:
    """The reason to refuse a value of const or enum that the library would write as another one."""
    left = [(key, node[key]) for key in ("const", "enum") if key in node]
    while left:
        key, value = left.pop()
        if isinstance(value, dict | list):
            left += [(key, part) for part in (value.values() if isinstance(value, dict) else value)]
        elif isinstance(value, str) and (control := _UNWRITABLE.search(value)):
            return (
                f"{key} has the character U+{ord(control[0]):04X}, which cannot be written; accepted: text "
                "without halves of surrogate pairs, and without control characters other than U+0008, "
                "U+0009, U+000A, U+000C and U+000D"
            )
        elif _is_number(value) and not _is_written(value):
            return (
                f"{key} has the number {str(value)[:40]}, which cannot be written exactly; "
                f"accepted: integers up to 2^53, and numbers of at most {DIGITS} digits"
            )
    return None


def _wrong_bound(node: dict[str, Any]) -> str | None:
    """The reason to refuse a bound that only larger integers satisfy than the library has."""
    for key, sign in (("minimum", 1), ("exclusiveMinimum", 1), ("maximum", -1), ("exclusiveMaximum", -1)):
        if _is_number(node.get(key)) and node[key] * sign > LARGEST_LIMIT:
            return f"{key} is {str(node[key])[:40]}; accepted: up to 10^18, or no number could be written"
    return None


def _wrong_divisor(node: dict[str, Any], others: set[Decimal]) -> str | None:
    """The reason to refuse a `multipleOf` that the library reads as another number.

    others: all those of the schema so far, which may hold for one value.
    """
    divisor = node.get("multipleOf")
    if not _is_number(divisor):
        return None
    exact, scaled, places = Decimal(repr(divisor)), float(divisor), 0
    if not 0 < exact < LARGEST_MULTIPLE:
        return f"multipleOf is {str(divisor)[:40]}; accepted: above 0, below 2^32"
    while scaled % 1:  # as the library does it
        scaled, places = scaled * 10, places + 1
    if not _is_read(exact) or scaled >= LARGEST_MULTIPLE or Decimal(scaled).scaleb(-places) != exact:
        return f"multipleOf {divisor} has too many digits; accepted: at most 9"
    others.add(exact)
    most = max(-int(other.normalize().as_tuple().exponent) for other in others)
    if len(others) > 1 and lcm(*(int(other.scaleb(max(0, most))) for other in others)) >= LARGEST_MULTIPLE:
        return (
            f"multipleOf {divisor} cannot be followed beside the others of the schema, because their least "
            "common multiple is too large"
        )
    return None


def _move_bounds(schema: dict[str, Any]) -> None:
    """Move the bounds of a schema inwards, in place, to numbers that the library follows exactly.

    An exclusive bound that is an integer becomes the next number: the library would allow the integer, unless
    the other bound is beyond the next one.
    """
    for key, exclusive, inwards, tighter in (
        ("minimum", "exclusiveMinimum", 1, max),
        ("maximum", "exclusiveMaximum", -1, min),
    ):
        for name in (key, exclusive):
            if _is_number(schema.get(name)):
                schema[name] = _inner(schema[name], inwards)
        bound, other = schema.get(exclusive), schema.get(key)
        if _is_number(bound) and bound % 1 == 0:
            del schema[exclusive]
            beyond = _inner(float(_next(Decimal(bound), inwards)), inwards)
            schema[key] = tighter(beyond, other) if _is_number(other) else beyond


def _inner(bound: float, inwards: int) -> float:
    """Return the nearest number on the inner side of a bound that the library reads and writes exactly.

    inwards: 1 for a lower bound, -1 for an upper one.
    """
    if abs(bound) <= LARGEST_INTEGER and bound % 1 == 0:
        return int(bound)
    exact = moved = Decimal(repr(bound))
    if abs(exact) > LARGEST_BOUND:
        return bound  # the library refuses it, or writes no integers beyond it
    large = abs(exact) > LARGEST_INTEGER  # the text of a float is another number than the float then
    while not _is_read(moved) or (
        large
        and any(
            (value - limit) * inwards < 0
            for value in (moved, Decimal(float(moved)))
            for limit in (exact, Decimal(bound))
        )
    ):
        moved = _next(moved, inwards)
    whole = moved % 1 == 0 and abs(moved) <= LARGEST_INTEGER
    return int(moved) if whole else float(moved)


def _next(number: Decimal, inwards: int) -> Decimal:
    """Return the next number of at most DIGITS digits and PLACES places, above or below a number."""
    last = max(number.adjusted() - DIGITS + 1, -PLACES) if number else -PLACES
    steps = number.scaleb(-last).to_integral(ROUND_FLOOR if inwards > 0 else ROUND_CEILING)
    return (steps + inwards).scaleb(last)


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) is int or (isinstance(value, float) and isfinite(value))


def _is_read(number: Decimal) -> bool:
    """Whether the library reads a number, as it is written, as the float that is nearest to it."""
    _, digits, exponent = number.as_tuple()
    return int("".join(map(str, digits))) <= LARGEST_INTEGER and abs(int(exponent)) <= PLACES


def _is_written(value: float) -> bool:
    """Whether the library writes a number of the schema as one that readers take for an equal one."""
    exact = Decimal(repr(value))
    return _is_read(exact) and (abs(exact) <= LARGEST_INTEGER or exact == Decimal(value))


def _compile_calls(form: AnswerFormat, vocabulary: LLTokenizer) -> LLMatcher:
    """Compile the form of tool calls: a grammar with rules that are given as schemas.

    Raises InvalidRequest, which names the place of the schema that is not supported.
    """
    from llguidance import LLMatcher

    value = json.loads(form.definition)
    tokens = {name: _is_token(mark, vocabulary) for name, mark in value["marks"].items()}
    rules = [value["grammar"], value["starts"]["token" if tokens.get("begin") else "text"]]
    for name, mark in value["marks"].items():
        rules.append(f"{name}: {mark if tokens[name] else json.dumps(mark)}\n")
    for name, part in value["schemas"].items():
        schema, place = part["schema"], part["param"]
        check_schema(schema)
        error = _compile(_json_grammar(schema, ""), vocabulary).get_error()
        if error:
            where = _blame(schema, error, vocabulary)
            raise InvalidRequest(
                f"{place}{' at ' + where if where else ''}: {explain_error(error, 'json')}",
                code="unsupported_format",
            )
        rules.append(_one_line_rule(name, schema))
    matcher = _compile(LLMatcher.grammar_from_lark("".join(rules)), vocabulary)
    if matcher.get_error():
        reason = explain_error(matcher.get_error(), "grammar")
        raise InvalidRequest(f"tools: {reason}", code="unsupported_format")
    return matcher


def _is_token(mark: str, vocabulary: LLTokenizer) -> bool:
    """Whether a mark is one token of the vocabulary that the library keeps apart from text."""
    from llguidance import LLMatcher

    named = mark.startswith("<") and mark.endswith(">")
    return named and not _compile(LLMatcher.grammar_from_lark(f"start: {mark}"), vocabulary).get_error()


def _compile(grammar: str, vocabulary: LLTokenizer) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        initial_lexer_fuel=INITIAL_FUEL,
        step_lexer_fuel=STEP_FUEL,
        step_max_items=STEP_ITEMS,
        max_grammar_size=GRAMMAR_SIZE,
        max_items_in_row=ROW_ITEMS,
        max_lexer_states=LEXER_STATES,
        verbose_errors=False,
    )
    return LLMatcher(vocabulary, grammar, log_level=0, limits=limits)


def _text_grammar(form: AnswerFormat) -> str:
    """Return the grammar of a form that is not JSON."""
    from llguidance import LLMatcher

    if form.kind == "regex":
        grammar: str = LLMatcher.grammar_from_regex(form.definition)
        return grammar
    if form.kind == "choice":
        options = " | ".join(map(_lark_text, json.loads(form.definition)))
        return LLMatcher.grammar_from_lark(f"start: {options}")
    return LLMatcher.grammar_from_lark(_lark(form.definition))


def _lark_text(text: str) -> str:
    """Return a text in Lark's notation, which does not take U+007F as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _one_line_grammar(schema: dict[str, Any]) -> str:
    """Return the grammar of JSON on one line, either with spaces after commas and colons or without any.

    The first comma or colon decides. After it the punctuation is forced, so that it can be drafted, and the
    model still writes JSON in the way in which it was trained.
    """
    from llguidance import LLMatcher

    grammar: str = LLMatcher.grammar_from_lark(_one_line_rule("start", schema))
    return grammar


def _one_line_rule(name: str, schema: dict[str, Any]) -> str:
    """Return the rule of JSON on one line, with the two rules of its ways of punctuation."""
    compact = json.dumps(_with_options(schema, item_separator=",", key_separator=":"))
    spaced = json.dumps(_with_options(schema, item_separator=", ", key_separator=": "))
    return (
        f"{name}: {name}_compact | {name}_spaced\n"
        f"{name}_compact: %json {compact}\n{name}_spaced: %json {spaced}\n"
    )


def _json_grammar(schema: dict[str, Any], whitespace: str) -> str:
    """Return the grammar of JSON with prescribed white space; "": none."""
    from llguidance import LLMatcher

    options: dict[str, Any] = (
        {"whitespace_flexible": True, "whitespace_pattern": whitespace} if whitespace else {}
    )
    grammar: str = LLMatcher.grammar_from_json_schema(json.dumps(_with_options(schema, **options)))
    return grammar


def _with_options(schema: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return the schema with the library's options. They replace those that a client wrote into it.

    A client's own could make the library ignore keywords that it does not know.
    """
    defaults = {
        "lenient": False,
        "coerce_one_of": False,
        "whitespace_flexible": False,
        # Without \u: the library does not recognise the name of a property in which letters are written so.
        "json_allowed_escapes": 'nrtbf"\\',
    }
    return {**exact_schema(schema), "x-guidance": {**defaults, **options}}


def _lark(text: str) -> str:
    """Return a grammar in Lark's notation, translated if it is in GBNF."""
    if "::=" not in text:
        return text
    if len(text) > MAX_GBNF:
        raise InvalidRequest(
            f"grammar: it has {len(text)} characters; accepted: at most {MAX_GBNF} in GBNF, "
            "more in Lark's notation",
            code="unsupported_format",
        )
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    try:
        lark: str = gbnf_to_lark(text)
    except GbnfToLarkError as error:
        raise InvalidRequest(
            f"grammar: it is not GBNF: {str(error)[:LONGEST_REASON]}", code="unsupported_format"
        ) from None
    return lark


def _blame(schema: dict[str, Any], error: str, vocabulary: LLTokenizer) -> str:
    """Return the JSON pointer of the innermost part of a schema that causes the error; "" for the whole."""
    definitions: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    path, node, left = "", schema, MAX_SEARCH
    while True:
        for name, part in parts_of(node):
            left -= 1
            if left < 0:
                return path
            if not isinstance(part, dict):
                continue
            if _compile(_json_grammar({**definitions, **part}, ""), vocabulary).get_error() == error:
                path, node = f"{path}/{name}", part
                break
        else:
            return path


def explain_error(error: str, kind: str) -> str:
    """Return an error of the library in one line of bounded length.

    It may cite a line of a grammar. Unless the client sent a grammar, that line was made here.
    """
    if kind != "grammar":
        error = _PLACE.sub("", _CITATION.sub("", error))
        error = _EMPTY.sub(
            "no text that can be written matches; accepted: patterns of text without control characters",
            error,
        )
    for theirs, ours in REWORDED.items():
        error = error.replace(theirs, ours)
    text = " ".join(error.split())
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}..."
