"""Every error that Fovea raises on purpose, as one tree.

    FoveaError                      message says: what was wrong, where, what is accepted
    |-- ConfigError                 a start-up setting is wrong; the process should not come up
    |-- ModelError                  a checkpoint can not be used
    |   |-- UnsupportedModel        its architecture is not one that Fovea runs
    |   `-- CheckpointError         its files are missing, truncated or of other shapes
    |-- RequestError                the caller's fault or the caller's limit; carries an HTTP status
    |   |-- InvalidRequest    400   a field has a wrong type, value or combination
    |   |   |-- PromptTooLong       it can never fit into the context or the KV pool
    |   |   `-- InvalidMedia        what was sent to be looked at; names it by its index in the request
    |   |       |-- InvalidImage
    |   |       `-- InvalidVideo
    |   |-- Unauthorized      401
    |   |-- Forbidden         403   a URL or path that this server's policy does not fetch
    |   |-- NotFound          404
    |   |-- PayloadTooLarge   413
    |   |-- DeadlineExceeded  408   the request's own time ran out
    |   `-- Overloaded        429   carries retry_after in seconds
    |-- Unavailable           503   draining, still loading, or no engine
    `-- EngineError           500   a defect of ours; the request dies, the server lives on

`RequestError.param` is the JSON path of the offending field (`messages[1].content[0].image_url`),
`code` a stable machine-readable word.
"""

from __future__ import annotations

from typing import Self


class FoveaError(Exception):
    """Base of the tree. `status` is the HTTP status that the server answers with."""

    status: int = 500
    kind: str = "server_error"
    default_code: str = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code


class ConfigError(FoveaError):
    default_code = "bad_config"


class ModelError(FoveaError):
    default_code = "bad_model"


class UnsupportedModel(ModelError):
    default_code = "unsupported_model"


class CheckpointError(ModelError):
    default_code = "bad_checkpoint"


class RequestError(FoveaError):
    status = 400
    kind = "invalid_request_error"
    default_code = "invalid_request"


class InvalidRequest(RequestError):
    default_code = "invalid_value"


class PromptTooLong(InvalidRequest):
    default_code = "context_length_exceeded"


class InvalidMedia(InvalidRequest):
    """`index` counts the request's images, or its videos, from 0 in the order of the messages."""

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
        """The same error, naming which one of the request it is about."""
        return type(self)(self.reason, index=index, param=param or self.param, code=self.code)


class InvalidImage(InvalidMedia):
    noun = "image"
    default_code = "invalid_image"


class InvalidVideo(InvalidMedia):
    noun = "video"
    default_code = "invalid_video"


class Unauthorized(RequestError):
    status = 401
    kind = "authentication_error"
    default_code = "invalid_api_key"


class Forbidden(RequestError):
    status = 403
    kind = "permission_error"
    default_code = "forbidden"


class NotFound(RequestError):
    status = 404
    kind = "not_found_error"
    default_code = "not_found"


class PayloadTooLarge(RequestError):
    status = 413
    default_code = "payload_too_large"


class DeadlineExceeded(RequestError):
    status = 408
    kind = "timeout_error"
    default_code = "deadline_exceeded"


class Overloaded(RequestError):
    status = 429
    kind = "rate_limit_error"
    default_code = "overloaded"

    def __init__(
        self, message: str, *, retry_after: float, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.retry_after = retry_after


class Unavailable(FoveaError):
    status = 503
    kind = "unavailable_error"
    default_code = "unavailable"


class EngineError(FoveaError):
    default_code = "engine_error"
