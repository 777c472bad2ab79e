"""The fields `prediction` and `speculate`: faster answers that are the same, counts, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fovea import Engine
from fovea.cli.main import main
from fovea.core.errors import InvalidRequest
from fovea.core.types import MAX_PREDICTION, Completion
from fovea.engine.schedule.draft_budget import DraftBudget
from fovea.engine.sequence import HINTS
from fovea.engine.speculate.hints import Hints
from fovea.server.settings import ServerSettings
from tests.server.support import Json, Server, chat, data_url, image, picture, running, user

CHAT = "/v1/chat/completions"
FIXED: Json = {"temperature": 0, "max_tokens": 40}
QUESTION, PICTURE = "Describe the image.", picture(seed=3)


@pytest.fixture(scope="module")
def expecting() -> Iterator[Engine]:
    """An engine that expects tokens by predictions alone, and computes all drafts, whatever they cost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftBudget, "choose", lambda self, sequences: None)
        with Engine.from_pretrained(
            "fovea-tiny", device="cpu", threads=1, kv_cache_mib=32, speculate="hints", answer_cache_mib=0
        ) as engine:
            yield engine


@pytest.fixture(scope="module")
def hints(expecting: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(expecting, ServerSettings(), tmp_path_factory.mktemp("files")) as server:
        yield server


def ask(server: Server, **fields: Any) -> tuple[str, Json]:
    """The text of an answer, and its counts of tokens."""
    body = {**chat(user(image(data_url(PICTURE)), QUESTION)), **FIXED, **fields}
    answer = server.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return body["choices"][0]["message"]["content"], body["usage"]["completion_tokens_details"]


def refusal(server: Server, **fields: Any) -> Json:
    answer = server.post(CHAT, {**chat(), **fields})
    assert answer.status_code == 400, answer.text
    return dict(answer.json()["error"])


def counts(usage: Json) -> tuple[int, ...]:
    return usage["accepted_prediction_tokens"], usage["rejected_prediction_tokens"], usage["draft_tokens"]


def as_parts(text: str) -> list[Json]:
    return [{"type": "text", "text": text[:5]}, {"type": "text", "text": text[5:]}]


def whole_answer(engine: Engine, **options: Any) -> Completion:
    return engine.generate(QUESTION, PICTURE, temperature=0, max_tokens=40, **options)


def test_a_right_prediction_saves_steps_and_changes_nothing(hints: Server) -> None:
    text, usage = ask(hints)
    assert counts(usage) == (0, 0, 0)
    for content in (text, as_parts(text)):
        again, usage = ask(hints, prediction={"type": "content", "content": content})
        accepted, rejected, drafts = counts(usage)
        assert again == text
        assert usage["accepted_draft_tokens"] == accepted
        assert accepted + rejected == drafts
        assert accepted > 10 > rejected


def test_a_wrong_prediction_is_rejected_and_changes_nothing(hints: Server) -> None:
    text, _ = ask(hints)
    wrong = text.replace(text.split()[2], "zebra")
    again, usage = ask(hints, prediction={"type": "content", "content": wrong})
    assert again == text
    accepted, rejected, drafts = counts(usage)
    assert accepted + rejected == drafts
    assert rejected > 0


@pytest.mark.parametrize("prediction", [None, {"type": "content", "content": ""}])
def test_an_empty_prediction_is_none(hints: Server, prediction: Any) -> None:
    assert counts(ask(hints, prediction=prediction)[1]) == (0, 0, 0)


def test_a_request_can_do_without_drafts(hints: Server) -> None:
    text, _ = ask(hints)
    prediction = {"type": "content", "content": text}
    again, usage = ask(hints, prediction=prediction, speculate=False)
    assert (again, counts(usage)) == (text, (0, 0, 0))
    for value in (True, None):
        assert ask(hints, prediction=prediction, speculate=value)[1]["draft_tokens"] > 0


def test_python_callers_have_both_fields(expecting: Engine) -> None:
    whole = whole_answer(expecting)
    again = whole_answer(expecting, prediction=whole.text, n=2)
    assert again.texts == (whole.text,) * 2
    usage = again.usage
    assert usage.drafts == usage.accepted_prediction + usage.rejected_prediction > 0
    alone = whole_answer(expecting, prediction=whole.text, speculate=False)
    assert (alone.text, alone.usage.drafts) == (whole.text, 0)


def test_drafts_after_the_end_do_not_count(expecting: Engine) -> None:
    """Tokens after a stop string are dropped, so an answer has at least one token for each step."""
    text = whole_answer(expecting).text
    usage = whole_answer(expecting, prediction=text, stop=(text[10:13],)).usage
    assert usage.completion > usage.accepted_drafts == usage.accepted_prediction > 0


def test_metrics_tell_whether_and_by_whom_tokens_are_expected(hints: Server) -> None:
    text, _ = ask(hints)
    ask(hints, prediction={"type": "content", "content": text})
    accepted = 'fovea:drafter_accepted_tokens_total{drafter="hints"} '
    (line,) = (line for line in hints.get("/metrics").text.splitlines() if line.startswith(accepted))
    assert float(line.removeprefix(accepted)) > 0
    assert hints.metrics()["fovea:speculating"] == 1


@pytest.mark.parametrize("stage", ["answers", "all", "kv"])
def test_clearing_answers_reaches_the_drafters(
    expecting: Engine, hints: Server, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    assert expecting.parts.speculator is not None
    monkeypatch.setattr(expecting.parts.speculator, "clear", lambda: calls.append(stage))
    assert main(["caches", "--url", hints.url, "--clear", stage]) == 0
    assert calls == ([] if stage == "kv" else [stage])


def test_the_name_of_the_drafter_that_reads_predictions() -> None:
    assert Hints.name == HINTS


@pytest.mark.parametrize(
    ("prediction", "param", "message"),
    [
        ("text", "prediction", "prediction: must be an object"),
        ([], "prediction", "prediction: must be an object"),
        ({}, "prediction.type", "prediction.type is required"),
        ({"type": "content"}, "prediction.content", "prediction.content is required"),
        ({"type": "tokens", "content": "a"}, "prediction.type", "must be 'content', got 'tokens'"),
        ({"type": "content", "content": None}, "prediction.content", "prediction.content: must be"),
        ({"type": "content", "content": 5}, "prediction.content", "prediction.content: must be"),
        ({"type": "content", "content": ["a"]}, "prediction.content[0]", "prediction.content[0]: must be"),
        (
            {"type": "content", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]},
            "prediction.content[0].type",
            "must be 'text', got 'image_url'",
        ),
        (
            {"type": "content", "content": [{"type": "text"}]},
            "prediction.content[0].text",
            "prediction.content[0].text is required",
        ),
    ],
)
def test_the_error_names_the_wrong_field(server: Server, prediction: Any, param: str, message: str) -> None:
    error = refusal(server, prediction=prediction)
    assert error["param"] == param
    assert message in error["message"]


def test_the_longest_prediction(server: Server) -> None:
    longest = "a" * MAX_PREDICTION
    ask(server, max_tokens=1, prediction={"type": "content", "content": longest})
    for content in (longest + "a", as_parts(longest + "a")):
        error = refusal(server, prediction={"type": "content", "content": content})
        assert error["param"] == "prediction"
        assert error["message"] == "prediction has 262145 characters; accepted: at most 262144"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"])
def test_every_api_has_the_switch(hints: Server, path: str) -> None:
    body: Json = {"max_tokens": 4, **chat()}
    if path == "/v1/completions":
        body = {"prompt": "what", "max_tokens": 4}
    elif path == "/v1/responses":
        body = {"input": "what", "max_output_tokens": 16}
    assert hints.post(path, {**body, "speculate": False}).status_code == 200
    answer = hints.post(path, {**body, "speculate": "off"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "speculate"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prediction": 5}, "prediction is 5; accepted: Unicode text"),
        ({"prediction": "\ud800"}, "accepted: Unicode text"),
        ({"speculate": "off"}, "speculate is 'off'; accepted: true or false"),
    ],
)
def test_python_callers_get_errors(engine: Engine, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        engine.request("what is it?", **options)
