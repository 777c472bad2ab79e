"""Options, processes that draw batches, and the state of a run: shared by the training loops."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.multiprocessing as mp

from clocks import WorkClock
from model import Fovea
from muon import Muon

T = TypeVar("T")


@dataclass
class Schedule:
    """Options that the settings of every `Run` have.

    minutes: minutes of work. decay_from: share of them after which the rate falls. warmup: steps.
    rate, adam_rate: learning rates of Muon and of Adam. average: decay of the averaged weights per step.
    """

    minutes: float = 60.0
    decay_from: float = 0.5
    warmup: int = 100
    rate: float = 3e-3
    adam_rate: float = 2e-3
    seed: int = 1
    threads: int = 2
    workers: int = 1
    average: float = 0.995
    resume: bool = False


def options(doc: str | None, kind: Callable[..., T]) -> T:
    """Read the settings of a run from the command line: a dataclass, each field of which is an option."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=raw)
    for name, default in asdict(kind()).items():  # type: ignore[call-overload]
        flag = "--" + name.replace("_", "-")
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(default), default=default)
    return kind(**vars(parser.parse_args()))


def tensors(batch: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """The arrays of a batch as tensors."""
    return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in batch.items()}


class Workers:
    """Processes that put batches into a queue. Use it in a `with` statement."""

    def __init__(self, produce: Callable[..., None], settings: Any, first_step: int, *more: Any) -> None:
        """produce: gets the queue, the settings, the first step, the worker's number, and `more`."""
        context = mp.get_context("spawn")
        self.queue = context.Queue(maxsize=6)
        self._processes = [
            context.Process(
                target=produce, args=(self.queue, settings, first_step, number, *more), daemon=True
            )
            for number in range(settings.workers)
        ]

    def __enter__(self) -> mp.Queue:
        for process in self._processes:
            process.start()
        return self.queue

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.terminate()


class Run:
    """A model in training: optimizer, averaged weights, schedule, checkpoint and log.

    The schedule follows the minutes of work: a short warmup, a constant rate, and a linear decay to zero.

    name: of the checkpoint and the log in the run's folder.
    """

    name = "checkpoint"

    def __init__(self, settings: Schedule, folder: Path, model: Fovea) -> None:
        self.settings, self.folder = settings, folder
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(settings.threads)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.to(self.device)
        if self.device.type == "cpu":
            self.model.fuse()
        self.averages = [p.detach().clone() for p in self.model.parameters()]
        self.optimizer = Muon(self.model, momentum=0.95, betas=(0.9, 0.98), decay=0.02)
        self.step = self.questions = 0
        self.earlier = 0.0
        if settings.resume:
            self.load()
        self.clock, self.first_step = WorkClock(settings.threads, self.device), self.step
        self.running: dict[str, float] = {}

    @property
    def checkpoint(self) -> Path:
        return self.folder / f"{self.name}.pt"

    @property
    def goes_on(self) -> bool:
        """Whether there is time left, and nobody has made the file `stop` in the run's folder."""
        return self.clock.seconds < 60 * self.settings.minutes and not (self.folder / "stop").exists()

    def load(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.device)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for mine, theirs in zip(self.averages, state["averaged"], strict=True):
            mine.copy_(theirs)
        self.step, self.questions, self.earlier = state["step"], state.get("questions", 0), state["seconds"]

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "averaged": self.averages,
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "questions": self.questions,
            "seconds": self.earlier + self.clock.seconds,
            "settings": asdict(self.settings),
        }
        torch.save(state, self.checkpoint.with_suffix(".tmp"))
        self.checkpoint.with_suffix(".tmp").rename(self.checkpoint)

    @property
    def factor(self) -> float:
        """Factor of the learning rates at this step."""
        warm = min(1.0, (self.step - self.first_step + 1) / self.settings.warmup)
        progress = self.clock.seconds / (60 * self.settings.minutes)
        return warm * max(0.0, min(1.0, (1 - progress) / (1 - self.settings.decay_from)))

    def forget_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def follow(self, name: str, value: float, share: float = 0.04) -> None:
        """Keep the running mean of a loss or an accuracy."""
        self.running[name] = (1 - share) * self.running.get(name, value) + share * value

    def apply(self) -> None:
        """Apply the gradients, and average the weights."""
        torch.nn.utils.clip_grad_norm_(self.optimizer.others, 1.0)
        factor = self.factor
        self.optimizer.step(self.settings.rate * factor, self.settings.adam_rate * factor)
        average = min(self.settings.average, 1 - 1 / (self.step + 2 - self.first_step))
        torch._foreach_lerp_(self.averages, [p.detach() for p in self.model.parameters()], 1 - average)
        self.step += 1

    def log(self, **values: object) -> None:
        """Append a line to the log and print it: progress, running means and `values`."""
        seconds = round(self.earlier + self.clock.seconds)
        line: dict[str, object] = {"seconds": seconds, "step": self.step, "questions": self.questions}
        line |= {name: round(value, 4) for name, value in self.running.items()} | values
        with (self.folder / f"{self.name}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
