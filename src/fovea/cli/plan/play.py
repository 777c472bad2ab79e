"""Plays sessions on an engine in this process, and the same sessions on the simulator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean, median
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np
from PIL import Image as Pillow

from fovea.bench.content import WORDS
from fovea.core.errors import EngineError
from fovea.core.media import Image
from fovea.core.trace import TraceRequest
from fovea.core.types import ChatPrompt, ImagePart, Message, TextPart
from fovea.engine.config import EngineConfig
from fovea.engine.request.inputs import to_image
from fovea.engine.simulate.report import Record
from fovea.engine.simulate.run import Next, simulated_records
from fovea.planner.cost import CostModel
from fovea.planner.fit import Preparation
from fovea.planner.sessions import Session, Turn

if TYPE_CHECKING:
    from fovea.engine.engine import Engine


@dataclass(slots=True)
class Played:
    """One request that was answered.

    turn: what was asked.
    sent: when, on the clock of `tokens`.
    tokens: when each token of the answer arrived.
    prompt, visual: tokens of the prompt, and how many of them are visual.
    preprocess_s: seconds that its text and pixels took before the engine could schedule it.
    """

    turn: Turn
    sent: float
    tokens: list[float] = field(default_factory=list)
    prompt: int = 0
    visual: int = 0
    preprocess_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures that a workload's clients see.

    ttft_s: median time to the first token.
    itl_s: mean time between tokens.
    tokens_per_s: tokens of all answers, over the whole time.
    """

    ttft_s: float
    itl_s: float
    tokens_per_s: float

    @classmethod
    def of(cls, answers: Iterable[tuple[float, Sequence[float]]]) -> Figures:
        """Return the figures of answers, each (when it was asked, when its tokens came)."""
        seen = list(answers)
        gaps = [b - a for _, times in seen for a, b in zip(times, times[1:], strict=False)]
        start, end = min(sent for sent, _ in seen), max(times[-1] for _, times in seen)
        return cls(
            median(times[0] - sent for sent, times in seen),
            fmean(gaps),
            sum(len(times) for _, times in seen) / (end - start),
        )

    @classmethod
    def middle(cls, several: Sequence[Figures]) -> Figures:
        """Return the median of each figure over repetitions."""
        return cls(
            median(one.ttft_s for one in several),
            median(one.itl_s for one in several),
            median(one.tokens_per_s for one in several),
        )


async def play(engine: Engine, clients: Sequence[Session], nonce: int) -> list[list[Played]]:
    """Play sessions at once, each client waiting for its answers. Returns the requests by client.

    nonce: another number gives other words and pixels, which no cache knows.
    """
    pictures = {
        turn.image: _picture(turn.image, nonce) for session in clients for turn in session if turn.image
    }

    async def client(number: int, session: Session) -> list[Played]:
        messages: tuple[Message, ...] = ()
        played = []
        for index, turn in enumerate(session):
            random = Random(f"{nonce} {number} {index}")
            question = " ".join(random.choice(WORDS) for _ in range(turn.text))
            parts: list[TextPart | ImagePart] = [TextPart(question)]
            if turn.image:
                parts.insert(0, ImagePart(pictures[turn.image]))
            before = messages if turn.continues else ()
            messages = (*before, Message("user", tuple(parts)))
            one, text = Played(turn, time.perf_counter()), ""
            async for delta in engine.stream(
                ChatPrompt(messages), temperature=0.0, max_tokens=turn.output, ignore_eos=True
            ):
                now = time.perf_counter()
                one.tokens += [now] * len(delta.token_ids)
                text += delta.text
                if delta.usage is not None:
                    one.prompt, one.visual = delta.usage.prompt, delta.usage.image
                if delta.timings is not None:
                    one.preprocess_s = delta.timings.preprocess
            if not one.tokens:
                raise EngineError("the model gave an answer without a token")
            messages = (*messages, Message("assistant", (TextPart(text),)))
            played.append(one)
        return played

    return await asyncio.gather(*(client(number, session) for number, session in enumerate(clients)))


def predict(
    clients: Sequence[Sequence[Played]],
    config: EngineConfig,
    cost: CostModel,
    preparation: Preparation,
    common: int,
) -> Figures:
    """Simulate the sessions that were played, with the same numbers of tokens.

    common: tokens with which every prompt begins.
    preparation: seconds until the engine can schedule a request.
    """
    trace: list[TraceRequest] = []
    seconds: list[float] = []
    following: dict[int, Next] = {}
    seen: set[tuple[str, int, int] | None] = set()
    for session in clients:
        before: Played | None = None
        for one in session:
            number = len(trace)
            if before is not None:
                following[number - 1] = Next(number, one.turn.continues)
            known = before.prompt + len(before.tokens) if before is not None and one.turn.continues else 0
            new_visual = one.visual if one.turn.image else 0
            images = ((one.turn.image[0], new_visual),) if one.turn.image else ()
            system = 0 if known else common
            text = max(1, one.prompt - known - new_visual - system)
            trace.append(TraceRequest(0.0, text, len(one.tokens), images, system))
            # An image is decoded and resized once; requests that find its outputs in a cache do not.
            pixels = 0 if one.turn.image in seen else one.turn.pixels
            seen.add(one.turn.image)
            seconds.append(preparation.seconds(one.prompt, pixels))
            before = one
    prepare = {id(request): value for request, value in zip(trace, seconds, strict=True)}
    records: list[Record] = simulated_records(
        tuple(trace), config, cost, following=following, prepare=lambda request: prepare[id(request)]
    )
    return Figures.of((record.arrival, record.tokens) for record in records)


def common_tokens(engine: Engine) -> int:
    """Return with how many equal tokens the prompts of different questions begin, by the chat template."""
    first, second = (engine.outline(ChatPrompt((Message("user", (TextPart(text),)),))).ids for text in "az")
    same = [one == other for one, other in zip(first, second, strict=False)]
    return same.index(False) if False in same else len(same)


def _picture(image: tuple[str, int, int], nonce: int) -> Image:
    key, width, height = image
    random = np.random.default_rng(crc32(f"{nonce} {key}".encode()))
    return to_image(Pillow.fromarray(random.integers(0, 255, (height, width, 3), dtype=np.uint8)))
