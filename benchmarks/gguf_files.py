"""Decode speed of GGUF files by Fovea and by llama.cpp, of one request at a time, alternating.

    python benchmarks/gguf_files.py FILE.gguf [FILE.gguf ...] [--tokens N] [--rounds N] [--threads N]

Needs llama-cpp-python, as in the environment of `make real`. Fovea writes N tokens after a prompt, the first
one left out; of llama.cpp only the computation of N tokens is measured. The table shows the best of all
rounds, and the last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

from fovea import Engine
from fovea.core.types import TokenPrompt

PROMPT = "The history of the Debian project began in the summer of 1993, when"


def of_fovea(engine: Engine, tokens: int) -> float:
    """Return tokens per second after the first token."""
    prompt = TokenPrompt((*engine.tokenizer.start_ids, *engine.tokenizer.encode_plain(PROMPT)))

    async def run() -> float:
        times = []
        async for delta in engine.stream(
            prompt, max_tokens=tokens, min_tokens=tokens, temperature=0.0, ignore_eos=True
        ):
            times += [time.perf_counter()] * len(delta.token_ids)
        return (len(times) - 1) / (times[-1] - times[0])

    return asyncio.run(run())


def of_llama_cpp(model: object, tokens: int) -> float:
    """Return tokens per second of its computation alone, because Python would slow the choice of tokens."""
    model.reset()  # type: ignore[attr-defined]
    ids = model.tokenize(PROMPT.encode())  # type: ignore[attr-defined]
    model.eval(ids)  # type: ignore[attr-defined]
    started = time.perf_counter()
    for number in range(tokens):
        model.eval([ids[number % len(ids)]])  # type: ignore[attr-defined]
    return tokens / (time.perf_counter() - started)


def main() -> None:
    from llama_cpp import Llama

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.gguf")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    found = {}
    for file in args.files:
        theirs = Llama(
            str(file), n_ctx=512, n_threads=args.threads, n_threads_batch=args.threads, verbose=False
        )
        with Engine.from_pretrained(str(file), device="cpu", threads=args.threads, kv_blocks=256) as engine:
            speeds = [
                (of_fovea(engine, args.tokens), of_llama_cpp(theirs, args.tokens)) for _ in range(args.rounds)
            ]
        ours, others = (max(pair[side] for pair in speeds) for side in (0, 1))
        found[file.name] = {"fovea": ours, "llama.cpp": others, "ratio": ours / others}
        print(f"{file.name:40} fovea {ours:7.1f}   llama.cpp {others:7.1f} tok/s   ratio {ours / others:.2f}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
