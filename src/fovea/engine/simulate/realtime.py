"""An executor that takes real time: steps last as long as a cost model says, and tokens are filler words."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

from fovea.engine.job import SequenceInputs
from fovea.engine.schedule.plan import StepPlan
from fovea.engine.sequence import Sequence
from fovea.engine.simulate.executor import CostExecutor
from fovea.engine.simulate.filler import Filler
from fovea.engine.step.executor import StepResult

LAG_S = 0.05
"""Largest delay that later steps make up for. Sleeping is exact to milliseconds only, and steps may be
shorter.
"""


class RealtimeExecutor:
    """A `CostExecutor` whose `execute` returns when the step would be over."""

    def __init__(self, executor: CostExecutor, filler: Filler) -> None:
        self._executor = executor
        self._filler = filler
        self._due = time.monotonic()

    @property
    def encoding(self) -> bool:
        return self._executor.encoding

    @property
    def slice_s(self) -> float:
        return self._executor.slice_s

    def add(self, seq: Sequence, inputs: SequenceInputs) -> Seq[int]:
        if not len(self._filler):  # the engine was idle, so there is no delay to make up for
            self._due = time.monotonic()
        self._filler.add(seq, inputs.choice)
        return self._executor.add(seq, inputs)

    def remove(self, seq: Sequence) -> None:
        self._filler.remove(seq)
        self._executor.remove(seq)

    def late(self) -> None:
        return None

    def execute(self, plan: StepPlan, encode_s: float) -> StepResult:
        result = self._executor.execute(plan, encode_s)
        # A step begins at the due end of the last one, however long Python took in between.
        seconds = (result.seconds or 0.0) + self._executor.cost.between_s
        self._due = max(self._due, time.monotonic() - LAG_S) + seconds
        time.sleep(max(0.0, self._due - time.monotonic()))
        return result
