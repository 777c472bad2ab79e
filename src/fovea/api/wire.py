"""Base classes and value types of the wire models."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MAX_TEXT = 4_000_000
MAX_WORD = 4096
MAX_COUNT = 2**31
MAX_ITEMS = 4096
MAX_VALUES = 50_000
MAX_PROMPTS = 1024


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


class Wire(BaseModel):
    """Base class of everything that a client sends. A field that the model does not declare is refused."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class Body(Wire):
    """Base class of request bodies. It refuses a body with too many values before they are validated.

    Pydantic reports every wrong value. The report on a million of them would block all other clients for
    seconds.
    """

    @model_validator(mode="before")
    @classmethod
    def _not_too_many_values(cls, value: Any) -> Any:
        if not _at_most(MAX_VALUES, value):
            raise ValueError(f"too many values; accepted: at most {MAX_VALUES}, not counting token ids")
        return value


def _at_most(limit: int, value: Any) -> bool:
    """Whether all lists and objects in `value` have together at most `limit` entries.

    Integers in lists do not count.
    """
    count, inner = 0, [value]
    while inner and count <= limit:
        node = inner.pop()
        entries: list[Any] = []
        if isinstance(node, dict):
            entries = list(node.values())
        elif isinstance(node, list):
            entries = [entry for entry in node if type(entry) is not int]
        count += len(entries)
        inner += entries
    return count <= limit
