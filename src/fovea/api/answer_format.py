"""Wire models of the form of an answer, under OpenAI's names and under those of other engines.

Docstrings and descriptions of this module are part of the OpenAPI description at /openapi.json.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from fovea.api.content import NO_EFFECT
from fovea.api.wire import Flag, Text, Wire, Word
from fovea.core.answer_format import MAX_CHOICES, MAX_WHITESPACE, AnswerFormat
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
    description: Text | None = Field(default=None, description=NO_EFFECT)
    schema_: Schema | None = Field(default=None, alias="schema", description=SCHEMA)
    strict: Flag | None = Field(
        default=None, description="Accepted, without effect: an answer always follows the schema."
    )


class ResponseFormat(Wire):
    """The form of the answer: any text, any JSON object, or JSON that is valid against a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = Field(
        default=None, description="Required for the type json_schema."
    )


class StructuredOutputs(Wire):
    """Extension, with vLLM's names. The form of the answer; exactly one of the first five fields is given."""

    json_: Schema | None = Field(default=None, alias="json", description=SCHEMA)
    json_object: Flag | None = Field(default=None, description="Whether the answer is any JSON object.")
    regex: Text | None = Field(default=None, description=REGEX)
    choice: Annotated[list[Word], Field(max_length=MAX_CHOICES, fail_fast=True)] | None = Field(
        default=None, description="The answer is one of these texts."
    )
    grammar: Text | None = Field(default=None, description=GRAMMAR)
    whitespace_pattern: Annotated[str, Field(max_length=MAX_WHITESPACE)] | None = Field(
        default=None, description=WHITESPACE
    )
    disable_any_whitespace: Flag | None = Field(
        default=None,
        description="true is the default. false: JSON may have up to 32 spaces, tabs and line breaks between "
        "its parts.",
    )
    disable_fallback: Flag | None = Field(default=None, description=NO_EFFECT)


class FormatFields(Wire):
    """The fields of a request that set the form of the answer. They may set at most one form."""

    response_format: ResponseFormat | None = Field(default=None, description="The form of the answer.")
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = Field(default=None, description=f"Extension. {SCHEMA}")
    guided_regex: Text | None = Field(default=None, description=f"Extension. {REGEX}")
    guided_choice: Annotated[list[Word], Field(max_length=MAX_CHOICES, fail_fast=True)] | None = Field(
        default=None, description="Extension. The answer is one of these texts."
    )
    guided_grammar: Text | None = Field(default=None, description=f"Extension. {GRAMMAR}")
    guided_whitespace_pattern: Annotated[str, Field(max_length=MAX_WHITESPACE)] | None = Field(
        default=None, description=f"Extension. For guided_json. {WHITESPACE}"
    )
    guided_decoding_backend: Word | None = Field(default=None, description=NO_EFFECT)


def answer_format(body: FormatFields) -> AnswerFormat | None:
    """The form that a request sets for its answer; None: any text.

    Raises InvalidRequest if a form is wrong, or if the request sets several.
    """
    forms = dict(_given(body))
    if len(forms) > 1:
        raise InvalidRequest(f"{' and '.join(forms)} exclude each other; send one", param=list(forms)[1])
    for param, make in forms.items():
        return make(param)
    return None


def _given(body: FormatFields) -> list[tuple[str, Callable[[str], AnswerFormat]]]:
    """The forms that a request sets, as (field, a function of the field's name that makes the form)."""
    forms: list[tuple[str, Callable[[str], AnswerFormat]]] = []
    chat, outputs = body.response_format, body.structured_outputs
    if chat is not None and chat.type != "text":
        forms += [_response_format(chat)]
    elif chat is not None and chat.json_schema is not None:
        raise InvalidRequest(
            "response_format.json_schema needs the type json_schema", param="response_format.json_schema"
        )
    if outputs is not None:
        forms += _structured(outputs)
    space = body.guided_whitespace_pattern
    forms += _forms(
        {
            "guided_json": body.guided_json,
            "guided_regex": body.guided_regex,
            "guided_choice": body.guided_choice,
            "guided_grammar": body.guided_grammar,
        },
        space,
    )
    return forms


def _response_format(body: ResponseFormat) -> tuple[str, Callable[[str], AnswerFormat]]:
    if body.type == "json_object":
        return "response_format", lambda param: AnswerFormat.json_object(param=param)
    if body.json_schema is None:
        raise InvalidRequest(
            "response_format.json_schema is required for the type json_schema",
            param="response_format.json_schema",
            code="missing_field",
        )
    schema = body.json_schema.schema_
    if schema is None:  # OpenAI's API takes a missing schema for that of any object
        return "response_format.json_schema", lambda param: AnswerFormat.json_object(param=param)
    return "response_format.json_schema.schema", lambda param: AnswerFormat.json_schema(schema, param=param)


def _structured(body: StructuredOutputs) -> list[tuple[str, Callable[[str], AnswerFormat]]]:
    space = body.whitespace_pattern
    if space is None and body.disable_any_whitespace is False:
        space = ANY_WHITESPACE
    values = {"json": body.json_, "regex": body.regex, "choice": body.choice, "grammar": body.grammar}
    forms = _forms({f"structured_outputs.{name}": value for name, value in values.items()}, space)
    if body.json_object:
        forms.append(
            (
                "structured_outputs.json_object",
                lambda param: AnswerFormat.json_object(whitespace=space, param=param),
            )
        )
    if not forms:
        raise InvalidRequest(
            "structured_outputs: one of json, json_object, regex, choice and grammar is required",
            param="structured_outputs",
            code="missing_field",
        )
    return forms


def _forms(values: dict[str, Any], whitespace: str | None) -> list[tuple[str, Callable[[str], AnswerFormat]]]:
    makers: dict[str, Callable[[Any, str], AnswerFormat]] = {
        "json": lambda value, param: AnswerFormat.json_schema(value, whitespace=whitespace, param=param),
        "regex": lambda value, param: AnswerFormat.regex(value, param=param),
        "choice": lambda value, param: AnswerFormat.choice(value, param=param),
        "grammar": lambda value, param: AnswerFormat.grammar(value, param=param),
    }
    return [
        (name, _bind(makers[name.rpartition(".")[2].removeprefix("guided_")], value))
        for name, value in values.items()
        if value is not None
    ]


def _bind(make: Callable[[Any, str], AnswerFormat], value: Any) -> Callable[[str], AnswerFormat]:
    return lambda param: make(value, param)
