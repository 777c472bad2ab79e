"""The targets of a deployment's alerts: those of its spec, and for the rest what a plan predicts.

Every pool whose model and GPU the planner knows is planned as `fovea plan` does (`planner.targets`). The
slowest one decides, because rules are those of the whole deployment. A pool that cannot be planned counts
with the documented defaults of `objectives.Targets`. The rendered rules say what came from where.
"""

from __future__ import annotations

from dataclasses import asdict

from fovea.deploy.gpus import hardware_of
from fovea.deploy.monitoring.objectives import Targets
from fovea.deploy.spec import DeploySpec, Pool
from fovea.planner.option import HEADROOM
from fovea.planner.precision import RECIPES, recipe
from fovea.planner.shape import find as find_model
from fovea.planner.targets import MARGIN, USUAL, usual_targets


def targets_of(spec: DeploySpec) -> tuple[Targets, tuple[str, ...]]:
    """Return the targets of a deployment's alerts, and sentences that say where they are from."""
    given = {} if spec.monitoring is None else dict(spec.monitoring.targets)
    planned: list[dict[str, float]] = []
    notes = [f"Targets that the spec states: {', '.join(given)}."] if given else []
    times = [name for name in asdict(Targets()) if name.endswith("_s") and name not in given]
    if not times:
        return Targets(**given), tuple(notes)
    for pool in spec.pools:
        found, reason = _plan(pool)
        if reason:
            notes.append(f"Pool {pool.name}: documented defaults, because {reason}.")
            defaults = asdict(Targets())
            found = {name: defaults[name] for name in times}
        else:
            width, height = USUAL.images[0]
            notes.append(
                f"Pool {pool.name}: {pool.model} on {pool.gpu}, planned at {HEADROOM:.0%} of its highest "
                f"rate of requests with one image of {width}x{height} and answers of "
                f"{USUAL.answer} tokens in the mean; each time is {MARGIN:g} times the predicted one."
            )
        planned.append(found)
    slowest = {name: _slowest([one[name] for one in planned]) for name in times}
    return Targets(**{**slowest, **given}), tuple(notes)


def _slowest(values: list[float]) -> float:
    """Return the largest value; 0, which is no objective, is larger than all."""
    return 0.0 if 0.0 in values else max(values)


def _plan(pool: Pool) -> tuple[dict[str, float], str]:
    """Return the predicted targets of a pool, or the reason why there are none."""
    shape = find_model(pool.model)
    quantization = str(pool.settings.get("quantization", "none")).replace("dequantize", "none")
    hardware = hardware_of(pool.gpu)
    if pool.settings.get("simulate"):
        return {}, "its engines are simulated"
    if pool.hardware == "cpu":
        return {}, "a spec does not name the kind of CPU"
    if pool.mig:
        return {}, "slices of a GPU are not planned"
    if hardware is None:
        return {}, f"the planner does not know the GPU {pool.gpu!r}" if pool.gpu else "it names no GPU"
    if shape is None:
        return {}, f"the planner does not know the model {pool.model}"
    if quantization not in RECIPES:
        return {}, f"the planner does not know the quantization {quantization}"
    return usual_targets(shape, hardware, recipe(quantization), pool.devices)
