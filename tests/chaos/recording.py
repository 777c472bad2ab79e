"""Records the answers of an undisturbed engine, and leaves out questions whose answers vary by themselves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence

from tests.chaos.answers import read
from tests.chaos.client import send
from tests.chaos.items import Item, chat_body, data_url, messages_body, responses_body
from tests.chaos.orders import PATHS

TIMEOUT_S = 60.0
AT_ONCE = (1, 6)
"""Requests in flight in each pass. Batches of other sizes may round differently, and change an answer."""


class NotRecorded(Exception):
    """The undisturbed stack does not answer."""


async def record(ports: Sequence[int], items: Sequence[Item]) -> Mapping[str, str]:
    """Return the answers by the items' names. ports: of the engines; every engine is asked in every way.

    An item is left out if two of its answers differ. Raises NotRecorded.
    """
    answers: dict[str, set[str]] = {item.name: set() for item in items}
    for port in ports:
        for at_once in AT_ONCE:
            gate = asyncio.Semaphore(at_once)
            apis = ("chat",) if at_once == 1 else ("chat", "messages", "responses")
            await asyncio.gather(
                *(_ask(port, gate, api, item, answers[item.name]) for item in items for api in apis)
            )
    return {name: texts.pop() for name, texts in answers.items() if len(texts) == 1}


async def _ask(port: int, gate: asyncio.Semaphore, api: str, item: Item, texts: set[str]) -> None:
    if api == "messages" and item.schema is not None:
        return
    if api == "chat":
        body = chat_body(item, [data_url(file) for file in item.images], stream=False)
    elif api == "messages":
        body = messages_body(item, stream=False)
    else:
        body = responses_body(item, stream=False)
    async with gate:
        headers = {"content-type": "application/json"}
        outcome = await send(port, "POST", PATHS[api], headers, json.dumps(body).encode(), TIMEOUT_S)
    answer = read(api, outcome.body, stream=False)
    if outcome.status != 200 or not answer.done:
        raise NotRecorded(f"{item.name} by {api}: {outcome.ending} {outcome.status} {outcome.body[:300]!r}")
    texts.add(answer.text)
