"""Wire models of answers: token counts and errors.

Docstrings and descriptions of this module are part of the OpenAPI description at /openapi.json.
"""

from __future__ import annotations

from pydantic import BaseModel, Field


class PromptTokensDetails(BaseModel):
    """Parts of the number of prompt tokens."""

    cached_tokens: int = Field(
        default=0, description="Prompt tokens whose KV was already cached from an earlier request."
    )
    image_tokens: int = Field(
        default=0, description="Extension. Prompt tokens that stand for images or videos."
    )


class CompletionTokensDetails(BaseModel):
    """Parts of the number of tokens of the answers."""

    reasoning_tokens: int = Field(default=0, description="Tokens in which the model reasoned.")


class UsageBody(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class ErrorBody(BaseModel):
    """The reason why a request was refused or failed."""

    message: str = Field(description="The fault, its place, and the accepted values, for people.")
    type: str = Field(description="Kind of error in OpenAI's terms.")
    param: str | None = Field(default=None, description="JSON path of the wrong field of the request.")
    code: str | None = Field(default=None, description="Stable name of the error, for programs.")


class ErrorEnvelope(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorBody
