"""/v1/predict and /invocations, the contracts of Vertex AI and SageMaker, and /v1/embeddings."""

from __future__ import annotations

import pytest

from fovea import Engine
from fovea.server.settings import ServerSettings
from tests.server.support import Json, Server, chat, data_url, image, picture, running, user

PATH, CHAT = "/v1/predict", "/v1/chat/completions"
TEXT: Json = {"prompt": "the red circle", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def predict(server: Server, *instances: Json, **extra: object) -> list[Json]:
    answer = server.post(PATH, {"instances": instances, **extra})
    assert answer.status_code == 200, answer.text
    predictions: list[Json] = answer.json()["predictions"]
    return predictions


def test_instances_are_chats_or_texts(server: Server) -> None:
    question = chat(user(image(data_url(picture())), "what is it?"))
    first, second, third = predict(server, question, TEXT, chat())
    assert (first["object"], second["object"], third["object"]) == (
        "chat.completion",
        "text_completion",
        "chat.completion",
    )
    assert first["choices"] == server.post(CHAT, question).json()["choices"]
    assert second["choices"] == server.post("/v1/completions", TEXT).json()["choices"]
    assert third["choices"] == server.post(CHAT, chat()).json()["choices"]


def test_parameters_hold_for_instances_without_their_own(server: Server) -> None:
    messages = chat()["messages"]
    parameters = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
    instances = ({"messages": messages}, {"messages": messages, "max_tokens": 5})
    lengths = [
        one["usage"]["completion_tokens"] for one in predict(server, *instances, parameters=parameters)
    ]
    assert lengths == [2, 5]


@pytest.mark.parametrize(
    ("instances", "param"),
    [
        ([], "instances"),
        ([chat()] * 65, "instances"),
        (["text"], "instances[0]"),
        ([{}], "instances[0].messages"),
        ([chat(), chat(temperature=9)], "instances[1].temperature"),
        ([TEXT, {**TEXT, "best_of": 129}], "instances[1].best_of"),
        (
            [chat(user(image("data:image/png;base64,AAAA")))],
            "instances[0].messages[0].content[0].image_url.url",
        ),
        ([chat(), chat(stream=True)], "instances[1].stream"),
    ],
    ids=["none", "many", "text", "empty", "chat", "prompt", "image", "stream"],
)
def test_first_error_ends_them_all(server: Server, instances: list[Json], param: str) -> None:
    answer = server.post(PATH, {"instances": instances})
    assert answer.status_code == 400
    wrong = answer.json()["error"]
    assert wrong["param"] == param
    assert wrong["type"] == "invalid_request_error"
    assert param.partition(".")[0] in wrong["message"]


def test_unknown_model_keeps_its_status(server: Server) -> None:
    answer = server.post(PATH, {"instances": [chat(model="gpt-9")]})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert answer.json()["error"]["param"] == "instances[0].model"


def test_a_key_is_needed(engine: Engine, server: Server) -> None:
    with running(engine, ServerSettings(api_keys=("secret",)), server.files) as closed:
        body = {"instances": [chat()]}
        assert closed.post("/invocations", body).status_code == 401
        assert closed.post(PATH, body).status_code == 401
        assert closed.post(PATH, body, headers={"authorization": "Bearer secret"}).status_code == 200


@pytest.mark.parametrize("path", [PATH, "/invocations"])
def test_a_body_without_instances_is_one_completion(server: Server, path: str) -> None:
    question = chat(user(image(data_url(picture())), "what is it?"), temperature=0)
    assert server.post(path, question).json()["choices"] == server.post(CHAT, question).json()["choices"]
    continued = server.post("/v1/completions", TEXT).json()["choices"]
    assert server.post(path, TEXT).json()["choices"] == continued
    streamed = server.post(path, {**question, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.text.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "messages"), ({"instances": []}, "instances"), ({"prompt": 3}, "prompt"), ([], None)],
)
def test_a_wrong_body_is_refused_by_its_own_kind(server: Server, body: object, param: str | None) -> None:
    answer = server.post("/invocations", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_embeddings_are_refused_with_the_reason(server: Server) -> None:
    answer = server.post("/v1/embeddings", {"model": "tiny", "input": ["a", "b"]})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unsupported_route"
    assert "embeddings" in answer.json()["error"]["message"]
