"""Count what checkpoints of states save, and what sliding windows save of the KV cache.

    python benchmarks/decoder_memory.py [--spacings 0,256,1024,4096] [--state-mib 512,1024,2048,4096]
        [--windows 8192,32768]

The scheduler, the KV manager and the slots are those of the engine. Nothing is computed, so the counts are
exact and do not depend on the machine.

states    a model with the proportions of Qwen3.5 (18.6 MiB per state), as many MiB for KV blocks as for
          states, which is the engine's default, 4 requests at a time, answers of 40 tokens. Workloads:
          chats      40 chats of 5 turns, in turns
          images     30 images of 256 to 1,024 tokens, 4 questions each
          diverging  60 prompts, each with a part of random length of one of 4 system prompts of 6,000 tokens
          repeated   24 prompts of 100 to 3,000 tokens, 3 times each
          mixed      all of these
          "savable" are the tokens that a prefix cache without any limit would not compute, "recomputed" those
          of them that were computed.
windows   a cache of the shape of Gemma 3 4B (34 layers; 5 with a window of 1,024 tokens to 1 without), with
          and without the return of blocks behind the window: MiB for a sequence, and sequences in 4 GiB.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

from decoder_build import decoder_config
from decoders import DELTA, DEPTH, EVERY, GATED, HIDDEN, HYBRID_WIDTH
from fovea.core.sampling import SamplingParams
from fovea.engine.cache.embeddings import EmbeddingCache
from fovea.engine.config import MIB, EngineConfig
from fovea.engine.execute.pool_sizes import pool_sizes
from fovea.engine.kv.blocks import GONE, BlockPool, WindowBlocks
from fovea.engine.kv.manager import KVManager
from fovea.engine.kv.states import StateSlots
from fovea.engine.layers.config import Attention, DecoderConfig, Dense
from fovea.engine.layers.ranks import ALONE
from fovea.engine.schedule.scheduler import Scheduler
from fovea.engine.sequence import ImageSpan, Sequence

BLOCK, ANSWER, CLIENTS, POOL_MIB = 16, 40, 4, 4096
GREEDY = SamplingParams(temperature=0.0)
Piece = list[int] | tuple[str, int]
"""Token ids, or key and number of tokens of an image."""


class CountedSlots(StateSlots):
    """State slots that count the checkpoints that were saved."""

    saved = 0

    def publish(self, name: bytes, slot: int) -> None:
        self.saved += self.find(name) is None
        super().publish(name, slot)


@dataclass
class Talk:
    """Requests of one user, each after the answer to the one before.

    turns: what each turn adds to the prompt. keep: a turn follows the earlier ones and their answers.
    """

    turns: list[list[Piece]]
    keep: bool
    history: list[Piece] = field(default_factory=list)

    def prompt(self) -> list[Piece]:
        turn = self.turns.pop(0)
        self.history = [*self.history, *turn] if self.keep else turn
        return self.history


class Tokens:
    """Different random token ids."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def __call__(self, low: int, high: int = 0) -> list[int]:
        count = self.random.randint(low, high or low)
        return [self.random.randrange(100_000) for _ in range(count)]


def workload(name: str, seed: int = 1) -> list[Talk]:
    new = Tokens(seed)
    if name == "chats":
        lengths = ((200, 1500), *[(20, 120)] * 4)
        return [Talk([[new(*length)] for length in lengths], keep=True) for _ in range(40)]
    if name == "images":
        system, random = new(60), new.random
        images = [(f"image {number}", random.randint(256, 1024)) for number in range(30)]
        return [Talk([[system, image, new(15, 60)] for _ in range(4)], keep=False) for image in images]
    if name == "diverging":
        systems = [new(6000) for _ in range(4)]
        shared = [new.random.choice(systems)[: new.random.randint(500, 6000)] for _ in range(60)]
        return [Talk([[part, new(50, 200)]], keep=False) for part in shared]
    if name == "repeated":
        prompts = [new(100, 3000) for _ in range(24)]
        talks = [Talk([[prompt]], keep=False) for prompt in prompts * 3]
        new.random.shuffle(talks)
        return talks
    talks = [talk for number, kind in enumerate(WORKLOADS[:-1]) for talk in workload(kind, seed + number)]
    new.random.shuffle(talks)
    return talks


WORKLOADS = ("chats", "images", "diverging", "repeated", "mixed")


class Novelty:
    """Counts the tokens of prompts that no earlier sequence began with."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def count(self, seq: Sequence) -> int:
        """Tokens of the prompt that are new; the last one is always computed."""
        hashes = list(self._prefixes(seq))[: len(seq.prompt_ids) - 1]
        new = sum(value not in self._known for value in hashes) + 1
        self.add(seq)
        return new

    def add(self, seq: Sequence) -> None:
        self._known.update(self._prefixes(seq))

    def _prefixes(self, seq: Sequence) -> Iterator[int]:
        keys = {place: span.key for span in seq.spans for place in range(span.start, span.end)}
        state = 0
        for place, token in enumerate([*seq.prompt_ids, *seq.output_ids]):
            state = hash((state, token, keys.get(place)))
            yield state


def sequence(name: str, pieces: list[Piece], arrival: float) -> Sequence:
    ids: list[int] = []
    spans: list[ImageSpan] = []
    for piece in pieces:
        if isinstance(piece, tuple):
            key, tokens = piece
            spans.append(ImageSpan(len(spans), len(ids), tokens, tokens, key, (1, 2, 2 * tokens)))
            ids += [100_000] * tokens
        else:
            ids += piece
    return Sequence(name, ids, GREEDY, ANSWER, tuple(spans), arrival=arrival)


def serve(talks: list[Talk], scheduler: Scheduler) -> dict[str, int]:
    """Run all talks, CLIENTS at a time in turns. Returns counts of prompt tokens."""
    waiting, running = list(talks), dict[str, tuple[Talk, Sequence]]()
    counts = {"requests": 0, "prompt": 0, "novel": 0, "computed": 0}
    novelty = Novelty()
    while waiting or running:
        while waiting and len(running) < CLIENTS:
            talk = waiting.pop(0)
            seq = sequence(f"s{counts['requests']}", talk.prompt(), counts["requests"])
            running[seq.id] = talk, seq
            counts["requests"] += 1
            counts["prompt"] += len(seq.prompt_ids)
            counts["novel"] += novelty.count(seq)
            scheduler.add(seq)
        plan = scheduler.schedule()
        for work in plan.work:
            counts["computed"] += max(0, min(work.stop, len(work.seq.prompt_ids)) - work.start)
        for job in plan.encode:
            scheduler.embeddings.put(job.span.key, job.span.key, 1, set(job.holders))
        sampled = {work.seq.id: [7 + work.seq.length] for work in plan.work if work.samples}
        scheduler.update(plan, sampled, {})
        for work in plan.work:
            seq = work.seq
            if len(seq.output_ids) < ANSWER:
                continue
            scheduler.finish(seq, "length")
            novelty.add(seq)
            talk, _ = running.pop(seq.id)
            if talk.turns:
                if talk.keep:
                    talk.history = [*talk.history, list(seq.output_ids)]
                waiting.append(talk)
    scheduler.check_integrity()
    return counts


def hybrid_config() -> DecoderConfig:
    mixers = [GATED if number % EVERY == EVERY - 1 else DELTA for number in range(DEPTH)]
    return decoder_config(HIDDEN, [(mixer, Dense(HYBRID_WIDTH, "silu")) for mixer in mixers])


def states(spacings: list[int], sizes: list[int]) -> list[dict[str, Any]]:
    decoder = hybrid_config()
    state = decoder.state_bytes(2)
    token = decoder.kv_bytes_per_token(2)
    print(f"a state is {state / MIB:.1f} MiB, the KV of a token {token / 1024:.0f} KiB")
    found = []
    for size in sizes:
        count, blocks = size * MIB // state, size * MIB // (token * BLOCK)
        print(f"{size} MiB of states, {count} slots, and {size} MiB of KV, {blocks * BLOCK:,} tokens")
        print(
            f"  {'workload':10}{'spacing':>8}{'prompts':>10}{'savable':>10}{'recomputed':>14}"
            f"{'hit rate':>10}{'saved':>7}{'evicted':>8}{'seconds':>8}"
        )
        for name in WORKLOADS:
            for spacing in spacings:
                slots = CountedSlots(count, spacing)
                kv = KVManager(BlockPool(blocks), BLOCK, states=slots)
                scheduler = Scheduler(EngineConfig.of().schedule, kv, EmbeddingCache(1 << 30))
                started = time.perf_counter()
                counts = serve(workload(name), scheduler)
                savable = counts["prompt"] - counts["novel"]
                again = counts["computed"] - counts["novel"]
                row = {
                    "state_mib": size, "slots": count, "workload": name, "spacing": spacing, **counts,
                    "recomputed": again, "recomputed_share": again / savable,
                    "hit_rate": kv.hit_tokens / kv.query_tokens, "checkpoints": slots.saved,
                    "evictions": slots.evictions,
                }  # fmt: skip
                found.append(row)
                print(
                    f"  {name:10}{spacing:8}{counts['prompt']:10,}{savable:10,}"
                    f"{again:9,}{again / savable:5.0%}{row['hit_rate']:10.1%}"
                    f"{slots.saved:7}{slots.evictions:8}"
                    f"{time.perf_counter() - started:8.1f}",
                    flush=True,
                )
    return found


def gemma(window: int | None = 1024) -> DecoderConfig:
    full = Attention(8, 4, 256, 256**-0.5, qk_norm=True)
    local = replace(full, window=window)
    return decoder_config(2560, [(full if n % 6 == 5 else local, Dense(10_240, "silu")) for n in range(34)])


def pools(decoder: DecoderConfig, config: EngineConfig) -> KVManager:
    """Return a manager with the pools that the engine makes of POOL_MIB."""
    parts = SimpleNamespace(config=decoder)
    model = SimpleNamespace(decoder=parts, ranks=ALONE, dtype=torch.bfloat16, device="cpu")
    sizes = pool_sizes(config, model)  # type: ignore[arg-type]
    group = decoder.window
    window = None
    if group is not None:
        assert group.window is not None
        most = config.schedule.max_step_tokens
        window = WindowBlocks(BlockPool(sizes.window), BLOCK, group.window, most)
    return KVManager(BlockPool(sizes.blocks), BLOCK, window=window)


def fill(kv: KVManager, tokens: int, step: int, most: int) -> tuple[list[Sequence], int, int]:
    """Admit sequences of `tokens` tokens and compute them, until no other fits.

    Returns them, and the most blocks of both pools that the first one used.
    """
    done: list[Sequence] = []
    blocks = windowed = 0
    while len(done) < most:
        seq = Sequence(f"s{len(done)}", Tokens(len(done))(tokens), GREEDY, 1)
        match = kv.match(seq)
        if not kv.can_admit(seq, match):
            break
        kv.admit(seq, match)
        while seq.computed_tokens < tokens:
            count = min(step, tokens - seq.computed_tokens)
            kv.extend(seq, seq.computed_tokens + count)
            if not done:
                blocks = len(seq.blocks)
                windowed = max(windowed, sum(block != GONE for block in seq.window_blocks))
            kv.commit(seq, count, tokens)
        done.append(seq)
    kv.check_integrity()
    return done, blocks, windowed


def windows(lengths: list[int]) -> list[dict[str, Any]]:
    config = EngineConfig.of(kv_cache_mib=POOL_MIB)
    found = []
    print(
        f"{'tokens':>7} {'blocks behind the window':26}{'MiB at most':>12}{'MiB after':>11}{'in 4 GiB':>10}"
    )
    for tokens in lengths:
        for returned in (True, False):
            decoder = gemma(1024 if returned else None)
            kv = pools(decoder, config)
            block = [group.bytes_per_token(2) * BLOCK for group in decoder.kv_groups]
            step = config.schedule.max_step_tokens
            sequences, blocks, windowed = fill(kv, tokens, step, 1000)
            after = sum(b != GONE for b in sequences[0].window_blocks) if sequences else 0
            if not sequences:  # not even one fits: all of its blocks
                blocks = kv.blocks_for(tokens)
            wide = block[1] if len(block) > 1 else 0
            most, rest = ((blocks * block[0] + count * wide) / MIB for count in (windowed, after))
            name = "are returned" if returned else "are kept"
            print(f"{tokens:7,} {name:26}{most:12.0f}{rest:11.0f}{len(sequences):10}")
            found.append(
                {
                    "tokens": tokens,
                    "returned": returned,
                    "most_mib": most,
                    "after_mib": rest,
                    "fit": len(sequences),
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spacings", default="0,256,1024,4096", help="values of state_spacing, by commas")
    parser.add_argument("--state-mib", default="512,1024,2048,4096", help="MiB of states, by commas")
    parser.add_argument("--windows", default="8192,32768", help="lengths of sequences, by commas")
    args = parser.parse_args()

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    results = {
        "states": states(numbers(args.spacings), numbers(args.state_mib)),
        "windows": windows(numbers(args.windows)),
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
