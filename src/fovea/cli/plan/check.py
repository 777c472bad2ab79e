"""Checks the planner on this machine: fits it to two workloads, predicts five others, and plays them.

Sessions are played on an engine in this process, and the same sessions on the simulator.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
from PIL import Image as Pillow
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fovea.bench.context import WORDS
from fovea.core.errors import ConfigError, EngineError
from fovea.core.media import Image
from fovea.core.trace import TraceRequest
from fovea.core.types import ChatPrompt, ImagePart, Message, TextPart
from fovea.engine.config import EngineConfig
from fovea.engine.request.inputs import to_image
from fovea.engine.simulate.executor import StepRecord, recorded_steps
from fovea.engine.simulate.report import Record
from fovea.engine.simulate.run import Next, simulated_records
from fovea.planner.cost import CostModel
from fovea.planner.fit import Preparation, fit_images, fit_preparation, fit_steps, image_error, step_error
from fovea.planner.sessions import FITTED, PREDICTED, Session, Turn, sessions

if TYPE_CHECKING:
    from fovea.engine.engine import Engine


@dataclass(slots=True)
class Played:
    """One request that was answered.

    turn: what was asked.
    sent: when, on the clock of `tokens`.
    tokens: when each token of the answer arrived.
    prompt, visual: tokens of the prompt, and how many of them are visual.
    preprocess_s: seconds that its text and pixels took before the engine could schedule it.
    """

    turn: Turn
    sent: float
    tokens: list[float] = field(default_factory=list)
    prompt: int = 0
    visual: int = 0
    preprocess_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures that a workload's clients see.

    ttft_s: median time to the first token.
    itl_s: mean time between tokens.
    tokens_per_s: tokens of all answers, over the whole time.
    """

    ttft_s: float
    itl_s: float
    tokens_per_s: float

    @classmethod
    def of(cls, answers: Iterable[tuple[float, Sequence[float]]]) -> Figures:
        """Return the figures of answers, each (when it was asked, when its tokens came)."""
        seen = list(answers)
        gaps = [b - a for _, times in seen for a, b in zip(times, times[1:], strict=False)]
        start, end = min(sent for sent, _ in seen), max(times[-1] for _, times in seen)
        return cls(
            median(times[0] - sent for sent, times in seen),
            fmean(gaps),
            sum(len(times) for _, times in seen) / (end - start),
        )

    @classmethod
    def middle(cls, several: Sequence[Figures]) -> Figures:
        """Return the median of each figure over repetitions."""
        return cls(
            median(one.ttft_s for one in several),
            median(one.itl_s for one in several),
            median(one.tokens_per_s for one in several),
        )


async def play(engine: Engine, clients: Sequence[Session], nonce: int) -> list[list[Played]]:
    """Play sessions at once, each client waiting for its answers. Returns the requests by client.

    nonce: another number gives other words and pixels, which no cache knows.
    """
    pictures = {
        turn.image: _picture(turn.image, nonce) for session in clients for turn in session if turn.image
    }

    async def client(number: int, session: Session) -> list[Played]:
        messages: tuple[Message, ...] = ()
        played = []
        for index, turn in enumerate(session):
            random = Random(f"{nonce} {number} {index}")
            question = " ".join(random.choice(WORDS) for _ in range(turn.text))
            parts: list[TextPart | ImagePart] = [TextPart(question)]
            if turn.image:
                parts.insert(0, ImagePart(pictures[turn.image]))
            before = messages if turn.continues else ()
            messages = (*before, Message("user", tuple(parts)))
            one, text = Played(turn, time.perf_counter()), ""
            async for delta in engine.stream(
                ChatPrompt(messages), temperature=0.0, max_tokens=turn.output, ignore_eos=True
            ):
                now = time.perf_counter()
                one.tokens += [now] * len(delta.token_ids)
                text += delta.text
                if delta.usage is not None:
                    one.prompt, one.visual = delta.usage.prompt, delta.usage.image
                if delta.timings is not None:
                    one.preprocess_s = delta.timings.preprocess
            if not one.tokens:
                raise EngineError("the model gave an answer without a token")
            messages = (*messages, Message("assistant", (TextPart(text),)))
            played.append(one)
        return played

    return await asyncio.gather(*(client(number, session) for number, session in enumerate(clients)))


def predict(
    clients: Sequence[Sequence[Played]],
    config: EngineConfig,
    cost: CostModel,
    preparation: Preparation,
    common: int,
) -> Figures:
    """Simulate the sessions that were played, with the same numbers of tokens.

    common: tokens with which every prompt begins.
    preparation: seconds until the engine can schedule a request.
    """
    trace: list[TraceRequest] = []
    seconds: list[float] = []
    following: dict[int, Next] = {}
    seen: set[tuple[str, int, int] | None] = set()
    for session in clients:
        before: Played | None = None
        for one in session:
            number = len(trace)
            if before is not None:
                following[number - 1] = Next(number, one.turn.continues)
            known = before.prompt + len(before.tokens) if before is not None and one.turn.continues else 0
            new_visual = one.visual if one.turn.image else 0
            images = ((one.turn.image[0], new_visual),) if one.turn.image else ()
            system = 0 if known else common
            text = max(1, one.prompt - known - new_visual - system)
            trace.append(TraceRequest(0.0, text, len(one.tokens), images, system))
            # An image is decoded and resized once; requests that find its outputs in a cache do not.
            pixels = 0 if one.turn.image in seen else one.turn.pixels
            seen.add(one.turn.image)
            seconds.append(preparation.seconds(one.prompt, pixels))
            before = one
    prepare = {id(request): value for request, value in zip(trace, seconds, strict=True)}
    records: list[Record] = simulated_records(
        tuple(trace), config, cost, following=following, prepare=lambda request: prepare[id(request)]
    )
    return Figures.of((record.arrival, record.tokens) for record in records)


def common_tokens(engine: Engine) -> int:
    """Return with how many equal tokens the prompts of different questions begin, by the chat template."""
    first, second = (engine.outline(ChatPrompt((Message("user", (TextPart(text),)),))).ids for text in "az")
    same = [one == other for one, other in zip(first, second, strict=False)]
    return same.index(False) if False in same else len(same)


def _picture(image: tuple[str, int, int], nonce: int) -> Image:
    key, width, height = image
    random = np.random.default_rng(crc32(f"{nonce} {key}".encode()))
    return to_image(Pillow.fromarray(random.integers(0, 255, (height, width, 3), dtype=np.uint8)))


LIMIT = 0.2
"""Largest relative error that counts as right."""
FIGURES = ("ttft_s", "itl_s", "tokens_per_s")


@dataclass(frozen=True, slots=True)
class Compared:
    """One workload: what was predicted, what was measured, and whether the costs were fitted to it."""

    name: str
    predicted: Figures
    measured: Figures
    fitted: bool

    def error(self, figure: str) -> float:
        """The relative error of one of FIGURES: predicted / measured - 1."""
        return float(getattr(self.predicted, figure) / getattr(self.measured, figure) - 1)

    @property
    def worst(self) -> float:
        return max(abs(self.error(figure)) for figure in FIGURES)


def run_check(model: str, repeats: int, threads: int, save: Path | None, *, as_json: bool) -> int:
    """Run the check and print it. Returns 0 if every predicted workload is within LIMIT, else 1."""
    from fovea.engine.engine import Engine

    if not 1 <= repeats <= 100:
        raise ConfigError(f"--repeats is {repeats}; accepted: 1 to 100", param="repeats")
    with Engine.from_pretrained(model, threads=threads, max_queue=0, speculate="off") as engine:
        print("fitting to two workloads ...", file=sys.stderr)
        record, fitted = measure_fit(engine, repeats)
        cost = fitted_cost(engine, record)
        preparation = fit_preparation([(one.prompt, one.turn.pixels, one.preprocess_s) for one in fitted])
        results = []
        for name in (*FITTED, *PREDICTED):
            print(f"{name} ...", file=sys.stderr)
            results.append(compare(engine, name, cost, preparation, repeats))
    if as_json:
        errors = step_error(cost, record.steps), image_error(cost, record.images)
        print(json.dumps(_values(results, cost, errors)))
    else:
        show(results, cost, record)
    if save is not None:  # last, so that the results are printed even if this fails
        cost.save(save)
    return 0 if all(one.worst <= LIMIT for one in results if not one.fitted) else 1


def measure_fit(engine: Engine, repeats: int) -> tuple[StepRecord, list[Played]]:
    """Play the workloads to fit to. Returns the record of all steps, and the requests."""
    asyncio.run(play(engine, sessions("mixed", seed=-1), nonce=-1))  # new shapes cost time once
    played: list[Played] = []
    with recorded_steps(engine.loop, engine.runner.model) as record:
        for seed in range(repeats):
            for name in FITTED:
                engine.clear_caches()
                clients = asyncio.run(play(engine, sessions(name, seed=seed), nonce=seed))
                played += [one for session in clients for one in session]
    return record, played


def fitted_cost(engine: Engine, record: StepRecord) -> CostModel:
    """Return the cost model that fits the recorded steps."""
    model, info = engine.runner.model, engine.info
    return CostModel(
        **fit_steps(record.steps),
        **fit_images(record.images),
        between_s=median(record.between),
        kv_token_bytes=engine.runner.block_bytes // engine.runner.block_size,
        visual_token_bytes=model.visual_token_bytes,
        max_context=info.max_context,
        made_from=f"{info.name}, {info.dtype} on {info.device}: {len(record.steps)} steps and "
        f"{len(record.images)} images",
    )


def compare(engine: Engine, name: str, cost: CostModel, preparation: Preparation, repeats: int) -> Compared:
    """Play a workload some times, and predict it."""
    common = common_tokens(engine)
    measured, predicted = [], []
    for seed in range(repeats):
        engine.clear_caches()
        clients: Sequence[Session] = sessions(name, seed=seed)
        played = asyncio.run(play(engine, clients, nonce=1000 + seed))
        measured.append(Figures.of((one.sent, one.tokens) for session in played for one in session))
        predicted.append(predict(played, engine.config, cost, preparation, common))
    return Compared(name, Figures.middle(predicted), Figures.middle(measured), name in FITTED)


def show(results: Sequence[Compared], cost: CostModel, record: StepRecord) -> None:
    """Print the comparison."""
    console = Console(file=sys.stdout, highlight=False)
    steps, images = step_error(cost, record.steps), image_error(cost, record.images)
    console.print(
        f"{cost.made_from}; median error of a step {steps.median:.1%}, of an image {images.median:.1%}\n"
        "predicted / measured, and the error of the prediction"
    )
    table = Table("workload", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("first token, ms", "", "between tokens, ms", "", "tokens/s", ""):
        table.add_column(column, justify="right")
    for one in results:
        cells = []
        for figure, factor in (("ttft_s", 1e3), ("itl_s", 1e3), ("tokens_per_s", 1.0)):
            sides = (factor * getattr(side, figure) for side in (one.predicted, one.measured))
            cells += [" / ".join(f"{side:,.1f}" for side in sides), f"{one.error(figure):+.0%}"]
        table.add_row(one.name + (" (fitted)" if one.fitted else ""), *cells)
    console.print(table)
    worst = max(one.worst for one in results if not one.fitted)
    verdict = "within" if worst <= LIMIT else "above"
    console.print(f"largest error of a predicted workload: {worst:.0%} ({verdict} {LIMIT:.0%})")


def _values(results: Sequence[Compared], cost: CostModel, errors: Sequence[Any]) -> dict[str, Any]:
    return {
        "fovea_plan_check": 1,
        "limit": LIMIT,
        "cost": asdict(cost),
        "steps": asdict(errors[0]),
        "images": asdict(errors[1]),
        "workloads": [
            {**asdict(one), "errors": {figure: one.error(figure) for figure in FIGURES}} for one in results
        ],
    }
