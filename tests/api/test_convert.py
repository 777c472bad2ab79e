"""Conversion of requests to core values, and of token counts and timings to wire models."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from fovea.api.convert import (
    chat_prompt,
    completion_prompts,
    image_references,
    sampling,
    timings_body,
    usage_body,
    wire_names,
)
from fovea.api.schema import ChatRequest, CompletionRequest, TokenizeRequest
from fovea.core.errors import InvalidRequest, PromptTooLong
from fovea.core.media import Image, PixelBudget
from fovea.core.sampling import SamplingParams
from fovea.core.types import ImagePart, Message, StageTimings, TextPart, TextPrompt, TokenPrompt, Usage
from fovea.gateway.translate.chat_reader import usage_of

PIXEL = Image("0" * 64, 1, 1, b"rgb")
OTHER = Image("1" * 64, 1, 1, b"bgr")


def chat(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": messages or [{"role": "user", "content": "hi"}], **fields})


def image(url: str = "x:", **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def complete(prompt: Any, **fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": prompt, **fields})


def test_api_does_not_import_torch() -> None:
    code = "import sys, fovea.api.convert, fovea.api.completion_bodies; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_image_references_are_in_order_and_have_json_paths() -> None:
    body = chat(
        {"role": "user", "content": [image("a:"), text("and"), image("b:")]},
        {"role": "assistant", "content": "so"},
        {"role": "user", "content": [text("then"), image("c:")]},
    )
    assert [(reference.url, reference.param) for reference in image_references(body.messages)] == [
        ("a:", "messages[0].content[0].image_url.url"),
        ("b:", "messages[0].content[2].image_url.url"),
        ("c:", "messages[2].content[1].image_url.url"),
    ]


def test_images_replace_their_references() -> None:
    body = chat(
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [image(), text("and"), image()]},
    )
    assert chat_prompt(body, [PIXEL, OTHER]).messages == (
        Message("system", (TextPart("be brief"),)),
        Message("user", (ImagePart(PIXEL), TextPart("and"), ImagePart(OTHER))),
    )


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_images_are_accepted_only_from_users(role: str) -> None:
    body = chat({"role": role, "content": [text("see"), image()]})
    with pytest.raises(InvalidRequest, match=f"not in {role} messages") as caught:
        chat_prompt(body, [PIXEL])
    assert caught.value.param == "messages[0].content[1]"


@pytest.mark.parametrize("content", [None, []])
def test_message_needs_content(content: Any) -> None:
    with pytest.raises(InvalidRequest, match="needs content") as caught:
        chat_prompt(chat({"role": "user", "content": content}), [])
    assert caught.value.param == "messages[0].content"


REFUSALS: list[dict[str, Any]] = [
    {"content": None, "refusal": "No."},
    {"content": "", "refusal": "No."},
    {"refusal": "No.", "annotations": []},
    {"content": [{"type": "refusal", "refusal": "No."}]},
    {"content": [{"type": "text", "text": "No."}], "refusal": None},
]


@pytest.mark.parametrize("fields", REFUSALS, ids=str)
def test_a_refusal_is_what_the_assistant_said(fields: dict[str, Any]) -> None:
    """Clients send OpenAI's refusals back as they came; these requests once failed for want of content."""
    prompt = chat_prompt(chat({"role": "assistant", **fields}), [])
    [message] = prompt.messages
    assert "".join(part.text for part in message.parts if isinstance(part, TextPart)) == "No."


def test_only_the_assistant_refuses() -> None:
    part = {"type": "refusal", "refusal": "No."}
    with pytest.raises(InvalidRequest, match="in messages of the assistant, not in those of user") as caught:
        chat_prompt(chat({"role": "user", "content": [{"type": "text", "text": "a"}, part]}), [])
    assert caught.value.param == "messages[0].content[1]"
    with pytest.raises(InvalidRequest, match="needs content"):
        chat_prompt(chat({"role": "user", "content": None, "refusal": "No."}), [])


def test_budget_of_an_image_overrides_that_of_the_request() -> None:
    body = chat(
        {"role": "user", "content": [image(max_pixels=9, detail="low"), image(), image(min_pixels=2)]},
        max_pixels=5,
        min_pixels=1,
    )
    (message,) = chat_prompt(body, [PIXEL] * 3).messages
    assert [part.budget for part in message.parts if isinstance(part, ImagePart)] == [
        PixelBudget("low", 1, 9),
        PixelBudget("auto", 1, 5),
        PixelBudget("auto", 2, 5),
    ]


def test_a_detail_of_null_or_original_is_accepted() -> None:
    """Clients send null for no choice. OpenAI's "original" is the most that an image can get: high."""
    body = chat({"role": "user", "content": [image(detail=None), image(detail="original")]})
    (message,) = chat_prompt(body, [PIXEL] * 2).messages
    assert [part.budget.detail for part in message.parts if isinstance(part, ImagePart)] == ["auto", "high"]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [TextPrompt("a")]),
        (["a", "b"], [TextPrompt("a"), TextPrompt("b")]),
        ([1, 2], [TokenPrompt((1, 2))]),
        ([[1], [2, 3]], [TokenPrompt((1,)), TokenPrompt((2, 3))]),
    ],
)
def test_completion_prompts(prompt: Any, expected: list[Any]) -> None:
    assert completion_prompts(complete(prompt)) == expected


def test_omitted_fields_have_the_checkpoints_defaults() -> None:
    assert sampling(chat(), {"temperature": 0.6, "top_k": 20}) == SamplingParams(temperature=0.6, top_k=20)
    assert sampling(chat(temperature=0, top_k=0), {"temperature": 0.6, "top_k": 20}) == SamplingParams(
        temperature=0, top_k=0
    )


def test_every_sampling_field_is_converted() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "seed": 7,
        "presence_penalty": 0.3, "frequency_penalty": 0.4, "max_tokens": 9, "min_tokens": 2, "n": 3,
        "logprobs": True, "top_logprobs": 4, "ignore_eos": True, "skip_special_tokens": False,
    }  # fmt: skip
    lists: dict[str, Any] = {"stop": ["a", "b"], "stop_token_ids": [1, 2], "logit_bias": {"3": -1.5, "4": 2}}
    expected = SamplingParams(**fields, stop=("a", "b"), stop_token_ids=(1, 2), logit_bias={3: -1.5, 4: 2.0})
    assert sampling(chat(**fields, **lists), {}) == expected


def test_null_means_omitted() -> None:
    nulls = {
        "n": None,
        "temperature": None,
        "stream": None,
        "stop": None,
        "logprobs": None,
        "max_tokens": None,
    }
    assert sampling(chat(**nulls), {"temperature": 0.6}) == SamplingParams(temperature=0.6)


def test_single_stop_string() -> None:
    assert sampling(chat(stop="end"), {}).stop == ("end",)


def test_max_completion_tokens_is_max_tokens() -> None:
    assert sampling(chat(max_completion_tokens=5), {}).max_tokens == 5
    assert sampling(chat(max_completion_tokens=5, max_tokens=5), {}).max_tokens == 5
    with pytest.raises(InvalidRequest, match="differ"):
        sampling(chat(max_completion_tokens=5, max_tokens=6), {})


def test_logprobs_of_completions() -> None:
    assert sampling(complete("a"), {}).max_tokens is None, "the engine applies the default of the route"
    assert sampling(complete("a"), {}).logprobs is False
    assert sampling(complete("a", logprobs=0), {}).logprobs is True
    assert sampling(complete("a", logprobs=3, max_tokens=1), {}) == SamplingParams(
        logprobs=True, top_logprobs=3, max_tokens=1
    )


@pytest.mark.parametrize("key", ["", "five", "--5", "5.0", " 5", "٣", "²", "+5", "9" * 5000])
def test_logit_bias_needs_token_ids(key: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a token id") as caught:
        sampling(chat(logit_bias={key: 1}), {})
    assert len(caught.value.message) < 200


def test_stream_options_need_a_stream() -> None:
    with pytest.raises(InvalidRequest, match="stream: true"):
        sampling(chat(stream_options={"include_usage": True}), {})
    sampling(chat(stream_options={"include_usage": True}, stream=True), {})


@pytest.mark.parametrize(
    ("body", "error", "param", "message"),
    [
        (complete("a"), InvalidRequest("text is bad", param="text"), "prompt", "prompt is bad"),
        (complete("a"), PromptTooLong("too long", param="messages"), "prompt", "too long"),
        (complete("a"), InvalidRequest("n is bad", param="n"), "n", "n is bad"),
        (TokenizeRequest(prompt="a"), InvalidRequest("x", param="text"), "prompt", "x"),
        (chat(), PromptTooLong("too long", param="messages"), "messages", "too long"),
        (
            chat(max_tokens=9),
            PromptTooLong("max_tokens is 9", param="max_tokens"),
            "max_tokens",
            "max_tokens is 9",
        ),
        (
            chat(max_completion_tokens=9),
            PromptTooLong("max_tokens is 9", param="max_tokens"),
            "max_completion_tokens",
            "max_completion_tokens is 9",
        ),
        (chat(), InvalidRequest("all wrong"), None, "all wrong"),
    ],
)
def test_errors_name_the_field_that_was_sent(
    body: Any, error: InvalidRequest, param: str | None, message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught, wire_names(body):
        raise error
    assert (caught.value.param, caught.value.message) == (param, message)


def test_usage_and_timings() -> None:
    assert usage_body(Usage(10, 5, 8, 4)).model_dump() == {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 8, "image_tokens": 4, "dropped_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
            "draft_tokens": 0,
            "accepted_draft_tokens": 0,
        },
    }
    drafted = Usage(10, 5, drafts=9, accepted_drafts=4, accepted_prediction=3, rejected_prediction=2)
    assert usage_body(drafted).completion_tokens_details.model_dump() == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 3,
        "rejected_prediction_tokens": 2,
        "draft_tokens": 9,
        "accepted_draft_tokens": 4,
    }
    assert usage_of(usage_body(drafted).model_dump()) == drafted, "a gateway reads what a server writes"
    timings = timings_body(StageTimings(fetch=0.0012345, media_decode=0.5, ttft=2))
    assert (timings["fetch"], timings["media_decode"], timings["ttft"], timings["decode"]) == (
        1.234,
        500,
        2000,
        0,
    )
