"""Measure how many renders per second one processor core answers, over a real socket.

    python benchmarks/render.py [--format jpeg] [--seconds 10] [--clients 4] [--engine model] [--beside]

A server process runs on one core with everything that it starts. This process, on another core, sends it
requests with four different pictures of 1280x720 pixels, 150 KB each, as data: URLs. No two requests have the
same pictures, as far as the server can tell: the text and a few bytes of each file differ. Every answer is
checked. With --beside, an answer is streamed meanwhile, and the gaps between its tokens are compared with
those of an answer alone. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.servers import free_port

PATH = "/v1/chat/completions/render"
SIZE = 1280, 720
FILE_BYTES = 150_000
PICTURES = 4
VARIANTS = 6
"""Requests that are prepared before the measurement and sent in turns, so that the client costs little."""
QUESTION = "What is different between these pictures, and what do they have in common? Number {number}."


def picture(kind: str, seed: int) -> bytes:
    """Return a file of FILE_BYTES: a picture whose quality, or number of greys, comes closest from below.

    The rest is filled with a comment, which decoders ignore.
    """
    noise = np.random.default_rng(seed)
    rough = noise.integers(0, 256, (SIZE[1] // 8, SIZE[0] // 8, 3), dtype=np.uint8)
    image = Image.fromarray(rough).resize(SIZE, Image.Resampling.BICUBIC)
    if kind == "jpeg":
        files = [saved(image, "JPEG", quality=quality) for quality in (90, 75, 60, 40, 20, 5)]
        file = next(file for file in files if len(file) <= FILE_BYTES - 64)
        return comment_in_jpeg(file, FILE_BYTES - len(file), seed)
    files = [
        saved(image.convert("L").point(lambda grey, step=step: grey // step * step), "PNG")
        for step in (8, 16, 32, 64, 128)
    ]
    file = next(file for file in files if len(file) <= FILE_BYTES - 64)
    return comment_in_png(file, FILE_BYTES - len(file), seed)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def comment_in_jpeg(file: bytes, size: int, seed: int) -> bytes:
    """Add comments of `size` bytes in all after the first marker."""
    parts = b""
    while size > 0:
        part = min(size, 60_000)
        body = os.urandom(part - 4) if part > 4 else b""
        parts += b"\xff\xfe" + (len(body) + 2).to_bytes(2, "big") + body
        size -= part
    return file[:2] + parts + file[2:]


def comment_in_png(file: bytes, size: int, seed: int) -> bytes:
    """Add a chunk of `size` bytes in all before the last one, which has 12 bytes."""
    import zlib

    body = b"fiLl" + os.urandom(size - 12)
    chunk = (size - 12).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")
    return file[:-12] + chunk + file[-12:]


def request_body(kind: str, number: int) -> bytes:
    files = [picture(kind, PICTURES * number + index) for index in range(PICTURES)]
    urls = [f"data:image/{kind};base64,{base64.b64encode(file).decode()}" for file in files]
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content.append({"type": "text", "text": QUESTION.format(number=number)})
    return json.dumps({"max_tokens": 16, "messages": [{"role": "user", "content": content}]}).encode()


def serve(port: int, core: int, engine: str, log: Path) -> subprocess.Popen[bytes]:
    """Start a server on one core. Its threads and processes inherit the core."""
    kinds = {"simulated": ["--simulate"], "model": ["fovea-tiny"], "process": ["fovea-tiny"]}
    command = [
        sys.executable, "-m", "fovea.cli.main", "serve", *kinds[engine], "--port", str(port), "--log-level",
        "warning",
    ]  # fmt: skip
    if engine == "process":
        command += ["--engine-process", "on"]
    return subprocess.Popen(
        command, stderr=log.open("wb"), preexec_fn=lambda: os.sched_setaffinity(0, {core})
    )


async def ask(url: str, bodies: list[bytes], clients: int, seconds: float) -> tuple[int, float, list[float]]:
    """Return the number of answers, the seconds that they took, and the seconds of each."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    port = int(url.rpartition(":")[2])

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
        turn = number
        while time.perf_counter() < end:
            body = bodies[turn % len(bodies)]
            turn += clients
            started = time.perf_counter()
            head = (
                f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200"), answer
            fields = dict(line.split(b": ", 1) for line in answer.lower().split(b"\r\n")[1:-2])
            data = await reader.readexactly(int(fields[b"content-length"]))
            times.append(time.perf_counter() - started)
            assert data.startswith(b'{"request_id":"chatcmpl-'), data[:100]
            assert data.count(b'"offset":') == PICTURES, data[-500:]
        writer.close()

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(client(number))
    return len(times), time.perf_counter() - started, times


async def gaps(url: str, end: asyncio.Event | None, seconds: float) -> list[float]:
    """Stream answers, and return the seconds between their events, ascending.

    end: ends it; None: it ends after `seconds`.
    """
    body = {
        "messages": [{"role": "user", "content": "Describe a picture."}], "stream": True, "max_tokens": 500,
        "ignore_eos": True,
    }  # fmt: skip
    found: list[float] = []
    started = time.perf_counter()
    async with httpx.AsyncClient(timeout=60) as client:
        while not (end.is_set() if end else time.perf_counter() > started + seconds):
            async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
                last = None
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now = time.perf_counter()
                    if last is not None:
                        found.append(now - last)
                    last = now
                    if end.is_set() if end else now > started + seconds:
                        break
    return sorted(found)


async def ask_beside(
    url: str, bodies: list[bytes], clients: int, seconds: float
) -> tuple[tuple[int, float, list[float]], dict[str, float]]:
    """Return what `ask` returns, and the gaps of an answer alone and beside the renders, in milliseconds."""
    alone = await gaps(url, None, seconds)
    end = asyncio.Event()
    streaming = asyncio.create_task(gaps(url, end, seconds))
    result = await ask(url, bodies, clients, seconds)
    end.set()
    beside = await streaming
    figures: dict[str, float] = {}
    for where, times in (("alone", alone), ("beside", beside)):
        figures[f"gap_mean_{where}_ms"] = round(1000 * sum(times) / len(times), 2)
        figures[f"gap_p99_{where}_ms"] = round(1000 * times[len(times) * 99 // 100], 1)
    return result, figures


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise TimeoutError("the server did not become ready")


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and of all that it has started and that still run, so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")).split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_seconds(int(child)) for child in children)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--format", choices=("jpeg", "png"), default="jpeg")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=4, help="connections that ask at the same time")
    parser.add_argument(
        "--engine",
        choices=("simulated", "model", "process"),
        default="model",
        help="fovea-tiny in the server's process or in one of its own, or a simulation",
    )
    parser.add_argument("--beside", action="store_true", help="stream an answer meanwhile")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    bodies = [request_body(args.format, number) for number in range(VARIANTS)]
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", Path(f"/tmp/fovea-render-{port}.log")
    process = serve(port, cores[0], args.engine, log)
    try:
        wait_until_ready(url, process, log)
        first = httpx.post(url + PATH, content=bodies[0], headers={"content-type": "application/json"})
        tokens = len(first.raise_for_status().json()["token_ids"])
        asyncio.run(ask(url, bodies, args.clients, 1.0))
        before = cpu_seconds(process.pid)
        figures: dict[str, float] = {}
        if args.beside:
            (count, seconds, times), figures = asyncio.run(
                ask_beside(url, bodies, args.clients, args.seconds)
            )
        else:
            count, seconds, times = asyncio.run(ask(url, bodies, args.clients, args.seconds))
        cpu = cpu_seconds(process.pid) - before
    finally:
        process.terminate()
        process.wait(30)
        log.unlink(missing_ok=True)
    times.sort()
    result = {
        "format": args.format,
        "engine": args.engine,
        "clients": args.clients,
        "body_kib": round(len(bodies[0]) / 1024),
        "tokens": tokens,
        "renders_per_s": round(count / seconds, 1),
        "server_cpu_ms": 0.0 if args.beside else round(1000 * cpu / count, 2),
        "p50_ms": round(1000 * times[len(times) // 2], 1),
        "p99_ms": round(1000 * times[len(times) * 99 // 100], 1),
        **figures,
    }
    sys.stdout.write(
        f"{result['renders_per_s']} renders/s on one core, {result['server_cpu_ms']} ms of processor time "
        f"each, {tokens} tokens\n{json.dumps(result)}\n"
    )


if __name__ == "__main__":
    main()
