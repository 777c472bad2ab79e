"""Random bodies: the answer is never a 5xx, and has the form that the OpenAPI description declares."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from fovea import Engine
from fovea.media.limits import MediaLimits
from fovea.server.app import create_app
from fovea.server.settings import BodySettings, ServerSettings
from tests.server.scripted import Script
from tests.server.support import Server, data_url, image, picture, running, until, user
from tests.support.thorough import examples, is_thorough

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
BOUNDED = settings(
    max_examples=examples(100),
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def fuzzed(checkpoint: Path, files: Path) -> Iterator[Server]:
    """A server with a short context, which keeps answers to accepted bodies short. It fetches no URLs."""
    media = MediaLimits(allow_remote=False, file_root=files)
    with (
        Engine.from_pretrained(
            str(checkpoint), dtype="float32", threads=1, kv_cache_mib=32, max_context=96
        ) as engine,
        running(engine, ServerSettings(bodies=BodySettings(max_body_mib=1), media=media), files) as server,
    ):
        yield server
        until(lambda: server.metrics()["fovea:kv_blocks_used"] == 0)
        assert server.metrics()["fovea:integrity_errors_total"] == 0
        assert server.post("/v1/completions", {"prompt": "the", "max_tokens": 1}).status_code == 200


@pytest.fixture(scope="module")
def http(fuzzed: Server) -> Iterator[httpx.Client]:
    with fuzzed.client() as client:
        yield client


PDF_BODIES = 'schemathesis.serializer.alias("application/pdf", "application/octet-stream")'
exec(PDF_BODIES)
DESCRIPTION = create_app(Script()).description
OPERATIONS = [
    (path, method)
    for path, operations in DESCRIPTION["paths"].items()
    for method in operations
    if path != "/admin/profile"  # it would profile this process, for seconds each time: test_profile.py
]


@pytest.fixture(scope="module")
def schema() -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_dict(DESCRIPTION)


# `schema.parametrize()` would make thousands of requests in every run: when tests are collected.
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_openapi_description(schema: schemathesis.BaseSchema, fuzzed: Server, path: str, method: str) -> None:
    """A few random requests of every operation. Bodies fit the description or contradict it."""
    operation = schema[path][method]
    requests = operation.as_strategy()
    if operation.body:
        requests |= operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)

    @settings(BOUNDED, max_examples=16 if is_thorough() else 3)
    @given(requests)
    def check(case: schemathesis.Case) -> None:
        case.call_and_validate(base_url=fuzzed.url, checks=CHECKS)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["coverage", "fuzzing"])
def test_every_request_that_schemathesis_makes(fuzzed: Server, tmp_path: Path, phase: str) -> None:
    """More random requests, and one for each limit and type of each field."""
    checks = ",".join(check.__name__ for check in CHECKS)
    (tmp_path / "hooks.py").write_text(f"import schemathesis\n{PDF_BODIES}\n")
    done = subprocess.run(
        [
            Path(sys.executable).with_name("schemathesis"), "run", f"{fuzzed.url}/openapi.json",
            f"--checks={checks}", f"--phases={phase}", "--max-examples=100", "--seed=1",
            "--continue-on-failure", "--suppress-health-check=all", "--no-color",
        ],
        cwd=tmp_path, env={**os.environ, "SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_openapi_declares_only_responses_that_occur() -> None:
    for path, operations in DESCRIPTION["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"], path
    answers = DESCRIPTION["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"}


SMALL = data_url(picture(32, 32))
PATHS = {"chat": "/v1/chat/completions", "text": "/v1/completions", "tokenize": "/tokenize"}
VALID: list[tuple[str, Any]] = [
    (
        "chat",
        {
            "model": "tiny",
            "messages": [
                {"role": "system", "content": "brief"},
                user("a", image(SMALL, detail="low", max_pixels=4096, min_pixels=1024), "b"),
                {"role": "assistant", "content": "so", "refusal": None},
                {"role": "user", "content": "and?"},
            ],
            "max_tokens": 3,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.1,
            "frequency_penalty": 0.1,
            "seed": 3,
            "stop": ["x", "y"],
            "stop_token_ids": [7],
            "min_tokens": 1,
            "n": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "logit_bias": {"5": 1, "9": -100},
            "stream": True,
            "stream_options": {"include_usage": True},
            "timeout": 30,
            "cache_salt": "s",
            "metadata": {"a": "b"},
            "response_format": {"type": "text"},
        },
    ),
    ("chat", {"messages": [user(image(SMALL))], "max_completion_tokens": 2, "max_pixels": 1024}),
    ("text", {"prompt": ["the", "red"], "max_tokens": 2, "logprobs": 3, "n": 2, "temperature": 0}),
    ("text", {"prompt": [60, 61, 62], "max_tokens": 2, "stream": True, "stop": "z"}),
    ("text", {"prompt": [[60], [61]], "max_tokens": 2, "skip_special_tokens": False, "ignore_eos": True}),
    ("tokenize", {"messages": [user("a", image(SMALL))], "max_pixels": 1024}),
    ("tokenize", {"prompt": "a"}),
]
NUMBERS = [0, -1, 1, 2, 0.5, -0.5, 1e308, -1e308, 2**31, 2**63, -(2**63) - 1, 10**400]
TEXTS = [
    "",
    "x",
    "\ud800",
    "\x00",
    "<|image_pad|>",
    "<|im_end|>",
    "{{ 1 }}",
    "x" * 5000,
    "data:image/png;base64,",
    "file:///",
]
ODD = st.sampled_from([None, True, False, [], {}, [[]], [{}], {"a": 1}, [None], *NUMBERS, *TEXTS])


@st.composite
def spoiled_bodies(draw: st.DrawFn) -> tuple[str, Any]:
    """A valid body in which up to three places were replaced, removed or added."""
    kind, valid = draw(st.sampled_from(VALID))
    body = copy.deepcopy(valid)
    for _ in range(draw(st.integers(0, 3))):
        body = spoil(draw, body)
    return kind, body


def spoil(draw: st.DrawFn, node: Any) -> Any:
    """Replace, remove or add one place in `node`, and return the result."""
    if not isinstance(node, dict | list) or not node or draw(st.integers(0, 9)) == 0:
        return copy.deepcopy(draw(ODD))
    keys = list(node) if isinstance(node, dict) else range(len(node))
    key = draw(st.sampled_from(keys))
    action = draw(st.sampled_from(["deeper", "deeper", "deeper", "remove", "add"]))
    if action == "deeper":
        node[key] = spoil(draw, node[key])
    elif action == "remove":
        del node[key]
    elif isinstance(node, dict):
        node[draw(st.sampled_from(["role", "url", "user", "\ud800", "tools", "123"]))] = copy.deepcopy(
            draw(ODD)
        )
    else:
        node.append(copy.deepcopy(node[key]))
    return node


def assert_answer_or_error(answer: httpx.Response) -> None:
    if answer.status_code == 200:
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert answer.text.endswith("data: [DONE]\n\n"), answer.text[-500:]
        else:
            assert answer.json()
        return
    assert answer.status_code in (400, 403, 404, 408), answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) < 600


@pytest.mark.parametrize(("kind", "body"), VALID)
def test_unspoiled_bodies_are_accepted(http: httpx.Client, kind: str, body: Any) -> None:
    assert http.post(PATHS[kind], json=body).status_code == 200


@settings(BOUNDED, max_examples=400 if is_thorough() else 48)
@given(spoiled_bodies())
def test_spoiled_bodies(fuzzed: Server, http: httpx.Client, case: tuple[str, Any]) -> None:
    kind, body = case
    content = json.dumps(body)
    assert_answer_or_error(
        http.post(PATHS[kind], content=content, headers={"Content-Type": "application/json"})
    )


@settings(BOUNDED, max_examples=examples(100))
@given(st.data())
def test_images_with_a_few_wrong_bytes(fuzzed: Server, http: httpx.Client, data: st.DataObject) -> None:
    png = bytearray(picture(32, 32))
    for _ in range(data.draw(st.integers(1, 3))):
        png[data.draw(st.integers(0, len(png) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(1, len(png)))
    assert_answer_or_error(
        http.post(PATHS["tokenize"], json={"messages": [user(image(data_url(bytes(png[:cut]))))]})
    )


@settings(BOUNDED, max_examples=examples(100))
@given(st.binary(max_size=200))
def test_random_bytes(fuzzed: Server, http: httpx.Client, content: bytes) -> None:
    assert_answer_or_error(
        http.post(PATHS["chat"], content=content, headers={"Content-Type": "application/json"})
    )
