"""An answer that was found, in the form that the client asked for."""

from __future__ import annotations

import json

from fovea.api import sse
from fovea.gateway.cache.entry import Entry
from fovea.gateway.cache.plan import Plan
from fovea.gateway.cache.replay import events


class Hit:
    """A stored answer for one request.

    entry: the stored answer.
    age_s: seconds since it was stored.
    """

    __slots__ = ("_plan", "age_s", "entry")

    def __init__(self, entry: Entry, plan: Plan, age_s: float) -> None:
        self.entry = entry
        self.age_s = age_s
        self._plan = plan

    def headers(self) -> dict[str, str]:
        """Return the headers of the response: its type, and that and for how long it was stored."""
        kind = sse.MEDIA_TYPE if self._plan.stream else "application/json"
        return {"content-type": kind, "x-fovea-cache": "hit", "age": str(int(self.age_s))}

    def payload(self) -> bytes:
        """Return the body of the response: JSON, or a whole stream of events with `[DONE]`."""
        if not self._plan.stream:
            return self.entry.body
        return b"".join(events(json.loads(self.entry.body), include_usage=self._plan.include_usage))
