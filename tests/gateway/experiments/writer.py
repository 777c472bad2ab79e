"""A process that counts requests in a state file: python -m ...writer FOLDER FIRST COUNT.

It writes after every 10 requests, and prints how many are written. With a count of 0 it never ends.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from fovea.gateway.experiments.experiments import SPLIT, Assignment, Experiments
from tests.gateway.experiments.support import a_config, an_outcome

BATCH = 10


def main(folder: str, first: int, count: int) -> None:
    experiments = Experiments(a_config(Path(folder)))
    for number in itertools.count() if count == 0 else range(count):
        assignment = Assignment("v2", "new" if number % 3 else "old", "vlm-2", SPLIT)
        experiments.record(assignment, an_outcome(first + number, request_id=f"r-{first + number}"))
        if number % BATCH == BATCH - 1:
            experiments.flush()
            print(number + 1, flush=True)
    experiments.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
