"""Checks of answers: text, image, stream, a second question about an image, JSON of a schema."""

from __future__ import annotations

import json
import secrets

from fovea.doctor.check import TEXT_ALONE, Check, Verdict, failed, not_applicable, passed, warned
from fovea.doctor.pictures import data_url, png
from fovea.doctor.server import Answer, answer_text, usage
from fovea.doctor.subject import Subject

SIDE = 224
SLOW_S = 0.3
"""Seconds from which on the pieces of a stream should arrive one by one."""
SCHEMA = {
    "type": "object",
    "properties": {"blue": {"type": "boolean"}},
    "required": ["blue"],
    "additionalProperties": False,
}


def text(subject: Subject) -> Verdict:
    """Is a question without an image answered?"""
    answer = subject.server.ask("Say hello.")
    words = answer_text(answer)
    if answer.status != 200 or words is None:
        return _refused(answer)
    return passed(f"{usage(answer).get('completion_tokens', len(words.split()))} tokens")


def image(subject: Subject) -> Verdict:
    """Is a question about an image answered, and are its visual tokens counted?"""
    if not subject.server.takes_images:
        return not_applicable(TEXT_ALONE)
    answer = subject.server.ask("Which colour is this?", [_new_picture()])
    if answer.status != 200 or answer_text(answer) is None:
        return _refused(answer)
    counted = usage(answer)
    prompt, tokens = counted.get("prompt_tokens", 0), counted.get("image_tokens")
    return passed(f"{prompt} prompt tokens" + (f", {tokens} of them visual" if tokens else ""))


def stream(subject: Subject) -> Verdict:
    """Does a stream arrive in pieces, and end?"""
    pieces = 0

    def count() -> None:
        nonlocal pieces
        pieces += 1

    begun = subject.clock()
    answer = subject.server.ask("Count to five.", stream=True, on_data=count)
    seconds = subject.clock() - begun
    body = answer.body.decode(errors="replace")
    if answer.status != 200:
        return _refused(answer)
    if "[DONE]" not in body:
        return failed("no end", "the stream broke off", "read the server's log, and those of proxies")
    events = body.count("data:")
    # The events of a fast answer may come in one piece. The headers are a piece, too.
    if events > 3 and pieces <= 2 and seconds > SLOW_S:
        return warned(
            f"{events} events in one piece after {seconds:.1f} s",
            "a proxy collects the stream, so clients wait for its end",
            "turn off buffering in the proxy: proxy_buffering off",
        )
    return passed(f"{events} events")


def image_cache(subject: Subject) -> Verdict:
    """Does a second question about an image use what the first one computed?"""
    url, server = _new_picture(), subject.server
    if not server.takes_images:
        return not_applicable(TEXT_ALONE)
    first = server.ask("Which colour is this picture?", [url])
    second = server.ask("Which colour is this picture, and why?", [url])
    if first.status != 200 or second.status != 200:
        return _refused(first if first.status != 200 else second)
    counted = usage(second)
    if "cached_tokens" not in counted:
        return not_applicable("the server does not tell how many tokens came from a cache")
    cached, prompt = int(counted["cached_tokens"] or 0), int(counted.get("prompt_tokens", 0))
    figure = f"{cached} of {prompt} prompt tokens came from the cache"
    if not cached:
        return warned(figure, "every question about an image computes it again", "--prefix-cache true")
    return passed(figure)


def schema(subject: Subject) -> Verdict:
    """Is an answer that has to follow a JSON schema valid?"""
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": SCHEMA, "strict": True}}
    answer = subject.server.ask("Is the sky blue? Answer as JSON.", response_format=form, max_tokens=32)
    words = answer_text(answer)
    if answer.status in (400, 422, 501):
        return warned(
            f"status {answer.status}",
            f"the server does not hold answers to a schema: {answer.message}",
            "serve the model with an engine that does: docs/structured-output.md",
        )
    if answer.status != 200 or words is None:
        return _refused(answer)
    try:
        value = json.loads(words)
    except ValueError:
        value = None
    if not isinstance(value, dict) or not isinstance(value.get("blue"), bool):
        return failed(
            words[:60], "the answer does not follow its schema", "start the server with guided decoding"
        )
    return passed(words[:60])


def usage_of_stream(subject: Subject) -> Verdict:
    """Does a stream end with the number of its tokens, by which clients are charged?"""
    answer = subject.server.ask("Say yes.", stream=True, stream_options={"include_usage": True})
    if answer.status != 200:
        return _refused(answer)
    if '"completion_tokens"' not in answer.body.decode(errors="replace"):
        return warned("none", "a gateway cannot charge for streams", "update the server")
    return passed("sent")


def _new_picture() -> str:
    """Return a picture in a colour that was never sent, so that no cache holds it."""
    red, green, blue = secrets.token_bytes(3)
    return data_url(png(SIDE, SIDE, (red, green, blue)))


def _refused(answer: Answer) -> Verdict:
    fix = (
        "give the key: --api-key, or FOVEA_API_KEY"
        if answer.status in (401, 403)
        else "read the server's log"
    )
    return failed(f"status {answer.status}", answer.message or "the answer has no text", fix)


CHECKS = (
    Check("answers", "text", "a question without an image", text),
    Check("answers", "image", "a question about an image", image),
    Check("answers", "stream", "a stream", stream),
    Check("answers", "usage", "tokens of a stream", usage_of_stream),
    Check("answers", "image-cache", "a second question about an image", image_cache),
    Check("answers", "schema", "JSON of a schema", schema),
)
