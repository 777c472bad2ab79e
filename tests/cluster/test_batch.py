"""Batches on many workers, without Ray: whatever is killed, each input has exactly one line."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.api.questions import Stopped
from fovea.cluster.batch import (
    INPUTS,
    JOB,
    SUMMARY,
    BlockResult,
    Job,
    Workers,
    answer_all,
    answer_block,
    check_same,
    create_job,
    image_lines,
    part_name,
    plan_workers,
    question_lines,
    read_job,
    survey,
)
from fovea.cluster.folders import LocalFolder
from fovea.core.errors import ConfigError, EngineError, InvalidRequest


class Killed(BaseException):
    """The process that uses a folder is killed."""


class MemoryFolder:
    """A folder in memory, whose user can be killed before or after any operation.

    kill_at: number of the operation at which the user is killed. after: whether the operation still happens.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.kill_at, self.after = -1, False

    def _act(self, change: dict[str, bytes]) -> None:
        self.kill_at -= 1
        if self.kill_at == 0 and not self.after:
            raise Killed
        self.files.update(change)
        if self.kill_at == 0:
            raise Killed

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        self._act({})
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name][start : None if length is None else start + length]

    def write(self, name: str, data: bytes) -> None:
        self._act({name: data})

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[Any]:
        """A crash leaves what was written before it."""
        folder = self

        class Writing(io.BytesIO):
            def write(self, data: Any, /) -> int:
                count = super().write(data)
                folder._act({name: self.getvalue()})
                return count

        self._act({name: b""})
        yield Writing()

    def names(self) -> set[str]:
        self._act({})
        return set(self.files)

    def walk(self, endings: Sequence[str]) -> Iterator[str]:
        yield from (name for name in self.files if name.lower().endswith(tuple(endings)))


class Answers:
    """A runner. fails: says whether the next answer is an error. gate: awaited before each answer."""

    def __init__(self, fails: Iterable[bool] = (), gate: Any = None) -> None:
        self._fails, self._gate = iter(fails), gate
        self.asked: list[int] = []

    async def answer(self, number: int, line: bytes) -> dict[str, Any]:
        self.asked.append(number)
        if self._gate is not None:
            await self._gate()
        head = {"line": number, "id": json.loads(line)["id"]}
        return {**head, "error": {}} if next(self._fails, False) else {**head, "text": "yes"}


def inputs(count: int) -> list[bytes]:
    return [json.dumps({"id": f"{number}.png", "image": f"{number}.png"}).encode() for number in range(count)]


def new_job(out: Any, count: int, block: int) -> Job:
    return create_job(out, inputs(count), "in", {}, block, "id")


def lines_of(files: dict[str, bytes]) -> list[Any]:
    """The lines of all files of answers, in the order of the files' names."""
    parts = sorted(name for name in files if name.startswith("part-"))
    return [json.loads(line) for name in parts for line in files[name].splitlines()]


def run(work: Awaitable[Any]) -> Any:
    async def wait() -> Any:
        return await work

    return asyncio.run(wait())


def direct(out: Any, job: Job, runner: Answers) -> Any:
    """Answers blocks one after the other."""
    return lambda blocks: (run(answer_block(out, job, block, runner)) for block in blocks)


@pytest.mark.parametrize(
    ("count", "block", "parts"), [(1, 5, 1), (5, 5, 1), (6, 5, 2), (10, 5, 2), (3, 1, 3)]
)
def test_every_input_has_a_line_in_its_place(count: int, block: int, parts: int) -> None:
    out = MemoryFolder({})
    job = new_job(out, count, block)
    assert answer_all(out, job, {}, direct(out, job, Answers())) == 0
    assert (job.blocks, sum(job.size(block) for block in range(parts))) == (parts, count)
    assert [(line["line"], line["id"]) for line in lines_of(out.files)] == [
        (number + 1, f"{number}.png") for number in range(count)
    ]
    assert json.loads(out.files[SUMMARY]) == {
        "lines": count, "answered": count, "failed": 0, "parts": parts,
    }  # fmt: skip
    assert Job.parse(out.files[JOB]) == job


CRASH = st.tuples(st.integers(1, 25), st.booleans(), st.lists(st.booleans(), max_size=6))


@given(count=st.integers(1, 9), block=st.integers(1, 4), crashes=st.lists(CRASH, max_size=6))
def test_any_crashes_leave_one_line_per_input(
    count: int, block: int, crashes: list[tuple[int, bool, list[bool]]]
) -> None:
    """Each run is killed at some operation, before or after it; the last run is not."""
    files: dict[str, bytes] = {}
    for kill_at, after, fails in [*crashes, (-1, False, [])]:
        out = MemoryFolder(files)
        out.kill_at, out.after = kill_at + 1 if kill_at > 0 else -1, after
        with contextlib.suppress(Killed):
            job = read_job(out) or new_job(out, count, block)
            answer_all(out, job, survey(out, job), direct(out, job, Answers(fails)))
        seen = [line["line"] for line in lines_of(files)]
        assert len(seen) == len(set(seen)), "a reader never sees two lines for an input"
        assert JOB in files or not seen, "nothing is asked before the list of inputs is complete"
    lines = lines_of(files)
    assert [line["line"] for line in lines] == list(range(1, count + 1))
    assert not any("error" in line for line in lines), "the last run asks again what failed"


@given(data=st.data())
def test_several_workers_may_have_the_same_block(data: st.DataObject) -> None:
    """Workers that were believed dead go on: any order of their steps leaves one line per input.

    Some workers are killed between two answers.
    """
    out = MemoryFolder({})
    job = new_job(out, 5, 3)
    waiting: list[asyncio.Future[None]] = []

    async def gate() -> None:
        waiting.append(asyncio.get_running_loop().create_future())
        await waiting[-1]

    async def race() -> None:
        asyncio.get_running_loop().set_default_executor(Inline())
        given_blocks = data.draw(st.lists(st.integers(0, 1), min_size=2, max_size=4))
        fails = data.draw(st.lists(st.booleans(), max_size=8))
        tasks = [
            asyncio.create_task(answer_block(out, job, block, Answers(fails, gate))) for block in given_blocks
        ]
        while not all(task.done() for task in tasks):
            await settle(waiting, tasks)
            if waiting:
                waiting.pop(data.draw(st.integers(0, len(waiting) - 1))).set_result(None)
                if data.draw(st.integers(0, 9)) == 0:
                    tasks[data.draw(st.integers(0, len(tasks) - 1))].cancel()
                    waiting[:] = [future for future in waiting if not future.done()]
            seen = [line["line"] for line in lines_of(out.files)]
            assert len(seen) == len(set(seen))
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(race())
    assert answer_all(out, job, survey(out, job), direct(out, job, Answers())) == 0
    assert [line["line"] for line in lines_of(out.files)] == [1, 2, 3, 4, 5]


class Inline(ThreadPoolExecutor):
    """Runs work at once, so that the order of steps is the test's alone."""

    def submit(self, work: Any, /, *arguments: Any, **names: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*arguments, **names))
        except Exception as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)
        return future


async def settle(waiting: list[asyncio.Future[None]], tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Let tasks run until one waits for an answer, or all are done."""
    while True:
        for _ in range(8):
            await asyncio.sleep(0)
        waiting[:] = [future for future in waiting if not future.done()]
        if waiting or all(task.done() for task in tasks):
            return


def test_only_what_failed_is_asked_again() -> None:
    out = MemoryFolder({})
    job = new_job(out, 6, 3)
    first = Answers([False, True, False, False, False, True])
    assert answer_all(out, job, {}, direct(out, job, first)) == 2
    kept = lines_of(out.files)[0]
    second = Answers([False, True])
    assert answer_all(out, job, survey(out, job), direct(out, job, second)) == 1
    assert (first.asked, second.asked) == ([1, 2, 3, 4, 5, 6], [2, 6])
    assert lines_of(out.files)[0] == kept
    assert ["error" in line for line in lines_of(out.files)] == [False] * 5 + [True]
    third = Answers()
    answer_all(out, job, survey(out, job), direct(out, job, third))
    assert third.asked == [6]


def test_a_file_that_someone_damaged_is_made_again() -> None:
    out = MemoryFolder({})
    job = new_job(out, 3, 3)
    answer_all(out, job, {}, direct(out, job, Answers()))
    good = out.files[part_name(0)]
    whole = good.splitlines(keepends=True)
    out.files[part_name(0)] = whole[0] + b"not JSON\n" + whole[2][:-1]
    again = Answers()
    answer_all(out, job, survey(out, job), direct(out, job, again))
    assert again.asked == [2, 3]
    assert out.files[part_name(0)] == good


def test_blocks_whose_workers_die_are_given_out_again_while_others_succeed() -> None:
    out = MemoryFolder({})
    job = new_job(out, 4, 1)
    rounds: list[list[int]] = []

    def ask(blocks: Sequence[int]) -> Iterator[BlockResult]:
        rounds.append(list(blocks))
        yield run(answer_block(out, job, blocks[-1], Answers()))

    assert answer_all(out, job, {}, ask) == 0
    assert rounds == [[0, 1, 2, 3], [0, 1, 2], [0, 1], [0]]


def test_a_block_that_always_kills_its_worker_ends_the_run_after_all_others() -> None:
    out = MemoryFolder({})
    job = new_job(out, 3, 1)

    def ask(blocks: Sequence[int]) -> Iterator[BlockResult]:
        yield from (run(answer_block(out, job, block, Answers())) for block in blocks if block != 1)

    with pytest.raises(EngineError, match=r"1 files of answers could not be made.*part-000001\.jsonl"):
        answer_all(out, job, {}, ask)
    assert [line["line"] for line in lines_of(out.files)] == [1, 3]
    assert SUMMARY not in out.files


def test_a_run_that_stops_leaves_the_block_as_it_was() -> None:
    out = MemoryFolder({})
    job = new_job(out, 3, 3)

    class Gone(Answers):
        async def answer(self, number: int, line: bytes) -> dict[str, Any]:
            if number == 2:
                raise Stopped("no engine")
            await asyncio.sleep(0)
            return await super().answer(number, line)

    with pytest.raises(Stopped):
        run(answer_block(out, job, 0, Gone()))
    assert part_name(0) not in out.files


def test_a_changed_list_of_inputs_is_an_error() -> None:
    out = MemoryFolder({})
    job = new_job(out, 3, 3)
    out.files[INPUTS] = out.files[INPUTS][:-10]
    with pytest.raises(EngineError, match="has changed since"):
        run(answer_block(out, job, 0, Answers()))


@pytest.mark.parametrize(
    ("source", "settings", "block", "message"),
    [
        ("else", {"prompt": "a"}, None, "IN 'in', and this one has 'else'"),
        ("in", {"prompt": "b"}, None, "prompt 'a', and this one has 'b'"),
        ("in", {"prompt": "a"}, 7, "block 3, and this one has 7"),
    ],
)
def test_another_batch_cannot_continue(source: str, settings: Any, block: int | None, message: str) -> None:
    job = create_job(MemoryFolder({}), inputs(3), "in", {"prompt": "a"}, 3, "id")
    check_same(job, "in", {"prompt": "a"}, None)
    check_same(job, "in", {"prompt": "a"}, 3)
    with pytest.raises(InvalidRequest, match=message):
        check_same(job, source, settings, block)


def test_a_folder_without_images_is_an_error() -> None:
    with pytest.raises(InvalidRequest, match=r"in has no question, and no image; accepted are \.png"):
        create_job(MemoryFolder({}), [], "in", {}, 3, "id")


@pytest.mark.parametrize("text", [b"", b"[]", b'{"format": 2}', b'{"format": 1, "other": 1}', b"\xff"])
def test_a_foreign_job_is_an_error(text: bytes) -> None:
    with pytest.raises(InvalidRequest, match="another version of Fovea"):
        Job.parse(text)


@given(st.lists(st.binary(max_size=12).filter(lambda line: b"\n" not in line), max_size=8), st.booleans())
def test_lines_of_a_file_are_those_that_are_not_blank(lines: list[bytes], ends: bool) -> None:
    """Files are read in slices; the slice is larger than any of these, so `Sliced` makes it smaller."""
    text = b"\n".join(lines) + (b"\n" if ends else b"")

    class Sliced(MemoryFolder):
        def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
            return super().read(name, start, 3)

    found = list(question_lines(Sliced({"in": text}), "in"))
    assert found == [line for line in lines if line.removeprefix(b"\xef\xbb\xbf").strip()]


def test_local_folder(tmp_path: Path) -> None:
    images = LocalFolder(tmp_path)
    for name in ("a.png", "deep/er/b.JPG", ".hidden.png", ".cache/c.png", "text.txt", "deep/d.webp"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"0123")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path)
    names = sorted(json.loads(line)["image"] for line in image_lines(images))
    assert names == ["a.png", "deep/d.webp", "deep/er/b.JPG"]
    assert (images.read("a.png"), images.read("a.png", 1, 2)) == (b"0123", b"12")
    images.write("a.png", b"new")
    assert images.read("a.png") == b"new"
    assert images.names() == {"a.png", ".hidden.png", "text.txt"}, "no unfinished file is left"
    with pytest.raises(IsADirectoryError):
        images.write("folder.png", b"")
    assert "folder.png" not in images.names()
    assert not list(tmp_path.glob("*.new"))
    with pytest.raises(FileNotFoundError):
        images.read("missing.png")


CPU_NODE, GPU_NODE = {"CPU": 8.0}, {"CPU": 16.0, "GPU": 4.0}


@pytest.mark.parametrize(
    ("nodes", "count", "gpus", "workers"),
    [
        ([CPU_NODE, CPU_NODE], None, None, Workers(2, 1.0, 0)),
        ([CPU_NODE, {"memory": 5.0}], 5, None, Workers(5, 1.0, 0)),
        ([CPU_NODE, GPU_NODE], None, 0, Workers(2, 8.0, 0)),
        ([CPU_NODE], 3, 0, Workers(3, 2.0, 0)),
        ([CPU_NODE, GPU_NODE, GPU_NODE], None, 1, Workers(8, 1.0, 1)),
        ([GPU_NODE], None, 2, Workers(2, 1.0, 2)),
    ],
)
def test_workers(nodes: Any, count: int | None, gpus: int | None, workers: Workers) -> None:
    assert plan_workers(nodes, count, gpus) == workers


@pytest.mark.parametrize(
    ("nodes", "count", "gpus", "message"),
    [
        ([CPU_NODE], None, 1, "room for 0 workers with 1 GPUs each, on 1 nodes, and 1 are wanted"),
        ([GPU_NODE], 3, 2, "room for 2 workers with 2 GPUs each.*3 are wanted; accepted: at most 2"),
        ([CPU_NODE], 9, None, "room for 8 workers with 1 CPUs each.*9 are wanted"),
        ([CPU_NODE], 9, 0, "room for 8 workers with 1 CPUs each.*9 are wanted"),
        ([], None, None, "at most 0"),
    ],
)
def test_too_many_workers(nodes: Any, count: int | None, gpus: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_workers(nodes, count, gpus)
