"""Events on their way from the engine's thread to the event loops in which callers wait.

Waking an event loop costs a system call. One call per row would be a large part of a step's host work. So the
events of a step wait here until all of them are there, and each event loop is woken once.
"""

from __future__ import annotations

import logging
from asyncio import AbstractEventLoop, Queue
from collections import defaultdict

from fovea.engine.events import Event, Sink

log = logging.getLogger("fovea.engine")
Mail = list[tuple["Queue[Event]", Event]]


class Outbox:
    """The events that wait for the end of the step, by event loop. For the thread that runs the steps."""

    def __init__(self) -> None:
        self._mail: defaultdict[AbstractEventLoop, Mail] = defaultdict(list)

    def sink(self, loop: AbstractEventLoop, queue: Queue[Event]) -> Sink:
        """Return a sink whose events are put into `queue` in the thread of `loop`, after the next `flush`.

        The sink raises RuntimeError if the event loop is closed. Any thread may call this method.
        """

        def post(event: Event) -> None:
            if loop.is_closed():
                raise RuntimeError("the event loop is closed")
            self._mail[loop].append((queue, event))

        return post

    def flush(self) -> None:
        """Hand the waiting events over. Events for a loop that was closed meanwhile are dropped."""
        if not self._mail:
            return
        waiting, self._mail = self._mail, defaultdict(list)
        for loop, mail in waiting.items():
            try:
                loop.call_soon_threadsafe(_put_all, mail)
            except Exception:  # noqa: BLE001 - a loop may be of any kind; the others get their events
                log.warning("an event loop was closed; %d events are not delivered", len(mail))


def _put_all(mail: Mail) -> None:
    for queue, event in mail:
        queue.put_nowait(event)
