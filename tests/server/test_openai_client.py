"""The public `openai` client against a real server: the behaviour on which its users rely."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from fovea import Engine
from fovea.media.limits import MediaLimits
from fovea.server.settings import ServerSettings
from tests.server.conftest import REMOTE, Web
from tests.server.support import Server, data_url, image, picture, running, user

MODEL = "tiny"
GREEDY: dict[str, Any] = {
    "model": MODEL,
    "temperature": 0,
    "max_tokens": 24,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, *messages: Any, **extra: Any) -> Any:
    return client.chat.completions.create(messages=list(messages), **{**GREEDY, **extra})


def visual_tokens(client: openai.OpenAI, url: str, **extra: Any) -> int:
    part = image(url, **extra)
    return int(ask(client, user(part), max_tokens=1).usage.prompt_tokens_details.image_tokens)


def test_complete_chat_answer(client: openai.OpenAI) -> None:
    answer = ask(client, user(image(data_url(picture())), "what is it?"))
    choice = answer.choices[0]
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24
    assert answer.usage.prompt_tokens_details.image_tokens == 6  # 96x64 in windows of 32
    assert answer.usage.prompt_tokens > 6


def test_stream_equals_the_complete_answer(client: openai.OpenAI) -> None:
    message = user(image(data_url(picture(seed=1))), "what is it?")
    whole = ask(client, message)
    chunks = list(ask(client, message, stream=True, stream_options={"include_usage": True}))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert choices[0].delta.role == "assistant"
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 24
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_stream_has_usage_only_on_request(client: openai.OpenAI) -> None:
    chunks = list(ask(client, user("and here?"), stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


async def test_async_client(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        message = user(image(data_url(picture(seed=2))), "what is it?")
        whole = await client.chat.completions.create(messages=[message], **GREEDY)
        stream = await client.chat.completions.create(messages=[message], stream=True, **GREEDY)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == whole.choices[0].message.content


def test_identical_request_reuses_the_prefix(client: openai.OpenAI) -> None:
    message = user(image(data_url(picture(128, 128, seed=3))), "describe the picture, please. " * 4)
    first, second = ask(client, message), ask(client, message)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens > 16
    assert second.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens
    assert second.choices[0].message.content == first.choices[0].message.content


def test_different_salts_share_no_prefix(client: openai.OpenAI) -> None:
    message = user("a secret that two tenants happen to share. " * 4)
    usages = [
        ask(client, message, extra_body={"cache_salt": salt}).usage.prompt_tokens_details.cached_tokens
        for salt in ("one", "two", "one")
    ]
    assert usages[:2] == [0, 0]
    assert usages[2] > 0


def test_two_choices(client: openai.OpenAI) -> None:
    answer = ask(client, user("what is it?"), n=2, temperature=1.0, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    assert answer.usage.completion_tokens == 48
    streamed = {0: "", 1: ""}
    for chunk in ask(client, user("what is it?"), n=2, temperature=1.0, seed=5, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == {choice.index: choice.message.content for choice in answer.choices}


def test_seed_makes_answers_repeatable(client: openai.OpenAI) -> None:
    def texts(**extra: Any) -> set[str]:
        answers = [ask(client, user("what is it?"), temperature=1.0, **extra) for _ in range(2)]
        return {answer.choices[0].message.content for answer in answers}

    assert len(texts(seed=11)) == 1
    assert len(texts()) == 2
    assert texts(seed=11) != texts(seed=12)


def test_logprobs(client: openai.OpenAI) -> None:
    answer = ask(client, user("what is it?"), logprobs=True, top_logprobs=3, max_tokens=5)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 5
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        ranked = [top.logprob for top in entry.top_logprobs]
        assert ranked == sorted(ranked, reverse=True)
        assert entry.logprob == ranked[0] <= 0  # greedy picks the most likely
        # A special token, which this random model writes, is not part of the text.
        assert bytes(entry.bytes).decode(errors="replace") == (
            "" if entry.token[:5] == "<row_" else entry.token
        )
    text = b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace")
    assert text == answer.choices[0].message.content
    streamed = ask(client, user("what is it?"), logprobs=True, top_logprobs=3, max_tokens=5, stream=True)
    again = [entry for chunk in streamed for entry in (chunk.choices[0].logprobs or NoLogprobs).content]
    assert [entry.token for entry in again] == [entry.token for entry in entries]
    assert ask(client, user("what is it?"), max_tokens=1).choices[0].logprobs is None


class NoLogprobs:
    """Stands for the log probabilities of a chunk that has none."""

    content: tuple[Any, ...] = ()


def test_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    whole = ask(client, user("what is it?")).choices[0].message.content
    stop = whole[8:11]
    cut = ask(client, user("what is it?"), stop=[stop, "never said"])
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].message.content == whole[: whole.index(stop)]
    streamed = ask(client, user("what is it?"), stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == whole[: whole.index(stop)]


def test_max_completion_tokens(client: openai.OpenAI) -> None:
    answer = ask(client, user("what is it?"), max_tokens=openai.omit, max_completion_tokens=3)
    assert answer.usage.completion_tokens == 3


def test_answer_can_be_sent_back_unchanged(client: openai.OpenAI) -> None:
    """Clients continue a conversation with `messages.append(answer.choices[0].message)`."""
    first = ask(client, user("what is it?"))
    second = ask(client, user("what is it?"), first.choices[0].message, user("sure?"))
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_developer_role_equals_system(client: openai.OpenAI) -> None:
    texts = [
        ask(client, {"role": role, "content": "describe the circle"}, user("now")).choices[0].message.content
        for role in ("developer", "system")
    ]
    assert texts[0] == texts[1]


def test_models(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "fovea"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-9")
    assert caught.value.code == "model_not_found"


def test_completions(client: openai.OpenAI) -> None:
    plain = client.completions.create(prompt="the red circle", **GREEDY)
    assert plain.object == "text_completion"
    several = client.completions.create(prompt=["the red circle", "the blue square"], n=2, **GREEDY)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text == plain.choices[0].text
    assert several.choices[2].text != plain.choices[0].text
    assert several.usage.completion_tokens == 4 * 24
    pieces = client.completions.create(prompt="the red circle", stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in pieces) == plain.choices[0].text


def test_completions_of_token_ids(client: openai.OpenAI, server: Server) -> None:
    ids = server.post("/tokenize", {"prompt": "the red circle"}).json()["tokens"]
    by_text = client.completions.create(prompt="the red circle", **GREEDY)
    by_ids = client.completions.create(prompt=ids, **GREEDY)
    by_lists = client.completions.create(prompt=[ids, ids], **GREEDY)
    assert by_ids.choices[0].text == by_text.choices[0].text
    assert [choice.text for choice in by_lists.choices] == [by_text.choices[0].text] * 2
    assert by_ids.usage.prompt_tokens == len(ids)


def test_completions_have_sixteen_tokens_by_default(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        prompt="the", model=MODEL, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 16


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt="the red circle", logprobs=2, **{**GREEDY, "max_tokens": 3})
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 3
    assert [len(top) for top in logprobs.top_logprobs] == [2, 2, 2]


def test_several_images_in_several_messages(client: openai.OpenAI) -> None:
    first, second, third = (data_url(picture(64, 64, seed)) for seed in (21, 22, 23))
    turns = [
        user(image(first), "and", image(second), "compare them"),
        {"role": "assistant", "content": "the circle is red"},
        user("and this?", image(third)),
    ]
    answer = ask(client, *turns)
    assert answer.usage.prompt_tokens_details.image_tokens == 3 * 4
    swapped = [user(image(second), "and", image(first), "compare them"), *turns[1:]]
    assert ask(client, *swapped).choices[0].message.content != answer.choices[0].message.content


def test_different_images_share_no_prefix(client: openai.OpenAI) -> None:
    """The two requests have the same text and image size. Only the pixels differ."""
    words = "what is in the image? " * 8
    first = ask(client, user(image(data_url(picture(160, 160, seed=31))), words))
    second = ask(client, user(image(data_url(picture(160, 160, seed=32))), words))
    assert first.usage.prompt_tokens == second.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens == 0
    assert first.choices[0].message.content != second.choices[0].message.content


def test_one_image_from_three_sources_is_encoded_once(client: openai.OpenAI, server: Server) -> None:
    data = (server.files / "picture.png").read_bytes()
    ask(client, user(image(data_url(data)), "what is it?"))
    encoded = server.metrics()["fovea:images_encoded_total"]
    by_file = ask(client, user("look:", image((server.files / "picture.png").as_uri())))
    by_data = ask(client, user("look:", image(data_url(data, "image/x-misnamed"))))
    assert by_file.choices[0].message.content == by_data.choices[0].message.content
    assert server.metrics()["fovea:images_encoded_total"] == encoded


def test_ten_questions_about_a_new_image_compute_it_once(client: openai.OpenAI, server: Server) -> None:
    """They arrive together. Nine wait until the first has computed the image, its KV included."""
    url, before = data_url(picture(160, 160, seed=71)), server.metrics()["fovea:images_encoded_total"]
    messages = [user(image(url), f"question {number}?") for number in range(10)]
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda message: ask(client, message, max_tokens=2), messages))
    assert server.metrics()["fovea:images_encoded_total"] == before + 1
    details = [answer.usage.prompt_tokens_details for answer in answers]
    assert sum(detail.cached_tokens < detail.image_tokens for detail in details) == 1


def test_images_from_private_hosts_if_allowed(engine: Engine, files: Path, web: Web) -> None:
    settings = ServerSettings(media=replace(MediaLimits(), allow_private_hosts=True))
    with (
        running(engine, settings, files) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        by_url = ask(client, user(image(f"{web.url}/one.png"), "what is it?"))
        encoded = server.metrics()["fovea:images_encoded_total"]
        by_other_url = ask(client, user(image(f"{web.url}/two.png?size=full"), "what is it?"))
        by_data = ask(client, user(image(data_url(REMOTE)), "what is it?"))
        assert by_url.choices[0].message.content == by_data.choices[0].message.content
        assert by_other_url.choices[0].message.content == by_data.choices[0].message.content
        assert server.metrics()["fovea:images_encoded_total"] == encoded
        assert by_data.usage.prompt_tokens_details.cached_tokens > 0


def test_detail_levels(client: openai.OpenAI) -> None:
    large = data_url(picture(480, 448, seed=51))
    tokens = {detail: visual_tokens(client, large, detail=detail) for detail in ("low", "auto", "high")}
    assert tokens["high"] == tokens["auto"] == 15 * 14
    assert tokens["low"] <= 64
    small = data_url(picture(64, 64, seed=52))
    assert visual_tokens(client, small, detail="low") == visual_tokens(client, small, detail="high")


def test_answer_reports_the_detail_of_each_image(client: openai.OpenAI) -> None:
    messages = [
        user(image(data_url(picture(480, 448, seed=51)), detail="low"), image(data_url(REMOTE)), "what?")
    ]
    whole = ask(client, messages[0], max_tokens=2)
    first, second = whole.model_extra["fovea"]["images"]
    assert (first["detail"], first["reason"]) == ("low", "the request sets the detail level")
    assert second["detail"] == "high"
    tokens = first["visual_tokens"] + second["visual_tokens"]
    assert tokens == whole.usage.prompt_tokens_details.image_tokens
    stream = ask(client, messages[0], max_tokens=2, stream=True)
    extensions = [chunk.model_extra["fovea"] for chunk in stream if "fovea" in (chunk.model_extra or {})]
    assert [extension["images"] for extension in extensions] == [[first, second]]
    assert extensions[0]["timings_ms"]["ttft"] > 0


def test_max_pixels(client: openai.OpenAI) -> None:
    large = data_url(picture(480, 448, seed=53))
    assert visual_tokens(client, large, max_pixels=32 * 32 * 20) <= 20
    assert visual_tokens(client, large, max_pixels=32 * 32) == 1
    of_request = ask(client, user(image(large)), max_tokens=1, extra_body={"max_pixels": 32 * 32 * 9})
    assert of_request.usage.prompt_tokens_details.image_tokens <= 9
    both = ask(
        client,
        user(image(large, max_pixels=32 * 32 * 30)),
        max_tokens=1,
        extra_body={"max_pixels": 32 * 32 * 9},
    )
    assert 9 < both.usage.prompt_tokens_details.image_tokens <= 30


def test_min_pixels(client: openai.OpenAI) -> None:
    tiny = data_url(picture(40, 40, seed=54))
    assert visual_tokens(client, tiny, min_pixels=32 * 32 * 50) >= 50 > visual_tokens(client, tiny)


@pytest.mark.parametrize("budget", [{}, {"max_pixels": 32 * 32 * 5}], ids=["plain", "budget"])
def test_tokenize_counts_like_chat(client: openai.OpenAI, server: Server, budget: dict[str, int]) -> None:
    messages = [user(image(data_url(picture(200, 150, seed=61)), detail="low"), "what is it?")]
    tokenized = server.post("/tokenize", {"messages": messages, **budget}).json()
    billed = ask(client, *messages, extra_body=budget).usage.prompt_tokens
    assert tokenized["count"] == len(tokenized["tokens"]) == billed
    assert tokenized["max_model_len"] == 4096


def test_errors_become_the_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, user("hello"), temperature=9)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        ask(client, user("hello"), model="gpt-9")
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, user(image("data:image/png;base64,AAAA")), stream=True)
    assert caught.value.param == "messages[0].content[0].image_url.url"
