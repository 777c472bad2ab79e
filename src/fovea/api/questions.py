"""Lines of questions and lines of answers, as `fovea batch` reads and writes them.

A question is {"image": "a.png", "question": "..."}; `images` takes several, `params` sampling parameters,
`id` a name. `messages`, instead of a question, takes a whole conversation. An answer has the number and the
id of its question, and a text or an error.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fovea.api.answer_format import FormatFields, answer_format
from fovea.api.convert import usage_body
from fovea.api.errors import error_body
from fovea.api.explain import explained, fields_of
from fovea.api.unknown import ignored_fields
from fovea.core.errors import FoveaError, InvalidImage, InvalidRequest
from fovea.core.json_text import one_line, parse_object
from fovea.core.media import PixelBudget
from fovea.core.types import AnswerBuilder

FIELDS = ("id", "image", "images", "question", "messages", "params")
TYPES: tuple[tuple[str, type, str], ...] = (
    ("image", str, "a path"),
    ("images", list, "a list of paths"),
    ("question", str, "text"),
    ("messages", list, "a list of messages"),
    ("params", dict, "an object of sampling parameters"),
)
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
"""Endings of the names of images in a folder."""


def check_question(value: dict[str, Any]) -> None:
    """Raise InvalidRequest unless the fields are known, compatible and of the right types."""
    unknown = sorted(set(value) - set(FIELDS))
    if unknown:
        raise InvalidRequest(f"unknown field {unknown[0]!r}; known: {', '.join(FIELDS)}", param=unknown[0])
    for one, other in (
        ("question", "messages"),
        ("image", "images"),
        ("image", "messages"),
        ("images", "messages"),
    ):
        if one in value and other in value:
            raise InvalidRequest(f"either {one} or {other}, not both", param=one)
    if "question" not in value and not value.get("messages"):
        raise InvalidRequest("question or messages is required")
    for name, kind, words in TYPES:
        if name in value and not isinstance(value[name], kind):
            raise InvalidRequest(f"{name} takes {words}", param=name)


def sampling_params(params: dict[str, Any]) -> dict[str, Any]:
    """Convert sampling parameters from JSON to the types of SamplingParams. Raises InvalidRequest.

    The form of the answer has the names that it has over HTTP, such as response_format.
    """
    values = dict(params)
    fields = {name: values.pop(name) for name in FormatFields.model_fields if name in values}
    with explained():
        body = FormatFields.model_validate(fields, extra="allow")
        ignored_fields(body, fields_of(FormatFields), strict=True)
        form = answer_format(body)
    if fields:  # also if they ask for plain text, against the flags
        values["format"] = form
    for name, kind in (
        ("stop", str), ("bad_words", str), ("stop_token_ids", int), ("allowed_token_ids", int),
    ):  # fmt: skip
        if name in values:
            entries = [values[name]] if isinstance(values[name], kind) else values[name]
            if not isinstance(entries, list) or not all(isinstance(entry, kind) for entry in entries):
                raise InvalidRequest(f"{name} takes a list of {kind.__name__}", param=name)
            values[name] = tuple(entries)
    if "logit_bias" in values:
        try:
            values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
        except (AttributeError, ValueError) as error:
            raise InvalidRequest("logit_bias takes an object of token ids", param="logit_bias") from error
    return values


def write_body(body: Mapping[str, Any]) -> bytes:
    """A line of OUT. A JSON string may contain a lone surrogate, which is written as its JSON escape."""
    return one_line(json.dumps(body, ensure_ascii=False)).encode("utf-8", "backslashreplace") + b"\n"


class Stopped(Exception):
    """No question can be answered any more, such as because no engine can be reached.

    The message says why. It is an error of the run, and of no line.
    """


def parse_question(line: bytes, prompt: str | None) -> dict[str, Any]:
    """Return the checked fields of a line. Raises InvalidRequest.

    prompt: the question of lines that have none.
    """
    value = parse_object(line)
    if prompt is not None and "messages" not in value:
        value.setdefault("question", prompt)
    check_question(value)
    return value


def image_names(value: Mapping[str, Any]) -> list[Any]:
    """Return the names of the images of a question without messages."""
    return list(value.get("images", [value["image"]] if "image" in value else []))


def map_images(messages: Sequence[Any], replace: Callable[[Any], Mapping[str, Any]]) -> list[Any]:
    """Replace the image parts of messages. What has another form stays, so that the engine can refuse it.

    replace: returns the new fields of a part, from its field `image`.
    """
    return [_map_message(message, replace) for message in messages]


def _map_message(message: Any, replace: Callable[[Any], Mapping[str, Any]]) -> Any:
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    parts = [
        {**{key: part[key] for key in part if key != "image"}, **replace(part["image"])}
        if isinstance(part, dict) and "image" in part
        else part
        for part in message["content"]
    ]
    return {**message, "content": parts}


async def answer_line(
    number: int, line: bytes, prompt: str | None, ask: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    """Return the body of the answer to a line, or of its error. One line's error does not stop the others.

    number: of the line, from 1 on. ask: returns text, finish_reason and usage for the fields of a question.
    Raises Stopped if `ask` does.
    """
    head: dict[str, Any] = {"line": number, "id": number}
    try:
        head["id"] = parse_object(line).get("id", number)
        return {**head, **await ask(parse_question(line, prompt))}
    except Stopped:
        raise
    except FoveaError as error:
        return {**head, **error_body(error)}
    except Exception as error:  # noqa: BLE001 - one bad line does not stop the rest
        return {**head, **error_body(InvalidRequest(f"{type(error).__name__}: {error}"))}


class LineRunner:
    """Turns a line of questions into a line of answers, with an engine of this process.

    images: returns an image, in a form that the engine takes, for its name in a line. Raises InvalidImage.
    params: sampling parameters of the flags.
    budget: image budget of the flags.
    prompt: the question of lines that have none; None: they are errors.
    """

    def __init__(
        self,
        engine: Any,
        images: Callable[[str], Any],
        params: dict[str, Any],
        budget: PixelBudget,
        prompt: str | None = None,
    ) -> None:
        self._engine = engine
        self._images = images
        self._params = params
        self._budget = budget
        self._prompt = prompt

    async def answer(self, number: int, line: bytes) -> dict[str, Any]:
        """Return the answer to a line, or its error."""
        return await answer_line(number, line, self._prompt, self._ask)

    async def _ask(self, value: dict[str, Any]) -> dict[str, Any]:
        request = await asyncio.to_thread(self._request, value)
        answer = AnswerBuilder(request.sampling.n)
        async for delta in self._engine.stream(request):
            answer.add(delta)
        done = answer.build()
        usage = usage_body(done.usage).model_dump()
        return answer_body(list(done.texts), list(done.finish_reasons), usage)

    def _request(self, value: dict[str, Any]) -> Any:
        params = {**self._params, **sampling_params(value.get("params", {}))}
        opener = ImageOpener(self._images)
        if "messages" in value:
            messages = map_images(value["messages"], lambda name: {"image": opener.open(name)})
            return self._engine.request(messages, budget=self._budget, **params)
        images = [opener.open(name) for name in image_names(value)]
        return self._engine.request(value["question"], images, budget=self._budget, **params)


def answer_body(texts: list[str | None], reasons: list[str | None], usage: Any) -> dict[str, Any]:
    """Return the fields of an answer: those of one text, or of several."""
    if len(texts) == 1:
        return {"text": texts[0], "finish_reason": reasons[0], "usage": usage}
    return {"texts": texts, "finish_reasons": reasons, "usage": usage}


class ImageOpener:
    """Opens the images of one question in their order, so that an error can name the image's index."""

    def __init__(self, images: Callable[[str], Any]) -> None:
        self._images = images
        self._count = 0

    def open(self, name: Any) -> Any:
        """Return the next image.

        Raises InvalidRequest for a name that is no text, and InvalidImage with the image's index.
        """
        if not isinstance(name, str):
            raise InvalidRequest(
                f"an image is {name!r}; accepted: the path of a file, as a string", param="image"
            )
        index, self._count = self._count, self._count + 1
        try:
            return self._images(name)
        except InvalidImage as error:
            raise error.at(index) from error
