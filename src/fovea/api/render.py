"""The answer of a render: the prompt of a request as token ids, in the form that vLLM's renders have.

Routers (llm-d) read `token_ids` and `features`, and find by them the engine whose caches know the prompt.
"""

from __future__ import annotations

from typing import Any

from fovea.api.schema import Sampling
from fovea.core.json_text import dump
from fovea.core.sampling import SamplingParams
from fovea.core.types import GenerationRequest, Rendered, RenderedSpan

_SAMPLING = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k",
    "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "prompt_logprobs",
    "skip_special_tokens", "include_stop_str_in_output",
)  # fmt: skip
"""Sampling parameters with the names that vLLM gives them, too."""


def render_body(
    prefix: str, body: Sampling, model: str, request: GenerationRequest, rendered: Rendered
) -> str:
    """Return the answer for one prompt as JSON.

    prefix: beginning of its id, by the route.
    body: of a chat or completion request; for Messages, converted from what the client sent.
    """
    first = dump({"request_id": f"{prefix}-{request.id}"})
    rest = {
        "features": _features(rendered.spans),
        "sampling_params": _sampling(request.sampling, rendered.max_tokens),
        "model": model,
        "stream": bool(body.stream),
        "cache_salt": body.cache_salt,
        "priority": body.priority or 0,
    }
    return f'{first[:-1]},"token_ids":[{ids_text(rendered)}],{dump(rest)[1:]}'


def ids_text(rendered: Rendered) -> str:
    """Return token ids in decimal, with commas between them.

    An image is the same id a thousand times, which is written once and repeated.
    """
    ids, done, parts = rendered.ids, 0, list[str]()
    for span in rendered.spans:
        parts.append(",".join(map(str, ids[done : span.offset])))
        done = span.offset + span.length
        inside = ids[span.offset : done]
        if inside.count(inside[0]) == len(inside):
            parts.append((f"{inside[0]}," * len(inside))[:-1])
        else:  # text stands between the rows of the image
            parts.append(",".join(map(str, inside)))
    parts.append(",".join(map(str, ids[done:])))
    return ",".join(filter(None, parts))


def _features(spans: tuple[RenderedSpan, ...]) -> dict[str, Any] | None:
    """Return names and places of images and of groups of frames; None: there are none."""
    if not spans:
        return None
    hashes: dict[str, list[str]] = {}
    places: dict[str, list[dict[str, int]]] = {}
    for span in spans:
        hashes.setdefault(span.kind, []).append(span.name)
        places.setdefault(span.kind, []).append({"offset": span.offset, "length": span.length})
    return {"mm_hashes": hashes, "mm_placeholders": places, "kwargs_data": None}


def _sampling(params: SamplingParams, max_tokens: int) -> dict[str, Any]:
    """Return sampling parameters by vLLM's names. What a format demands of the answer is left out."""
    values: dict[str, Any] = {name: getattr(params, name) for name in _SAMPLING}
    return {
        **values,
        "max_tokens": max_tokens,
        "logprobs": params.top_logprobs if params.logprobs else None,
        "logit_bias": dict(params.logit_bias) or None,
        "allowed_token_ids": list(params.allowed_token_ids) or None,
        "bad_words": list(params.bad_words),
    }
