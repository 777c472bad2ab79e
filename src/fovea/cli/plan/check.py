"""Checks the planner on this machine: fits it to two workloads, predicts five others, and plays them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fovea.cli.plan.play import Figures, Played, common_tokens, play, predict
from fovea.core.errors import ConfigError
from fovea.engine.simulate.executor import StepRecord, recorded_steps
from fovea.planner.cost import CostModel
from fovea.planner.fit import Preparation, fit_images, fit_preparation, fit_steps, image_error, step_error
from fovea.planner.sessions import FITTED, PREDICTED, Session, sessions

if TYPE_CHECKING:
    from fovea.engine.engine import Engine

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
    with Engine.from_pretrained(model, threads=threads, max_queue=0) as engine:
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
        kv_token_bytes=model.decoder.config.kv_bytes_per_token(model.dtype.itemsize),
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
