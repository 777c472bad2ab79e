"""Errors of HTTP requests that have no place in the tree of `core.errors`, for the server and the gateway."""

from __future__ import annotations

from fovea.core.errors import InvalidRequest


class ClientGone(Exception):
    """The client closed the connection, so no answer can be sent."""


class MethodNotAllowed(InvalidRequest):
    """The route exists, but not for this HTTP method."""

    status = 405
    default_code = "method_not_allowed"
