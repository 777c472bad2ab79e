"""A sequence on its way through the engine, with what only the one who asked cares about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fovea.core.types import StageTimings
from fovea.engine.request.detokenize import TextStream
from fovea.engine.sequence import Sequence
from fovea.engine.step.events import Sink

if TYPE_CHECKING:  # a simulated engine has jobs too, and no torch
    from fovea.engine.execute.runner import PixelSource
    from fovea.engine.vision.features import VisualFeatures


@dataclass(slots=True)
class Job:
    """Seconds are durations; `admitted`, `first_token` and `last_token` are on the monotonic clock of `seq.arrival`.

    encoded_before_s: the part of encode_s that was spent before it was admitted.
    pixels: makes each image's pixels when the encoder needs them, by span key. found: outputs that it need not make; emptied as they
    are handed to the cache, or are needed no more.
    """

    seq: Sequence
    choice: int
    pixels: dict[str, PixelSource]
    found: dict[str, VisualFeatures]
    sink: Sink
    text: TextStream
    fetch_s: float = 0.0
    media_decode_s: float = 0.0
    preprocess_s: float = 0.0
    encode_s: float = 0.0
    encoded_before_s: float = 0.0
    admitted: float | None = None
    first_token: float | None = None
    last_token: float = 0.0

    @property
    def timings(self) -> StageTimings:
        admitted = self.admitted or self.seq.arrival
        first = self.first_token or self.last_token
        return StageTimings(
            fetch=self.fetch_s,
            media_decode=self.media_decode_s,
            preprocess=self.preprocess_s,
            queue=max(0.0, admitted - self.seq.arrival - self.preprocess_s - self.encoded_before_s),
            encode=self.encode_s,
            prefill=max(0.0, first - admitted - (self.encode_s - self.encoded_before_s)),
            decode=self.last_token - first,
            ttft=first - self.seq.arrival,
        )
