"""A stream of requests in which images, or long texts, come back, and how many of these found a warm engine.

Every subject is asked about several times, each time with another question. What a request says about its own
subject stands at the beginning of the prompt, so an engine that has answered about it before has most of the
prompt cached. The answer's own `cached_tokens` say whether it had.
"""

from __future__ import annotations

import base64
import random
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Kind = Literal["images", "texts"]
SUBJECTS, ASKS = 32, 3
APART = 4
"""At least so many requests lie between two about one subject, so that the first is answered by then."""
WIDTH, HEIGHT, TILE = 320, 240, 20
WORDS = 160
"""Words of a text."""
_QUESTIONS = (
    "What is in the middle?",
    "Which colour is used most?",
    "What is at the top left?",
    "Is there anything red?",
    "What is at the bottom?",
    "Describe it in one word.",
)
_VOCABULARY = (
    *("river", "stone", "paper", "window", "garden", "letter"),
    *("bridge", "winter", "summer", "copper", "silver", "market"),
)


class Ask(NamedTuple):
    """A request. subject: number of what it is about. turn: 0 for the first request about it."""

    subject: int
    turn: int


class Reply(NamedTuple):
    """An answer's own account: the tokens of its prompt, and how many of them were cached."""

    ask: Ask
    prompt: int
    cached: int

    @property
    def warm(self) -> bool:
        """Whether the engine knew the subject. One that does not know it has the first few tokens at most."""
        return 2 * self.cached > self.prompt


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a stream of requests.

    warm, repeats: requests about a known subject that reached an engine that knows it, and all such requests.
    split: requests by engine. A router that sends all to one engine finds it warm, too.
    """

    warm: int
    repeats: int
    split: tuple[int, ...]

    @property
    def share(self) -> float:
        return self.warm / self.repeats

    @property
    def busier(self) -> float:
        """The part of all requests that reached the busier engine."""
        return max(self.split) / sum(self.split)


def order(seed: int, subjects: int = SUBJECTS, asks: int = ASKS) -> list[Ask]:
    """Return the requests in their order: each turn asks about every subject once, in random order."""
    chance = random.Random(seed)
    asked: list[Ask] = []
    for turn in range(asks):
        numbers = list(range(subjects))
        recent = {ask.subject for ask in asked[-APART:]}
        chance.shuffle(numbers)
        while recent & set(numbers[:APART]):
            chance.shuffle(numbers)
        asked += (Ask(number, turn) for number in numbers)
    return asked


def judge(replies: Iterable[Reply], split: Sequence[int]) -> Found:
    """Count the repeats that found a warm engine. split: requests by engine."""
    repeats = [reply for reply in replies if reply.ask.turn]
    return Found(sum(reply.warm for reply in repeats), len(repeats), tuple(split))


def body(kind: Kind, name: str, ask: Ask) -> dict[str, Any]:
    """Return a chat request. name: subjects of other names are others."""
    question = _QUESTIONS[ask.turn % len(_QUESTIONS)]
    seed = f"{name} {ask.subject}"
    if kind == "texts":
        content: Any = f"{text(seed)}\n\n{question}"
    else:
        url = f"data:image/png;base64,{base64.b64encode(picture(seed)).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    return {"model": "fovea-tiny", "max_tokens": 4, "messages": [{"role": "user", "content": content}]}


def reply(ask: Ask, answer: Mapping[str, Any]) -> Reply:
    """Read what an answer says of its prompt."""
    usage = answer["usage"]
    return Reply(
        ask, usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    )


def text(seed: str) -> str:
    """A text that no other seed has, from its first word on."""
    chance = random.Random(seed)
    return " ".join(chance.choice(_VOCABULARY) for _ in range(WORDS))


def picture(seed: str) -> bytes:
    """A PNG file of random tiles."""
    chance = random.Random(seed)
    rows = bytearray()
    for _ in range(HEIGHT // TILE):
        row = b"".join(chance.randbytes(3) * TILE for _ in range(WIDTH // TILE))
        rows += (b"\0" + row) * TILE
    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(rows))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
