"""Base classes and value types of the wire models, and the fields that all generating APIs share.

Descriptions of this module are part of the OpenAPI description at /openapi.json.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from fovea.core.errors import InvalidRequest
from fovea.core.media import Payload

MAX_TEXT = 4_000_000
MAX_WORD = 4096
MAX_URL = 16_384
"""Longest URL in characters, except of data: URLs."""
MAX_COUNT = 2**31
MAX_ITEMS = 4096
MAX_VALUES = 30_000
"""Most entries of all lists and objects of a body together, not counting token ids."""
MAX_KEYS = 1100
"""Most keys of one object. The largest that a field accepts has 1024."""
MAX_PROMPTS = 64
MAX_IDS = 200_000
"""Most token ids of a prompt."""


def option(description: str, **limits: Any) -> Any:
    """A field that a request may leave out or set to null. limits: as pydantic's Field takes them."""
    return Field(default=None, description=description, **limits)


def _real_number(value: Any) -> Any:
    if isinstance(value, bool | str):
        raise ValueError("must be a number")
    return value


Number = Annotated[float, BeforeValidator(_real_number)]
Integer = Annotated[int, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
# The length limit also makes pydantic refuse half of a surrogate pair, which no tokenizer can encode.
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Word = Annotated[str, Field(max_length=MAX_WORD)]
TokenIds = Annotated[list[Integer], Field(max_length=MAX_IDS, fail_fast=True)]
Prompts = (
    Text
    | Annotated[list[Text], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    | TokenIds
    | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)]
)


class _UrlSchema:
    """Lets pydantic accept a Payload beside a text. The OpenAPI description says text."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(_url, core_schema.str_schema(min_length=1))


def _url(value: Any, text: core_schema.ValidatorFunctionWrapHandler) -> str | Payload:
    if isinstance(value, Payload):
        return value
    url: str = text(value)
    if len(url) > MAX_URL and not url[:MAX_URL].lstrip()[:5].lower() == "data:":
        raise ValueError(f"a URL that is not a data: URL has at most {MAX_URL} characters")
    return url


Url = Annotated[str | Payload, _UrlSchema()]


class _Base64Schema:
    """Lets pydantic accept a Payload beside a text of any length. The OpenAPI description says text."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(_base64, core_schema.str_schema(min_length=1))


def _base64(value: Any, text: core_schema.ValidatorFunctionWrapHandler) -> str | Payload:
    return value if isinstance(value, Payload) else str(text(value))


Base64 = Annotated[str | Payload, _Base64Schema()]


def _writable(value: Any) -> Any:
    """Refuse what JSON cannot hold: infinite numbers, and halves of characters."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise ValueError("must be JSON with finite numbers and whole characters") from None
    return value


FreeJson = Annotated[dict[str, Any], AfterValidator(_writable)]
"""A JSON object of the client's own, which answers repeat."""


class Wire(BaseModel):
    """Base class of everything that a client sends.

    The server decides about fields that a model does not declare (`api.unknown`).
    """

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class Body(Wire):
    """Base class of request bodies. It refuses a body with too many values before they are validated.

    Pydantic reports every wrong value. The report on a million of them would block all other clients for
    seconds.
    """

    @model_validator(mode="before")
    @classmethod
    def _not_too_many_values(cls, value: Any) -> Any:
        check_count(value)
        return value


def too_many_values() -> InvalidRequest:
    """The error for a body with too many values."""
    return InvalidRequest(
        f"the body: too many values; accepted: at most {MAX_VALUES}, not counting token ids"
    )


def check_count(value: Any) -> None:
    """Raise InvalidRequest if the lists and objects in `value` have too many entries, or one too many keys.

    Integers in lists do not count.
    """
    count, inner = 0, [value]
    while inner:
        node = inner.pop()
        entries: list[Any] = []
        if isinstance(node, dict):
            if len(node) > MAX_KEYS:
                raise InvalidRequest(
                    f"the body: an object has {len(node)} fields; accepted: at most {MAX_KEYS}"
                )
            entries = list(node.values())
        elif isinstance(node, list):
            entries = [entry for entry in node if type(entry) is not int]
        count += len(entries)
        if count > MAX_VALUES:
            raise too_many_values()
        inner += entries


SAME = "As in chat completions."
EXTENSION = "Extension. As in chat completions."


class SharedFields(Wire):
    """Fields that are copied into the chat request as they are."""

    model: Word | None = option("Name of the served model. May be omitted.")
    temperature: Number | None = option(SAME, ge=0, le=2)
    top_p: Number | None = option(SAME, gt=0, le=1)
    top_k: Integer | None = option(EXTENSION, ge=-1, le=MAX_COUNT)
    stream: Flag | None = Field(default=False, description="Send the answer as server-sent events.")
    timeout: Number | None = option(EXTENSION, gt=0, le=86_400)
    cache_salt: str | None = option(EXTENSION, max_length=256)
    kv_keep: Word | None = option(EXTENSION)
    speculate: Flag | None = option(EXTENSION)
    priority: Integer | None = option(EXTENSION, ge=-1000, le=1000)
    visual_tokens: dict[Word, Any] | None = option(EXTENSION)


def shared_values(body: SharedFields, *more: str) -> dict[str, Any]:
    """The fields of a request to copy that are set. more: names of further ones."""
    names = (*SharedFields.model_fields, *more)
    return {name: value for name in names if (value := getattr(body, name)) is not None}
