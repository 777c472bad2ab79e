"""Speculation with fovea-tiny: tokens per step and speed per kind of question and drafter, and a crowd.

The drafter `answers` has the right answers of earlier questions. They are put into its store directly, which
takes seconds: the model would give nearly the same ones. Their scenes come from a seed of training, and are
not drawn. During the measurement the store takes no further answers, and before each question the answers
about its image are forgotten. Otherwise a question that is asked again would find its own answer.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from random import Random
from typing import Any

import PIL.Image

from fovea import Engine
from fovea.cli.questions import visual_of
from fovea.core.constraints import AnswerFormat, Tool
from fovea.core.media import Image
from fovea.core.sampling import SamplingParams
from fovea.core.types import ChatPrompt, ImagePart, Message, Prompt, TemplateInputs, TextPart
from fovea.engine.job import SequenceInputs
from fovea.engine.request.inputs import to_image
from fovea.engine.sequence import Sequence
from fovea.engine.speculate.answers import EarlierAnswers
from fovea.evaluation.datasets import Case, scene_cases
from fovea.evaluation.scenes import ALL_KINDS, HELD_OUT_SEED
from fovea.evaluation.scenes.compose import random_size
from fovea.evaluation.scenes.dataset import content
from fovea.evaluation.scenes.structured import TOOLS
from speculation_runs import (
    ALL_DRAFTERS,
    ALWAYS,
    OFF,
    Answer,
    Engines,
    Question,
    ask,
    compare,
    crowds,
    draft_counts,
    of_medians,
    summary,
)

MODEL = "fovea-tiny"
EARLIER_SEED = 1
LONGEST_ANSWER = 96
DRAFTERS = {
    "prompt": "prompt",
    "answers": "answers",
    "layer": "layer",
    ALWAYS: "layer",
    ALL_DRAFTERS: "prompt,hints,answers,layer",
    "auto": "auto",
}
STREAMS = 8
END = "<|im_end|>"
"""The token with which fovea-tiny ends an answer."""
SETTINGS: dict[str, Any] = {"kv_cache_mib": 128, "embed_disk_dir": "", "max_queue": 0}


@contextmanager
def engines(args: argparse.Namespace, drafters: Mapping[str, str]) -> Iterator[Engines]:
    """Engines with earlier answers. Without a trained layer, there is no drafter `layer`."""
    settings = SETTINGS | {"threads": args.threads}
    with Engines(args.model, drafters, {}, **settings) as found:
        for name in list(drafters):
            speculator = found[name].parts.speculator
            if name in ("layer", ALWAYS) and speculator is not None and not speculator.computed:
                found.engines.pop(name).shutdown()
                print(f"{args.model} has no draft layer, so the drafter `layer` is left out", file=sys.stderr)
        if ALWAYS in found.engines:
            draft_always(found[ALWAYS])
        for name in found.stores:
            put_earlier_answers(found[name], args.earlier)
        found.fix()
        yield found


def draft_always(engine: Engine) -> None:
    """Let the layer draft in every step, and let steps compute all drafts, whether that pays or not."""
    budget, speculator = engine.loop.stepper.drafts, engine.parts.speculator
    assert speculator is not None
    budget.choose = lambda sequences: None  # type: ignore[method-assign]
    budget.pays_to_compute = lambda *figures: True  # type: ignore[method-assign]
    for worth in speculator.worth.values():
        worth.gain, worth.note_gain = math.inf, lambda right: None  # type: ignore[method-assign]


def put_earlier_answers(engine: Engine, count: int) -> None:
    """Put the right answers of so many questions into an engine's store."""
    drafters = engine.parts.speculator.drafters if engine.parts.speculator else ()
    [drafter] = [each for each in drafters if isinstance(each, EarlierAnswers)]
    image = ImagePart(to_image(PIL.Image.new("RGB", (128, 128))))
    [end] = engine.tokenizer.encode(END)
    number = 0
    for index, (inputs, turns, images) in enumerate(_earlier_conversations()):
        messages: list[Message] = []
        for place, turn in enumerate(turns):
            pictures = [image] * images if place == 0 else []
            messages.append(Message(turn.role, (*pictures, TextPart(turn.question))))
            prepared = engine.outline(ChatPrompt(tuple(messages), template=inputs))
            answer = [*engine.tokenizer.encode_plain(turn.answer), end]
            seq = Sequence(
                f"earlier-{index}-{place}", prepared.ids, SamplingParams(), LONGEST_ANSWER, prepared.spans,
                output_ids=answer,
            )  # fmt: skip
            drafter.add(seq, SequenceInputs())
            drafter.remove(seq)
            messages.append(Message("assistant", (TextPart(turn.answer),)))
            number += 1
            if number == count:
                return


def _earlier_conversations() -> Iterator[tuple[TemplateInputs, Any, int]]:
    """Yield tools, turns and the number of images of conversations of all kinds in turn, without an end."""
    index = 0
    while True:
        kind = ALL_KINDS[index % len(ALL_KINDS)]
        rng = Random(f"{EARLIER_SEED}/{index}/{kind}")
        scenes, turns, _ = content(kind, rng, random_size(rng))
        tools = TOOLS if kind == "tool" else ()
        yield _template(tools), turns, len(scenes)
        index += 1


def _template(tools: Any) -> TemplateInputs:
    return TemplateInputs(tools=tuple(Tool(tool["function"]["name"], {}, tool) for tool in tools))


def _question(case: Case) -> Question:
    visual = _images(case)
    inputs = _template(case.tools)

    def converse(engine: Engine) -> list[Answer]:
        messages: list[Message] = []
        answers = []
        for place, exchange in enumerate(case.exchanges):
            parts = visual if place == 0 else []
            messages.append(Message(exchange.role, (*parts, TextPart(exchange.question))))
            prompt = ChatPrompt(tuple(messages), template=inputs)
            answer, text = ask(engine, prompt, **_options(exchange.schema))
            answers.append(answer)
            messages.append(Message("assistant", (TextPart(text),)))
        return answers

    return Question(case.kind, converse)


def _images(case: Case) -> list[ImagePart]:
    return [ImagePart(one) for one in visual_of(case) if isinstance(one, Image)]


def _options(schema: Mapping[str, Any] | None) -> dict[str, Any]:
    form = None if schema is None else AnswerFormat.json_schema(schema)
    return {"max_tokens": LONGEST_ANSWER, "format": form}


def one_stream(args: argparse.Namespace) -> dict[str, Any]:
    """Ask one question after the other. Raises Differs."""
    cases = scene_cases(args.count, args.kinds, HELD_OUT_SEED)
    total, done = args.count * len(args.kinds), 0

    def seen(question: Question) -> None:
        nonlocal done
        done += 1
        if done * 10 // total > (done - 1) * 10 // total:
            print(f"tiny: {done} of {total} conversations", file=sys.stderr, flush=True)

    with engines(args, DRAFTERS) as found:
        names = list(found.engines)
        for name in names:  # the first steps are slower
            for case in scene_cases(1, ("describe", "reading"), HELD_OUT_SEED + 1):
                _question(case).ask(found[name])
        turns = compare(found, map(_question, cases), args.passes, seen=seen)
        return {
            "model": args.model_name,
            "conversations": total,
            "passes": args.passes,
            "earlier": args.earlier,
            "names": names,
            "kinds": summary(turns, names),
            "drafts": {name: draft_counts(found[name]) for name in names[1:]},
        }


def many_streams(args: argparse.Namespace) -> dict[str, Any]:
    """Ask questions 8 at a time, whose prompts are known. Raises Differs."""
    requests: list[tuple[Prompt, dict[str, Any]]] = []
    for case in scene_cases(args.crowd_count, args.kinds, HELD_OUT_SEED + 2):
        exchange = case.exchanges[0]
        parts = _images(case)
        message = Message(exchange.role, (*parts, TextPart(exchange.question)))
        prompt = ChatPrompt((message,), template=_template(case.tools))
        requests.append((prompt, _options(exchange.schema)))
    with engines(args, {"auto": "auto"}) as found:
        rates = crowds(found, requests, STREAMS, args.crowd_repeats)
        return {
            "model": args.model_name,
            "questions": len(requests),
            "streams": STREAMS,
            "repeats": args.crowd_repeats,
            "rates": rates,
            "ratio": of_medians(rates["auto"], rates[OFF])._asdict(),
            "drafts": draft_counts(found["auto"]),
        }
