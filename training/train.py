"""Trains fovea-tiny. A run can be resumed: its folder holds its checkpoint and its log.

    python train.py --run runs/first --minutes 110
    python train.py --run runs/first --minutes 60 --resume      # 60 more minutes, with a new schedule

The schedule follows the minutes of work: a short warmup, a constant rate, and a linear decay to zero over the
last part. A process that is stopped for a while (SIGSTOP), or that shares its cores, ends later, but does the
same work.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from batches import scene_batch, text_batch, tool_batch
from common import ASSETS
from evaluate import exact_match, held_out_batches
from model import Fovea
from muon import Muon
from packing import Batch, Packer
from several import motion_batch, pair_batch, still_batch
from varied import Tower, tower, varied_batch

torch._dynamo.config.cache_size_limit = 32
SMALL = (128, 160, 192, 224, 256)
NOTHING = 0.15  # weight of class 0 (nothing is there) for heads in which it is by far the most frequent class


@dataclass
class Settings:
    """The command-line options of a run.

    run: folder of the run.
    minutes: minutes of work, as WorkClock counts them.
    decay_from: share of the time after which the rate decays.
    large_from: share of the time after which larger images come in.
    warmup: steps until the full rate.
    rate, adam_rate: learning rates of Muon and of Adam.
    images: images of a main batch.
    several: pairs or motions of a step's second batch; 0: no such batch.
    tools: conversations in a step's batch with tools on offer; 0: no such batch.
    varied: at most so many images in a step's batch of images in parts; 0: no such batch.
    minor: probability of a minor batch in a step.
    large: probability that a minor batch is of larger images.
    asked: questions about each image.
    seed: of the run.
    threads: of torch.
    workers: processes that draw batches.
    eval_minutes: minutes between evaluations.
    auxiliary: weight of the auxiliary heads' losses at the start; it falls to half of that.
    average: decay of the averaged weights per step.
    resume: whether to continue from the run's checkpoint.
    language: begin with the bundled weights, and train the text layers alone. The vision tower and the
        embeddings stay as they are, and with them everything that was trained on their outputs.
    """

    run: str = "runs/first"
    minutes: float = 110.0
    decay_from: float = 0.4
    large_from: float = 0.3
    warmup: int = 150
    rate: float = 3e-3
    adam_rate: float = 2e-3
    images: int = 32
    several: int = 12
    tools: int = 0
    varied: int = 16
    minor: float = 0.6
    large: float = 0.7
    asked: int = 8
    seed: int = 1
    threads: int = 3
    workers: int = 1
    eval_minutes: float = 5.0
    auxiliary: float = 1.0
    average: float = 0.99
    resume: bool = False
    language: bool = False


def small_size(rng: Random) -> tuple[int, int]:
    while True:
        width, height = rng.choice(SMALL), rng.choice(SMALL)
        if width * height <= 224 * 224:
            return width, height


def large_size(rng: Random) -> tuple[int, int]:
    if rng.random() < 0.15:
        long, short = 32 * rng.randint(30, 42), 32 * rng.randint(20, 28)
        return (long, short) if rng.random() < 0.6 else (short, long)
    low, high = rng.choice(((7, 12), (8, 16), (8, 16), (14, 28), (16, 28)))
    return 32 * rng.randint(low, high), 32 * rng.randint(low, high)


def minor_batch(rng: Random, packer: Packer, settings: Settings, large: bool) -> Batch:
    """A smaller batch beside a step's main batch: larger images, conversations, still videos, or text."""
    if large and rng.random() < settings.large:
        size = large_size(rng)
        count = max(1, min(20, 3000 * 1024 // (size[0] * size[1])))
        return scene_batch(rng, packer, size, count, settings.asked, rng.random() < 0.1)
    kind, size = rng.random(), small_size(rng)
    if kind < 0.4:
        return scene_batch(rng, packer, size, settings.images // 2, 4, True)
    if kind < 0.9:
        return still_batch(rng, packer, size, settings.images // 2, settings.asked)
    return text_batch(rng, packer, 16)


def parts_batch(rng: Random, packer: Packer, settings: Settings, embeds: Tower) -> Batch:
    """Images encoded in parts.

    Half of the batches are of large images, for which the method is meant. The other half are of small
    images, in which each missing part matters.
    """
    size = small_size(rng) if rng.random() < 0.5 else large_size(rng)
    count = max(2, min(settings.varied, 2500 * 1024 // (size[0] * size[1])))
    return varied_batch(rng, packer, size, count, 6, embeds)


def several_batch(rng: Random, packer: Packer, settings: Settings) -> Batch:
    """Pairs of images, or motions. Half of the motions are videos."""
    size, count = small_size(rng), settings.several
    if rng.random() < 0.4:
        return pair_batch(rng, packer, size, count)
    return motion_batch(rng, packer, size, count, rng.random() < 0.5)


def produce(queue: mp.Queue, settings: Settings, start: int, worker: int, progress: mp.Value) -> None:
    """Put the batches of every `workers`-th step into the queue, without end.

    The random stream of a step depends on the run's seed and the step's number; held-out samples use other
    seeds.
    """
    os.nice(5)
    torch.set_num_threads(1)
    packer, embeds = Packer(str(ASSETS / "tokenizer.json")), tower()
    step = start + worker
    while True:
        rng = Random(f"{settings.seed}/{step}")
        done = progress.value
        main = scene_batch(rng, packer, small_size(rng), settings.images, settings.asked, False)
        batches = [main]
        if settings.several:
            batches.append(several_batch(rng, packer, settings))
        if settings.tools:
            size = small_size(rng) if rng.random() < 0.6 else large_size(rng)
            count = max(2, min(settings.tools, 2000 * 1024 // (size[0] * size[1])))
            batches.append(tool_batch(rng, packer, size, count))
        if settings.varied:
            batches.append(parts_batch(rng, packer, settings, embeds))
        if rng.random() < settings.minor:
            batches.append(minor_batch(rng, packer, settings, done > settings.large_from))
        queue.put([{key: torch.from_numpy(np.ascontiguousarray(v)) for key, v in b.items()} for b in batches])
        step += settings.workers


def dense_loss(logits: Tensor, target: Tensor, nothing: float) -> Tensor:
    """Cross-entropy of one head. nothing: weight of class 0. Targets of -1 are ignored."""
    logits = logits.float().reshape(target.numel(), -1)
    weight = torch.ones(logits.shape[1], device=logits.device)
    weight[0] = nothing
    return F.cross_entropy(logits, target.flatten(), weight=weight, ignore_index=-1)


def losses(model: Fovea, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The mean losses by name: "answer", for answer tokens, and one for each auxiliary head with targets."""
    states, visual, middle = model.hidden(batch)
    row, column, token, _ = batch["targets"].unbind(1)
    logits = model.logits(states[row, column])
    values = {"answer": F.cross_entropy(logits, token)}
    if "patches" not in batch or not visual.requires_grad:
        return values
    dense = {
        "shape": (batch["patches"][..., 0], 1.0),
        "colour": (batch["patches"][..., 1], 1.0),
        "centre": (batch["centres"], NOTHING),
        "character": (batch["characters"], NOTHING),
        "rank": (batch["ranks"], NOTHING),
        "place": (batch["places"], 1.0),
        "cell": (batch["cells"], NOTHING),
    }
    if "moved" in batch:
        dense["moved"] = (batch["moved"], NOTHING)
    for name, (target, nothing) in dense.items():
        if not bool((target >= 0).any()):
            continue
        values[name] = dense_loss(model.auxiliary[name](visual), target, nothing)
    if "before" in batch and bool((batch["before"] >= 0).any()):
        values["before"] = dense_loss(model.auxiliary["before"](middle), batch["before"], NOTHING)
    target = batch["counts"].flatten()
    if bool((target >= 0).any()):
        logits = model.auxiliary["count"](visual).float().reshape(len(target), -1)
        values["count"] = 2 * F.cross_entropy(logits, target, ignore_index=-1)
    return values


class Courtesy:
    """Uses one thread less while other programs need the cores, because one late thread delays all others."""

    def __init__(self, threads: int) -> None:
        self.threads = self.now = threads
        self.mark = self.read()

    @staticmethod
    def read() -> tuple[float, float, float]:
        """Seconds of the clock, of work of all cores, and of work of this process."""
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:8]]
        busy = sum(fields) - fields[3] - fields[4]
        return time.time(), busy / os.sysconf("SC_CLK_TCK"), time.process_time()

    def adapt(self) -> None:
        """Set the number of threads by the load of the last 12 seconds or more; do nothing before that."""
        at, busy, own = self.read()
        elapsed = at - self.mark[0]
        if elapsed < 12:
            return
        others = (busy - self.mark[1] - own + self.mark[2]) / elapsed
        self.mark = at, busy, own
        free = (os.cpu_count() or 1) - others
        threads = self.threads if free > self.threads - 0.25 else max(2, self.threads - 1)
        if threads != self.now:
            self.now = threads
            torch.set_num_threads(threads)


class WorkClock:
    """Counts seconds of work since the start.

    On a CPU it is the process's CPU time divided by its threads, so that pauses and other programs do not
    count. On a GPU it is wall-clock time.
    """

    def __init__(self, threads: int, device: torch.device) -> None:
        self.threads = threads if device.type == "cpu" else 1
        self.read = time.process_time if device.type == "cpu" else time.monotonic
        self.start = self.read()

    @property
    def seconds(self) -> float:
        return (self.read() - self.start) / self.threads


class Trainer:
    """Training loop of one run: model, optimizer, averaged weights, checkpoint and log."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.folder = Path(settings.run)
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(settings.seed)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.set_num_threads(settings.threads)
        self.model = Fovea(json.loads((ASSETS / "config.json").read_text())).to(self.device)
        if settings.language:
            self.begin_with_bundled()
        if self.device.type == "cpu":
            self.model.fuse()
        self.averages = [p.detach().clone() for p in self.model.parameters()]
        self.optimizer = Muon(self.model, momentum=0.95, betas=(0.9, 0.98), decay=0.02)
        self.step = self.images = 0
        self.earlier = 0.0
        if settings.resume:
            self.load()
        self.clock = WorkClock(settings.threads, self.device)
        self.first_step = self.step
        self.running: dict[str, float] = {}
        self.packer = Packer(str(ASSETS / "tokenizer.json"))

    @property
    def elapsed(self) -> float:
        return self.clock.seconds

    @property
    def progress(self) -> float:
        return min(1.0, self.elapsed / (60 * self.settings.minutes))

    def begin_with_bundled(self) -> None:
        """Load the bundled weights, and keep all but the text layers and the last norm fixed."""
        weights = load_file(ASSETS / "model.safetensors")
        self.model.load_state_dict({name: value.float() for name, value in weights.items()}, strict=False)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_("language_model.layers" in name or "language_model.norm" in name)

    def load(self) -> None:
        state = torch.load(self.folder / "checkpoint.pt", map_location=self.device)
        self.model.load_state_dict(state["model"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])
        # Auxiliary heads come last in every list, so that a checkpoint without a newer head can be loaded.
        for mine, theirs in zip(self.averages, state["averaged"], strict=False):
            mine.copy_(theirs)
        self.step, self.images, self.earlier = state["step"], state["images"], state["seconds"]

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "averaged": self.averages,
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "images": self.images,
            "seconds": self.earlier + self.elapsed,
            "settings": asdict(self.settings),
        }
        torch.save(state, self.folder / "checkpoint.tmp")
        (self.folder / "checkpoint.tmp").rename(self.folder / "checkpoint.pt")

    def factor(self) -> float:
        """Factor of the learning rates at this step, by warmup and decay."""
        warm = min(1.0, (self.step - self.first_step + 1) / self.settings.warmup)
        left = (1 - self.progress) / (1 - self.settings.decay_from)
        return warm * max(0.0, min(1.0, left))

    def update(self, batches: list[dict[str, Tensor]]) -> None:
        """One step of the optimizer, on several batches, each weighted by its number of answer tokens."""
        weight_of = [float(len(batch["targets"])) for batch in batches]
        for parameter in self.model.parameters():
            parameter.grad = None
        for number, (batch, weight) in enumerate(zip(batches, weight_of, strict=True)):
            batch = {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}
            # Only main batches use compiled code. The others have too many shapes.
            stance = torch.compiler.set_stance("force_eager" if number else "default")
            with stance, torch.autocast(self.device.type, torch.bfloat16):
                values = losses(self.model, batch)
            auxiliary = self.settings.auxiliary * (1 - 0.5 * self.progress)
            total = sum(value * (1.0 if name == "answer" else auxiliary) for name, value in values.items())
            (total * (weight / sum(weight_of))).backward()
            for name, value in values.items():
                self.running[name] = 0.98 * self.running.get(name, float(value.detach())) + 0.02 * float(
                    value.detach()
                )
            pictures = batch["images"].shape[:-3].numel() if batch["images"].numel() else 0
            self.images += len(batch["tokens"]) if "order" in batch else pictures
        torch.nn.utils.clip_grad_norm_(self.optimizer.others, 1.0)
        factor = self.factor()
        self.optimizer.step(self.settings.rate * factor, self.settings.adam_rate * factor)
        average = min(self.settings.average, 1 - 1 / (self.step + 1 - self.first_step + 1))
        torch._foreach_lerp_(self.averages, [p.detach() for p in self.model.parameters()], 1 - average)
        self.step += 1

    def evaluate(self, batches: dict[str, list[Batch]]) -> dict[str, float]:
        """The exact match of the averaged weights by kind. Afterwards the model has its own weights again."""
        originals = [p.detach().clone() for p in self.model.parameters()]
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), self.averages, strict=True):
                parameter.copy_(value)
            with torch.compiler.set_stance("force_eager"):
                scores = {kind: exact_match(self.model, some, self.device) for kind, some in batches.items()}
            for parameter, value in zip(self.model.parameters(), originals, strict=True):
                parameter.copy_(value)
        return scores

    def log(self, **values: object) -> None:
        """Append a line to log.jsonl and print it: progress, running means of the losses, and `values`."""
        line = {"seconds": round(self.earlier + self.elapsed), "step": self.step, "images": self.images}
        line |= {name: round(value, 4) for name, value in self.running.items()} | values
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    def run(self, batches: Iterator[list[dict[str, Tensor]]], progress: mp.Value) -> None:
        batches_by_kind = held_out_batches(self.packer, 48)
        courtesy = Courtesy(self.settings.threads) if self.device.type == "cpu" else None
        next_eval = 60 * self.settings.eval_minutes
        images, since = self.images, time.time()
        while self.progress < 1 and not (self.folder / "stop").exists():
            self.update(next(batches))
            progress.value = self.progress
            if courtesy is not None:
                courtesy.adapt()
            if not all(math.isfinite(value) for value in self.running.values()):
                raise RuntimeError(f"a loss is not finite: {self.running}")
            if self.step % 50 == 0:
                speed = (self.images - images) / (time.time() - since)
                self.log(
                    factor=round(self.factor(), 3),
                    images_per_s=round(speed, 1),
                    threads=torch.get_num_threads(),
                )
                images, since = self.images, time.time()
            if self.elapsed > next_eval:
                next_eval = self.elapsed + 60 * self.settings.eval_minutes
                self.log(exact=self.evaluate(batches_by_kind))
                self.save()
                since, images = time.time(), self.images
        self.log(exact=self.evaluate(batches_by_kind), end=True)
        self.save()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in asdict(Settings()).items():
        flag = "--" + name.replace("_", "-")
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(default), default=default)
    settings = Settings(**vars(parser.parse_args()))
    trainer = Trainer(settings)
    context = mp.get_context("spawn")
    queue, progress = context.Queue(maxsize=6), context.Value("d", 0.0)
    workers = [
        context.Process(target=produce, args=(queue, settings, trainer.step, w, progress), daemon=True)
        for w in range(settings.workers)
    ]
    for worker in workers:
        worker.start()
    trainer.run(iter(queue.get, None), progress)
    for worker in workers:
        worker.terminate()


if __name__ == "__main__":
    main()
