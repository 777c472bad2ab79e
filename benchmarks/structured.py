"""Measure structured output: answers with and without forced tokens, masks, and schemas that are refused.

    python benchmarks/structured.py [--answers 60] [--repeats 3] [--vocabulary 150000]

1. The bundled model answers questions about scenes as JSON of a schema, one after the other, with the tokens
   that the schema forces computed as drafts, and without. The two settings take turns.
2. Masks are filled for random answers by many schemas over a large vocabulary.
3. Schemas that take long to compile are sent while another answer is streamed. The time until each is refused
   and the longest gap of the stream are compared with those of a valid schema.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

from tests.support.schemas import SINGLE

from fovea import AnswerFormat, Engine
from fovea.core.errors import InvalidRequest
from fovea.core.sampling import SamplingParams
from fovea.core.types import Completion
from fovea.engine.grammar.compiler import Grammar
from fovea.engine.grammar.definition import compile_format
from fovea.engine.grammar.guide import Guides
from fovea.engine.grammar.trial import PlainTokens
from fovea.engine.sequence import Sequence as Answer
from fovea.evaluation.scenes import HELD_OUT_SEED, Sample, generate

DRAFTS = 16
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 200}
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answers", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    args = parser.parse_args()
    results = {
        "forced": forced_tokens(args.answers, args.repeats),
        "masks": masks(args.vocabulary),
        "hostile": asyncio.run(hostile()),
    }
    print(json.dumps(results))


def forced_tokens(count: int, repeats: int) -> dict[str, float]:
    """Steps and seconds of JSON answers with forced tokens as drafts, and without."""
    samples = list(generate(HELD_OUT_SEED, count, ("json",)))
    engines = {drafts: bundled(drafts) for drafts in (DRAFTS, 0)}
    seconds: dict[int, list[float]] = {drafts: [] for drafts in engines}
    with_prompt: dict[int, list[float]] = {drafts: [] for drafts in engines}
    steps: dict[int, float] = {}
    texts: dict[int, list[str]] = {}
    for number in range(repeats + 1):
        for drafts, engine in engines.items():
            before = engine.stats()["engine_steps"]
            answers = [ask(engine, sample) for sample in samples]
            steps[drafts] = engine.stats()["engine_steps"] - before
            texts[drafts] = [answer.text for answer in answers]
            if number:  # the first round warms up
                decode = sum(answer.timings.decode for answer in answers)
                seconds[drafts].append(decode)
                with_prompt[drafts].append(decode + sum(answer.timings.prefill for answer in answers))
    free = [engines[0].generate(sample.turns[0].question, sample.images, **GREEDY).text for sample in samples]
    tokens = sum(len(engines[0].tokenizer.encode(text)) for text in texts[0])
    for engine in engines.values():
        engine.shutdown()
    assert texts[DRAFTS] == texts[0], "drafts have changed an answer"
    accepted = [sample.turns[0].accepted for sample in samples]
    result = {
        "answers": count,
        "tokens": tokens,
        "steps_ratio": round(steps[0] / steps[DRAFTS], 2),
        "speed_ratio": round(statistics.median(seconds[0]) / statistics.median(seconds[DRAFTS]), 2),
        "speed_ratio_with_prompt": round(
            statistics.median(with_prompt[0]) / statistics.median(with_prompt[DRAFTS]), 2
        ),
        "right_with_schema": sum(t in a for t, a in zip(texts[0], accepted, strict=True)),
        "right_without": sum(t in a for t, a in zip(free, accepted, strict=True)),
    }
    print(
        f"{count} JSON answers, {tokens} tokens: {steps[0]:.0f} steps without drafts, {steps[DRAFTS]:.0f} "
        f"with ({result['steps_ratio']}x fewer); decoding {result['speed_ratio']}x as fast, with the "
        f"prompt {result['speed_ratio_with_prompt']}x; right: "
        f"{result['right_with_schema']} with a schema, {result['right_without']} without"
    )
    return result


def bundled(drafts: int) -> Engine:
    return Engine.from_pretrained("fovea-tiny", device="cpu", max_draft_tokens=drafts, max_queue=0)


def ask(engine: Engine, sample: Sample) -> Completion:
    turn = sample.turns[0]
    form = AnswerFormat.json_schema(schema_of(json.loads(turn.answer)))
    return engine.generate(turn.question, sample.images, format=form, **GREEDY)


def schema_of(value: Any) -> dict[str, Any]:
    """The schema that a question states in words, from a value of its kind."""
    if isinstance(value, dict):
        return {
            "type": "object",
            "properties": {name: schema_of(part) for name, part in value.items()},
            "required": list(value),
            "additionalProperties": False,
        }
    if isinstance(value, list):
        entry = {"shape": "", "color": ""}
        return {"type": "array", "items": schema_of(entry)}
    kinds = {bool: "boolean", int: "integer", str: "string"}
    return {"type": kinds[type(value)]}


def masks(size: int) -> dict[str, float]:
    """Milliseconds of a mask over a vocabulary of `size` tokens, along random answers by every schema."""
    vocabulary = large_vocabulary(size)
    rng = Random(1)
    times, compiled = [], []
    for schema in SINGLE:
        started = time.perf_counter()
        grammar = Grammar(compile_format(AnswerFormat.json_schema(schema), vocabulary))
        compiled.append(time.perf_counter() - started)
        for _ in range(3):
            times += _walk(grammar, size, rng)
    result = {
        "vocabulary": size,
        "masks": len(times),
        "mask_p50_ms": _ms(statistics.median(times)),
        "mask_p99_ms": _ms(float(np.percentile(times, 99))),
        "mask_max_ms": _ms(max(times)),
        "compile_p50_ms": _ms(statistics.median(compiled)),
        "compile_max_ms": _ms(max(compiled)),
    }
    print(
        f"{len(times)} masks over {size} tokens: p50 {result['mask_p50_ms']} ms, "
        f"p99 {result['mask_p99_ms']} ms, longest {result['mask_max_ms']} ms; "
        f"compilation p50 {result['compile_p50_ms']} ms"
    )
    return result


def _walk(grammar: Grammar, size: int, rng: Random) -> list[float]:
    guides, times = Guides(), []
    guides.add("a", grammar)
    complete = None
    answer = Answer("a", [0], SamplingParams(), 200)
    for _ in range(60):
        started = time.perf_counter()
        if answer.output_ids:
            guides.look("a", answer.output_ids[:-1], answer.output_ids[-1:])
            guides.wait(["a"])
            ahead = guides.ahead("a")
            complete = ahead and ahead.complete
        allowed, _ = guides.masks([(answer, 0)], size, {})
        times.append(time.perf_counter() - started)
        if complete or allowed is None:
            break
        tokens = np.nonzero(allowed.allowed(size)[0])[0]
        token = int(tokens[rng.randrange(len(tokens))])
        answer.append([token])
    return times


def large_vocabulary(size: int) -> Any:
    """A byte-level vocabulary of words, as large as those of current models."""
    from llguidance import LLTokenizer, TokenizerWrapper

    rng = Random(0)
    words = {bytes([byte]): None for byte in range(256)}
    for text in ('{"', '":', '": ', '", "', '":"', '"}', "},", "[{", "true", "false", "null", "  ", "\\n"):
        words[text.encode()] = None
    while len(words) < size - 1:
        word = "".join(rng.choice(LETTERS) for _ in range(rng.randint(2, 9)))
        words[rng.choice(("", " ", "", '"')).encode() + rng.choice((word, word.title())).encode()] = None

    tokens = PlainTokens([*words, b"<end>"], size - 1)
    return LLTokenizer(TokenizerWrapper(tokens), eos_token=size - 1)


def hostile_formats() -> dict[str, AnswerFormat | dict[str, Any]]:
    """Formats that cost as much as possible."""
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(64):
        deep = {"type": "object", "properties": {"a": deep}}
    doubling: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": {n: {"$ref": f"#/$defs/d{i + 1}"} for n in "ab"}}
        for i in range(30)
    }
    doubling["d30"] = {"type": "null"}
    products = {f"d{i}": {"allOf": [{"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2}] * 2} for i in range(30)}
    products["d30"] = {"type": "null"}
    names = {f"property {i} {'x' * 90}": {"type": "string"} for i in range(9000)}
    return {
        "1 MB": {"type": "object", "properties": names},
        "64 levels": deep,
        "doubling $ref": {"$defs": doubling, "$ref": "#/$defs/d0"},
        "product of $ref": {"$defs": products, "$ref": "#/$defs/d0"},
        "long enum": {"enum": [f"{i}{'y' * 20}" for i in range(4000)]},
        "wide anyOf": {"anyOf": [{"type": "string", "pattern": f"^a{{{i}}}b*$"} for i in range(1, 1500)]},
        "counted string": {"type": "string", "minLength": 50_000, "maxLength": 100_000},
        "counted array": {
            "type": "array",
            "items": {"type": "integer"},
            "minItems": 5000,
            "maxItems": 10_000,
        },
        "catastrophic pattern": {"type": "string", "pattern": "^(([a-z]{1,500}){1,500}){1,500}$"},
        "catastrophic regex": AnswerFormat.regex("((((a{1,99}){1,99}){1,99}){1,99}){1,99}"),
        "ambiguous regex": AnswerFormat.regex("(a|a|aa)*" * 60 + "b"),
        "intersections": AnswerFormat.grammar(
            "start: A\nA: "
            + " & ".join(f"/(.|\\n){{0,{i}}}[a-{chr(98 + i % 20)}](.|\\n){{{i}}}/" for i in range(1, 40))
        ),
        "ambiguous grammar": AnswerFormat.grammar('start: a\na: "x" | a a | a a a\n'),
    }


async def hostile() -> dict[str, dict[str, float]]:
    """Milliseconds until each format is refused or compiled, and the longest gap of a stream meanwhile."""
    results = {}
    with bundled(DRAFTS) as engine:
        question = "Describe the picture."
        calm = await _gap(engine, question, asyncio.sleep(0.5))
        for name, form in hostile_formats().items():
            outcome: list[str] = []
            gap = await _gap(engine, question, _send(engine, form, outcome))
            result, milliseconds = outcome[0], float(outcome[1])
            results[name] = {"ms": milliseconds, "gap_ratio": round(gap / calm, 1)}
            gaps = f"longest gap {_ms(gap)} ms, {_ms(calm)} without"
            print(f"{name}: {result} after {milliseconds} ms; {gaps}")
    return results


async def _send(engine: Engine, form: Any, outcome: list[str]) -> None:
    """Ask for an answer of this form. outcome: gets what happened, and the milliseconds until then."""
    started = time.perf_counter()
    try:
        made = AnswerFormat.json_schema(form) if isinstance(form, dict) else form
        request = engine.request("x", format=made, max_tokens=30, temperature=1.0)
        async for _ in engine.stream(request):
            outcome[:] = outcome or ["compiled", str(_ms(time.perf_counter() - started))]
    except InvalidRequest as error:
        outcome[:] = [f"refused ({error.message[:80]})", str(_ms(time.perf_counter() - started))]


async def _gap(engine: Engine, question: str, work: Any) -> float:
    """Run `work` beside a stream, and return the longest gap of the stream in seconds."""
    task, gaps = asyncio.ensure_future(work), []
    while not task.done() or len(gaps) < 40:
        last = None
        request = engine.request(question, temperature=0, max_tokens=200, ignore_eos=True)
        async for _ in engine.stream(request):
            now = time.perf_counter()
            if last is not None:
                gaps.append(now - last)
            last = now
            if task.done() and len(gaps) >= 40:
                break
    await task
    return max(gaps)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


if __name__ == "__main__":
    main()
