"""Trains fovea-tiny. Restartable: a run's folder holds its checkpoint and its log.

    python train.py --run runs/first --minutes 110
    python train.py --run runs/first --minutes 60 --resume      # 60 more, with a fresh schedule

The schedule follows the minutes of work: a short warmup, a constant rate, and a linear decay to zero over the last
part. A process that was stopped for a while (SIGSTOP), or shared its cores, only ends later.
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
from torch import Tensor
from torch.nn import functional as F

from batches import scene_batch, text_batch
from common import ASSETS
from evaluate import exact_match, held_out
from model import Fovea
from muon import Muon
from packing import Batch, Packer
from several import motion_batch, pair_batch, still_batch
from varied import Tower, tower, varied_batch

torch._dynamo.config.cache_size_limit = 32
SMALL = (128, 160, 192, 224, 256)
NOTHING = 0.15  # weight of the class `nothing there` where it is by far the most frequent


@dataclass
class Settings:
    run: str = "runs/first"
    minutes: float = 110.0
    decay_from: float = 0.4
    large_from: float = 0.3
    warmup: int = 150
    rate: float = 3e-3
    adam_rate: float = 2e-3
    images: int = 32
    several: int = 12
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
    """A smaller batch that goes with a step's main batch: larger images, conversations, videos of one scene, text."""
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
    """Images seen in parts: large, where that is what it is for, and small, where each part that is missing is missed."""
    size = small_size(rng) if rng.random() < 0.5 else large_size(rng)
    count = max(2, min(settings.varied, 2500 * 1024 // (size[0] * size[1])))
    return varied_batch(rng, packer, size, count, 6, embeds)


def several_batch(rng: Random, packer: Packer, settings: Settings) -> Batch:
    """Pairs, or a motion, which is a video in half of the cases."""
    size, count = small_size(rng), settings.several
    if rng.random() < 0.4:
        return pair_batch(rng, packer, size, count)
    return motion_batch(rng, packer, size, count, rng.random() < 0.5)


def produce(queue: mp.Queue, settings: Settings, start: int, worker: int, progress: mp.Value) -> None:
    """Steps as lists of batches; the seed of a step is its number, always below the held-out seeds."""
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
        if settings.varied:
            batches.append(parts_batch(rng, packer, settings, embeds))
        if rng.random() < settings.minor:
            batches.append(minor_batch(rng, packer, settings, done > settings.large_from))
        queue.put([{key: torch.from_numpy(np.ascontiguousarray(v)) for key, v in b.items()} for b in batches])
        step += settings.workers


def dense_loss(logits: Tensor, target: Tensor, nothing: float) -> Tensor:
    """Of one head; `nothing` is the weight of class 0, and -1 is not asked for."""
    logits = logits.float().reshape(target.numel(), -1)
    weight = torch.ones(logits.shape[1], device=logits.device)
    weight[0] = nothing
    return F.cross_entropy(logits, target.flatten(), weight=weight, ignore_index=-1)


def losses(model: Fovea, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Mean losses: of answer tokens and of the dense targets."""
    states, visual, middle = model.hidden(batch)
    row, column, token, _ = batch["targets"].unbind(1)
    logits = model.logits(states[row, column])
    found = {"answer": F.cross_entropy(logits, token)}
    if "patches" not in batch:
        return found
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
        found[name] = dense_loss(model.auxiliary[name](visual), target, nothing)
    if "before" in batch and bool((batch["before"] >= 0).any()):
        found["before"] = dense_loss(model.auxiliary["before"](middle), batch["before"], NOTHING)
    target = batch["counts"].flatten()
    if bool((target >= 0).any()):
        logits = model.auxiliary["count"](visual).float().reshape(len(target), -1)
        found["count"] = 2 * F.cross_entropy(logits, target, ignore_index=-1)
    return found


class Courtesy:
    """Gives a thread up while other programs need the cores: one late thread holds all the others up."""

    def __init__(self, threads: int) -> None:
        self.threads = self.now = threads
        self.mark = self.read()

    @staticmethod
    def read() -> tuple[float, float, float]:
        """Seconds: of the clock, of all cores busy, of this process."""
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:8]]
        busy = sum(fields) - fields[3] - fields[4]
        return time.time(), busy / os.sysconf("SC_CLK_TCK"), time.process_time()

    def adapt(self) -> None:
        at, busy, own = self.read()
        elapsed = at - self.mark[0]
        if elapsed < 12:
            return
        others = (busy - self.mark[1] - own + self.mark[2]) / elapsed
        self.mark = at, busy, own
        free = (os.cpu_count() or 1) - others
        wanted = self.threads if free > self.threads - 0.25 else max(2, self.threads - 1)
        if wanted != self.now:
            self.now = wanted
            torch.set_num_threads(wanted)


class WorkClock:
    """Seconds of work since the start: on a CPU those of the process over its threads, so that neither pauses nor
    neighbours count; on a GPU those of the wall."""

    def __init__(self, threads: int, device: torch.device) -> None:
        self.threads = threads if device.type == "cpu" else 1
        self.read = time.process_time if device.type == "cpu" else time.monotonic
        self.start = self.read()

    @property
    def seconds(self) -> float:
        return (self.read() - self.start) / self.threads


class Trainer:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.folder = Path(settings.run)
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(settings.seed)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.set_num_threads(settings.threads)
        self.model = Fovea(json.loads((ASSETS / "config.json").read_text())).to(self.device)
        if self.device.type == "cpu":
            self.model.fuse()
        self.averaged = [p.detach().clone() for p in self.model.parameters()]
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

    def load(self) -> None:
        state = torch.load(self.folder / "checkpoint.pt", map_location=self.device)
        self.model.load_state_dict(state["model"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])
        # Dense heads come last in every list: a checkpoint from before a head was added still loads.
        for mine, theirs in zip(self.averaged, state["averaged"], strict=False):
            mine.copy_(theirs)
        self.step, self.images, self.earlier = state["step"], state["images"], state["seconds"]

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "averaged": self.averaged,
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "images": self.images,
            "seconds": self.earlier + self.elapsed,
            "settings": asdict(self.settings),
        }
        torch.save(state, self.folder / "checkpoint.tmp")
        (self.folder / "checkpoint.tmp").rename(self.folder / "checkpoint.pt")

    def factor(self) -> float:
        warm = min(1.0, (self.step - self.first_step + 1) / self.settings.warmup)
        left = (1 - self.progress) / (1 - self.settings.decay_from)
        return warm * max(0.0, min(1.0, left))

    def update(self, batches: list[dict[str, Tensor]]) -> None:
        weight_of = [float(len(batch["targets"])) for batch in batches]
        for parameter in self.model.parameters():
            parameter.grad = None
        for number, (batch, weight) in enumerate(zip(batches, weight_of, strict=True)):
            batch = {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}
            # Only main batches are worth compiled code: the others come in too many shapes.
            stance = torch.compiler.set_stance("force_eager" if number else "default")
            with stance, torch.autocast(self.device.type, torch.bfloat16):
                found = losses(self.model, batch)
            auxiliary = self.settings.auxiliary * (1 - 0.5 * self.progress)
            total = sum(value * (1.0 if name == "answer" else auxiliary) for name, value in found.items())
            (total * (weight / sum(weight_of))).backward()
            for name, value in found.items():
                self.running[name] = 0.98 * self.running.get(name, float(value.detach())) + 0.02 * float(
                    value.detach()
                )
            shown = batch["images"].shape[:-3].numel() if batch["images"].numel() else 0
            self.images += len(batch["tokens"]) if "order" in batch else shown
        torch.nn.utils.clip_grad_norm_(self.optimizer.others, 1.0)
        factor = self.factor()
        self.optimizer.step(self.settings.rate * factor, self.settings.adam_rate * factor)
        average = min(self.settings.average, 1 - 1 / (self.step + 1 - self.first_step + 1))
        torch._foreach_lerp_(self.averaged, [p.detach() for p in self.model.parameters()], 1 - average)
        self.step += 1

    def evaluate(self, batches: dict[str, list[Batch]]) -> dict[str, float]:
        """Exact matches of the averaged weights."""
        kept = [p.detach().clone() for p in self.model.parameters()]
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), self.averaged, strict=True):
                parameter.copy_(value)
            with torch.compiler.set_stance("force_eager"):
                scores = {kind: exact_match(self.model, some, self.device) for kind, some in batches.items()}
            for parameter, value in zip(self.model.parameters(), kept, strict=True):
                parameter.copy_(value)
        return scores

    def log(self, **values: object) -> None:
        line = {"seconds": round(self.earlier + self.elapsed), "step": self.step, "images": self.images}
        line |= {name: round(value, 4) for name, value in self.running.items()} | values
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    def run(self, batches: Iterator[list[dict[str, Tensor]]], progress: mp.Value) -> None:
        held = held_out(self.packer, 48)
        courtesy = Courtesy(self.settings.threads) if self.device.type == "cpu" else None
        next_eval = 60 * self.settings.eval_minutes
        seen, since = self.images, time.time()
        while self.progress < 1 and not (self.folder / "stop").exists():
            self.update(next(batches))
            progress.value = self.progress
            if courtesy is not None:
                courtesy.adapt()
            if not all(math.isfinite(value) for value in self.running.values()):
                raise RuntimeError(f"a loss is not finite: {self.running}")
            if self.step % 50 == 0:
                speed = (self.images - seen) / (time.time() - since)
                self.log(
                    factor=round(self.factor(), 3),
                    images_per_s=round(speed, 1),
                    threads=torch.get_num_threads(),
                )
                seen, since = self.images, time.time()
            if self.elapsed > next_eval:
                next_eval = self.elapsed + 60 * self.settings.eval_minutes
                self.log(exact=self.evaluate(held))
                self.save()
                since, seen = time.time(), self.images
        self.log(exact=self.evaluate(held), end=True)
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
