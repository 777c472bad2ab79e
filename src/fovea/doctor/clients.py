"""Several questions to a server at the same time: streams that are still running, and a crowd."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from fovea.core.errors import FoveaError
from fovea.doctor.pictures import data_url, png
from fovea.doctor.server import Server, usage
from fovea.doctor.web import Answer, NoAnswer

CLIENTS = 4
LONG_TOKENS = 96
"""Tokens of an answer that is still running when its server is ended."""
IN_TIME_S = 30.0
"""Seconds without any data after which a request is given up, where an answer must not take long."""
CROWD_S = 600.0
"""Seconds that the requests of a crowd have."""


@dataclass(slots=True)
class Streams:
    """Streams that run in threads.

    server: gets them. answers: how they ended, in the order of their ends.
    started: released once by each stream whose answer has begun, or that has ended.
    """

    server: Server
    answers: list[Answer | NoAnswer] = field(default_factory=list)
    started: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _threads: list[threading.Thread] = field(default_factory=list)

    def begin(self) -> bool:
        """Start CLIENTS streams. Returns whether all answers have begun."""
        for number in range(CLIENTS):
            thread = threading.Thread(target=self._ask, args=(number,), daemon=True)
            self._threads.append(thread)
            thread.start()
        return all(self.started.acquire(timeout=IN_TIME_S) for _ in range(CLIENTS))

    def end(self) -> list[Answer | NoAnswer]:
        """Wait for all streams, and return how they ended."""
        for thread in self._threads:
            thread.join()
        return self.answers

    def _ask(self, number: int) -> None:
        begun = False

        def on_data() -> None:
            nonlocal begun
            if not begun:
                begun = True
                self.started.release()

        try:
            answer: Answer | NoAnswer = self.server.ask(
                f"Count up from {number}, and do not stop.",
                [data_url(png(224, 224, (number, 120, 60)))],
                stream=True, max_tokens=LONG_TOKENS, ignore_eos=True, on_data=on_data, patience=IN_TIME_S,
            )  # fmt: skip
        except NoAnswer as error:
            answer = error
        except FoveaError as error:
            answer = NoAnswer(error.message)
        self.answers.append(answer)
        on_data()


def tokens_per_word(server: Server) -> float:
    """Return how many tokens this server's tokenizer makes of a short word, measured by two questions."""
    few, many = (
        int(usage(server.ask("word" + " word" * count, max_tokens=1)).get("prompt_tokens") or 0)
        for count in (1, 41)
    )
    return max(1.0, (many - few) / 40)


def ask_together(server: Server, texts: Sequence[str]) -> list[Answer | NoAnswer]:
    """Ask all texts at the same time, and return how they ended."""

    def ask(text: str) -> Answer | NoAnswer:
        try:
            return server.ask(text, patience=CROWD_S)
        except NoAnswer as error:
            return error

    server.card()
    with ThreadPoolExecutor(len(texts)) as pool:
        return list(pool.map(ask, texts))
