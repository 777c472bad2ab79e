"""Refuses bodies by their headers, before any of them is read."""

from __future__ import annotations

from email.message import Message

from fovea.core.errors import InvalidRequest, PayloadTooLarge

MIB = 1024 * 1024


class UnsupportedEncoding(InvalidRequest):
    """The body is compressed."""

    status = 415
    default_code = "unsupported_encoding"


def check_body_headers(encoding: str, content_type: str, length: str, largest: int) -> None:
    """Check the headers of a request whose body has to be JSON.

    encoding, content_type, length: values of Content-Encoding, Content-Type and Content-Length; "": the
        request has no such header.
    largest: most bytes of the body.
    Raises UnsupportedEncoding, InvalidRequest and PayloadTooLarge.
    """
    encoding = encoding.strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedEncoding(
            f"the body has the Content-Encoding {encoding[:40]!r}; accepted: bodies that are not compressed"
        )
    if content_type != "application/json" and not _is_json(content_type):
        raise InvalidRequest(
            "the body must be JSON, sent as Content-Type: application/json", code="invalid_json"
        )
    if length.isdecimal() and int(length) > largest:
        raise PayloadTooLarge(
            f"the body has {int(length)} bytes; accepted: at most {largest} bytes ({largest // MIB} MiB)"
        )


def _is_json(content_type: str) -> bool:
    kind = Message()
    kind["content-type"] = content_type or "text/plain"
    subtype = kind.get_content_subtype()
    return kind.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))
