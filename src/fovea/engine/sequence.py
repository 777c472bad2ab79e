"""One answer in the making: which tokens it has, and how many of them are computed.

There is no prefill phase and no decode phase. A sequence has tokens computed and tokens wanted; the scheduler gives it
some of the difference each step, and when the difference becomes zero the sampler adds one token, which makes it one
again. A prompt, a follow-up on a cached prefix, a preempted sequence and a decode differ only in those two numbers.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum

from fovea.core.sampling import SamplingParams
from fovea.core.types import FinishReason


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Where the visual tokens of one image, or of one group of a video's frames, stand in the prompt.

    The span runs over [start, start + length) and holds `tokens` visual positions: the ids equal to the model's image
    token. `key` names the encoder output: identity, processor plan and salt.
    `grid` is the (t, h, w) patch grid that M-RoPE positions follow; unused by 1-D models.
    `kept`: which cells of the merged grid the tokens are, ascending, if not all of them.
    `time`: what a group's positions in time are ahead of its video's beginning. `more`: the next span goes on with the
    same video, and begins where this one began.
    `full`: how many tokens the image would have of which the encoder hands on only some, and with them their places; 0: all.
    """

    index: int
    start: int
    length: int
    tokens: int
    key: str
    grid: tuple[int, int, int]
    kept: tuple[int, ...] | None = None
    time: int = 0
    more: bool = False
    full: int = 0

    @property
    def end(self) -> int:
        return self.start + self.length


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable state of one choice of one request. Only the scheduler and the cache manager write to it.

    passed: how many later ones joined before it. came, began: the steps in which it came and got its first token.
    """

    id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    spans: tuple[ImageSpan, ...] = ()
    salt: str = ""
    arrival: float = 0.0
    deadline: float | None = None
    output_ids: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    priority: int = 0
    encode_only: bool = False
    passed: int = 0
    came: int = 0
    began: int = 0

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def wanted(self) -> int:
        """Tokens not computed yet; 1 for a sequence that decodes."""
        return self.length - self.computed

    @property
    def decoding(self) -> bool:
        return self.wanted == 1 and bool(self.output_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids in [start, stop), prompt first."""
        prompt = len(self.prompt_ids)
        if stop <= prompt:
            return self.prompt_ids[start:stop]
        if start >= prompt:
            return self.output_ids[start - prompt : stop - prompt]
        return self.prompt_ids[start:] + self.output_ids[: stop - prompt]

    def spans_between(self, start: int, stop: int) -> Seq[ImageSpan]:
        """The image spans that [start, stop) touches."""
        return [span for span in self.spans if span.start < stop and span.end > start]
