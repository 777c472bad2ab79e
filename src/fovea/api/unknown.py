"""Fields of a body that the API does not declare: unsupported, misspelt, or unknown.

Clients send fields of other engines. These are ignored, and the answer names them in a header. A field that
would change the answer, and that this server cannot carry out, is accepted without a note if its value is
neutral (`audio: null`), and refused otherwise. A field that looks like a misspelt one of this API is
refused, too: the client would not notice that it had no effect. So is a field that holds a picture: otherwise
the model would answer without seeing the image.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel

from fovea.api.errors import clip
from fovea.api.explain import LONGEST_PATH, misspelt, path_of_extra, unknown_field
from fovea.core.errors import InvalidRequest
from fovea.core.media import Payload

_OFF: tuple[object, ...] = (None, False)
_ZERO: tuple[object, ...] = (None, 0)
_ONE: tuple[object, ...] = (None, 1)
_EMPTY: tuple[object, ...] = (None, "", [], {})
_BEAMS = "beam search is not supported"
_SAMPLER = "this sampling method is not supported"
_FORM = "forms of answers under this name are not supported; send structured_outputs or response_format"
_ADAPTER = "adapters are not supported"
_TEMPLATE = "chat templates and documents of clients are not supported"

UNSUPPORTED: dict[str, tuple[str, tuple[object, ...]]] = {
    # OpenAI and Anthropic
    "functions": ("the older form of tools is not supported; send tools", (None, [])),
    "function_call": ("the older form of tools is not supported; send tool_choice", (None, "none", "auto")),
    "audio": ("audio is not supported", (None,)),
    "modalities": ("only text is produced", (None, ["text"])),
    "web_search_options": ("web search is not supported", (None,)),
    "suffix": ("suffix is not supported", (None, "")),
    "moderation": ("moderation is not supported", (None,)),
    "mcp_servers": ("MCP servers are not supported", _EMPTY),
    "conversation": ("stored conversations are not supported; send previous_response_id", (None,)),
    "prompt": ("stored prompts, and prompts beside messages, are not supported", (None,)),
    # vLLM, Hugging Face, and programs that offer their samplers
    "use_beam_search": (_BEAMS, _OFF),
    "num_beams": (_BEAMS, _ONE),
    "length_penalty": (_BEAMS, _ONE),
    "early_stopping": (_BEAMS, _OFF),
    "best_of": ("best_of outside /v1/completions is not supported", _ONE),
    "echo": ("echo outside /v1/completions is not supported", _OFF),
    "truncate_prompt_tokens": ("shortening prompts is not supported", (None, -1)),
    "truncate": ("shortening prompts is not supported", (None,)),
    "no_repeat_ngram_size": (_SAMPLER, _ZERO),
    "watermark": ("watermarks are not supported", _OFF),
    "typical_p": (_SAMPLER, _ONE),
    "guidance_scale": (_SAMPLER, _ONE),
    "penalty_alpha": (_SAMPLER, _ZERO),
    "epsilon_cutoff": (_SAMPLER, _ZERO),
    "eta_cutoff": (_SAMPLER, _ZERO),
    "encoder_repetition_penalty": (_SAMPLER, _ONE),
    "smoothing_factor": (_SAMPLER, _ZERO),
    "logits_processors": ("code of clients is not supported", _EMPTY),
    "prompt_embeds": ("embeddings as prompts are not supported", _EMPTY),
    "chat_template": (_TEMPLATE, _EMPTY),
    "documents": (_TEMPLATE, _EMPTY),
    "logprob_token_ids": ("log probabilities of chosen tokens are not supported", _EMPTY),
    "return_tokens_as_token_ids": ("ids in place of texts are not supported; send return_token_ids", _OFF),
    "adapter_id": (_ADAPTER, _EMPTY),
    # SGLang and llama.cpp
    "lora_path": (_ADAPTER, _EMPTY),
    "custom_logit_processor": ("code of clients is not supported", _EMPTY),
    "regex": (_FORM, _EMPTY),
    "ebnf": (_FORM, _EMPTY),
    "grammar": (_FORM, _EMPTY),
    "json_schema": (_FORM, _EMPTY),
    "structural_tag": (_FORM, _EMPTY),
    "stop_regex": ("stop strings that are patterns are not supported", _EMPTY),
    "no_stop_trim": ("true is not supported; send include_stop_str_in_output", _OFF),
    "n_predict": ("a limit under this name is not supported; send max_tokens", (None, -1)),
    "num_predict": ("a limit under this name is not supported; send max_tokens", (None, -1)),
    "repeat_penalty": ("a penalty under this name is not supported; send repetition_penalty", _ONE),
    "mirostat": (_SAMPLER, _ZERO),
    "mirostat_mode": (_SAMPLER, _ZERO),
    "dry_multiplier": (_SAMPLER, _ZERO),
    "xtc_probability": (_SAMPLER, _ZERO),
    "dynatemp_range": (_SAMPLER, _ZERO),
    "top_n_sigma": (_SAMPLER, (None, -1)),
    "top_a": (_SAMPLER, _ZERO),
    "tfs_z": (_SAMPLER, _ONE),
}
"""The reason of each refusal, and the neutral values, which are accepted, by the field's name."""


HEADER = "x-fovea-ignored-fields"
"""Header of an answer with the fields of the request that were ignored."""
MOST_NAMED = 16
MOST = 32
"""Most undeclared fields of a body: each is compared with all names of the API."""
SAFE = "[]._-"
HEAD_BYTES = 256
"""Bytes of a string that tell whether it is a picture."""
Head = Callable[[str], bytes]
"""Returns the beginning of a string as UTF-8, with or without JSON's escapes."""
_PARTS = frozenset(("image", "image_url", "input_image", "video", "video_url", "input_video"))
_MEDIA_NAMES = frozenset(
    ("image", "images", "image_url", "image_urls", "img", "picture", "pictures", "photo", "photos", "video",
     "videos", "video_url", "video_urls")
)  # fmt: skip
_MEDIA_TYPES = ("media_type", "mime_type", "mimetype", "content_type", "contenttype")
_DATA_URL = re.compile(rb"\s*data:\s*(?:(image|video)/|[^,]{0,120},)", re.IGNORECASE)
_ADDRESS = re.compile(rb"\s*(?:https?|file|fovea-image)://", re.IGNORECASE)
_BASE64 = re.compile(rb"[A-Za-z0-9+/_-]{32}")
_MAGIC = re.compile(
    rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8[79]a|RIFF....WEBP"
    rb"|BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0|II\*\0|MM\0\*|....ftyp|\x1aE\xdf\xa3",
    re.DOTALL,
)
"""How files of pictures and videos begin, those of formats that are not accepted, too."""


def head_of(text: str) -> bytes:
    """The beginning of a text as UTF-8."""
    return text[:HEAD_BYTES].encode("utf-8", "replace")


def ignored_fields(body: BaseModel, known: Sequence[str], *, strict: bool, head: Head = head_of) -> list[str]:
    """Remove undeclared fields from a validated body, and return the JSON paths of those that are ignored.

    known: names of declared fields, for hints.
    strict: refuse every unknown field.
    head: returns the beginning of a string, in which it may be a placeholder.

    Raises InvalidRequest for a field that is refused.
    """
    ignored: list[str] = []
    for count, (location, value) in enumerate(_extras(body, ())):
        name, path = str(location[-1]), path_of_extra(location)
        if count == MOST:
            raise InvalidRequest(
                f"the body: more than {MOST} unknown fields, such as {path}", code="unknown_field"
            )
        picture = picture_in(value, name, head)
        if picture is not None:
            raise misplaced_picture(path + picture, "messages" in known or "input" in known)
        if name in UNSUPPORTED:
            reason, neutral = UNSUPPORTED[name]
            if value not in neutral:
                accepted = " or ".join(map(json.dumps, neutral))
                raise InvalidRequest(
                    f"{path}: {reason}; accepted: {accepted}", param=path, code="unsupported_field"
                )
            continue
        if strict or misspelt(name, known):
            raise unknown_field(path, known)
        ignored.append(path)
    return ignored


def picture_in(value: Any, name: str, head: Head = head_of) -> str | None:
    """Return the path of the first picture or video in the value of an unknown field; None: there is none.

    A picture is a data: URL of an image, base64 that begins like a file of one, a part of a message, an
    address under a name such as `images`, or a file with the media type of an image. name: of the field.
    """
    if isinstance(value, Payload):
        return ""
    if isinstance(value, str):
        return "" if _is_picture(head(value), name) else None
    if isinstance(value, list):
        inner = ((f"[{index}]", picture_in(entry, name, head)) for index, entry in enumerate(value))
    elif isinstance(value, dict):
        if _is_part(value):
            return ""
        inner = ((f".{key}", picture_in(entry, key, head)) for key, entry in value.items())
    else:
        return None
    return next((f"{place}{rest}" for place, rest in inner if rest is not None), None)


def misplaced_picture(path: str, in_conversations: bool) -> InvalidRequest:
    """The error for a picture in a field that is not read.

    in_conversations: whether the API has messages, which may hold pictures.
    """
    path = clip(path, LONGEST_PATH)
    place = "images in messages of /v1/chat/completions"
    if in_conversations:
        place = "parts of a message's content (image_url, input_image or image)"
    return InvalidRequest(
        f"{path}: this field is not read, and it holds a picture; accepted: {place}",
        param=path,
        code="misplaced_image",
    )


def _is_part(value: dict[Any, Any]) -> bool:
    kind = value.get("type")
    if isinstance(kind, str) and kind in _PARTS and len(value) > 1:
        return True
    kinds = (value[name] for name in value if isinstance(name, str) and name.lower() in _MEDIA_TYPES)
    if any(isinstance(kind, str) and kind.startswith(("image/", "video/")) for kind in kinds):
        return len(value) > 1
    urls = (value.get(name) for name in ("image_url", "video_url"))
    return any(isinstance(url.get("url") if isinstance(url, dict) else None, str | Payload) for url in urls)


def _is_picture(head: bytes, name: str) -> bool:
    """Whether a text that begins so is a picture."""
    head = head.replace(b"\\/", b"/")  # JSON's escape
    match = _DATA_URL.match(head)
    if match is not None and match[1]:
        return True
    if name.lower() in _MEDIA_NAMES and _ADDRESS.match(head):
        return True
    digits = _BASE64.match(head, match.end() if match else 0)
    if digits is None:
        return False
    data = base64.b64decode(digits[0].replace(b"-", b"+").replace(b"_", b"/"))
    return _MAGIC.match(data) is not None


def header(ignored: Sequence[str]) -> str:
    """The value of HEADER. What clients wrote is quoted, so that it cannot contain anything but ASCII."""
    names = [quote(path, safe=SAFE, errors="replace") for path in ignored[:MOST_NAMED]]
    more = len(ignored) - len(names)
    return ", ".join([*names, *([f"and {more} more"] if more else [])])


def _extras(model: BaseModel, at: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the location and value of every undeclared field, and remove it from its model."""
    extras = model.__pydantic_extra__
    if extras:
        for name in list(extras):
            yield (*at, name), extras.pop(name)
    for name, value in model.__dict__.items():
        kind = type(value)
        if value is None or kind is str or kind is bool:  # most values; the check of a class takes longer
            continue
        if isinstance(value, BaseModel):
            yield from _extras(value, (*at, type(model).model_fields[name].alias or name))
        elif kind is list:
            path = (*at, type(model).model_fields[name].alias or name)
            for index, entry in enumerate(value):
                if isinstance(entry, BaseModel):
                    yield from _extras(entry, (*path, index))
