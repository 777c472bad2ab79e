"""The cost of a request's level of detail: the seconds of encoder and prompt before its first token.

Tokens are no measure of it: an image of 1024 visual tokens may take forty times as long as a question in the
encoder, and nothing if it is cached. The cost counts only what remains to be computed. Requests that wait for
the same image share its part, so the cost keeps the parts of images apart, by their keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fovea.engine.schedule.image_times import ImageTimes
from fovea.engine.schedule.step_times import StepTimes
from fovea.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class LodCost:
    """Seconds of work before a first token, on an engine that does nothing else.

    text_s: seconds for the prompt's tokens outside of images.
    encode_s: seconds of the encoder, by the key of the image.
    visual_s: seconds for the visual tokens in the prompt, by the key of the image.
    visual_tokens: number of the visual tokens that are not computed yet.
    prompt_tokens: number of all tokens of the prompt that are not computed yet.
    """

    text_s: float = 0.0
    encode_s: dict[str, float] = field(default_factory=dict)
    visual_s: dict[str, float] = field(default_factory=dict)
    visual_tokens: int = 0
    prompt_tokens: int = 0

    @property
    def ready(self) -> bool:
        """Whether no image remains to be encoded."""
        return not self.encode_s

    @property
    def prompt_s(self) -> float:
        """Seconds of the whole prompt, without the encoder."""
        return self.text_s + sum(self.visual_s.values())

    @property
    def seconds(self) -> float:
        """Seconds of encoder and prompt."""
        return self.prompt_s + sum(self.encode_s.values())

    @property
    def reason(self) -> str:
        """The cost in words."""
        return (
            f"images to encode: {len(self.encode_s)}, in {sum(self.encode_s.values()):.2f} s; "
            f"tokens of the prompt: {self.prompt_tokens}, {self.visual_tokens} of them visual, "
            f"in {self.prompt_s:.2f} s"
        )


def total(costs: Iterable[LodCost]) -> LodCost:
    """Return the cost of several requests together. An image that several of them need counts once."""
    text_s, visual_tokens, prompt_tokens = 0.0, 0, 0
    encode_s: dict[str, float] = {}
    visual_s: dict[str, float] = {}
    for cost in costs:
        text_s += cost.text_s
        encode_s |= cost.encode_s
        visual_s |= cost.visual_s
        visual_tokens += cost.visual_tokens
        prompt_tokens += cost.prompt_tokens
    return LodCost(text_s, encode_s, visual_s, visual_tokens, prompt_tokens)


class LodCosts:
    """Tells the costs of requests, by the predictions that the engine has learnt.

    times, images: predict durations.
    encoded: tells whether the encoder output of an image is in the cache, by its key.
    """

    def __init__(self, times: StepTimes, images: ImageTimes, encoded: Callable[[str], bool]) -> None:
        self.times = times
        self.images = images
        self.encoded = encoded

    def remaining(self, seq: Sequence, computed: int, chunk_tokens: float = math.inf) -> LodCost:
        """Return the cost of what remains of a sequence's prompt. Zero before the first measured step.

        computed: tokens of the prompt that are computed, or will be found in the prefix cache.
        chunk_tokens: tokens of a chunk, each of which has a fixed cost; at least 1.
        """
        left = len(seq.prompt_ids) - computed
        if left <= 0 or not self.times.measured:
            return LodCost()
        encode_s: dict[str, float] = {}
        visual_s: dict[str, float] = {}
        visual = 0
        prompt_s = self.times.prompt_s(computed, left) + left // chunk_tokens * self.times.chunk_s
        token_s = 0.0 if seq.encode_only else prompt_s / left
        for span in seq.spans:
            if span.end <= computed and not seq.encode_only:
                continue
            if not self.encoded(span.key):
                encode_s[span.key] = self.images.seconds(span.encoder_rows)
            tokens = span.end - max(span.start, computed)
            visual += tokens
            visual_s[span.key] = visual_s.get(span.key, 0.0) + tokens * token_s
        return LodCost((left - visual) * token_s, encode_s, visual_s, visual, left)
