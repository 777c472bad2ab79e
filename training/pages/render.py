"""Draws pages for training into a folder, until there are `count` of them.

    python -m pages.render --folder runs/pages --count 4000
    python -m pages.render --folder runs/pages-held --count 300 --held-out

Pages of templates and fonts that are held out belong in a folder of their own, which only measures.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from random import Random

from fovea.evaluation.documents import store
from fovea.evaluation.documents.charts import draw_chart
from fovea.evaluation.documents.chromium import browser

CHARTS = 0.1
"""The share of pages that are charts."""
PER_BROWSER = 400
"""Pages that one browser draws before a new one takes over, so that its memory stays small."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/pages"))
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--held-out", action="store_true")
    arguments = parser.parse_args()
    os.nice(5)
    folder: Path = arguments.folder
    done = sum(1 for _ in store.records(folder)) if (folder / store.INDEX).exists() else 0
    while done < arguments.count:
        with browser(arguments.held_out) as renderer:
            for number in range(done, min(arguments.count, done + PER_BROWSER)):
                rng = Random(f"pages/{arguments.seed}/{number}")
                page = draw_chart(rng, arguments.held_out) if rng.random() < CHARTS else renderer.draw(rng)
                store.write(page, folder, f"{arguments.seed}-{number:06d}", compress_level=1)
                done += 1
        print(done, flush=True)


if __name__ == "__main__":
    main()
