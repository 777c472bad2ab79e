"""fovea batch --cluster ADDRESS IN OUT: a batch on the machines of a Ray cluster.

IN is a folder of images or a file of questions, OUT a folder; both are paths that every node has, or
addresses of an object store. The engines are behind --url; without it, each worker loads the model itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fovea.api.questions import LineRunner, Stopped
from fovea.cli import options
from fovea.cli.common import (
    SINGLE_USER,
    config_file,
    engine_arguments,
    pixel_budget,
    sampling_values,
    utf8,
)
from fovea.cluster.batch import (
    BLOCK_LINES,
    BlockResult,
    Folder,
    Job,
    Runner,
    answer_all,
    check_same,
    plan_workers,
    read_job,
    survey,
)
from fovea.cluster.batch_http import HttpClient, HttpOptions, HttpRunner, http_params
from fovea.core.errors import ConfigError, InvalidRequest, Unavailable
from fovea.core.media import PixelBudget
from fovea.core.names import install_command

if TYPE_CHECKING:
    from fovea.cluster.ray.batch import OpenRunner
    from fovea.engine.config import EngineConfig

IN_FLIGHT = 64


@dataclass(frozen=True)
class HttpRunners:
    """Makes runners that send requests to a URL. It travels to workers."""

    options: HttpOptions

    async def __call__(self, images: Callable[[str], bytes]) -> Runner:
        return HttpRunner(self.options, images, HttpClient(self.options).send)


@dataclass(frozen=True)
class EngineRunners:
    """Makes runners with an engine of the worker's own process, so none stays behind if the worker is killed.

    model, config, template: of the engine. params, budget, prompt: of the flags.
    in_flight: questions in flight at each engine.
    """

    model: str
    config: EngineConfig
    template: str | None
    params: Mapping[str, Any]
    budget: PixelBudget
    prompt: str | None
    in_flight: int

    async def __call__(self, images: Callable[[str], bytes]) -> Runner:
        import asyncio

        from fovea.engine.engine import Engine

        engine = await asyncio.to_thread(
            Engine.from_pretrained, self.model, config=self.config, chat_template=self.template
        )
        return Bounded(
            LineRunner(engine, images, dict(self.params), self.budget, self.prompt), self.in_flight
        )


class Bounded:
    """A runner with a bound on the lines that are answered at the same time."""

    def __init__(self, runner: Runner, in_flight: int) -> None:
        import asyncio

        self._runner = runner
        self._places = asyncio.Semaphore(in_flight)

    async def answer(self, number: int, line: bytes) -> Mapping[str, Any]:
        async with self._places:
            return await self._runner.answer(number, line)


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    group = parser.add_argument_group("cluster")
    group.add_argument(
        "--cluster",
        metavar="ADDRESS",
        help="answer on a Ray cluster: local, auto or HOST:PORT; OUT is a folder then (docs/batch.md)",
    )
    group.add_argument(
        "--url",
        help="address of the engines: a gateway or one engine; without it, each worker loads the model",
    )
    group.add_argument(
        "--api-key", metavar="KEY", help="key for --url (FOVEA_API_KEY keeps it out of the process list)"
    )
    group.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="workers (default: one per node; with GPUs, as many as have room for an engine)",
    )
    group.add_argument(
        "--block",
        type=int,
        metavar="N",
        help=f"lines in each file of answers; if a worker dies, two such files are asked again at most "
        f"(default: {BLOCK_LINES})",
    )


def check_without(args: argparse.Namespace) -> None:
    """Refuse what needs --cluster. Raises InvalidRequest."""
    for name in ("url", "api_key", "workers", "block"):
        if getattr(args, name) is not None:
            raise InvalidRequest(f"--{name.replace('_', '-')} is for batches with --cluster", param=name)
    for place in (args.input, args.output):
        if "://" in place:
            raise InvalidRequest(f"{place}: addresses of object stores need --cluster", param="input")


def run_cluster(args: argparse.Namespace) -> int:
    """Run the batch. Returns the exit code. Raises FoveaError."""
    file, sampling, budget = config_file(args), sampling_values(args), pixel_budget(args)
    for name in ("workers", "block"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise InvalidRequest(f"--{name} is {value}; accepted: 1 or more", param=name)
    prompt = None if args.prompt is None else utf8(args.prompt)
    try:
        from fovea.cluster.ray import batch as ray_batch
        from fovea.cluster.ray.folders import find_inputs, open_folder
    except ImportError as error:
        raise ConfigError(
            f"--cluster needs Ray, which is not here ({error}); {install_command('cluster')} adds it",
            param="cluster",
        ) from error
    source, out = _absolute(args.input), _absolute(args.output)
    images, questions = find_inputs(source)
    if questions is None and prompt is None:
        raise InvalidRequest(f"{args.input} is a folder: give the question with --prompt", param="prompt")
    open_runner, gpus, model = _runners(args, file, sampling, budget, prompt)
    settings = {
        "prompt": prompt, "params": http_params(sampling, budget), "detail": args.detail, "model": model,
    }  # fmt: skip
    folder = open_folder(out)
    job = _read_job(folder, out)
    if job is not None:
        check_same(job, source, settings, args.block)
    with ray_batch.connected(args.cluster):
        workers = plan_workers(ray_batch.nodes(), args.workers, gpus)
        if job is None:
            job = ray_batch.list_inputs(out, source, settings, args.block or BLOCK_LINES)
        task = ray_batch.BatchTask(out, job.id, images, open_runner)
        failed = _answer(folder, job, lambda blocks: ray_batch.ask_blocks(blocks, task, workers))
    if failed:
        print(
            f"fovea: {failed} of {job.lines} lines could not be answered; each has an error in {args.output}",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _absolute(place: str) -> str:
    return place if "://" in place else str(Path(place).absolute())


def _read_job(folder: Folder, out: str) -> Job | None:
    try:
        return read_job(folder)
    except OSError as error:
        raise ConfigError(f"{out} cannot be used as a folder: {error}", param="output") from error


def _runners(
    args: argparse.Namespace,
    file: Mapping[str, Any],
    sampling: dict[str, Any],
    budget: PixelBudget,
    prompt: str | None,
) -> tuple[OpenRunner, int | None, str | None]:
    """Return what makes runners, the GPUs of each worker (None: it has no engine), and the model's name."""
    in_flight = args.concurrency or IN_FLIGHT
    if args.url is None:
        if args.api_key is not None:
            raise InvalidRequest("--api-key is for --url, which is not given", param="api_key")
        model, config, template = engine_arguments(args, file, **SINGLE_USER)
        gpus = config.parallel.size if config.model.device.startswith("cuda") else 0
        model = str(Path(model).absolute()) if Path(model).exists() else model
        return EngineRunners(model, config, template, sampling, budget, prompt, in_flight), gpus, model
    name = options.lookup("model", args, file)
    key = options.lookup("api_key", args, {})
    http = HttpOptions(
        args.url,
        str(key[0]) if key else None,
        str(name[0]) if name else None,
        http_params(sampling, budget),
        args.detail,
        prompt,
        in_flight,
    )
    return HttpRunners(http), None, http.model


def _answer(folder: Folder, job: Job, ask: Callable[[Any], Any]) -> int:
    """Have all blocks answered, with a progress bar. Returns the number of errors."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        states = survey(folder, job)
        good = {block: state.lines - state.failed for block, state in states.items()}
        done, failed = sum(good.values()), sum(state.failed for state in states.values())
        if states:
            again = f"; asking again what failed: {failed}" if failed else ""
            print(f"fovea: {done} of {job.lines} lines are answered already{again}", file=sys.stderr)
        with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
            bar = progress.add_task("answering", total=job.lines, completed=done)

            def report(result: BlockResult) -> None:
                progress.advance(bar, result.lines - good.get(result.block, 0))

            return answer_all(folder, job, states, ask, report)
    except Stopped as error:
        raise Unavailable(f"{error}; run the same command again to continue") from error
    except OSError as error:
        raise ConfigError(f"OUT cannot be read or written: {error}", param="output") from error
