"""Turns the form of an answer into a grammar of the library, and explains what the library refuses."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from fovea.core.constraints import AnswerFormat
from fovea.core.errors import InvalidRequest
from fovea.engine.grammar.exact import check_schema, exact_schema, parts_of

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
            f"grammar: it is no GBNF: {str(error)[:LONGEST_REASON]}", code="unsupported_format"
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
