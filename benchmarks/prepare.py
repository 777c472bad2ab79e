"""Measure how fast images become pixels for an encoder: python benchmarks/prepare.py

Pages of 1275x1650 pixels with text (PNG and JPEG) and photos of 12 megapixels (JPEG) are prepared for
Qwen2.5-VL in bfloat16, a page as 2,714 visual tokens:

    in process    decoded, resized, normalised and cut into patches by threads of this process, one per core
    server        sent over HTTP to Fovea's own server, which decodes in its sandboxed decoding processes, and
                  whose engine only prepares the pixels, counts them and drops them; as chats with data URLs,
                  as uploads to /v1/images, and as chats about images whose encoder output is known
    transformers  its image processor after Pillow, in threads of this process; vLLM and SGLang call it, too

Everything runs on one core and on two (CPU affinity); the client of the server may use all cores. Rates are
images per second. "ms" is processor time per image, of all processes except the client: it can be compared on
a busy machine. "GIL" is how long a thread of the server waits for the GIL: median and 99th percentile. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import http.client
import io
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Pillow
from PIL import ImageDraw

from fovea.core.media import PixelBudget
from fovea.core.protocols import CacheStage, EngineStatus
from fovea.core.types import Delta, GenerationRequest, ModelInfo, Prompt, Usage
from fovea.engine.config.memory import PixelSettings
from fovea.engine.files import read_json
from fovea.engine.request.pixels import PixelPool, PixelStore
from fovea.engine.request.prompt import PromptBuilder
from fovea.engine.simulate.serving import FOLDER, load_prompt_builder
from fovea.engine.vision.processor import ImageProcessor, build
from fovea.engine.vision.processor.pixels import in_type
from fovea.media.image.decode import decode
from fovea.media.limits import MIB, MediaLimits
from fovea.server.app import create_app
from fovea.server.run import serve
from fovea.server.settings import ServerSettings

QWEN = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_processor_type": "Qwen2VLImageProcessor",
}
PAGE, PHOTO = (1275, 1650), (4000, 3000)
LIMITS = MediaLimits()
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PROBE_S = 0.002
"""Pause between two waits for the GIL that are measured."""
COLD = ("server, chats", "server, uploads")
"""Ways in which the server prepares every image."""
ROUNDS = 4
"""Rounds of a measurement; their medians count."""
CLIENTS = 6
"""Requests in flight for each core of the server."""


def qwen() -> ImageProcessor:
    return in_type(build("qwen2_5_vl", QWEN, {}), "bfloat16")


def draw(kind: str, number: int) -> bytes:
    """Draw an image as a file. Each number gives a different image."""
    rng, out = np.random.default_rng(number), io.BytesIO()
    if kind == "photo":
        small = rng.integers(0, 255, (PHOTO[1] // 32, PHOTO[0] // 32, 3), np.uint8)
        smooth = np.asarray(Pillow.fromarray(small).resize(PHOTO, Pillow.Resampling.BICUBIC), np.int16)
        grain = rng.integers(-6, 7, (PHOTO[1], PHOTO[0], 1), np.int16)
        Pillow.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
        return out.getvalue()
    page = Pillow.new("RGB", PAGE, "white")
    pen = ImageDraw.Draw(page)
    words = ["".join(map(chr, rng.integers(97, 123, rng.integers(2, 10)))) for _ in range(200)]
    for y in range(80, PAGE[1] - 80, 21):
        line = " ".join(words[index] for index in rng.integers(0, len(words), 15))
        pen.text((90, y), f"{number} {line}"[:150], fill=(20, 20, 30), font_size=15)
    page.save(out, "PNG" if kind == "page, PNG" else "JPEG", quality=90)
    return out.getvalue()


class CountingEngine:
    """An engine client that prepares pixels as the engine does, counts them, and answers one token.

    An image that was prepared before is known, as if its encoder output were cached.
    """

    def __init__(self, workers: int) -> None:
        processor = qwen()
        self.tokenizer, _ = load_prompt_builder()
        token = read_json(FOLDER / "config.json")["image_token_id"]
        self._builder = PromptBuilder(self.tokenizer, processor, token)
        self._pixels = PixelStore(processor, workers, PixelPool(512 * MIB, 0), value_bytes=2)
        self._known: set[str] = set()
        self._info = ModelInfo(
            "counting", "none", 0, "bfloat16", "none", "cpu", 1 << 20, self.tokenizer.vocab_size
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def status(self) -> EngineStatus:
        return "ready"

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        prompt = await asyncio.to_thread(self._builder.build, request.prompt, request.cache_salt, 1 << 20)
        tasks = [self._pixels.task(image) for image in prompt.images if image.key not in self._known]
        reservation = self._pixels.pool.reserve(tasks)
        try:
            await asyncio.wrap_future(reservation.granted)
            for task in tasks:
                await asyncio.wrap_future(task.start())
        finally:
            reservation.release()
        self._known.update(image.key for image in prompt.images)
        usage = Usage(len(prompt.ids), 1, 0, prompt.image_tokens)
        images = tuple(image.use for image in prompt.images)
        yield Delta(
            0, "1", (5,), finish_reason="length", usage=usage, images=images, prompt_tokens=len(prompt.ids)
        )

    def check_room(self, choices: int, reserved: int = 0) -> None:
        """Accept everything."""

    async def tokenize(self, prompt: Prompt) -> list[int]:
        return self._builder.build(prompt).ids

    async def detokenize(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids))

    def stats(self) -> Mapping[str, float]:
        return {}

    def clear_caches(self, *stages: CacheStage) -> None:
        self._known.clear()

    async def close(self, drain_s: float = 0.0) -> None:
        self._pixels.close()


class Probe:
    """Measures in a thread of its own how long it waits for the GIL, and where the processor time went."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(PROBE_S)
            started = time.perf_counter()
            os.sched_yield()  # releases the GIL, and takes it again
            self.waits.append(time.perf_counter() - started)

    def report(self) -> dict[str, Any]:
        """Waits for the GIL since the last report, in ms; processor seconds by thread since the start."""
        waits, self.waits = self.waits, []
        spent: Counter[str] = Counter()
        for thread in threading.enumerate():
            spent[thread.name.rstrip("0123456789").rstrip("-_")] += _ticks(
                f"/proc/self/task/{thread.native_id}/stat"
            )
        for child in _children(os.getpid()):
            spent["decoder processes"] += _ticks(f"/proc/{child}/stat")
        spent["all"] = time.process_time() + spent["decoder processes"]
        return {
            "waits_ms": np.percentile(np.array(waits or [0.0]) * 1e3, (50, 99)).tolist(),
            "spent_s": dict(spent),
        }


def _ticks(path: str) -> float:
    """Seconds of processor time of a process or a thread; 0 if it has ended."""
    with contextlib.suppress(OSError):
        fields = Path(path).read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK_S
    return 0.0


def _children(pid: int) -> list[str]:
    return [
        each
        for task in Path(f"/proc/{pid}/task").iterdir()
        for each in (task / "children").read_text().split()
    ]


def run_server(port: int, workers: int) -> None:
    """Serve a counting engine. Each line of the input is answered by a line with a report of the probe.

    workers: pixel threads, and decoding processes if more than usual.
    """
    settings = ServerSettings()
    media = replace(settings.media, image_workers=max(workers, settings.media.image_workers))
    settings = replace(settings, media=media)
    probe = Probe()

    def report() -> None:
        for _ in sys.stdin:
            print(json.dumps(probe.report()), flush=True)

    def ready() -> None:
        print("ready", flush=True)
        threading.Thread(target=report, daemon=True).start()

    serve(create_app(CountingEngine(workers), settings), "127.0.0.1", port, on_start=ready)


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement.

    rate: images per second. ms: processor time per image, and spent_ms: by threads.
    gil_ms: waits for the GIL, median and 99th percentile.
    """

    kind: str
    way: str
    cores: int
    rate: float
    ms: float
    gil_ms: tuple[float, ...] = ()
    spent_ms: Mapping[str, float] | None = None


class Server:
    """The server in a process of its own, on the first cores."""

    def __init__(self, cores: int, port: int, workers: int) -> None:
        command = [sys.executable, __file__, "--serve", str(port), "--workers", str(workers)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        os.sched_setaffinity(self._process.pid, range(cores))
        self.port = port
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def report(self) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print("report", file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def measure(self, kind: str, way: str, cores: int, path: str, bodies: Sequence[bytes]) -> Row:
        """Send the bodies, some at a time, and return the rate at which they were answered."""
        local = threading.local()

        def send(body: bytes) -> None:
            if not hasattr(local, "connection"):
                local.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
            local.connection.request("POST", path, body, {"content-type": "application/json"})
            answer = local.connection.getresponse()
            text = answer.read()
            if answer.status != 200:
                raise RuntimeError(f"the server answered {answer.status}: {text[:300]!r}")

        before = self.report()
        with ThreadPoolExecutor(CLIENTS * cores) as pool:
            started = time.perf_counter()
            list(pool.map(send, bodies))
            seconds = time.perf_counter() - started
        after = self.report()
        spent = {
            name: (s - before["spent_s"].get(name, 0)) * 1e3 / len(bodies)
            for name, s in after["spent_s"].items()
        }
        named = {name: round(ms, 2) for name, ms in spent.items() if ms >= 0.1 and name != "all"}
        return Row(kind, way, cores, len(bodies) / seconds, spent["all"], tuple(after["waits_ms"]), named)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def chat(file: bytes) -> bytes:
    url = f"data:image/{'png' if file[1:4] == b'PNG' else 'jpeg'};base64,{base64.b64encode(file).decode()}"
    content = [
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
        {"type": "text", "text": "Read it."},
    ]
    return json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 1}).encode()


def upload(file: bytes) -> bytes:
    url = json.loads(chat(file))["messages"][0]["content"][0]["image_url"]["url"]
    return json.dumps({"url": url, "detail": "high"}).encode()


def in_process(
    kind: str, way: str, cores: int, files: Sequence[bytes], prepare: Callable[[bytes], object]
) -> Row:
    """Prepare the files by a thread for each core."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(cores))
    try:
        with ThreadPoolExecutor(cores) as pool:
            list(pool.map(prepare, files[:4]))
            started, spent = time.perf_counter(), time.process_time()
            list(pool.map(prepare, files))
            seconds, spent = time.perf_counter() - started, time.process_time() - spent
    finally:
        os.sched_setaffinity(0, own)
    return Row(kind, way, cores, len(files) / seconds, spent * 1e3 / len(files))


def preparer() -> Callable[[bytes], object]:
    """Return a function that prepares a file as Fovea does in a program of one's own."""
    processor = qwen()

    def prepare(file: bytes) -> object:
        image = decode(file, LIMITS)
        return processor.process(image, processor.plan(image.width, image.height, PixelBudget("high")))

    return prepare


def theirs() -> Callable[[bytes], object]:
    """Return a function that prepares a file by transformers' image processor."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(
        **{key: value for key, value in QWEN.items() if key != "image_processor_type"}
    )
    return lambda file: processor(images=Pillow.open(io.BytesIO(file)).convert("RGB"), return_tensors="np")


def rows(kinds: Sequence[str], cores: Sequence[int], count: int, port: int, workers: int) -> Iterator[Row]:
    """Measure in rounds, so that other work on the machine disturbs all ways alike."""
    ways = {"in process": preparer(), "transformers": theirs()}
    for kind in kinds:
        number = max(2, (count if kind.startswith("page") else count // 4) // ROUNDS)
        files = [draw(kind, seed) for seed in range(3 * number * ROUNDS)]
        cold, uploads, first = (files[way::3] for way in range(3))
        for many in cores:
            found: dict[str, list[Row]] = {}
            server = Server(many, port, workers)

            def ask(way: str, bodies: Sequence[bytes], path: str = "/v1/chat/completions") -> None:
                row = server.measure(kind, f"server, {way}", many, path, bodies)  # noqa: B023
                found.setdefault(row.way, []).append(row)  # noqa: B023

            def compute(way: str, some: Sequence[bytes]) -> None:
                found.setdefault(way, []).append(in_process(kind, way, many, some, ways[way]))  # noqa: B023

            try:
                # Warm-up: until the caches are full, images also pay for new memory pages.
                server.measure(kind, "", many, "/v1/chat/completions", [chat(file) for file in first])
                for at in range(0, number * ROUNDS, number):
                    some = cold[at : at + number]
                    compute("in process", some)
                    ask("chats", [chat(file) for file in some])
                    ask("uploads", [upload(file) for file in uploads[at : at + number]], "/v1/images")
                    ask("known images", [chat(file) for file in some])
                compute("transformers", cold[: 3 * many])
            finally:
                server.close()
            yield from map(middle, found.values())


def middle(rounds: Sequence[Row]) -> Row:
    """Return the medians of the rounds of one way."""

    def of(values: Iterable[float]) -> float:
        return round(statistics.median(values), 4)

    gil = tuple(of(waits) for waits in zip(*(row.gil_ms for row in rounds), strict=True))
    names = {name for row in rounds for name in row.spent_ms or {}}
    spent = {name: of((row.spent_ms or {}).get(name, 0.0) for row in rounds) for name in names}
    return replace(
        rounds[0],
        rate=of(row.rate for row in rounds),
        ms=of(row.ms for row in rounds),
        gil_ms=gil,
        spent_ms=spent,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--images", type=int, default=64, help="pages per measurement; photos are a quarter (default: 64)"
    )
    parser.add_argument(
        "--kinds", default="page, PNG;page, JPEG;photo", help="separated by semicolons (default: all)"
    )
    parser.add_argument("--cores", default="1,2", help="numbers of cores (default: 1,2)")
    parser.add_argument("--port", type=int, default=18431, help="port of the server (default: 18431)")
    usual = PixelSettings().preprocess_workers
    parser.add_argument(
        "--workers", type=int, default=usual, help=f"pixel threads of the server (default: {usual})"
    )
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    cores = [int(number) for number in args.cores.split(",")]
    if args.serve:
        run_server(args.serve, args.workers)
        return
    found = []
    print(f"{'image':11}{'way':22}cores  images/s  per core       ms   GIL ms: median, p99   ms by threads")
    for row in rows(args.kinds.split(";"), cores, args.images, args.port, args.workers):
        found.append(row)
        rate, gil = row.rate / row.cores, "  ".join(f"{wait:8.3f}" for wait in row.gil_ms)
        spent = sorted((row.spent_ms or {}).items(), key=lambda entry: -entry[1])
        print(
            f"{row.kind:11}{row.way:22}{row.cores:5}{row.rate:10.1f}{rate:10.1f}{row.ms:9.1f}   {gil:22}",
            ", ".join(f"{name} {ms:g}" for name, ms in spent),
            flush=True,
        )
    for kind, many in dict.fromkeys((row.kind, row.cores) for row in found):
        own = [row for row in found if (row.kind, row.cores) == (kind, many)]
        here = next(row for row in own if row.way == "in process")
        shares = [
            f"{row.way[8:]} {here.ms / row.ms:.2f} ({row.rate / here.rate:.2f})"
            for row in own
            if row.way in COLD
        ]
        print(
            f"{kind}, cores: {many}; server to in process, by processor time (by rate): {', '.join(shares)}"
        )
    print(json.dumps([{name: getattr(row, name) for name in Row.__slots__} for row in found]))


if __name__ == "__main__":
    main()
