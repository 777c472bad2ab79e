"""Every error that Fovea raises on purpose, as one tree.

    FoveaError                      the message says what was wrong, where, and what is accepted
    |-- ConfigError                 a start-up setting is wrong; the process should not start
    |-- ModelError                  a checkpoint cannot be used
    |   |-- UnsupportedModel        Fovea does not run its architecture
    |   `-- CheckpointError         its files are missing, truncated or have other shapes
    |-- RequestError                the request is wrong or exceeds a limit of the caller; has an HTTP status
    |   |-- InvalidRequest    400   a field has a wrong type, value or combination
    |   |   |-- PromptTooLong       the prompt can never fit into the context or the KV pool
    |   |   `-- InvalidMedia        an image or video cannot be used; names it by its index in the request
    |   |       |-- InvalidImage
    |   |       `-- InvalidVideo
    |   |-- Unauthorized      401   the API key is missing or wrong
    |   |-- Forbidden         403   the server's policy does not allow this URL or path
    |   |-- NotFound          404   the named model, image, cache or URL path does not exist
    |   |-- PayloadTooLarge   413   the body exceeds the server's limit
    |   |-- DeadlineExceeded  408   the request's own timeout is over
    |   `-- Overloaded        429   no room now; carries retry_after in seconds
    |-- Unavailable           503   the server is draining or still loading, or has no engine
    `-- EngineError           500   a defect in Fovea; the request fails, the server continues
        `-- OutOfMemory             the request does not fit into the device's memory, even alone

Every error has three attributes that the server sends:

`param`: JSON path of the wrong field (`messages[1].content[0].image_url`), or None.
`code`: a stable machine-readable word.
`kind`: the error's type in OpenAI's error body.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

Scope = Literal["engine", "request"]
"""Scope of a refusal.

engine: all further requests with this key would be refused now.
request: only this request is refused, for its size, media or form; others could be accepted.
"""


class FoveaError(Exception):
    """Base class of all errors that Fovea raises on purpose.

    status: HTTP status of the server's answer.
    kind: type of the error in the answer's body.
    default_code: the code of an error that gets none when it is raised.
    """

    status: int = 500
    kind: str = "server_error"
    default_code: str = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code


class ConfigError(FoveaError):
    """A start-up setting is wrong, so the process should not start.

    at: place of the table in its file, as ("pool", 2, "settings"): the second [[pool]], its settings.
    findings: the single errors, if this one stands for several (`core.findings`); otherwise itself.
    """

    default_code = "bad_config"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        at: tuple[str | int, ...] = (),
        findings: Sequence[ConfigError] = (),
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.at = at
        self.findings = tuple(findings) or (self,)


class ModelError(FoveaError):
    """A checkpoint cannot be used."""

    default_code = "bad_model"


class UnsupportedModel(ModelError):
    """The checkpoint has an architecture that Fovea does not run."""

    default_code = "unsupported_model"


class CheckpointError(ModelError):
    """The files of a checkpoint are missing, truncated, or hold tensors of other shapes."""

    default_code = "bad_checkpoint"


class RequestError(FoveaError):
    """The request is wrong, or it exceeds a limit of its caller."""

    status = 400
    kind = "invalid_request_error"
    default_code = "invalid_request"


class InvalidRequest(RequestError):
    """A field of the request has a wrong type or value, or does not fit another field."""

    default_code = "invalid_value"


class PromptTooLong(InvalidRequest):
    """The prompt can never fit into the model's context or the KV pool."""

    default_code = "context_length_exceeded"


class InvalidMedia(InvalidRequest):
    """An image or video of the request cannot be used.

    index: position among the request's images, or among its videos, from 0 in the order of the messages.
    reason: the message without the index.
    """

    noun = "media"
    default_code = "invalid_media"

    def __init__(
        self, message: str, *, index: int | None = None, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(
            message if index is None else f"{self.noun} {index}: {message}", param=param, code=code
        )
        self.reason = message
        self.index = index

    def at(self, index: int, param: str | None = None) -> Self:
        """Return a copy of this error whose message names the image or video by its index."""
        return type(self)(self.reason, index=index, param=param or self.param, code=self.code)


class InvalidImage(InvalidMedia):
    """An image of the request cannot be used."""

    noun = "image"
    default_code = "invalid_image"


class InvalidVideo(InvalidMedia):
    """A video of the request cannot be used."""

    noun = "video"
    default_code = "invalid_video"


class Unauthorized(RequestError):
    """The API key is missing or wrong."""

    status = 401
    kind = "authentication_error"
    default_code = "invalid_api_key"


class Forbidden(RequestError):
    """The server's policy does not allow this URL or path."""

    status = 403
    kind = "permission_error"
    default_code = "forbidden"


class NotFound(RequestError):
    """The request names a model, image, cache or URL path that does not exist."""

    status = 404
    kind = "not_found_error"
    default_code = "not_found"


class PayloadTooLarge(RequestError):
    """The body of the request exceeds the server's limit."""

    status = 413
    default_code = "payload_too_large"


class DeadlineExceeded(RequestError):
    """The request's own timeout is over."""

    status = 408
    kind = "timeout_error"
    default_code = "deadline_exceeded"


class Overloaded(RequestError):
    """The server has no room for the request now.

    retry_after: seconds after which the client may try again.
    scope: see `Scope`.
    """

    status = 429
    kind = "rate_limit_error"
    default_code = "overloaded"

    def __init__(
        self,
        message: str,
        *,
        retry_after: float,
        param: str | None = None,
        code: str | None = None,
        scope: Scope = "engine",
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.retry_after = retry_after
        self.scope = scope


class Unavailable(FoveaError):
    """The server is draining or still loading, or it lacks what the request needs.

    scope: see `Scope`.
    """

    status = 503
    kind = "unavailable_error"
    default_code = "unavailable"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, scope: Scope = "engine"
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.scope = scope


class EngineError(FoveaError):
    """A defect in Fovea made the request fail; the server continues to run."""

    default_code = "engine_error"


class OutOfMemory(EngineError):
    """The request does not fit into the memory of the engine's device, even alone and in small steps."""

    default_code = "out_of_memory"
