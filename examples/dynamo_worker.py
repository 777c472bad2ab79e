"""Put engines behind NVIDIA Dynamo's frontend, so that a request reaches the one that has its images cached.

The engines are ordinary servers that announce what they cache:

    fovea serve --port 8001 --kv-events 'tcp://*:5557' --kv-events-replay 'tcp://*:5558'
    fovea serve --port 8002 --kv-events 'tcp://*:5567' --kv-events-replay 'tcp://*:5568'

This worker and the frontend run in an environment of their own (docs/routers.md); no CUDA is needed:

    python examples/dynamo_worker.py \\
        --engine http://127.0.0.1:8001,tcp://127.0.0.1:5557,tcp://127.0.0.1:5558 \\
        --engine http://127.0.0.1:8002,tcp://127.0.0.1:5567,tcp://127.0.0.1:5568
    python -m dynamo.frontend --discovery-backend file --request-plane tcp --event-plane zmq

For each request, an engine renders the prompt (token ids, names and places of images), Dynamo's selection
service chooses by them and by its own count of the load, and the chosen engine answers.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, NamedTuple

import aiohttp
from dynamo._core import SelectionService, SelectionServiceError
from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
from dynamo.llm.exceptions import CannotConnect, InvalidArgument, Unknown
from dynamo.runtime import DistributedRuntime

ENDPOINT = "fovea.worker.generate"
CHAT = "/v1/chat/completions"
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
NAME_DIGITS = 16
"""Dynamo reads only this many hexadecimal digits of an image's name, from its beginning."""
LONGEST_S = 3600.0
PREFILL_WEIGHT = 4.0
"""Weight of a block that has to be computed; a block that running requests hold has weight 1.

Dynamo's own value is 1, which is for text. A block of an image needs the encoder, too, so it is worth a
busier engine."""


class Engine(NamedTuple):
    """A server, and the addresses of its announcements. replay: "": it has none."""

    url: str
    events: str
    replay: str


def engine(text: str) -> Engine:
    """Read URL,EVENTS[,REPLAY]."""
    url, events, *more = text.split(",")
    return Engine(url.rstrip("/"), events, more[0] if more else "")


def block_images(features: dict[str, Any] | None, tokens: int, size: int) -> list[dict[str, Any] | None]:
    """Return, for each block of a rendered prompt, the images that it touches, as Dynamo wants them.

    features: what a render says about images; None: there are none.
    """
    blocks: list[dict[str, Any] | None] = [None] * -(-tokens // size)
    if features is None:
        return blocks
    spans = [
        (place["offset"], place["length"], name)
        for kind, names in features["mm_hashes"].items()
        for name, place in zip(names, features["mm_placeholders"][kind], strict=True)
    ]
    for start, length, name in sorted(spans):
        for index in range(start // size, (start + length - 1) // size + 1):
            block = blocks[index] = blocks[index] or {"mm_objects": []}
            block["mm_objects"].append({"mm_hash": int(name[:NAME_DIGITS], 16), "offsets": []})
    return blocks


class Worker:
    """Answers requests of Dynamo's frontend by engines.

    model: name under which the engines serve it. block_size: tokens of a KV block of the engines.
    """

    def __init__(
        self, engines: Sequence[Engine], model: str, block_size: int, http: aiohttp.ClientSession
    ) -> None:
        self._engines, self._model, self._block_size, self._http = engines, model, block_size, http
        self._selection = SelectionService()
        self._turns = itertools.cycle(engines)

    async def register(self) -> None:
        """Tell the selection service of the engines. It subscribes to their announcements."""
        for number in range(len(self._engines)):
            await self._add(number)

    async def _add(self, number: int) -> None:
        one = self._engines[number]
        await self._selection.upsert_worker(
            {
                "worker_id": number,
                "model_name": self._model,
                "endpoint": one.url,
                "kv_events_endpoint": one.events,
                "replay_endpoint": one.replay or None,
                "block_size": self._block_size,
            }
        )

    async def _forget(self, url: str) -> None:
        """Drop what is known of an engine that is away. If it is back, its announcements begin anew."""
        number = next(number for number, one in enumerate(self._engines) if one.url == url)
        await self._selection.delete_worker(number)
        await self._add(number)

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks of an answer to a chat request. Errors of the engine are raised with its words.

        If an engine cannot be reached, another one takes its place, as long as there is no chunk.
        """
        rendered = await self._render(request)
        tokens = rendered["token_ids"]
        chosen = await self._selection.select_and_reserve(
            {
                "model_name": self._model,
                "token_ids": tokens,
                "block_mm_infos": block_images(rendered["features"], len(tokens), self._block_size),
            }
        )
        reservation = chosen["selection_id"]
        try:
            first = True
            async with self._post(chosen["endpoint"], CHAT, {**request, **STREAM}) as answer:
                async for chunk in _chunks(answer):
                    if context.is_stopped():
                        return
                    if first:
                        with suppress(SelectionServiceError):  # reservations end with their engine
                            await self._selection.prefill_complete(reservation)
                        first = False
                    yield chunk
        finally:
            with suppress(SelectionServiceError):
                await self._selection.free_reservation(reservation)

    async def _render(self, request: dict[str, Any]) -> dict[str, Any]:
        async with self._post(next(self._turns).url, f"{CHAT}/render", request) as answer:
            rendered: dict[str, Any] = await answer.json()
            return rendered

    @asynccontextmanager
    async def _post(self, url: str, path: str, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request to an engine, or to another one if that cannot be reached."""
        others = [one.url for one in self._engines if one.url != url]
        async with AsyncExitStack() as stack:
            for address in (url, *others):
                try:
                    answer = await stack.enter_async_context(self._http.post(f"{address}{path}", json=body))
                except aiohttp.ClientConnectorError:
                    await self._forget(address)
                    continue
                await _check(answer)
                yield answer
                return
            raise CannotConnect("no engine can be reached")


async def _chunks(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of a streamed answer. Raises an error that the engine reports in it."""
    async for line in answer.content:
        data = line.decode().removeprefix("data:").strip()
        if line.startswith(b"data:") and data != "[DONE]":
            chunk: dict[str, Any] = json.loads(data)
            if "error" in chunk:
                raise Unknown(chunk["error"]["message"])
            yield chunk


async def _check(answer: aiohttp.ClientResponse) -> None:
    """Raise the error that an engine answered, if it is one."""
    if answer.status >= 400:
        words = (await answer.json())["error"]["message"]
        raise (InvalidArgument if answer.status < 500 else Unknown)(words)


async def _model_of(url: str, http: aiohttp.ClientSession) -> str:
    """Return the name of an engine's model, as soon as the engine has loaded it."""
    while True:
        with suppress(aiohttp.ClientConnectionError):
            async with http.get(f"{url}/ready") as answer:
                if answer.status == 200:
                    async with http.get(f"{url}/v1/models") as models:
                        name: str = (await models.json())["data"][0]["id"]
                        return name
        await asyncio.sleep(1)


async def _run(options: argparse.Namespace) -> None:
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint(ENDPOINT)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(LONGEST_S)) as http:
        model = await _model_of(options.engine[0].url, http)
        worker = Worker(options.engine, model, options.block_size, http)
        await worker.register()
        await register_model(
            ModelInput.Text,
            ModelType.Chat,
            endpoint,
            model,
            model,
            worker_type=WorkerType.Aggregated,
            skip_model_assets=True,
        )
        print(f"{model} is registered", flush=True)
        await endpoint.serve_endpoint(worker.generate)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engine", type=engine, action="append", required=True, metavar="URL,EVENTS[,REPLAY]",
        help="address of a server, of its events, and of their replays; may be given several times",
    )  # fmt: skip
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a KV block of the engines")
    parser.add_argument(
        "--prefill-weight", type=float, default=PREFILL_WEIGHT,
        help="weight of a block that has to be computed; one that running requests hold has weight 1 "
        "(default: %(default)s; of Dynamo itself: 1)",
    )  # fmt: skip
    options = parser.parse_args()
    os.environ.setdefault("DYN_LOG", "warn")
    os.environ["DYN_ROUTER_PREFILL_LOAD_SCALE"] = str(options.prefill_weight)
    asyncio.run(_run(options))


if __name__ == "__main__":
    main()
