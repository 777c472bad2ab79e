"""Measure what announcing its caches costs the engine's thread, and how much memory a slow router can take.

    python benchmarks/events.py [--prompts 3000] [--rounds 5]

Prompts of 2,048 tokens with one image each go through the real account of KV blocks, whose pool holds a
quarter of them, so that every prompt also evicts. Each round measures this without announcements, with them
and no router, with two routers that read, and with two that read nothing. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import socket
import threading
import time
from statistics import median

import zmq

from fovea.core.sampling import SamplingParams
from fovea.engine.config import EngineConfig
from fovea.engine.kv.blocks import BlockPool
from fovea.engine.kv.manager import KVManager
from fovea.engine.publish import CacheEvents
from fovea.engine.sequence import ImageSpan, Sequence

SIZE, TOKENS, IMAGE = 16, 2048, 1024
CASES = ("off", "no router", "two routers", "two that do not read")


def prompt(number: int) -> Sequence:
    key = f"\x00image {number}\x00plan"
    span = ImageSpan(0, 16, IMAGE, IMAGE, key, (1, 64, 64))
    ids = [number % 50_000, *range(TOKENS - 1)]
    return Sequence(f"request {number}", ids, SamplingParams(temperature=0), 1, (span,), arrival=0.0)


def serve(kv: KVManager, sequences: list[Sequence]) -> float:
    """Serve prompts one after the other. Returns the microseconds of this thread for each block."""
    started = time.thread_time()
    for seq in sequences:
        kv.admit(seq, kv.match(seq))
        kv.extend(seq, TOKENS)
        kv.commit(seq, seq.missing_tokens, TOKENS)
        kv.release(seq)
    return (time.thread_time() - started) / (len(sequences) * TOKENS / SIZE) * 1e6


def port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


class Routers:
    """Subscribers, which read or do not."""

    def __init__(self, address: str, count: int, *, read: bool) -> None:
        self._closing = False
        self._threads = [
            threading.Thread(target=self._follow, args=(address, read), daemon=True) for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()
        time.sleep(0.3)

    def _follow(self, address: str, read: bool) -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as one:
            one.linger = 0
            one.subscribe(b"")
            one.connect(address)
            while not self._closing:
                if not read:
                    time.sleep(0.05)
                elif one.poll(50):
                    one.recv_multipart()

    def close(self) -> None:
        self._closing = True
        for thread in self._threads:
            thread.join()


def measure(case: str, prompts: int, start: int) -> float:
    events = CacheEvents()
    routers = None
    if case != "off":
        config = EngineConfig.of(kv_events=port(), block_size=SIZE)
        events = CacheEvents.open(config)
        if case != "no router":
            routers = Routers(config.events.kv_events, 2, read=case == "two routers")
    kv = KVManager(BlockPool(prompts * TOKENS // SIZE // 4), SIZE, changes=events.blocks)
    took = serve(kv, [prompt(start + number) for number in range(prompts)])
    if routers is not None:
        routers.close()
    events.close()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=int, default=3000, help="prompts of each case (default: 3000)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: 5)")
    args = parser.parse_args()
    measure("off", args.prompts // 4, 0)
    took: dict[str, list[float]] = {case: [] for case in CASES}
    peaks: dict[str, float] = {}
    for number in range(args.rounds):
        for case in CASES:
            took[case].append(measure(case, args.prompts, number * args.prompts))
            peaks.setdefault(case, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    off = median(took["off"])
    print(f"processor time of the engine's thread for each block of {SIZE} tokens, in microseconds; median")
    for case in CASES:
        value = median(took[case])
        print(f"{case:24} {value:6.2f}  {value / off:.2f}x   highest memory so far {peaks[case]:.0f} MiB")
    print(json.dumps({"us_per_block": {case: round(median(took[case]), 3) for case in CASES}}))


if __name__ == "__main__":
    main()
