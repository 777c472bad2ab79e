"""A batch that many workers answer: its inputs, its blocks, what is left to do. It knows no Ray and no HTTP.

Three rules give exactly one line per input, no matter which process is killed, or when:

1. The inputs are listed once, into OUT/inputs.jsonl, and numbered by their places there. OUT/job.json is
   written when the list is complete. Before that nothing is asked, and a run that finds no job.json makes
   the list again.
2. A block is a fixed run of consecutive lines. Its answers are one file, OUT/part-N.jsonl, which becomes
   visible as a whole or not at all, and holds one line for each input of the block, in their order.
3. Whoever answers a block asks only those inputs that have no answer in its file, and replaces the file by a
   whole one. So a block may be answered again after a crash, or twice at the same time: the last file stays.

Nothing is appended, and no record of progress can disagree with the answers: they are the record.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

from fovea.api.questions import IMAGES, write_body
from fovea.core.errors import ConfigError, EngineError, InvalidRequest
from fovea.core.json_text import is_blank

INPUTS, JOB, SUMMARY = "inputs.jsonl", "job.json", "summary.json"
FORMAT = 1
"""Version of the files of a job."""
BLOCK_LINES = 256
READERS = 16
"""Files that are read at the same time when a run continues."""
SLICE = 4 * 1024 * 1024
"""Bytes of a file of questions that are read at once."""


class Writer(Protocol):
    """A file that is being written."""

    def write(self, data: bytes, /) -> Any: ...


class Folder(Protocol):
    """A folder of files, on a disk or in an object store. Thread-safe. Names are relative, with slashes."""

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Return bytes of a file. None: to its end. Raises OSError, FileNotFoundError if there is no file."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Replace a file as a whole: readers see the old bytes or the new ones. Raises OSError."""
        ...

    def create(self, name: str) -> AbstractContextManager[Writer]:
        """Write a file piece by piece, over an old one. A crash may leave a part of it. Raises OSError."""
        ...

    def names(self) -> set[str]:
        """Return the names of the files in the folder itself. Raises OSError."""
        ...

    def walk(self, endings: Sequence[str]) -> Iterator[str]:
        """Yield the names of files below, in any order, without hidden ones. Raises OSError.

        endings: of the names, in lower case.
        """
        ...


class Runner(Protocol):
    """Answers lines, many at the same time."""

    async def answer(self, number: int, line: bytes) -> Mapping[str, Any]:
        """Return the body of the answer, or of the line's error. Raises Stopped if the run cannot go on."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """A batch whose inputs are listed.

    id: random; tells workers that they see the same folder.
    source: where the inputs are.
    settings: what the answers depend on. A later run needs the same.
    lines: number of inputs.
    block_lines: inputs of a block. The last one may have fewer.
    offsets: the byte of inputs.jsonl at which each block begins, and the end of the last block.
    """

    id: str
    source: str
    settings: Mapping[str, Any]
    lines: int
    block_lines: int
    offsets: tuple[int, ...]

    @property
    def blocks(self) -> int:
        return len(self.offsets) - 1

    def first(self, block: int) -> int:
        """Return the number of a block's first input. Inputs count from 1."""
        return block * self.block_lines + 1

    def size(self, block: int) -> int:
        """Return the number of a block's inputs."""
        return min(self.block_lines, self.lines - block * self.block_lines)

    def text(self) -> bytes:
        return json.dumps({"format": FORMAT, **asdict(self)}).encode() + b"\n"

    @staticmethod
    def parse(text: bytes) -> Job:
        """Read a job. Raises InvalidRequest if it has another form."""
        try:
            value = json.loads(text)
            if value.pop("format") != FORMAT:
                raise ValueError
            return Job(**{**value, "offsets": tuple(value["offsets"])})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidRequest(
                f"{JOB} was written by another version of Fovea, or is damaged; choose another folder as OUT"
            ) from error


class BlockResult(NamedTuple):
    """The state of a block's file.

    lines: inputs that have a line. failed: those of them whose line is an error.
    """

    block: int
    lines: int
    failed: int


def part_name(block: int) -> str:
    """Return the name of a block's file. In the order of their names, files have their lines in order."""
    return f"part-{block:06d}.jsonl"


def image_lines(folder: Folder) -> Iterator[bytes]:
    """Yield a question line for every image below a folder. Raises OSError."""
    for name in folder.walk(IMAGES):
        yield json.dumps({"id": name, "image": name}).encode()


def question_lines(folder: Folder, name: str) -> Iterator[bytes]:
    """Yield the lines of a file of questions that are not blank. Raises OSError."""
    at, rest = 0, b""
    while data := folder.read(name, at, SLICE):
        at += len(data)
        *whole, rest = (rest + data).split(b"\n")
        yield from (line for line in whole if not is_blank(line))
    if not is_blank(rest):
        yield rest


def read_job(out: Folder) -> Job | None:
    """Return the job of OUT; None: its list of inputs was never completed. Raises InvalidRequest, OSError."""
    try:
        return Job.parse(out.read(JOB))
    except FileNotFoundError:
        return None


def check_same(job: Job, source: str, settings: Mapping[str, Any], block_lines: int | None) -> None:
    """Check that OUT belongs to what a run asks. Raises InvalidRequest.

    block_lines: None: not given, so the job's own.
    """
    found = {"IN": job.source, **job.settings}
    asked: dict[str, Any] = {"IN": source, **settings}
    if block_lines is not None:
        found["block"], asked["block"] = job.block_lines, block_lines
    for name in sorted(found.keys() | asked.keys()):
        if found.get(name) != asked.get(name):
            raise InvalidRequest(
                f"OUT belongs to a run with {name} {_brief(found.get(name))}, and this one has "
                f"{_brief(asked.get(name))}; accepted: the same again, or another folder as OUT",
                param=name,
            )


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def create_job(
    out: Folder, lines: Iterable[bytes], source: str, settings: Mapping[str, Any], block_lines: int, name: str
) -> Job:
    """List the inputs, and write the list and the job. Memory does not grow with the number of inputs.

    name: the job's random id.
    Raises InvalidRequest if there is no input, OSError.
    """
    count, at, offsets = 0, 0, [0]
    with out.create(INPUTS) as file:
        for line in lines:
            if count and count % block_lines == 0:
                offsets.append(at)
            file.write(line + b"\n")
            count, at = count + 1, at + len(line) + 1
    if not count:
        raise InvalidRequest(f"{source} has no question, and no image; accepted are {', '.join(IMAGES)}")
    job = Job(name, source, dict(settings), count, block_lines, (*offsets, at))
    out.write(JOB, job.text())
    return job


def survey(out: Folder, job: Job) -> dict[int, BlockResult]:
    """Read the files of all blocks that have one, and return their states."""
    names = out.names()
    blocks = [block for block in range(job.blocks) if part_name(block) in names]

    def read(block: int) -> BlockResult:
        return _state(job, block, _bodies(out.read(part_name(block))))

    with ThreadPoolExecutor(READERS) as pool:
        return {result.block: result for result in pool.map(read, blocks)}


def _state(job: Job, block: int, bodies: Mapping[int, tuple[bytes, bool]]) -> BlockResult:
    first, size = job.first(block), job.size(block)
    failed = [bodies[number][1] for number in range(first, first + size) if number in bodies]
    return BlockResult(block, len(failed), sum(failed))


def _bodies(data: bytes) -> dict[int, tuple[bytes, bool]]:
    """Return each whole line of a file of answers, and whether it is an error, by its number."""
    bodies = {}
    for line in data.split(b"\n")[:-1]:
        try:
            body = json.loads(line)
            bodies[int(body["line"])] = line, "error" in body
        except (ValueError, TypeError, KeyError, RecursionError):
            continue  # no line of ours; its input is asked again
    return bodies


async def answer_block(out: Folder, job: Job, block: int, runner: Runner) -> BlockResult:
    """Answer the inputs of a block that have no answer yet, and write its file.

    Raises Stopped if the run cannot go on; then the file stays as it is. Raises OSError.
    """
    start, end = job.offsets[block : block + 2]
    data = await asyncio.to_thread(out.read, INPUTS, start, end - start)
    lines, first = data.split(b"\n")[:-1], job.first(block)
    if len(lines) != job.size(block):
        raise EngineError(
            f"{INPUTS} has changed since the run began: block {block} has another number of lines"
        )
    try:
        old = _bodies(await asyncio.to_thread(out.read, part_name(block)))
    except FileNotFoundError:
        old = {}
    kept = {number: line for number, (line, failed) in old.items() if not failed}
    asked = {number: line for number, line in enumerate(lines, first) if number not in kept}
    if asked:
        bodies = await _ask_all(runner, asked)
        new = {number: write_body(body)[:-1] for number, body in bodies.items()}
        whole = [(kept | new)[number] for number in range(first, first + len(lines))]
        await asyncio.to_thread(out.write, part_name(block), b"".join(line + b"\n" for line in whole))
        return BlockResult(block, len(lines), sum("error" in body for body in bodies.values()))
    return BlockResult(block, len(lines), 0)


async def _ask_all(runner: Runner, lines: Mapping[int, bytes]) -> dict[int, Mapping[str, Any]]:
    """Ask all lines at the same time; the runner bounds how many are in flight. Raises Stopped."""
    tasks = {number: asyncio.create_task(runner.answer(number, line)) for number, line in lines.items()}
    try:
        await asyncio.gather(*tasks.values())
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    return {number: task.result() for number, task in tasks.items()}


def answer_all(
    out: Folder,
    job: Job,
    states: dict[int, BlockResult],
    ask: Callable[[Sequence[int]], Iterable[BlockResult]],
    report: Callable[[BlockResult], None] = lambda result: None,
) -> int:
    """Have every block answered that is not whole or has errors, and write the summary.

    states: of the blocks that have a file; it is kept up to date.
    ask: gives blocks to workers, and yields the results of those that are answered. It may leave some out.
    report: called with each result.
    Returns the number of inputs whose line is an error. Raises EngineError if blocks stay without answers.
    """
    left = [block for block in range(job.blocks) if not _is_done(job, states.get(block))]
    while left:
        answered = set()
        for result in ask(left):
            states[result.block] = result
            answered.add(result.block)
            report(result)
        rest = [block for block in left if block not in answered]
        if len(rest) == len(left):
            names = ", ".join(part_name(block) for block in rest[:5])
            raise EngineError(
                f"{len(rest)} files of answers could not be made, among them {names}: the workers that tried "
                "died or failed; see Ray's logs, and run the same command again"
            )
        left = rest
    failed = sum(state.failed for state in states.values())
    summary = {"lines": job.lines, "answered": job.lines - failed, "failed": failed, "parts": job.blocks}
    out.write(SUMMARY, json.dumps(summary).encode() + b"\n")
    return failed


def _is_done(job: Job, state: BlockResult | None) -> bool:
    return state is not None and state.lines == job.size(state.block) and not state.failed


class Workers(NamedTuple):
    """The workers of a run. number: how many. cpus, gpus: what each takes of its node."""

    number: int
    cpus: float
    gpus: int


def plan_workers(nodes: Sequence[Mapping[str, float]], count: int | None, gpus: int | None) -> Workers:
    """Return how many workers a run has, and what each of them takes.

    nodes: resources of each node, with Ray's names CPU and GPU.
    count: number that the user asks for; None: one per node, or one for each share of `gpus` GPUs.
    gpus: GPUs of each worker's engine; 0: an engine on CPUs, which takes its share of the node; None: the
        workers have no engine.
    Raises ConfigError if the nodes have no place for so many.
    """
    nodes = [node for node in nodes if node.get("CPU", 0) >= 1]
    if gpus:
        places = sum(int(node.get("GPU", 0) // gpus) for node in nodes)
        wanted, cpus = count or places, 1.0
    else:
        wanted = count or len(nodes)
        cpus = 1.0
        if gpus == 0 and nodes:
            per_node = -(-wanted // len(nodes))
            cpus = max(1.0, min(node["CPU"] for node in nodes) // per_node)
        places = sum(int(node["CPU"] // cpus) for node in nodes)
    if not 0 < wanted <= places:
        what = f"{gpus} GPUs" if gpus else f"{cpus:g} CPUs"
        raise ConfigError(
            f"the cluster has room for {places} workers with {what} each, on {len(nodes)} nodes, and "
            f"{max(wanted, 1)} are wanted; accepted: at most {places}",
            param="workers",
        )
    return Workers(wanted, cpus, gpus or 0)
