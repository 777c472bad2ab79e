"""`fovea batch --cluster` on two nodes of Ray: workers and commands are killed, images are bad, URLs wrong.

Runs where Ray is installed (`make test-cluster`).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fovea.cluster.batch import create_job, part_name
from fovea.cluster.folders import LocalFolder
from fovea.core.errors import ConfigError, InvalidImage
from tests.support.servers import free_port

pytest.importorskip("ray")
pytest.importorskip("pyarrow")
pytestmark = pytest.mark.slow

WAIT_S = 120.0
PNG = b"\x89PNG "
WORKER = b"ray::MapWorker"
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


class Engine(ThreadingHTTPServer):
    """Answers with the text that follows PNG in an image, and refuses other images.

    delay_s: seconds before each answer. missing: whether it answers 404.
    asked: how often each image was sent.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.delay_s, self.missing = 0.0, False
        self.asked: Counter[bytes] = Counter()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that are killed are part of the tests."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._reply(200, {"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        engine: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        url = body["messages"][0]["content"][0]["image_url"]["url"]
        image = base64.b64decode(url.partition(",")[2])
        engine.asked[image] += 1
        time.sleep(engine.delay_s)
        if engine.missing:
            self._reply(404, {})
            return
        if not image.startswith(PNG):
            self._reply(400, {"error": {"message": "no image", "type": "invalid_request_error"}})
            return
        message = {"content": image.removeprefix(PNG).decode()}
        self._reply(200, {"choices": [{"message": message, "finish_reason": "stop"}], "usage": USAGE})

    def _reply(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Write nothing."""


@pytest.fixture
def engine() -> Iterator[Engine]:
    server = Engine()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Two nodes of Ray with two processors each, and keys for an object store."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        nodes.add_node(num_cpus=2)
        yield nodes
        nodes.shutdown()


@pytest.fixture(scope="module")
def cluster(nodes: Any) -> str:
    """The address of the nodes."""
    return str(nodes.address)


@pytest.fixture
def batch(cluster: str, engine: Engine, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts the command on the images of `in`, with answers in `out`."""

    def start(*words: object, source: object = tmp_path / "in", out: object = tmp_path / "out") -> Any:
        command = [sys.executable, "-m", "fovea.cli.main", "batch", source, out, "--prompt", "what?"]
        command += ["--cluster", cluster, "--url", engine.url, "--block", 8, "--concurrency", 8, *words]
        return subprocess.Popen(
            [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    (tmp_path / "in").mkdir()
    return start


def write_images(folder: Path, count: int) -> None:
    for number in range(count):
        (folder / f"{number:03d}.png").write_bytes(PNG + f"text {number}".encode())


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for a command. Returns its exit code and the last line of its error output."""
    try:
        _, err = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    lines = [line for line in err.splitlines() if line.startswith("fovea: ")]
    assert "Traceback" not in err, err
    return process.returncode, lines[-1] if lines else ""


def answers(folder: Path, count: int) -> dict[str, Any]:
    """The lines of all files by image. Each image of `count` must have exactly one, in its place."""
    parts = sorted(folder.glob("part-*.jsonl"))
    lines = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
    assert [line["line"] for line in lines] == list(range(1, count + 1))
    assert len({line["id"] for line in lines}) == count
    return {line["id"]: line for line in lines}


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.05)
    return value


def workers() -> list[int]:
    """Processes of actors among all that this process started. Other users of the machine have theirs."""
    parents, commands = {}, {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            parents[int(entry)] = int(stat[1])
            commands[int(entry)] = Path(f"/proc/{entry}/cmdline").read_bytes()
    found = [os.getpid()]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return [process for process in found if commands.get(process, b"").startswith(WORKER)]


def parts(folder: Path) -> int:
    return len(list(folder.glob("part-*.jsonl")))


def test_killed_workers(batch: Any, engine: Engine, tmp_path: Path) -> None:
    """Both workers are killed in the middle of their blocks, one of them twice."""
    write_images(tmp_path / "in", 240)
    engine.delay_s = 0.1
    process = batch("--workers", 2)
    for wanted in (2, 6):
        until(lambda wanted=wanted: parts(tmp_path / "out") >= wanted and workers())
        os.kill(workers()[0], signal.SIGKILL)
    os.kill(until(workers)[-1], signal.SIGKILL)
    assert finish(process) == (0, "")
    found = answers(tmp_path / "out", 240)
    assert {line["text"] for line in found.values()} == {f"text {number}" for number in range(240)}
    assert 240 <= engine.asked.total() <= 240 + 3 * 2 * 8, "a killed worker repeats two blocks at most"
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["answered"] == 240


def test_lost_node(batch: Any, nodes: Any, engine: Engine, tmp_path: Path) -> None:
    """A node disappears with its worker; the blocks of that worker go to others."""
    write_images(tmp_path / "in", 200)
    engine.delay_s = 0.1
    third = nodes.add_node(num_cpus=2)
    process = batch("--workers", 5)
    try:
        until(lambda: parts(tmp_path / "out") >= 3 and len(workers()) == 5)
    finally:
        nodes.remove_node(third, allow_graceful=False)
    assert finish(process) == (0, "")
    found = answers(tmp_path / "out", 200)
    assert {line["text"] for line in found.values()} == {f"text {number}" for number in range(200)}


def test_killed_command(batch: Any, engine: Engine, tmp_path: Path) -> None:
    """The command is killed; its workers end by themselves; the next run asks what is missing."""
    write_images(tmp_path / "in", 160)
    engine.delay_s = 0.1
    process = batch()
    until(lambda: parts(tmp_path / "out") >= 4)
    assert workers()
    process.kill()
    process.communicate()
    until(lambda: not workers())
    done = parts(tmp_path / "out")
    assert 4 <= done < 20
    engine.delay_s = 0.0
    engine.asked.clear()
    code, line = finish(batch())
    assert (code, line) == (0, f"fovea: {8 * done} of 160 lines are answered already")
    assert engine.asked.total() == 160 - 8 * done
    answers(tmp_path / "out", 160)


def test_bad_images_are_lines(batch: Any, engine: Engine, tmp_path: Path) -> None:
    write_images(tmp_path / "in", 20)
    (tmp_path / "in" / "003.png").write_bytes(b"no image")
    (tmp_path / "in" / "deep").mkdir()
    (tmp_path / "in" / "deep" / "gone.png").symlink_to(tmp_path / "target.png")
    (tmp_path / "target.png").write_bytes(PNG + b"target")
    code, line = finish(batch())
    assert (code, engine.asked.total()) == (1, 21)
    assert line == f"fovea: 1 of 21 lines could not be answered; each has an error in {tmp_path / 'out'}"
    found = answers(tmp_path / "out", 21)
    assert found["003.png"]["error"]["message"] == "no image"
    (tmp_path / "in" / "003.png").write_bytes(PNG + b"good")
    (tmp_path / "target.png").unlink()  # it is answered, so it is not read again
    assert finish(batch())[0] == 0
    assert engine.asked.total() == 22
    found = answers(tmp_path / "out", 21)
    assert (found["003.png"]["text"], found["deep/gone.png"]["text"]) == ("good", "target")
    code, line = finish(batch("--max-tokens", 3))
    wrong = "fovea: OUT belongs to a run with params {}, and this one has {'max_tokens': 3}"
    assert (code, line.partition(";")[0]) == (2, wrong)


def test_missing_image(batch: Any, tmp_path: Path) -> None:
    questions = [{"image": "a.png", "question": "q"}, {"image": "b.png"}, {"id": 3, "other": 4}]
    (tmp_path / "in" / "a.png").write_bytes(PNG + b"a")
    (tmp_path / "in" / "q.jsonl").write_text("\n".join(json.dumps(line) for line in questions))
    assert finish(batch(source=tmp_path / "in" / "q.jsonl"))[0] == 1
    lines = [json.loads(line) for line in (tmp_path / "out" / part_name(0)).read_text().splitlines()]
    assert lines[0]["text"] == "a"
    assert lines[1]["error"]["message"] == "image 0: b.png cannot be read: No such file or directory"
    assert lines[2]["error"]["message"].startswith("unknown field 'other'")
    assert [line["id"] for line in lines] == [1, 2, 3]


def test_wrong_places(batch: Any, cluster: str, tmp_path: Path) -> None:
    code, line = finish(batch())
    assert code == 2
    assert "in has no question, and no image" in line
    code, line = finish(batch(source=tmp_path / "missing"))
    assert (code, line) == (2, f"fovea: {tmp_path / 'missing'} cannot be read: No such file or directory")
    write_images(tmp_path / "in", 1)
    (tmp_path / "file").write_text("text")
    code, line = finish(batch(out=tmp_path / "file"))
    assert code == 2
    assert "file cannot be used as a folder" in line
    code, line = finish(batch("--workers", 9))
    assert code == 2
    assert "accepted: at most 4" in line
    code, line = finish(batch("--cluster", "127.0.0.1:1"))
    assert code == 2
    assert line.startswith("fovea: no Ray at 127.0.0.1:1")


def test_a_wrong_url_ends_the_run(batch: Any, tmp_path: Path) -> None:
    write_images(tmp_path / "in", 20)
    with Engine() as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        other.missing = True
        code, line = finish(batch("--url", other.url))
        other.shutdown()
        thread.join()
    assert code == 2
    reason = "status 404 without a message; run the same command again to continue"
    assert line == f"fovea: {other.url} answers 404: {reason}"
    assert parts(tmp_path / "out") == 0
    assert finish(batch())[0] == 0, "another URL may continue"
    answers(tmp_path / "out", 20)


def test_object_store(batch: Any, engine: Engine, tmp_path: Path) -> None:
    """Images and answers are in a bucket of a small S3 server."""
    pytest.importorskip("moto")
    from pyarrow.fs import FileSelector, FileSystem

    port = free_port()
    options = f"endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
    options += "&allow_bucket_creation=true"
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-p", str(port)], stdout=log, stderr=log
        )
    try:
        until(lambda: b"Running" in (tmp_path / "log").read_bytes())
        system, _ = FileSystem.from_uri(f"s3://bucket/?{options}")
        system.create_dir("bucket")
        for number in range(30):
            with system.open_output_stream(f"bucket/in/{number % 3}/{number}.png") as file:
                file.write(PNG + f"text {number}".encode())
        source, out = f"s3://bucket/in?{options}", f"s3://bucket/out?{options}"
        assert finish(batch(source=source, out=out)) == (0, "")
        code, line = finish(batch(source=source, out=out))
        assert (code, line) == (0, "fovea: 30 of 30 lines are answered already")
        assert engine.asked.total() == 30
        names = sorted(info.base_name for info in system.get_file_info(FileSelector("bucket/out")))
        assert names == [
            "inputs.jsonl",
            "job.json",
            *(part_name(block) for block in range(4)),
            "summary.json",
        ]
        lines = b"".join(
            system.open_input_file(f"bucket/out/{part_name(block)}").read() for block in range(4)
        )
        bodies = [json.loads(line) for line in lines.splitlines()]
        assert [body["line"] for body in bodies] == list(range(1, 31))
        assert {body["id"]: body["text"] for body in bodies} == {
            f"{number % 3}/{number}.png": f"text {number}" for number in range(30)
        }
    finally:
        server.terminate()
        server.wait(WAIT_S)


def test_a_worker_with_its_own_engine_answers_as_the_command_alone(cluster: str, tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "in").mkdir()
    for number in range(6):
        Image.new("RGB", (40, 30), (40 * number, 9, 200)).save(tmp_path / "in" / f"{number}.png")
    command = [sys.executable, "-m", "fovea.cli.main", "batch", str(tmp_path / "in")]
    words = ["--prompt", "what?", "--max-tokens", "6", "--temperature", "0"]
    subprocess.run([*command, str(tmp_path / "alone.jsonl"), *words], check=True, timeout=WAIT_S)
    far = [*command, str(tmp_path / "out"), *words, "--cluster", cluster, "--workers", "1", "--block", "4"]
    subprocess.run(far, check=True, timeout=WAIT_S)
    alone = [json.loads(line) for line in (tmp_path / "alone.jsonl").read_text().splitlines()]
    found = answers(tmp_path / "out", 6)
    assert {line["id"]: line["text"] for line in alone} == {
        name: line["text"] for name, line in found.items()
    }


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_folders_of_other_file_systems(kind: str, tmp_path: Path) -> None:
    """memory: is known to fsspec alone; file: is pyarrow's own."""
    from fovea.cluster.ray.folders import ArrowFolder, ImageReader, find_inputs, open_folder

    address = f"memory://{tmp_path.name}" if kind == "memory" else f"file://{tmp_path}/folder"
    folder = open_folder(address)
    assert isinstance(folder, ArrowFolder)
    with folder.create("list") as file:
        file.write(b"one")
        file.write(b"two")
    assert (folder.read("list"), folder.read("list", 2, 3)) == (b"onetwo", b"etw")
    folder.write("list", b"new")
    assert folder.read("list") == b"new"
    assert folder.names() == {"list"}, "no unfinished file is left"
    folder.system.create_dir(folder._path + "/deep/er")
    for name in ("a.png", "deep/er/b.JPG", ".hidden.png", "text.txt"):
        folder.write(name, b"image")
    assert sorted(folder.walk([".png", ".jpg"])) == ["a.png", "deep/er/b.JPG"]
    with pytest.raises(FileNotFoundError):
        folder.read("missing")
    assert find_inputs(address) == (address, None)
    assert find_inputs(f"{address}/text.txt") == (address, "text.txt")
    reader = ImageReader(address)
    assert reader.read("deep/er/b.JPG") == reader.read(f"{address}/a.png") == b"image"
    with pytest.raises(InvalidImage, match=r"missing\.png cannot be read"):
        reader.read("missing.png")
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        find_inputs(f"{address}/missing")


def test_an_unknown_address_is_an_error() -> None:
    from fovea.cluster.ray.folders import open_folder

    with pytest.raises(ConfigError, match="foo://bar cannot be opened: .*accepted: a path, or an address"):
        open_folder("foo://bar")


def test_a_node_that_sees_another_folder_ends_the_run(tmp_path: Path) -> None:
    """Each node may have its own /data; then answers would be scattered."""
    from fovea.cluster.ray.batch import BatchTask, BlockWorker

    async def no_runner(images: Any) -> Any:
        raise AssertionError("no runner is made")

    create_job(LocalFolder(tmp_path), [b"{}"], str(tmp_path), {}, 1, "this")
    for out, name in ((tmp_path, "other"), (tmp_path / "missing", "this")):
        worker = BlockWorker(BatchTask(str(out), name, str(tmp_path), no_runner))
        row = worker({"block": [0]})
        assert (row["block"], row["lines"]) == ([0], [0])
        assert (
            f"does not see the folder {out}; accepted: a folder that every node mounts" in row["stopped"][0]
        )


def test_ctrl_c(batch: Any, engine: Engine, tmp_path: Path) -> None:
    write_images(tmp_path / "in", 160)
    engine.delay_s = 0.1
    process = batch()
    until(lambda: parts(tmp_path / "out") >= 2)
    process.send_signal(signal.SIGINT)
    assert finish(process) == (130, "fovea: interrupted")
    until(lambda: not workers())
    engine.delay_s = 0.0
    assert finish(batch())[0] == 0
    answers(tmp_path / "out", 160)


def test_benchmark() -> None:
    """benchmarks/cluster_batch.py checks its run, and prints what docs/batch.md shows."""
    root = Path(__file__).parents[2]
    command = [
        sys.executable,
        str(root / "benchmarks" / "cluster_batch.py"),
        "--images",
        "3000",
        "--block",
        "32",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=WAIT_S, check=True)
    table, last = done.stdout.splitlines()[2:-1], json.loads(done.stdout.splitlines()[-1])
    assert last["images"] == 3000
    assert len(table) == len(last["rows"]) >= 1
    assert last["rows"][-1]["images"] == 3000
    assert all(row["driver"] > 0 and row["whole"] > 0 for row in last["rows"])
