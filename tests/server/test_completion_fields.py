"""Fields of /v1/completions that other engines have, too: echo, best_of, token ids, running counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers as hf

from fovea.core.types import Delta, StageTimings, Usage
from fovea.server.app import create_app
from tests.server.scripted import Script
from tests.server.support import Json, Server, chat, data_url, image, picture, user

PATH = "/v1/completions"
PROMPT = "the red circle"
BODY: Json = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
KNOWN: Json = {"allowed_token_ids": list(range(60, 300))}
"""Keeps to tokens of the tokenizer: the random model has some more."""


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(server: Server, **extra: Any) -> Json:
    answer = server.post(PATH, {**BODY, **extra})
    assert answer.status_code == 200, answer.text
    body: Json = answer.json()
    return body


def choice(server: Server, **extra: Any) -> Json:
    [first] = complete(server, **extra)["choices"]
    return dict(first)


def stream(server: Server, path: str = PATH, **extra: Any) -> list[Json]:
    body = {**(BODY if path == PATH else chat()), **extra, "stream": True}
    lines = server.post(path, body).text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def error(server: Server, path: str = PATH, **extra: Any) -> Json:
    answer = server.post(path, {**(BODY if path == PATH else chat()), **extra})
    assert answer.status_code == 400, answer.text
    return dict(answer.json()["error"])


def test_a_request_chooses_what_it_keeps_and_is_told_what_was_left_out(server: Server) -> None:
    long = {"prompt": PROMPT * 20}
    details = complete(server, **long, kv_keep="snap:0.5")["usage"]["prompt_tokens_details"]
    assert details["dropped_tokens"] > 20
    assert complete(server, **long)["usage"]["prompt_tokens_details"]["dropped_tokens"] == 0
    for path in (PATH, "/v1/chat/completions"):
        wrong = error(server, path, kv_keep="snop:0.5")
        assert wrong["param"] == "kv_keep"
        assert "did you mean 'snap'?" in wrong["message"]


def test_echo_puts_the_prompt_before_the_text(server: Server) -> None:
    plain, echoed = choice(server), choice(server, echo=True)
    assert echoed["text"] == PROMPT + plain["text"]
    two = complete(server, echo=True, n=2, prompt=[PROMPT, "a"])["choices"]
    assert [one["text"].startswith(start) for one, start in zip(two, (PROMPT, PROMPT, "a", "a"), strict=True)]
    assert [one["index"] for one in two] == [0, 1, 2, 3]


def test_echo_of_token_ids_is_their_text(server: Server) -> None:
    ids = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    assert choice(server, prompt=ids, echo=True) == choice(server, echo=True)


def test_prompt_alone_can_be_scored(server: Server) -> None:
    """Evaluation harnesses ask so for the log probabilities of a text: echo, logprobs, and no new tokens."""
    body = complete(server, echo=True, logprobs=2, max_tokens=0)
    [scored] = body["choices"]
    logprobs = scored["logprobs"]
    assert scored["text"] == PROMPT == "".join(logprobs["tokens"])
    assert body["usage"]["completion_tokens"] == 0
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] == len(logprobs["tokens"])
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert all(len(top) >= 2 for top in logprobs["top_logprobs"][1:])
    starts = [PROMPT[offset:] for offset in logprobs["text_offset"]]
    assert all(rest.startswith(token) for rest, token in zip(starts, logprobs["tokens"], strict=True))


def test_scores_of_a_prompt_are_those_of_the_same_text_as_an_answer(server: Server) -> None:
    ids = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    written = choice(server, prompt=ids, logprobs=1, return_token_ids=True, **KNOWN)
    whole = choice(server, prompt=ids + written["token_ids"], logprobs=1, echo=True, max_tokens=0)
    again = whole["logprobs"]["token_logprobs"][len(ids) :]
    assert again == pytest.approx(written["logprobs"]["token_logprobs"], abs=1e-3)
    echoed = choice(server, prompt=ids, logprobs=1, echo=True, **KNOWN)["logprobs"]
    assert echoed["tokens"] == whole["logprobs"]["tokens"]
    assert echoed["token_logprobs"][1:] == pytest.approx(whole["logprobs"]["token_logprobs"][1:], abs=1e-3)
    assert echoed["text_offset"] == whole["logprobs"]["text_offset"]


def test_echo_by_the_public_client(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, echo=True, logprobs=1, max_tokens=0)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == PROMPT
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None


def test_prompt_logprobs(server: Server) -> None:
    ids = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    entries = choice(server, prompt_logprobs=2)["prompt_logprobs"]
    assert len(entries) == len(ids)
    assert entries[0] is None
    for token, entry in zip(ids[1:], entries[1:], strict=True):
        own = entry[str(token)]
        assert own["logprob"] <= 0 < own["rank"]
        assert 2 <= len(entry) <= 3
        assert {1, 2} <= {value["rank"] for value in entry.values()}
    assert "".join(
        entry[str(token)]["decoded_token"] for token, entry in zip(ids[1:], entries[1:], strict=True)
    )
    assert [list(entry) for entry in choice(server, prompt_logprobs=0)["prompt_logprobs"][1:]] == [
        [str(token)] for token in ids[1:]
    ]


def test_scores_of_a_prompt_are_those_of_transformers(server: Server, checkpoint: Path) -> None:
    """Both forms have the same numbers: the first token none, and each other its own and the likeliest ones.

    lm-eval reads `echo` with `logprobs`, and vLLM's clients read `prompt_logprobs`.
    """
    prompt, top = "the red circle \u00e9 of <|im_end|> 7", 3
    ids = server_tokens(server, prompt)
    one = choice(server, prompt=prompt, echo=True, logprobs=top, prompt_logprobs=top, max_tokens=0)
    scored = choice(server, prompt=prompt, prompt_logprobs=top)["prompt_logprobs"]
    model = hf.AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        theirs = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], -1)
    echoed = one["logprobs"]
    assert len(scored) == len(ids) == len(echoed["tokens"])
    assert (scored[0], echoed["token_logprobs"][0], echoed["top_logprobs"][0]) == (None, None, None)
    for place, row in enumerate(theirs[:-1], 1):
        own, entry = scored[place][str(ids[place])], scored[place]
        best = row.topk(top)
        assert own["logprob"] == pytest.approx(row[ids[place]].item(), abs=1e-3)
        assert own["rank"] == int((row > row[ids[place]]).sum()) + 1
        assert own["decoded_token"] == echoed["tokens"][place]
        assert echoed["token_logprobs"][place] == pytest.approx(own["logprob"], abs=1e-5)
        ranked = sorted(entry, key=lambda token: int(entry[token]["rank"]))
        assert ranked[:top] == [str(token) for token in best.indices.tolist()]
        assert set(entry) == {*ranked[:top], str(ids[place])}
        values = [entry[token]["logprob"] for token in ranked[:top]]
        assert values == pytest.approx(best.values.tolist(), abs=1e-3)
        # Several tokens of this random model have one text; the most likely one counts.
        written = {entry[token]["decoded_token"]: entry[token]["logprob"] for token in reversed(ranked)}
        assert echoed["top_logprobs"][place] == pytest.approx(written, abs=1e-5)


def test_prompt_logprobs_of_a_chat_have_none_for_its_image(server: Server) -> None:
    body = chat(user(image(data_url(picture())), "what?"), prompt_logprobs=1)
    answer = server.post("/v1/chat/completions", body).json()
    entries = answer["prompt_logprobs"]
    assert len(entries) == answer["usage"]["prompt_tokens"]
    assert entries.count(None) == 1 + answer["usage"]["prompt_tokens_details"]["image_tokens"]


def test_best_of_returns_the_most_likely_answers(server: Server) -> None:
    """The best are chosen by the mean log probability of their tokens, and all of them are paid for."""
    sampled: Json = {"temperature": 1.0, "seed": 5, "logprobs": 0}
    every = complete(server, n=4, **sampled)["choices"]

    def mean(one: Json) -> float:
        values = one["logprobs"]["token_logprobs"]
        return float(sum(values) / len(values))

    best = sorted(every, key=mean, reverse=True)[:2]
    body = complete(server, n=2, best_of=4, **sampled)
    assert [one["text"] for one in body["choices"]] == [one["text"] for one in best]
    assert [one["index"] for one in body["choices"]] == [0, 1]
    assert body["usage"]["completion_tokens"] == 4 * BODY["max_tokens"]
    plain = complete(server, n=2, best_of=4, temperature=1.0, seed=5)["choices"]
    assert [one["text"] for one in plain] == [one["text"] for one in best]
    assert [one["logprobs"] for one in plain] == [None, None]


def test_best_of_equal_to_n_changes_nothing(server: Server) -> None:
    sampled: Json = {"temperature": 1.0, "seed": 5, "n": 2}
    assert complete(server, best_of=2, **sampled)["choices"] == complete(server, **sampled)["choices"]


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"echo": True, "stream": True}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"best_of": 129}, "best_of"),
        ({"request_id": "a b"}, "request_id"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"suffix": "x"}, "suffix"),
    ],
    ids=str,
)
def test_wrong_fields_are_refused_by_name(server: Server, extra: Json, param: str) -> None:
    wrong = error(server, **extra)
    assert wrong["param"] == param
    assert param in wrong["message"]


ODD = "\U0001f600 \u00e9 ab\u65e5x"
"""An emoji is four tokens of this tokenizer, an accented letter two, and a Chinese character three."""
ODD_TEXT: Json = {"guided_choice": [ODD], "max_tokens": 40, "logprobs": 1, "ignore_eos": False}


def offsets_of(text: str, logprobs: Json) -> list[int]:
    """The places of tokens; each was checked."""
    places: list[int] = logprobs["text_offset"]
    for token, place, following in zip(logprobs["tokens"], places, [*places[1:], len(text)], strict=True):
        assert 0 <= place <= following <= len(text)
        if "\ufffd" in token:
            assert following - place <= 1
        else:  # a stop string may have cut it off
            assert text[place:following] == token[: len(text) - place]
    return places


@pytest.mark.parametrize("extra", [{}, {"stop": "b"}, {"stop": "\u65e5", "include_stop_str_in_output": True}])
def test_text_offsets_count_characters_of_the_text(bundled_server: Server, extra: Json) -> None:
    """Each of the four tokens of an emoji once counted as a character, so all later places were wrong.

    A stream has the same places, although it learns only later where a stop string cuts the text off.
    """
    whole = choice(bundled_server, **ODD_TEXT, **extra)
    places = offsets_of(whole["text"], whole["logprobs"])
    assert places[:5] == [0, 0, 0, 0, 1]
    chunks = [chunk["choices"][0] for chunk in stream(bundled_server, **ODD_TEXT, **extra)]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    streamed = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
    assert [place for entry in streamed for place in entry["text_offset"]] == places
    assert [token for entry in streamed for token in entry["tokens"]] == whole["logprobs"]["tokens"]


def test_text_offsets_of_any_tokens(server: Server) -> None:
    """A random model writes special tokens, and bytes that are not characters, among its words."""
    sampled: Json = {"logprobs": 1, "max_tokens": 40, "temperature": 1.5, "seed": 3, **KNOWN}
    for one in complete(server, n=2, prompt=[PROMPT, "a"], **sampled)["choices"]:
        assert one["logprobs"]["text_offset"][0] == 0
        assert max(one["logprobs"]["text_offset"]) <= len(one["text"])
    whole = choice(server, **sampled)
    chunks = [chunk["choices"][0] for chunk in stream(server, **sampled)]
    streamed = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
    assert [place for entry in streamed for place in entry["text_offset"]] == whole["logprobs"]["text_offset"]


@pytest.mark.parametrize(
    "prompt",
    [
        "cafe\u0301 x", "\u00e9\U0001f600 x", "10 \u212b", "\u0958 z", "  a\n\nb ",
        "<|im_start|>user\nhi<|im_end|>",
    ],
    ids=ascii,
)  # fmt: skip
def test_echo_gives_the_prompt_as_it_was_sent(bundled_server: Server, prompt: str) -> None:
    """The tokenizer composes characters (NFC); the text of the tokens came back in place of the prompt."""
    echoed = choice(bundled_server, prompt=prompt, echo=True, logprobs=1, max_tokens=3)
    assert echoed["text"].startswith(prompt)
    places = echoed["logprobs"]["text_offset"]
    length = len(server_tokens(bundled_server, prompt))
    assert places == sorted(places)
    assert places[0] == 0
    assert places[length] == len(prompt)
    assert choice(bundled_server, prompt=prompt, echo=True, max_tokens=0)["text"] == prompt


def server_tokens(server: Server, prompt: str) -> list[int]:
    ids: list[int] = server.post("/tokenize", {"prompt": prompt}).json()["tokens"]
    return ids


def test_a_prompt_of_token_ids_is_echoed_as_their_text(bundled_server: Server) -> None:
    """A client that sends ids has sent no text, so the answer repeats what the tokens stand for."""
    prompt = "<|im_start|>cafe\u0301 \U0001f600"
    ids = server_tokens(bundled_server, prompt)
    echoed = choice(bundled_server, prompt=ids, echo=True, logprobs=1, max_tokens=2)
    composed = "<|im_start|>caf\u00e9 \U0001f600"
    assert echoed["text"].startswith(composed)
    offsets_of(echoed["text"], echoed["logprobs"])
    assert echoed["logprobs"]["text_offset"][len(ids)] == len(composed)


@pytest.mark.parametrize("end", ["stop", "length"])
def test_bytes_of_all_tokens_are_the_text(bundled_server: Server, end: str) -> None:
    """OpenAI documents it: clients join the bytes. The token that ends an answer adds nothing to its text."""
    body = chat(model="fovea-tiny", logprobs=True, top_logprobs=2, temperature=0, ignore_eos=False)
    if end == "length":
        body |= {"guided_choice": [ODD], "max_tokens": 40}
    else:
        body |= {"max_tokens": 60}
    [one] = bundled_server.post("/v1/chat/completions", body).json()["choices"]
    entries = one["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == one["message"]["content"]
    if end == "stop":
        assert (entries[-1]["token"], entries[-1]["bytes"]) == ("<|im_end|>", [])


def test_token_ids_are_returned(server: Server) -> None:
    prompt = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    whole = choice(server, return_token_ids=True, **KNOWN)
    assert whole["prompt_token_ids"] == prompt
    assert len(whole["token_ids"]) == BODY["max_tokens"]
    assert server.post("/detokenize", {"tokens": whole["token_ids"]}).json()["prompt"] == whole["text"]
    chunks = stream(server, return_token_ids=True, **KNOWN)
    streamed = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())]
    assert streamed == whole["token_ids"]
    sent = [chunk.get("prompt_token_ids") or chunk["choices"][0].get("prompt_token_ids") for chunk in chunks]
    assert [ids for ids in sent if ids] == [prompt]
    assert "token_ids" not in choice(server)


def test_token_ids_of_a_chat(server: Server) -> None:
    body = chat(return_token_ids=True)
    answer = server.post("/v1/chat/completions", body).json()
    prompt = server.post("/tokenize", {"messages": body["messages"]}).json()["tokens"]
    assert answer["prompt_token_ids"] == prompt
    assert len(answer["choices"][0]["token_ids"]) == body["max_tokens"]
    chunks = stream(server, "/v1/chat/completions", return_token_ids=True)
    streamed = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())]
    assert streamed == answer["choices"][0]["token_ids"]
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [prompt]


async def test_ids_of_the_prompt_arrive_although_the_first_text_is_held_back() -> None:
    """The first token may be half a character: its delta has no text, so no chunk is sent for it."""
    deltas = (
        Delta(0, "", (7,), prompt_ids=(1, 2, 3)),
        Delta(0, "\N{SNOWMAN}", (8,)),
        Delta(0, "", (9,), finish_reason="stop", usage=Usage(3, 3), timings=StageTimings()),
    )
    transport = httpx.ASGITransport(create_app(Script(*deltas)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.post(PATH, json={"prompt": "x", "stream": True, "return_token_ids": True})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == [7, 8, 9]
    sent = [chunk.get("prompt_token_ids") or chunk["choices"][0].get("prompt_token_ids") for chunk in chunks]
    assert [ids for ids in sent if ids] == [[1, 2, 3]]


def test_request_id_is_part_of_the_answers_id(server: Server) -> None:
    assert complete(server, request_id="batch-7.line_1")["id"] == "cmpl-batch-7.line_1"
    assert {chunk["id"] for chunk in stream(server, request_id="mine")} == {"cmpl-mine"}
    answer = server.post("/v1/chat/completions", chat(request_id="mine")).json()
    assert answer["id"] == "chatcmpl-mine"
    assert complete(server)["id"] != complete(server)["id"]


def test_two_requests_of_one_id_at_a_time_are_both_answered(server: Server) -> None:
    texts = [one["text"] for one in complete(server, request_id="same", prompt=[PROMPT, PROMPT])["choices"]]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_running_counts_come_with_every_chunk(server: Server, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(server, path, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1
    assert all(
        chunk["usage"]["total_tokens"]
        == chunk["usage"]["prompt_tokens"] + chunk["usage"]["completion_tokens"]
        for chunk in chunks
    )
    *rest, last = chunks
    assert last["choices"] == []
    assert counts[-1] == (BODY if path == PATH else chat())["max_tokens"] == counts[-2]
    assert all(chunk["choices"] for chunk in rest)


def test_stop_reason_names_what_ended_the_answer(server: Server) -> None:
    whole = choice(server, max_tokens=24, return_token_ids=True)
    assert (whole["finish_reason"], whole["stop_reason"]) == ("length", None)
    text, token = whole["text"][4:6], whole["token_ids"][5]
    by_text = choice(server, max_tokens=24, stop=["never said", text])
    assert (by_text["finish_reason"], by_text["stop_reason"]) == ("stop", text)
    by_token = choice(server, max_tokens=24, stop_token_ids=[token])
    assert (by_token["finish_reason"], by_token["stop_reason"]) == ("stop", token)


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_streams_name_the_stop_reason_like_whole_answers(server: Server, path: str) -> None:
    """vLLM's clients read `stop_reason` of the last chunk."""
    whole = server.post(path, {**(BODY if path == PATH else chat()), "return_token_ids": True}).json()
    stop = whole["choices"][0]["token_ids"][2]
    chunks = [chunk["choices"][0] for chunk in stream(server, path, stop_token_ids=[stop])]
    assert chunks[-1]["finish_reason"] == "stop"
    assert chunks[-1].get("stop_reason") == stop


def test_processor_options_bound_the_size_of_images(server: Server) -> None:
    large, small = data_url(picture(480, 448, seed=90)), data_url(picture(40, 40, seed=91))

    def tokens(url: str, **options: int) -> int:
        body = chat(user(image(url)), max_tokens=1, mm_processor_kwargs=options)
        usage = server.post("/v1/chat/completions", body).json()["usage"]
        return int(usage["prompt_tokens_details"]["image_tokens"])

    assert tokens(large) == 15 * 14
    assert tokens(large, max_pixels=32 * 32 * 9) <= 9
    assert tokens(small) < 50 <= tokens(small, min_pixels=32 * 32 * 50)


def test_other_processor_options_are_refused(server: Server) -> None:
    """They could change what an image costs, or code that runs on the server."""
    for options in ({"do_resize": False}, {"max_pixels": "9"}, {"size": {}}):
        wrong = error(server, "/v1/chat/completions", mm_processor_kwargs=options)
        assert wrong["param"] == f"mm_processor_kwargs.{next(iter(options))}"


@pytest.mark.parametrize("options", [0.5, 7, True, "max_pixels", ["max_pixels"]])
def test_processor_options_that_are_no_object_are_refused(server: Server, options: Any) -> None:
    """A number here once ended the request with status 500."""
    wrong = error(server, "/v1/chat/completions", mm_processor_kwargs=options)
    assert wrong["param"] == "mm_processor_kwargs"
