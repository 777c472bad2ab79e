"""Turns the form of an answer into a grammar of the library, and explains what the library refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fovea.core.answer_format import AnswerFormat
from fovea.core.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

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
REWORDED = {
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf": (
        "oneOf is supported only if no value can fit two of its schemas; use anyOf"
    )
}
_PLACE = re.compile(r"^at \d+\(\d+\): (?:invalid regex .*?\(in regex\): )?", re.DOTALL)
_CITATION = re.compile(r"\n\s*\d+ \| .*", re.DOTALL)
SUBSCHEMA = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
SUBSCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
NAMED_SUBSCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


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
        _check_counts(schema)
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
        _check_counts(schema)
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
    ids = vocabulary.tokenize_str(mark, parse_special=True)
    return len(ids) == 1 and bool(vocabulary.is_special_token(ids[0]))


def _check_counts(schema: dict[str, Any]) -> None:
    """Refuse `minProperties` that the library could satisfy by one name twice: readers keep only one."""
    left: list[tuple[str, Any]] = [("", schema)]
    while left:
        path, node = left.pop()
        if not isinstance(node, dict):
            continue
        least, required = node.get("minProperties"), node.get("required")
        names = len({name for name in required if isinstance(name, str)}) if isinstance(required, list) else 0
        if isinstance(least, int) and least > max(1, names):
            raise InvalidRequest(
                f"json{' at ' + path if path else ''}: minProperties above the number of required properties "
                "cannot be followed, because a name might be repeated; name the properties in required",
                code="unsupported_format",
            )
        left += [(f"{path}/{name}", part) for name, part in _parts(node)]


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
        options = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(form.definition))
        return LLMatcher.grammar_from_lark(f"start: {options}")
    return LLMatcher.grammar_from_lark(_lark(form.definition))


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
    return {**_exact(schema), "x-guidance": {**defaults, **options}}


def _exact(schema: Any) -> Any:
    """Return a schema with patterns beside those formats of which the library allows too much."""
    if not isinstance(schema, dict):
        return schema
    exact = {}
    for key, value in schema.items():
        if key in SUBSCHEMA:
            exact[key] = _exact(value)
        elif key in SUBSCHEMAS and isinstance(value, list):
            exact[key] = [_exact(part) for part in value]
        elif key in NAMED_SUBSCHEMAS and isinstance(value, dict):
            exact[key] = {name: _exact(part) for name, part in value.items()}
        else:
            exact[key] = value
    pattern = PATTERNS.get(schema["format"]) if isinstance(schema.get("format"), str) else None
    if pattern is not None:
        also = exact.get("allOf")
        exact["allOf"] = [*(also if isinstance(also, list) else []), {"pattern": pattern}]
    return exact


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
            f"grammar: it is no GBNF: {str(error)[:LONGEST_REASON]}", code="unsupported_format"
        ) from None
    return lark


def _blame(schema: dict[str, Any], error: str, vocabulary: LLTokenizer) -> str:
    """Return the JSON pointer of the innermost part of a schema that causes the error; "" for the whole."""
    definitions: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    path, node, left = "", schema, MAX_SEARCH
    while True:
        for name, part in _parts(node):
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


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the direct parts of a schema that are schemas, with their place in it."""
    for key in SUBSCHEMA:
        if key in schema:
            yield key, schema[key]
    for key in SUBSCHEMAS:
        if isinstance(schema.get(key), list):
            yield from ((f"{key}/{index}", part) for index, part in enumerate(schema[key]))
    for key in NAMED_SUBSCHEMAS:
        if isinstance(schema.get(key), dict):
            for name, part in schema[key].items():
                yield f"{key}/{name.replace('~', '~0').replace('/', '~1')}", part


def explain_error(error: str, kind: str) -> str:
    """Return an error of the library in one line of bounded length.

    It may cite a line of a grammar. Unless the client sent a grammar, that line was made here.
    """
    if kind != "grammar":
        error = _PLACE.sub("", _CITATION.sub("", error))
    for theirs, ours in REWORDED.items():
        error = error.replace(theirs, ours)
    text = " ".join(error.split())
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}..."
