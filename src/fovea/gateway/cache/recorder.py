"""Takes a backend's answer for the response cache while it is forwarded."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from fovea.gateway.cache.plan import Plan
from fovea.gateway.cache.recording import Recording

if TYPE_CHECKING:
    from fovea.gateway.cache.cache import ResponseCache


class Recorder:
    """Takes the answer of a backend while it is forwarded. A context manager.

    active: whether the answer may be stored. If not, the recorder does nothing.
    """

    __slots__ = ("_cache", "_plan", "_recording")

    def __init__(self, cache: ResponseCache, plan: Plan, recording: Recording | None) -> None:
        self._cache = cache
        self._plan = plan
        self._recording = recording

    @property
    def active(self) -> bool:
        """Whether the answer may still be stored."""
        return self._recording is not None

    @property
    def followers(self) -> int:
        """Number of requests that wait for this answer.

        While there are any, it is worth reading the answer to its end, also if its own client is gone.
        """
        return 0 if self._plan.seat is None else self._plan.seat.followers

    def feed(self, data: bytes) -> None:
        """Append bytes of the answer's body, decoded from any Content-Encoding."""
        if self._recording is None:
            return
        self._recording.feed(data)
        if self._recording.reason:
            self._cache.refuse(self._recording.reason)
            self._recording = None
            if self._plan.seat is not None:
                self._plan.seat.scatter()

    def finish(self, status: int) -> None:
        """Store the answer, which has ended. status: HTTP status; only answers with 200 are stored."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        if status == 200:
            self._cache.keep(self._plan, recording)
            return
        recording.drop("status")
        self._cache.refuse("status")
        self._cache.abandon(self._plan)

    def close(self) -> None:
        """Give up an answer that has not ended. Another request leads those that wait."""
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.drop("cut")
            self._cache.refuse("cut")
            self._cache.abandon(self._plan)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
