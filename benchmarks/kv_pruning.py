"""Costs and gains of keeping a part of the keys and values (`kv_keep`): chats, texts, needles, memory.

    PYTHONPATH=src:. python3 benchmarks/kv_pruning.py chats [--images 4] [--count 200] [--rules snap:0.25 ...]
    PYTHONPATH=src:. python3 benchmarks/kv_pruning.py texts MODEL... --text FILE.txt [--rules snap:1024 ...]
    PYTHONPATH=src:. python3 benchmarks/kv_pruning.py needles MODEL... --text FILE.txt [--rules snap:0.25 ...]
    PYTHONPATH=src:. python3 benchmarks/kv_pruning.py turns [--turns 200] [--images 20] [--rules snap:1024]
    PYTHONPATH=src:. python3 benchmarks/kv_pruning.py speed [--contexts 2048 8192]

chats: the bundled model is asked about the newest of several images, each with a question that is answered
    already. With --images 1 there are several questions about one image, and the last one counts. Right
    answers, and tokens that are kept of the prompt.
texts: perplexity of a text, whose later tokens see only what is kept. needles: facts found in it, which were
    inserted at several depths.
turns: one long chat, in which every tenth turn brings an image: rows and blocks that it holds, tokens that a
    turn computes, right answers.
speed: milliseconds of a decode step of a random decoder of 0.5 B after a prompt of which a part is kept.

The last line of each is JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from statistics import median

import torch
from benchmarks.decoder_build import Subject, build, decoder_config, interleaved, native_kernels
from benchmarks.kv_quantization import DEPTHS, finds, report

from fovea import Engine
from fovea.cli.common import SINGLE_USER
from fovea.cli.questions import visual_of
from fovea.core.media import Image
from fovea.core.types import ChatPrompt, Completion, ImagePart, Message, TextPart, TokenPrompt
from fovea.engine.kv.manager import KVManager
from fovea.engine.layers.config import Attention, Dense
from fovea.engine.sequence import Sequence
from fovea.evaluation.datasets import Case, scene_cases
from fovea.evaluation.perplexity import Perplexity, pieces
from fovea.evaluation.score import Result
from fovea.kernels.quantize import INT8

KINDS = ("colour", "shape", "position", "existence", "counting", "listing", "reading", "relation")
METHODS = ("window", "snap", "text", "images")
SEED = 4242
ALL = "all"
SMALL = 50_000
"""Most pixels of an image in the long chat, so that the whole chat fits into the model's context."""
LATER = ("Is there a star?", "What color is it?", "How many red objects are there?")
"""Questions about an image after the first one. Their answers are not scored."""


def chats(count: int, images: int) -> Iterator[list[Case]]:
    """Yield groups of cases with one image each, which no other group has."""
    if images == 1:
        yield from ([case] for case in scene_cases(count, ["chat"], seed=SEED))
        return
    cases = list(scene_cases(-(-count * images // len(KINDS)), KINDS, seed=SEED))
    Random(SEED).shuffle(cases)
    for first in range(0, count * images, images):
        yield cases[first : first + images]


def area(case: Case) -> int:
    return case.facts["width"] * case.facts["image_height"]


def turn(case: Case) -> Message:
    """The first question of a case, with its image."""
    parts = [ImagePart(image) for image in visual_of(case) if isinstance(image, Image)]
    return Message("user", (*parts, TextPart(case.exchanges[0].question)))


def right(case: Case, answer: Completion) -> bool:
    """Whether the last answer is right. The others were given."""
    given = (exchange.accepted[0] for exchange in case.exchanges[:-1])
    return Result(case, (*given, answer.text), 0, 0, 0).correct


def ask_chats(engine: Engine, groups: list[list[Case]], rule: str) -> list[Completion]:
    """Ask the last question of each chat. The answers before are the right ones."""

    def one(group: list[Case]) -> Completion:
        messages: list[Message] = []
        for case in group:
            for number, exchange in enumerate(case.exchanges):
                question = Message("user", (TextPart(exchange.question),))
                messages.append(question if number else turn(case))
                messages.append(Message("assistant", (TextPart(exchange.accepted[0]),)))
        prompt = ChatPrompt(tuple(messages[:-1]))
        return engine.generate(prompt, temperature=0.0, max_tokens=64, kv_keep=rule)

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, groups))


def measure_chats(args: argparse.Namespace) -> None:
    rules = args.rules or [ALL, *(f"{method}:{share}" for share in (0.5, 0.25, 0.125) for method in METHODS)]
    rows = {}
    with Engine.from_pretrained("fovea-tiny", device="cpu", kv_blocks=4096) as engine:
        groups = list(chats(args.count, args.images))
        for rule in rules:
            done = ask_chats(engine, groups, rule)
            found = [right(group[-1], answer) for group, answer in zip(groups, done, strict=True)]
            prompt = sum(answer.usage.prompt for answer in done)
            kept = prompt - sum(answer.usage.dropped for answer in done)
            rows[rule] = {
                "right": f"{sum(found)} / {len(found)}",
                "percent": 100 * sum(found) / len(found),
                "prompt": prompt / len(done),
                "kept": kept / len(done),
            }
    report(rows)


def measure_texts(args: argparse.Namespace) -> None:
    text, rows = args.text.read_text()[: args.characters], {}
    rules = args.rules or [ALL, *(f"{method}:{n}" for n in (2048, 1024, 512) for method in METHODS[:2])]
    for model in args.models:
        for rule in rules:
            with open_engine(model, args) as engine:
                ids, start = engine.tokenizer.encode_plain(text), engine.tokenizer.start_ids
                done = [
                    engine.generate(
                        TokenPrompt(part), max_tokens=1, temperature=0, prompt_logprobs=0, kv_keep=rule
                    )
                    for part in pieces(ids, start, args.window)
                ]
            found = Perplexity.of([each.prompt_logprobs for each in done], len(text.encode()))
            rows[f"{Path(model).name} {rule}"] = {"tokens": found.tokens, "perplexity": found.perplexity}
    report(rows)


def measure_needles(args: argparse.Namespace) -> None:
    text, rows = args.text.read_text(), {}
    rules = args.rules or [ALL, *(f"{method}:{share}" for share in (0.5, 0.25) for method in METHODS[:2])]
    for model in args.models:
        with open_engine(model, args) as engine:
            for context in args.contexts:
                for rule in rules:
                    found = [finds(engine, text, context, at, n, rule) for n, at in enumerate(DEPTHS)]
                    row = rows.setdefault(f"{Path(model).name} at {context}", {})
                    row[rule] = f"{sum(found)} of {len(found)}"
    report(rows)


def open_engine(model: str, args: argparse.Namespace) -> Engine:
    settings = {"device": "cpu", "dtype": args.dtype, "quantization": args.quantization}
    return Engine.from_pretrained(model, **SINGLE_USER, **settings, kv_cache_mib=args.mib)


def measure_turns(args: argparse.Namespace) -> None:
    """Run one chat for each rule, and note what it holds. The model sees its own answers."""
    cases = [case for case in scene_cases(args.images, KINDS, seed=SEED) if area(case) <= SMALL]
    Random(SEED).shuffle(cases)
    spacing = args.turns // args.images
    most, extend = 0, KVManager.extend

    def noted(self: KVManager, seq: Sequence, tokens: int) -> None:
        nonlocal most
        extend(self, seq, tokens)
        most = max(most, len(seq.blocks))

    KVManager.extend = noted  # type: ignore[method-assign]
    rows = {}
    for rule in args.rules or [ALL, "window:1024", "snap:1024", "text:1024", "images:1024"]:
        most, computed, found = 0, [], []
        messages: list[Message] = []
        with Engine.from_pretrained(
            "fovea-tiny", device="cpu", kv_blocks=args.blocks, kv_keep=rule
        ) as engine:
            for number in range(args.turns):
                case, old = cases[number // spacing], number % spacing
                messages.append(Message("user", (TextPart(LATER[old % 3]),)) if old else turn(case))
                answer = engine.generate(ChatPrompt(tuple(messages)), temperature=0.0, max_tokens=24)
                messages.append(Message("assistant", (TextPart(answer.text),)))
                computed.append(answer.usage.prompt - answer.usage.cached)
                if not old:
                    found.append(right(case, answer))
            last = answer.usage
        rows[rule] = {
            "tokens at the end": last.prompt + last.completion,
            "most rows": 16 * most,
            "computed per turn": median(computed),
            "at most": max(computed),
            "right about new images": f"{sum(found)} / {len(found)}",
        }
    report(rows)


def measure_speed(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    layers = [(Attention(14, 2, 64, 64**-0.5, qkv_bias=True), Dense(4864, "silu"))] * args.layers
    decoder = build(decoder_config(896, layers), native_kernels(), INT8)
    rows = {}
    for context in args.contexts:
        shares = {"all": 1.0, "half": 0.5, "a quarter": 0.25}
        calls = {}
        for name, share in shares.items():
            subject = Subject(decoder, 1, int(context * share), None)
            calls[name] = subject.decode_step(1, int(context * share))
        times = interleaved(calls, args.repeats)
        rows[f"{context} tokens"] = {f"{name} ms": 1e3 * time.median for name, time in times.items()}
    report(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)

    def command(name: str, run: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        added = commands.add_parser(name)
        added.set_defaults(run=run)
        if name != "speed":
            added.add_argument("--rules", nargs="+", default=[])
        return added

    about_chats = command("chats", measure_chats)
    about_chats.add_argument("--images", type=int, default=4)
    about_chats.add_argument("--count", type=int, default=200)
    texts, needles = command("texts", measure_texts), command("needles", measure_needles)
    for each in (texts, needles):
        each.add_argument("models", nargs="+")
        each.add_argument("--text", type=Path, required=True)
        each.add_argument("--dtype", default="bfloat16")
        each.add_argument("--quantization", default="none")
        each.add_argument("--mib", type=int, default=1024)
    texts.add_argument("--window", type=int, default=4096)
    texts.add_argument("--characters", type=int, default=120_000)
    needles.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096, 8000])
    turns = command("turns", measure_turns)
    turns.add_argument("--turns", type=int, default=200)
    turns.add_argument("--images", type=int, default=20)
    turns.add_argument("--blocks", type=int, default=1024)
    speed = command("speed", measure_speed)
    speed.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192])
    speed.add_argument("--layers", type=int, default=24)
    speed.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
