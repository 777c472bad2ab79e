"""Ask the bundled model about the images in this folder, and show the time and tokens of each answer.

    python examples/demo.py

The questions and their right answers are in questions.jsonl. For a wrong answer the right one is printed,
too. Then fovea-page, if it is installed, reads invoice.png into JSON of a schema.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from fovea import AnswerFormat, Engine
from fovea.api.convert import timings_body
from fovea.core.bundled import PAGE
from fovea.core.errors import CheckpointError
from fovea.core.tools import Tool
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


def read_invoice() -> None:
    """Read the invoice into JSON, and compare every field with its right value."""
    schema = json.loads((HERE / "invoice.schema.json").read_text())
    values = json.loads((HERE / "invoice.values.json").read_text())
    print(f"\n{PAGE} reads examples/invoice.png into JSON of examples/invoice.schema.json:\n")
    try:
        engine = Engine.from_pretrained(PAGE)
    except CheckpointError as error:
        print(f"  {error.message}")
        return
    with engine:
        form = AnswerFormat.json_schema(schema)
        question = "Extract the data as JSON."
        answer = engine.generate(
            question, images=[HERE / "invoice.png"], temperature=0, max_tokens=384, format=form
        )
    print(f"  {answer.text}\n")
    for line in checked(answer.text, values):
        print(f"  {line}")


def checked(answer: str, values: dict[str, str]) -> list[str]:
    """A line for each field: its right value, and whether the answer has it; then how many are right."""
    try:
        found = json.loads(answer)
    except ValueError:  # cut off at the longest answer
        found = {}
    lines = []
    for key, value in values.items():
        verdict = "right" if found.get(key) == value else f"wrong: {found.get(key)!r}"
        lines.append(f"{key:16} {value:20} {verdict}")
    right = sum(found.get(key) == value for key, value in values.items())
    return [*lines, f"{right} of {len(values)} fields are right."]


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
    read_invoice()


if __name__ == "__main__":
    main()
