"""Decode speed of GGUF files by Fovea and by llama.cpp, of one request at a time, alternating.

    python benchmarks/gguf_files.py FILE.gguf [FILE.gguf ...] [--tokens N] [--rounds N] [--threads N]
                                    [--q8-0 FOLDER] [--cpu-time]

Needs llama-cpp-python, as in the environment of `make real`. Fovea writes N tokens after a prompt, the first
one left out; of llama.cpp only the computation of N tokens is measured. The table shows the best of all
rounds, and the last line is JSON. --q8-0 adds a copy of each file that llama.cpp writes in Q8_0.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import time
from collections.abc import Callable
from pathlib import Path

from fovea import Engine
from fovea.core.types import TokenPrompt

PROMPT = "The history of the Debian project began in the summer of 1993, when"
Clock = Callable[[], float]


def of_fovea(engine: Engine, tokens: int, clock: Clock) -> float:
    """Return tokens per second after the first token."""
    prompt = TokenPrompt((*engine.tokenizer.start_ids, *engine.tokenizer.encode_plain(PROMPT)))

    async def run() -> float:
        times = []
        async for delta in engine.stream(
            prompt, max_tokens=tokens, min_tokens=tokens, temperature=0.0, ignore_eos=True
        ):
            times += [clock()] * len(delta.token_ids)
        return (len(times) - 1) / (times[-1] - times[0])

    return asyncio.run(run())


def of_llama_cpp(model: object, tokens: int, clock: Clock) -> float:
    """Return tokens per second of its computation alone, because Python would slow the choice of tokens."""
    model.reset()  # type: ignore[attr-defined]
    ids = model.tokenize(PROMPT.encode())  # type: ignore[attr-defined]
    model.eval(ids)  # type: ignore[attr-defined]
    started = clock()
    for number in range(tokens):
        model.eval([ids[number % len(ids)]])  # type: ignore[attr-defined]
    return tokens / (clock() - started)


def in_q8_0(file: Path, folder: Path) -> Path:
    """Write a copy of a file with all matrices in Q8_0, by llama.cpp's own quantizer, and return its path."""
    from llama_cpp import llama_cpp as library

    copy = folder / f"{file.stem}-as-q8_0.gguf"
    if not copy.exists():
        folder.mkdir(parents=True, exist_ok=True)
        params = library.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = library.LLAMA_FTYPE_MOSTLY_Q8_0, True
        params.pure = True  # llama.cpp leaves some matrices in other types otherwise
        if library.llama_model_quantize(str(file).encode(), str(copy).encode(), ctypes.byref(params)):
            raise RuntimeError(f"llama.cpp cannot write {file} in Q8_0")
    return copy


def main() -> None:
    from llama_cpp import Llama

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.gguf")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--q8-0", type=Path, metavar="FOLDER", help="also copies in Q8_0, written to FOLDER")
    parser.add_argument(
        "--cpu-time", action="store_true", help="tokens per second of processor time; needs --threads 1"
    )
    args = parser.parse_args()
    if args.cpu_time and args.threads != 1:
        parser.error("--cpu-time needs --threads 1: threads that wait for each other take processor time")
    clock = time.process_time if args.cpu_time else time.perf_counter
    copies = [in_q8_0(file, args.q8_0) for file in args.files] if args.q8_0 else []
    found = {}
    for file in (*args.files, *copies):
        theirs = Llama(
            str(file), n_ctx=512, n_threads=args.threads, n_threads_batch=args.threads, verbose=False
        )
        with Engine.from_pretrained(str(file), device="cpu", threads=args.threads, kv_blocks=256) as engine:
            speeds = [
                (of_fovea(engine, args.tokens, clock), of_llama_cpp(theirs, args.tokens, clock))
                for _ in range(args.rounds)
            ]
        ours, others = (max(pair[side] for pair in speeds) for side in (0, 1))
        found[file.name] = {"fovea": ours, "llama.cpp": others, "ratio": ours / others}
        print(f"{file.name:40} fovea {ours:7.1f}   llama.cpp {others:7.1f} tok/s   ratio {ours / others:.2f}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
