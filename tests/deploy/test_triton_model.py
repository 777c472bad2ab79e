"""Triton's Python models over the bundled model, with a stand-in for Triton's own module."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fovea.deploy.spec import DeploySpec, Pool
from fovea.deploy.targets import triton
from fovea.deploy.write import write
from tests.deploy.fake_triton import InferenceResponse, Request, load

EXAMPLES = Path(__file__).parents[2] / "examples"
SHAPES = (EXAMPLES / "shapes.png").read_bytes()
QUESTION, ANSWER = "How many circles are there?", "There is 1 circle."
GREEDY = json.dumps({"temperature": 0})
SPEC = DeploySpec(pools=(Pool(name="tiny", settings={"threads": 1, "kv_cache_mib": 64}),))


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("triton")
    write(triton.render(SPEC), folder)
    return folder / "triton" / "models"


def started(repository: Path, name: str, patch: pytest.MonkeyPatch) -> Any:
    folder = repository / name
    return load(folder / "1" / "model.py", (folder / "config.pbtxt").read_text(), patch)


@pytest.fixture(scope="module")
def generate(repository: Path, patch: pytest.MonkeyPatch) -> Iterator[Any]:
    model = started(repository, "fovea_generate", patch)
    yield model
    model.finalize()


@pytest.fixture(scope="module")
def preprocess(repository: Path, patch: pytest.MonkeyPatch) -> Iterator[Any]:
    model = started(repository, "fovea_preprocess", patch)
    yield model
    model.finalize()


def ask(model: Any, **inputs: Any) -> list[InferenceResponse]:
    request = Request({"sampling_parameters": GREEDY, **inputs})
    model.execute([request])
    return request.sender.all()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize(
    "image", [SHAPES, base64.b64encode(SHAPES), data_url(SHAPES)], ids=["file", "64", "url"]
)
def test_an_answer_about_an_image(generate: Any, image: Any) -> None:
    (response,) = ask(generate, question=QUESTION, image=[image], return_finish_reason=True)
    assert response.text() == ANSWER
    assert response.text("finish_reason") == "stop"


def test_a_stream_is_the_same_answer_in_pieces_and_counts_its_tokens(generate: Any) -> None:
    counts = {"return_num_input_tokens": True, "return_num_output_tokens": True}
    (whole,) = ask(generate, question=QUESTION, image=[SHAPES], **counts)
    pieces = ask(generate, question=QUESTION, image=[SHAPES], stream=True, **counts)
    assert len(pieces) > 1
    assert "".join(piece.text() for piece in pieces) == whole.text() == ANSWER
    tokens = [sum(int(piece.outputs["num_output_tokens"][0]) for piece in each) for each in (pieces, [whole])]
    assert tokens[0] == tokens[1] > 3
    assert {int(piece.outputs["num_input_tokens"][0]) for piece in (*pieces, whole)} == {
        int(whole.outputs["num_input_tokens"][0])
    }


def test_a_conversation_may_have_a_prediction(generate: Any) -> None:
    said = json.dumps([{"role": "user", "content": "Hello."}])
    prediction = {"type": "content", "content": "Hello"}
    plain, predicted, alone = (
        ask(generate, messages=said, sampling_parameters=json.dumps({"temperature": 0, **more}))[0].text()
        for more in ({}, {"prediction": prediction}, {"prediction": prediction, "speculate": False})
    )
    assert plain == predicted == alone


def test_a_conversation_names_its_own_images(generate: Any) -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(SHAPES)}},
        {"type": "text", "text": QUESTION},
    ]
    (response,) = ask(generate, messages=json.dumps([{"role": "user", "content": parts}]))
    assert response.text() == ANSWER


def test_a_whole_prompt_gets_no_template_as_from_the_openai_frontend(generate: Any) -> None:
    parameters = json.dumps({"temperature": 0, "max_tokens": 5, "ignore_eos": True})
    prompt = "the red circle"
    plain, echoed = (
        ask(generate, text_input=prompt, sampling_parameters=parameters, exclude_input_in_output=exclude)[0]
        for exclude in (True, False)
    )
    assert echoed.text() == prompt + plain.text()


@pytest.mark.parametrize("stream", [False, True])
def test_the_inputs_of_triton_s_openai_frontend_are_accepted(generate: Any, stream: bool) -> None:
    """With `--backend vllm`, it sends these inputs, and in the parameters each field that is set."""
    parameters = {"frequency_penalty": 0, "n": 1, "presence_penalty": 0, "temperature": 0, "top_p": 1,
                  "stop": ["#"], "seed": 3, "ignore_eos": True, "max_tokens": 12}  # fmt: skip
    responses = ask(
        generate,
        text_input="the red circle",
        stream=stream,
        exclude_input_in_output=True,
        sampling_parameters=json.dumps(parameters),
        return_num_input_tokens=True,
        return_num_output_tokens=True,
        return_logprobs=False,
    )
    assert all(response.error is None for response in responses)
    assert (len(responses) > 1) == stream
    assert sum(int(response.outputs["num_output_tokens"][0]) for response in responses) <= 12


def test_requests_of_one_call_are_answered_together(generate: Any) -> None:
    requests = [
        Request({"question": QUESTION, "image": [SHAPES], "sampling_parameters": GREEDY}) for _ in range(4)
    ]
    generate.execute(requests)
    answers = [request.sender.all() for request in requests]
    assert [[response.text() for response in answer] for answer in answers] == [[ANSWER]] * 4


def test_a_cancelled_request_ends_and_frees_its_place(generate: Any) -> None:
    parameters = json.dumps({"max_tokens": 1500, "ignore_eos": True})
    request = Request({"question": "count", "stream": True, "sampling_parameters": parameters})
    generate.execute([request])
    assert request.sender.next() is not None
    request.sender.cancelled = True
    last = request.sender.all()[-1]
    assert last.error is not None
    assert last.error.code == "CANCELLED"
    generate._engine.check_integrity()  # returns after the step in which the request left
    assert generate._engine.unfinished == 0


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, "accepted: one of text_input, question, messages"),
        ({"question": "a", "text_input": "b"}, "inputs text_input, question; accepted: one"),
        ({"question": "a", "image": [b"no image"]}, "image 0"),
        ({"question": "a", "image": ["http://127.0.0.1/x.png"]}, "127.0.0.1"),
        ({"question": "a", "sampling_parameters": "["}, "sampling_parameters is not JSON"),
        ({"question": "a", "sampling_parameters": '{"temprature": 0}'}, "temperature"),
        ({"question": "a", "sampling_parameters": '{"temperature": 9}'}, "temperature"),
        ({"question": "a", "sampling_parameters": '{"n": 2}'}, "n is 2; accepted: 1"),
        ({"question": "a", "return_logprobs": True}, "return_logprobs is not supported"),
        ({"messages": "{}"}, "messages is not the JSON of a list"),
        ({"messages": "[]", "image": [SHAPES]}, "images are parts"),
        ({"question": b"\xff"}, "question is not UTF-8"),
    ],
)
def test_a_wrong_request_gets_one_error_that_names_the_input(
    generate: Any, inputs: dict[str, Any], words: str
) -> None:
    (response,) = ask(generate, **inputs)
    assert response.error is not None
    assert response.error.code == "INVALID_ARG"
    assert words in str(response.error)


def test_the_ensemble_s_models_give_the_answer_to_the_pixels_of_the_file(
    generate: Any, preprocess: Any
) -> None:
    right, wrong = preprocess.execute([Request({"image": SHAPES}), Request({"image": b"GIF8"})])
    pixels = right.outputs["pixels"]
    with Image.open(EXAMPLES / "shapes.png") as picture:
        assert np.array_equal(pixels, np.asarray(picture.convert("RGB")))
    assert wrong.error.code == "INVALID_ARG"
    (response,) = ask(generate, question=QUESTION, pixels=pixels)
    assert response.text() == ANSWER


def test_a_defect_of_the_model_is_answered(generate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(request: Any) -> None:
        raise RuntimeError("defect")

    monkeypatch.setattr(generate._engine, "stream", broken)
    (response,) = ask(generate, question="a")
    assert response.error is not None
    assert response.error.code == "INTERNAL"
    assert "defect; its log" in str(response.error)
