"""Costs and gains of keys and values in 8 bits: memory, speed, accuracy on pictures and on texts.

    PYTHONPATH=src:. python3 benchmarks/kv_quantization.py bytes
    PYTHONPATH=src:. python3 benchmarks/kv_quantization.py speed [--rows 1 4 8] [--int8-weights]
    PYTHONPATH=src:. python3 benchmarks/kv_quantization.py attention
    PYTHONPATH=src:. python3 benchmarks/kv_quantization.py requests
    PYTHONPATH=src:. python3 benchmarks/kv_quantization.py biases
    PYTHONPATH=src:. python3 benchmarks/kv_quantization.py pictures [--count 200]
    PYTHONPATH=src:. python3 benchmarks/kv_quantization.py texts MODEL... --text FILE.txt [--window 4096]
    PYTHONPATH=src:. python3 benchmarks/kv_quantization.py needles MODEL... --text FILE.txt

bytes: of a token, for heads of 64 to 256 numbers.
speed: milliseconds of a decode step of a random decoder of 0.5 B (the sizes of Qwen2.5-0.5B), both types by
    turns, on Fovea's C++ kernels.
attention: nanoseconds of processor time per token and KV head of the attention of one row, on one thread.
requests: how many requests the engine runs at a time with a pool of some MiB.
biases: scores of keys with biases as large as those of Qwen2, for several ways to round them.
pictures: accuracy of the bundled model by kind of question, which takes long.
texts: perplexity of a text. needles: facts found in it, which were inserted at several depths.

The last line of each is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.decoder_build import Subject, build, decoder_config, interleaved, native_kernels
from torch import Tensor

from fovea import Engine
from fovea.cli.common import SINGLE_USER
from fovea.core.types import TokenPrompt
from fovea.engine.layers.config import Attention, Dense
from fovea.evaluation.perplexity import Perplexity, pieces
from fovea.kernels.attention import AttentionPlan, Decodes
from fovea.kernels.pages import FORMATS, INT8, KVPool, round_heads, store, token_bytes
from fovea.kernels.quantize import INT8 as INT8_WEIGHTS

TYPES = ("auto", "int8")
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Places of a needle, as shares of the context."""
NAMES = ("harbour", "orchard", "library", "station", "museum", "bakery")


def report(rows: dict[str, dict[str, Any]]) -> None:
    """Print a table, and its JSON."""
    columns = list(next(iter(rows.values())))
    first = max(len(name) for name in rows)
    widths = {name: max(len(name), *(len(_text(row[name])) for row in rows.values())) for name in columns}
    print(" " * first, *(name.rjust(widths[name]) for name in columns), sep="  ")
    for name, row in rows.items():
        print(name.ljust(first), *(_text(row[each]).rjust(widths[each]) for each in columns), sep="  ")
    print(json.dumps(rows))


def _text(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def count_bytes(args: argparse.Namespace) -> None:
    rows = {}
    for dim in (64, 96, 128, 256):
        sizes = {name: token_bytes(1, dim, 2, FORMATS.get(name)) for name in ("auto", *FORMATS)}
        rows[f"{dim} numbers"] = sizes | {"share": sizes["int8"] / sizes["auto"]}
    report(rows)


def measure_speed(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    if args.threads:
        torch.set_num_threads(args.threads)
    layers = [(Attention(14, 2, 64, 64**-0.5, qkv_bias=True), Dense(4864, "silu"))] * args.layers
    weights = INT8_WEIGHTS if args.int8_weights else None
    decoder = build(decoder_config(896, layers), native_kernels(), weights)
    rows = {}
    for context in args.contexts:
        for count in args.rows:
            subjects = {name: Subject(decoder, count, context, FORMATS.get(name)) for name in TYPES}
            for subject in subjects.values():
                _fill(subject.memory.kv[0])
            calls = {name: subject.decode_step(count, context) for name, subject in subjects.items()}
            clock = time.process_time if args.cpu_time else time.perf_counter
            times = interleaved(calls, args.repeats, clock=clock)
            ratio, low, high = times["auto"].over(times["int8"])
            rows[f"{count} x {context}"] = {
                **{f"{name} ms": 1e3 * time.median for name, time in times.items()},
                "faster": ratio, "quartiles": f"{low:.2f} to {high:.2f}",
            }  # fmt: skip
    report(rows)


def _fill(pool: KVPool) -> None:
    """Fill the pages of every layer with the same random numbers."""
    _, blocks, size, _, heads, dim = pool.kv.shape
    draw = torch.Generator().manual_seed(1)
    numbers = torch.randn(blocks * size, 2, heads, dim, generator=draw).to(torch.bfloat16)
    store(pool.kv[0], numbers, torch.arange(blocks * size))
    pool.pages[1:] = pool.pages[:1]


def measure_attention(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    kernels, rows = native_kernels(), {}
    for heads, kv_heads, dim in ((14, 2, 64), (28, 4, 128), (9, 3, 64)):
        for context in (512, 8192):
            blocks = context // 16
            table = torch.randperm(blocks, generator=torch.Generator().manual_seed(0))[None]
            decodes = Decodes(0, table, torch.tensor([context]), context, None)
            plan = AttentionPlan(torch.tensor([0]), (decodes,), ())
            query = torch.randn(1, heads, dim).to(torch.bfloat16)
            # So many layers that their pages do not stay in the processor's cache.
            layers = max(1, (64 << 20) // (context * token_bytes(kv_heads, dim, 2, None)))
            pools = {
                name: KVPool((layers, blocks, 16), kv_heads, dim, torch.bfloat16, FORMATS.get(name))
                for name in TYPES
            }
            times: dict[str, list[float]] = {name: [] for name in TYPES}
            for pool in pools.values():
                _fill(pool)
            for _ in range(args.rounds):  # by turns, so that other work on the machine affects both
                for name, pool in pools.items():
                    for layer in range(layers):
                        started = time.thread_time()
                        kernels.attend(query, pool.kv[layer], plan, dim**-0.5)
                        times[name].append(time.thread_time() - started)
            best = {name: 1e9 * min(taken) / (context * kv_heads) for name, taken in times.items()}
            row = f"{heads} heads, {kv_heads} of KV, {dim} numbers, {context} tokens"
            rows[row] = {name: f"{value:.0f} ns" for name, value in best.items()} | {
                "faster": best["auto"] / best["int8"]
            }
    report(rows)


def count_requests(args: argparse.Namespace) -> None:
    """Run many requests in a small pool, and count how many are computed at a time."""
    rows = {}
    for name in TYPES:
        settings = {"kv_cache_mib": args.mib, "kv_dtype": name, "max_running": 256, "max_queue": 0}
        with Engine.from_pretrained("fovea-tiny", device="cpu", prefix_cache=False, **settings) as engine:
            most = asyncio.run(_most_running(engine, args.requests, args.tokens))
            blocks = engine.stats()["kv_blocks_total"]
        rows[name] = {"blocks": int(blocks), "tokens": int(blocks) * 16, "requests at a time": most}
    report(rows)


async def _most_running(engine: Engine, requests: int, tokens: int) -> int:
    most, done = 0, 0

    async def one(number: int) -> None:
        nonlocal done
        ids = tuple(100 + (number * 7 + place) % 400 for place in range(tokens))
        async for _ in engine.stream(TokenPrompt(ids), max_tokens=tokens, temperature=0, ignore_eos=True):
            pass
        done += 1

    async def watch() -> None:
        nonlocal most
        while done < requests:
            most = max(most, int(engine.stats().get("requests_running", 0)))
            await asyncio.sleep(0.01)

    await asyncio.gather(watch(), *(one(number) for number in range(requests)))
    return most


def compare_biases(args: argparse.Namespace) -> None:
    """Relative error of attention over rotated keys, some of whose numbers have large biases.

    Keys are random with magnitude 1, and queries with magnitude 1. Every way is exact before keys are
    rounded, and the reference is in float64.
    """
    heads, dim, tokens = 4, 64, 2048
    draw = torch.Generator().manual_seed(0)
    rows = {}
    for bias in (0, 10, 100, 300):
        keys = torch.randn(tokens, heads, dim, generator=draw)
        queries = torch.randn(64, heads, dim, generator=draw)
        values = torch.randn(tokens, heads, dim, generator=draw)
        shift = torch.zeros(heads, dim)
        shift[:, torch.tensor([5, 21, 37])] = float(bias)
        queries[..., [5, 21, 37, 53]] *= 1 / max(1.0, bias / 10)  # trained models do not let them decide all
        turned_bias = _rotate(shift.expand(tokens, -1, -1), torch.arange(tokens))
        turned = _rotate(keys + shift, torch.arange(tokens))
        asked = _rotate(queries, torch.full((64,), tokens))
        exact = _attention(asked.double(), turned.double(), values.double())
        half = dim // 2
        pair = (shift[:, :half].square() + shift[:, half:].square()).sqrt() + 3
        factors = torch.exp2((pair / pair.median()).log2().round().clamp(0, 8)).repeat(1, 2)
        hadamard = _hadamard(dim)
        ways: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
            "bf16": lambda: (asked, turned.bfloat16().float()),  # noqa: B023 - called in this round
            "int8": lambda: (asked, _rounded(turned)),  # noqa: B023
            "int8, rotated by Hadamard": lambda: (asked @ hadamard, _rounded(turned @ hadamard)),  # noqa: B023
            "int8, bias added again": lambda: (asked, _rounded(turned - turned_bias) + turned_bias),  # noqa: B023
            "int8, balanced": lambda: (asked * factors, _rounded(turned / factors)),  # noqa: B023
        }
        for name, way in ways.items():
            query, key = way()
            error = _attention(query.double(), key.double(), values.double()) - exact
            rows.setdefault(name, {})[f"bias {bias}"] = float(error.norm() / exact.norm())
    report(rows)


def _rounded(keys: Tensor) -> Tensor:
    levels, scales = round_heads(keys, INT8)
    return levels.float() * scales.float()[..., None]


def _attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", query, keys) * query.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def _rotate(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 10_000.0 ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _hadamard(size: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)


def measure_pictures(args: argparse.Namespace) -> None:
    """Run `fovea eval` with both types, and print right answers in percent by kind of question."""
    found = dict(zip(TYPES, (json.loads(file.read_text()) for file in args.results), strict=False))
    for name in TYPES[len(found) :]:
        found[name] = json.loads(_evaluate("--count", str(args.count), "--kv-dtype", name))
    kinds = {name: {row["kind"]: row for row in result["rows"]} for name, result in found.items()}
    rows = {}
    for kind, plain in kinds["auto"].items():
        before, after = 100 * plain["accuracy"], 100 * kinds["int8"][kind]["accuracy"]
        rows[kind] = {"auto": before, "int8": after, "change": after - before}
    report(rows)


def _evaluate(*flags: str) -> str:
    import subprocess

    command = [sys.executable, "-c", "from fovea.cli.main import main; main()", "eval", "--json", *flags]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]


def measure_texts(args: argparse.Namespace) -> None:
    text, rows = args.text.read_text()[: args.characters], {}
    for model in args.models:
        for name in TYPES:
            with Engine.from_pretrained(model, **SINGLE_USER, **_settings(args, name)) as engine:
                ids, start = engine.tokenizer.encode_plain(text), engine.tokenizer.start_ids
                parts = list(pieces(ids, start, args.window))
                done = [
                    engine.generate(TokenPrompt(part), max_tokens=1, temperature=0, prompt_logprobs=0)
                    for part in parts
                ]
            found = Perplexity.of([each.prompt_logprobs for each in done], len(text.encode()))
            rows[f"{Path(model).name} {name}"] = {"tokens": found.tokens, "perplexity": found.perplexity}
        plain, small = (rows[f"{Path(model).name} {name}"]["perplexity"] for name in TYPES)
        print(f"{Path(model).name}: perplexity {100 * (small / plain - 1):+.3f}%")
    report(rows)


def find_needles(args: argparse.Namespace) -> None:
    text, rows = args.text.read_text(), {}
    for model in args.models:
        for name in TYPES:
            with Engine.from_pretrained(model, **SINGLE_USER, **_settings(args, name)) as engine:
                for context in args.contexts:
                    found = [finds(engine, text, context, depth, n) for n, depth in enumerate(DEPTHS)]
                    right = f"{sum(found)} of {len(found)}"
                    print(f"{Path(model).name} at {context}, {name}: {right}", flush=True)
                    rows.setdefault(f"{Path(model).name} at {context}", {})[name] = right
    report(rows)


def finds(
    engine: Engine, text: str, context: int, depth: float, number: int, keep: str | None = None
) -> bool:
    """Whether the engine repeats a number that stands in a sentence at this depth. keep: see `kv_keep`."""
    code, name = str(1000 + 1237 * (number + context) % 9000), NAMES[number % len(NAMES)]
    encode = engine.tokenizer.encode_plain
    ids = encode(text)
    ids = (ids * (context // len(ids) + 1))[: context - 100]
    place = int(len(ids) * depth)
    needle = encode(f"\n\nRemember this: the code of the {name} is {code}.\n\n")
    question = encode(f"\n\nWhat is the code of the {name}? The code of the {name} is")
    prompt = TokenPrompt((*engine.tokenizer.start_ids, *ids[:place], *needle, *ids[place:], *question))
    return code in engine.generate(prompt, max_tokens=12, temperature=0, kv_keep=keep).text


def _settings(args: argparse.Namespace, name: str) -> dict[str, Any]:
    return {
        "device": "cpu", "dtype": args.dtype, "kv_dtype": name, "quantization": args.quantization,
        "kv_cache_mib": args.mib,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)

    def command(name: str, run: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        added = commands.add_parser(name)
        added.set_defaults(run=run)
        return added

    command("bytes", count_bytes)
    speed = command("speed", measure_speed)
    speed.add_argument("--contexts", type=int, nargs="+", default=[8192])
    speed.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    speed.add_argument("--layers", type=int, default=24)
    speed.add_argument("--repeats", type=int, default=9)
    speed.add_argument("--threads", type=int, default=0)
    speed.add_argument("--int8-weights", action="store_true")
    speed.add_argument("--cpu-time", action="store_true", help="processor time, for a busy machine")
    attention = command("attention", measure_attention)
    attention.add_argument("--rounds", type=int, default=30)
    requests = command("requests", count_requests)
    requests.add_argument("--mib", type=int, default=16)
    requests.add_argument("--requests", type=int, default=96)
    requests.add_argument("--tokens", type=int, default=128)
    command("biases", compare_biases)
    pictures = command("pictures", measure_pictures)
    pictures.add_argument("--count", type=int, default=200)
    pictures.add_argument(
        "--results", nargs=2, type=Path, default=[], metavar="FILE", help="of fovea eval --json: auto, int8"
    )
    for name, run in (("texts", measure_texts), ("needles", find_needles)):
        texts = command(name, run)
        texts.add_argument("models", nargs="+")
        texts.add_argument("--text", type=Path, required=True)
        texts.add_argument("--dtype", default="bfloat16")
        texts.add_argument("--quantization", default="none")
        texts.add_argument("--mib", type=int, default=512)
        texts.add_argument("--window", type=int, default=4096)
        texts.add_argument("--characters", type=int, default=80_000)
        texts.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    args = parser.parse_args()
    with torch.inference_mode():
        args.run(args)


if __name__ == "__main__":
    main()
