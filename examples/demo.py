"""Ask the bundled model about the images in this folder, and show the time and tokens of each answer.

    python examples/demo.py

The questions and their right answers are in questions.jsonl. For a wrong answer the right one is printed,
too.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from fovea import AnswerFormat, Engine
from fovea.api.convert import timings_body
from fovea.core.constraints import Tool
from fovea.core.types import ChatPrompt, Completion, ImagePart, Message, TemplateInputs, TextPart
from fovea.engine.request.inputs import to_image
from fovea.evaluation.datasets import Case, read_jsonl
from fovea.evaluation.score import matches

HERE = Path(__file__).resolve().parent
STAGES = ("preprocess", "encode", "prefill", "decode")


def ask(engine: Engine, case: Case) -> Completion:
    """Answer the question of a case, which may offer tools, or set the form of the answer."""
    exchange = case.exchanges[0]
    form = None if exchange.schema is None else AnswerFormat.json_schema(exchange.schema)
    if not case.tools:
        return engine.generate(
            exchange.question, images=case.images, temperature=0, max_tokens=96, format=form
        )
    images = (ImagePart(to_image(path)) for path in case.images)
    tools = (Tool(tool["function"]["name"], {}, tool) for tool in case.tools)
    message = Message("user", (*images, TextPart(exchange.question)))
    prompt = ChatPrompt((message,), template=TemplateInputs(tuple(tools)))
    return engine.generate(prompt, temperature=0, max_tokens=96, format=form)


def main() -> None:
    started = time.perf_counter()
    right = 0
    cases = read_jsonl(HERE / "questions.jsonl")
    with Engine.from_pretrained("fovea-tiny") as engine:
        info = engine.info
        print(
            f"{info.name}: {info.parameters / 1e6:.1f} M parameters, {info.dtype} on {info.device}, ready ",
            end="",
        )
        print(f"after {time.perf_counter() - started:.1f} s\n")
        for case in cases:
            exchange = case.exchanges[0]
            answer = ask(engine, case)
            good = matches(answer.text, exchange.accepted)
            right += good
            names = ", ".join(str(path.relative_to(HERE.parent)) for path in case.images)
            milliseconds = timings_body(answer.timings)
            stages = "  ".join(f"{stage} {milliseconds[stage]:.0f}" for stage in STAGES)
            usage = answer.usage
            print(f"{names}\n  Q  {exchange.question}\n  A  {answer.text}")
            if not good:
                print(f"     (right would be: {exchange.accepted[0]})")
            print(
                f"     ms: {stages}   tokens: {usage.image} visual, {usage.prompt - usage.image} text", end=""
            )
            print(f" ({usage.cached} cached), {usage.completion} answer\n")
    print(f"{right} of {len(cases)} answers are right.")


if __name__ == "__main__":
    main()
