"""The rendered repository in a real Triton, which the variable FOVEA_TRITONSERVER names.

The package nvidia-pytriton has one: pytriton/tritonserver, with the stub of the own Python from
`python_backend_stubs` copied into `backends/python`, and LD_LIBRARY_PATH with nvidia_pytriton.libs. Triton
2.51 reads texts wrongly with numpy 2, so FOVEA_TRITON_PACKAGES names a folder with numpy 1, which goes before
the own one.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import site
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import fovea
from fovea.deploy.targets import triton
from fovea.deploy.write import write
from tests.deploy.test_triton_model import ANSWER, EXAMPLES, GREEDY, QUESTION, SHAPES, SPEC
from tests.support import servers

BINARY = os.environ.get("FOVEA_TRITONSERVER", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BINARY, reason="FOVEA_TRITONSERVER names no tritonserver"),
]
IMAGE = base64.b64encode(SHAPES).decode()
GRPC = """
import json, queue, sys
import numpy as np
import tritonclient.grpc as grpc

port, path, question = sys.argv[1:]
client = grpc.InferenceServerClient(f"127.0.0.1:{port}")

def tensor(name, kind, value):
    given = grpc.InferInput(name, [1], kind)
    given.set_data_from_numpy(np.array([value], dtype=object if kind == "BYTES" else bool))
    return given

def ask(cancel=False, **texts):
    answers, pieces = queue.Queue(), []
    client.start_stream(lambda result, error: answers.put((result, error)))
    inputs = [tensor("stream", "BOOL", True), *(tensor(name, "BYTES", text) for name, text in texts.items())]
    client.async_stream_infer("fovea_generate", inputs, enable_empty_final_response=True)
    while True:
        result, error = answers.get(timeout=60)
        assert error is None, error
        pieces.append(result.as_numpy("text_output")[0].decode())
        if cancel or result.get_response().parameters["triton_final_response"].bool_param:
            client.stop_stream(cancel_requests=cancel)
            return pieces

picture = open(path, "rb").read()
asked = {"question": question, "image": picture, "sampling_parameters": '{"temperature": 0}'}
endless = {"question": "count", "sampling_parameters": '{"max_tokens": 7000, "ignore_eos": true}'}
print(json.dumps([ask(**asked), ask(cancel=True, **endless), ask(**asked)]))
"""
SKIPPED = (".pth", "__pycache__", ".egg-link")


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Triton's backends with this Python's packages beside its own: its Python ignores PYTHONPATH."""
    folder = tmp_path_factory.mktemp("backends") / "python"
    folder.mkdir()
    first = [Path(path) for path in os.environ.get("FOVEA_TRITON_PACKAGES", "").split(":") if path]
    own = Path(BINARY).parents[1] / "backends" / "python"
    for source in (own, Path(fovea.__file__).parents[1], *first, *map(Path, site.getsitepackages())):
        names = ("numpy", "numpy.libs") if source in first else None
        for entry in source.iterdir():
            if entry.name.endswith(SKIPPED) or (names and entry.name not in names):
                continue
            with contextlib.suppress(FileExistsError):
                (folder / entry.name).symlink_to(entry)
    return folder.parent


@contextlib.contextmanager
def running(repository: Path, backends: Path, log: Path, grpc: int = 0) -> Iterator[str]:
    http, free, metrics = (servers.free_port() for _ in range(3))
    command = [
        BINARY, f"--model-repository={repository}", f"--backend-directory={backends}",
        f"--http-port={http}", f"--grpc-port={grpc or free}", f"--metrics-port={metrics}",
        "--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--metrics-config=summary_latencies=true",
    ]  # fmt: skip
    with servers.started(command, [http, metrics], log):
        yield f"http://127.0.0.1:{http}"


@pytest.fixture(scope="module")
def grpc_port() -> int:
    return servers.free_port()


@pytest.fixture(scope="module")
def server(
    backends: Path, grpc_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("triton")
    write(triton.render(SPEC), folder)
    with (
        pytest.MonkeyPatch.context() as patch,
        running_slowly(patch, folder / "triton" / "models", backends, folder / "log", grpc=grpc_port) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


@contextlib.contextmanager
def running_slowly(patch: pytest.MonkeyPatch, *paths: Path, grpc: int = 0) -> Iterator[str]:
    patch.setattr(servers, "READY_S", 120.0)  # three models load one after the other
    with running(*paths, grpc=grpc) as url:
        yield url


def pieces(client: httpx.Client, model: str, output: str, **inputs: Any) -> list[str]:
    body = {"sampling_parameters": GREEDY, "stream": True, **inputs}
    answer = client.post(f"/v2/models/{model}/generate_stream", json=body)
    assert answer.status_code == 200, answer.text
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(event)[output] for event in events]


@pytest.mark.parametrize("model", ["fovea_generate", "fovea_preprocess", "fovea_ensemble"])
def test_every_model_is_ready(server: httpx.Client, model: str) -> None:
    assert server.get(f"/v2/models/{model}/ready").status_code == 200


def test_the_engine_streams_an_answer_about_an_image(server: httpx.Client) -> None:
    streamed = pieces(server, "fovea_generate", "text_output", question=QUESTION, image=[IMAGE])
    assert len(streamed) > 3
    assert "".join(streamed) == ANSWER


def test_one_answer_without_streaming(server: httpx.Client) -> None:
    body = {"question": QUESTION, "image": [IMAGE], "sampling_parameters": GREEDY}
    answer = server.post("/v2/models/fovea_generate/generate", json=body)
    assert answer.json()["text_output"] == ANSWER


def test_the_ensemble_streams_the_same_answer(server: httpx.Client) -> None:
    streamed = pieces(server, "fovea_ensemble", "generated_text", text_prompt=QUESTION, image=IMAGE)
    assert len(streamed) > 3
    assert "".join(streamed) == ANSWER


def test_grpc_streams_and_cancels(server: httpx.Client, grpc_port: int) -> None:
    """The client runs in a process of its own, with the packages that belong to Triton's client."""
    done = subprocess.run(
        [sys.executable, "-c", GRPC, str(grpc_port), str(EXAMPLES / "shapes.png"), QUESTION],
        env={"PYTHONPATH": os.environ["FOVEA_TRITON_PACKAGES"]},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    whole, cancelled, after = json.loads(done.stdout)
    assert len(whole) > 3
    assert "".join(whole) == "".join(after) == ANSWER
    assert len(cancelled) == 1


def test_a_wrong_request_gets_fovea_s_message(server: httpx.Client) -> None:
    body = {"question": "a", "sampling_parameters": '{"temperature": 9}'}
    answer = server.post("/v2/models/fovea_generate/generate", json=body)
    assert answer.status_code == 400
    assert "temperature" in answer.json()["error"]


MAPPED, ENSEMBLE = 'value: "decoded_image"', 'platform: "ensemble"'


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        ("fovea_generate/config.pbtxt", "TYPE_STRING", "TYPE_TEXT"),
        ("fovea_ensemble/config.pbtxt", f'key: "pixels" {MAPPED}', f'key: "pixel" {MAPPED}'),
        ("fovea_ensemble/config.pbtxt", ENSEMBLE, f"{ENSEMBLE}\nsequence_batching {{ }}"),
        ("fovea_preprocess/1/model.py", "class TritonPythonModel", "class Model"),
    ],
    ids=["type", "tensor", "batching", "class"],
)
def test_triton_refuses_a_mutated_repository(
    backends: Path, tmp_path: Path, path: str, before: str, after: str
) -> None:
    write(triton.render(SPEC), tmp_path)
    models = tmp_path / "triton" / "models"
    text = (models / path).read_text()
    assert before in text
    (models / path).write_text(text.replace(before, after))
    if "preprocess" in path:
        shutil.rmtree(models / "fovea_generate")
        shutil.rmtree(models / "fovea_ensemble")
    with (
        pytest.raises(RuntimeError, match="failed to load"),
        pytest.MonkeyPatch.context() as patch,
        running_slowly(patch, models, backends, tmp_path / "log"),
    ):
        pass
