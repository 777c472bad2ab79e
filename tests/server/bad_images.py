"""Requests with images that the server refuses, each with the expected error."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

from tests.media.samples import animation, png_header, sample
from tests.server.conftest import MAX_IMAGE_BYTES, MAX_IMAGES
from tests.server.support import chat, data_url, image, picture, text, user

CHAT = "/v1/chat/completions"
URL = "messages[0].content[0].image_url.url"
GOOD = data_url(picture())


@dataclass(frozen=True)
class Case:
    """A wrong request and the expected error.

    pattern: a pattern that occurs in the message.
    body: a JSON value, or bytes that are sent unchanged.
    """

    name: str
    pattern: str
    body: Any
    param: str | None = None
    status: int = 400
    code: str = "invalid_value"
    path: str = CHAT


def of_url(name: str, pattern: str, url: str, *, status: int = 400, code: str = "invalid_image") -> Case:
    return Case(name, f"image 0: .*{pattern}", chat(user(image(url))), URL, status, code)


def of_data(name: str, pattern: str, data: bytes, *, code: str = "invalid_image") -> Case:
    return of_url(name, pattern, data_url(data), code=code)


def refused_url(name: str, pattern: str, url: str) -> Case:
    return of_url(name, pattern, url, status=403, code="url_not_allowed")


PNG = picture(40, 30)
IMAGES = [
    of_data("truncated png", "trunc|decoded|corrupt", PNG[: len(PNG) // 2], code="image_truncated"),
    of_data("truncated within its header", "within its header", PNG[:20], code="image_truncated"),
    of_data("truncated jpeg", "JPEG", sample("JPEG")[:-200], code="image_truncated"),
    of_data("corrupt pixels", "PNG", png_header(64, 64)),
    of_data("html page", "an HTML page", b"<!DOCTYPE html><html></html>", code="unsupported_image_type"),
    of_data("svg drawing", "an SVG drawing", b"<svg xmlns='x'></svg>", code="unsupported_image_type"),
    of_data("pdf", "a PDF document", b"%PDF-1.7 ....", code="unsupported_image_type"),
    of_data("plain text", "plain text; accepted: .*PNG", b"hello there", code="unsupported_image_type"),
    of_data("random bytes", "unknown data", bytes(range(200, 255)), code="unsupported_image_type"),
    of_data("bomb by header", "50000x50000", png_header(50_000, 50_000), code="image_too_large"),
    of_data("too many pixels", "accepted: at most", png_header(16_000, 16_000), code="image_too_large"),
    of_data("no pixels", "0x8", png_header(0, 8)),
    of_data("a line of pixels", "aspect ratio", sample("PNG", 1000, 2), code="image_too_long"),
    of_data("animated gif", "animated with 3 frames", animation("GIF"), code="image_animated"),
    of_data("animated webp", "animated with 3 frames", animation("WEBP"), code="image_animated"),
    of_data("too many bytes", f"accepted: at most {MAX_IMAGE_BYTES}", PNG + bytes(MAX_IMAGE_BYTES),
         code="image_too_large"),
    of_url("no data", "no data", "data:image/png;base64,"),
    of_url("bad base64", "base64", "data:image/png;base64,@@not*base64@@"),
    of_url("cut base64", "base64", "data:image/png;base64,iVBOR"),
    of_url("not base64 at all", "base64", "data:image/png,rawdata", code="invalid_image_url"),
    of_url("bare base64", "data:image", base64.b64encode(PNG).decode(), code="invalid_image_url"),
    of_url("a path", "accepted: data:image", "/etc/passwd", code="invalid_image_url"),
    of_url("unknown scheme", "scheme 'gopher'", "gopher://example.com/x.png", code="invalid_image_url"),
    of_url("ftp", "scheme 'ftp'", "ftp://example.com/x.png", code="invalid_image_url"),
    of_url("javascript", "scheme 'javascript'", "javascript:alert(1)", code="invalid_image_url"),
    refused_url("file outside the root", "leaves the folder", "file:///etc/passwd"),
    refused_url("file by dots", "leaves the folder", "file://{files}/../secret.png"),
    refused_url("file by encoded dots", "leaves the folder", "file://{files}/%2e%2e/secret.png"),
    refused_url("file by a link", "leaves the folder", "file://{files}/link.png"),
    refused_url("folder as file", "not a regular file", "file://{files}"),
    refused_url("file of another host", "host", "file://example.com/x.png"),
    of_url("no such file", "cannot be read", "file://{files}/none.png", code="image_fetch_failed"),
    refused_url("loopback", "not a public host", "http://127.0.0.1/x.png"),
    refused_url("loopback by name", "not a public host", "http://localhost/x.png"),
    refused_url("loopback v6", "not a public host", "http://[::1]/x.png"),
    refused_url("loopback as a number", "not a public host", "http://2130706433/x.png"),
    refused_url("mapped loopback", "not a public host", "http://[::ffff:127.0.0.1]/x.png"),
    refused_url("metadata service", "not a public host", "http://169.254.169.254/latest/meta-data/"),
    refused_url("private network", "not a public host", "https://10.0.0.1/x.png"),
    refused_url("port", "port 8080", "http://93.184.216.34:8080/x.png"),
    refused_url("credentials", "user name or password", "https://user:pass@example.com/x.png"),
    of_url("url without host", "host", "http:///x.png", code="invalid_image_url"),
    of_url("url with a space", "space", "https://example.com/a b.png", code="invalid_image_url"),
    Case("empty url", "at least 1 character", chat(user(image(""))), URL),
    Case(
        "too many images", f"{MAX_IMAGES + 1} images; accepted: at most {MAX_IMAGES}",
        chat(user(*[image(GOOD)] * (MAX_IMAGES + 1))),
        f"messages[0].content[{MAX_IMAGES}].image_url.url", code="too_many_images",
    ),
    Case(
        "second image is the bad one", "image 1: .*HTML",
        chat(user("look", image(GOOD), image(data_url(b"<html>")))),
        "messages[0].content[2].image_url.url", code="unsupported_image_type",
    ),
    Case("image by a system message", "not in system messages",
         chat({"role": "system", "content": [image(GOOD)]}), "messages[0].content[0]"),
    Case("image by an assistant", "not in assistant messages",
         chat(user("hi"), {"role": "assistant", "content": [text("so"), image(GOOD)]}),
         "messages[1].content[1]"),
    Case("unknown detail", "'low'.*'high'", chat(user(image(GOOD, detail="ultra"))),
         "messages[0].content[0].image_url.detail"),
    Case("max_pixels too small", "max_pixels is 10; .*accepts 1024", chat(user(image(GOOD, max_pixels=10))),
         "max_pixels"),
    Case("max_pixels too large", "max_pixels is 99999999",
         chat(user("hi", image(GOOD)), max_pixels=99_999_999), "max_pixels"),
    Case("max_pixels zero", "greater than or equal to 1", chat(user(image(GOOD, max_pixels=0))),
         "messages[0].content[0].image_url.max_pixels"),
    Case("min_pixels over max_pixels", "min_pixels",
         chat(user(image(GOOD, min_pixels=90_000, max_pixels=5000))), "min_pixels"),
    Case("unknown field of an image", "unknown field .*did you mean 'detail'",
         chat(user(image(GOOD, details="low"))), "messages[0].content[0].image_url.details",
         code="unknown_field"),
    Case("image_url as a list", "must be an object", chat(user({"type": "image_url", "image_url": [GOOD]})),
         "messages[0].content[0].image_url"),
    Case("image without image_url", "image_url is required", chat(user({"type": "image_url"})),
         "messages[0].content[0].image_url", code="missing_field"),
    Case("audio part", "must be one of 'text', 'image_url', .*got 'input_audio'",
         chat(user({"type": "input_audio", "input_audio": {}})), "messages[0].content[0].type"),
]  # fmt: skip
