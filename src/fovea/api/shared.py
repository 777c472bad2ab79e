"""Wire model of the fields that the other APIs have in common with chat completions.

Descriptions of this module are part of the OpenAPI description at /openapi.json.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from fovea.api.wire import MAX_COUNT, Flag, Integer, Number, Wire, Word

SAME = "As in chat completions."
EXTENSION = "Extension. As in chat completions."


class SharedFields(Wire):
    """Fields that are copied into the chat request as they are."""

    model: Word | None = Field(default=None, description="Name of the served model. May be omitted.")
    temperature: Number | None = Field(default=None, ge=0, le=2, description=SAME)
    top_p: Number | None = Field(default=None, gt=0, le=1, description=SAME)
    top_k: Integer | None = Field(default=None, ge=-1, le=MAX_COUNT, description=EXTENSION)
    stream: Flag | None = Field(default=False, description="Send the answer as server-sent events.")
    timeout: Number | None = Field(default=None, gt=0, le=86_400, description=EXTENSION)
    cache_salt: str | None = Field(default=None, max_length=256, description=EXTENSION)
    priority: Integer | None = Field(default=None, ge=-1000, le=1000, description=EXTENSION)
    visual_tokens: dict[Word, Any] | None = Field(default=None, description=EXTENSION)


def shared_values(body: SharedFields, *more: str) -> dict[str, Any]:
    """The fields of a request to copy that are set. more: names of further ones."""
    names = (*SharedFields.model_fields, *more)
    return {name: value for name in names if (value := getattr(body, name)) is not None}
