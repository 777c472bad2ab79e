"""Wire models of the form of an answer, under OpenAI's names and under those of other engines.

Docstrings and descriptions of this module are part of the OpenAPI description at /openapi.json.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from fovea.api.content import NO_EFFECT
from fovea.api.wire import Flag, Text, Wire, Word, option
from fovea.core.constraints import MAX_CHOICES, MAX_WHITESPACE, AnswerFormat
from fovea.core.errors import InvalidRequest

Schema = dict[str, Any] | Flag | Text
SCHEMA = "A JSON Schema as an object, or as the text of one."
REGEX = "A regular expression that the whole answer matches. Without look-around and back references."
GRAMMAR = "A context-free grammar in Lark's notation (start symbol `start`) or in GBNF (`root`)."
WHITESPACE = (
    "Regular expression of the white space between the parts of JSON. Default: a space after every comma and "
    "colon or after none of them, as the model begins, and no line breaks."
)
ANY_WHITESPACE = r"[ \n\t]{0,32}"
"""White space that is not prescribed. It is bounded: a model could write it for ever."""


class JsonSchemaFormat(Wire):
    """A JSON Schema with a name."""

    name: Word = Field(description=NO_EFFECT)
    description: Text | None = option(NO_EFFECT)
    schema_: Schema | None = option(SCHEMA, alias="schema")
    strict: Flag | None = option("Accepted, without effect: an answer always follows the schema.")


class ResponseFormat(Wire):
    """The form of the answer: any text, any JSON object, or JSON that is valid against a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = option("Required for the type json_schema.")


class StructuredOutputs(Wire):
    """Extension, with vLLM's names. The form of the answer; exactly one of the first five fields is given."""

    json_: Schema | None = option(SCHEMA, alias="json")
    json_object: Flag | None = option("Whether the answer is any JSON object.")
    regex: Text | None = option(REGEX)
    choice: Annotated[list[Word], Field(max_length=MAX_CHOICES, fail_fast=True)] | None = option(
        "The answer is one of these texts."
    )
    grammar: Text | None = option(GRAMMAR)
    whitespace_pattern: Annotated[str, Field(max_length=MAX_WHITESPACE)] | None = option(WHITESPACE)
    disable_any_whitespace: Flag | None = option(
        "true is the default. false: JSON may have up to 32 spaces, tabs and line breaks between its parts."
    )
    disable_fallback: Flag | None = option(NO_EFFECT)


class FormatFields(Wire):
    """The fields of a request that set the form of the answer. They may set at most one form."""

    response_format: ResponseFormat | None = option("The form of the answer.")
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = option(f"Extension. {SCHEMA}")
    guided_regex: Text | None = option(f"Extension. {REGEX}")
    guided_choice: Annotated[list[Word], Field(max_length=MAX_CHOICES, fail_fast=True)] | None = option(
        "Extension. The answer is one of these texts."
    )
    guided_grammar: Text | None = option(f"Extension. {GRAMMAR}")
    guided_whitespace_pattern: Annotated[str, Field(max_length=MAX_WHITESPACE)] | None = option(
        f"Extension. For guided_json. {WHITESPACE}"
    )
    guided_decoding_backend: Word | None = option(NO_EFFECT)


class _Wish(NamedTuple):
    """A form that a request names, before it is checked.

    param: name of the field.
    kind: json, json_object, regex, choice or grammar.
    """

    param: str
    kind: str
    value: Any
    whitespace: str | None = None


def answer_format(body: FormatFields) -> AnswerFormat | None:
    """The form that a request sets for its answer; None: any text.

    Raises InvalidRequest if a form is wrong, or if the request sets several.
    """
    wishes = [*_response_format(body.response_format), *_structured(body.structured_outputs), *_guided(body)]
    if len(wishes) > 1:
        names = " and ".join(wish.param for wish in wishes)
        raise InvalidRequest(f"{names} exclude each other; send one", param=wishes[1].param)
    return _make(*wishes[0]) if wishes else None


def _make(param: str, kind: str, value: Any, whitespace: str | None) -> AnswerFormat:
    if kind == "json":
        return AnswerFormat.json_schema(value, whitespace=whitespace, param=param)
    if kind == "json_object":
        return AnswerFormat.json_object(whitespace=whitespace, param=param)
    make = {"regex": AnswerFormat.regex, "choice": AnswerFormat.choice, "grammar": AnswerFormat.grammar}[kind]
    return make(value, param=param)


def _response_format(body: ResponseFormat | None) -> list[_Wish]:
    if body is None:
        return []
    if body.type == "json_object":
        return [_Wish("response_format", "json_object", True)]
    if body.type == "text":
        if body.json_schema is None:
            return []
        raise InvalidRequest(
            "response_format.json_schema needs the type json_schema", param="response_format.json_schema"
        )
    if body.json_schema is None:
        raise InvalidRequest(
            "response_format.json_schema is required for the type json_schema",
            param="response_format.json_schema",
            code="missing_field",
        )
    schema = body.json_schema.schema_
    if schema is None:  # OpenAI's API takes a missing schema for that of any object
        return [_Wish("response_format.json_schema", "json_object", True)]
    return [_Wish("response_format.json_schema.schema", "json", schema)]


def _structured(body: StructuredOutputs | None) -> list[_Wish]:
    if body is None:
        return []
    space = body.whitespace_pattern
    if space is None and body.disable_any_whitespace is False:
        space = ANY_WHITESPACE
    values: dict[str, Any] = {"json": body.json_, "regex": body.regex, "choice": body.choice}
    values |= {"grammar": body.grammar, "json_object": body.json_object or None}
    wishes = _wishes("structured_outputs.", values, space)
    if not wishes:
        raise InvalidRequest(
            "structured_outputs: one of json, json_object, regex, choice and grammar is required",
            param="structured_outputs",
            code="missing_field",
        )
    return wishes


def _guided(body: FormatFields) -> list[_Wish]:
    values = {kind: getattr(body, f"guided_{kind}") for kind in ("json", "regex", "choice", "grammar")}
    return _wishes("guided_", values, body.guided_whitespace_pattern)


def _wishes(prefix: str, values: dict[str, Any], whitespace: str | None) -> list[_Wish]:
    return [
        _Wish(f"{prefix}{kind}", kind, value, whitespace)
        for kind, value in values.items()
        if value is not None
    ]
