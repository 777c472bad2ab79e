"""Turns the tokens of one answer into text and log probabilities.

The receiver of the answer reads its tokens: in a server its event loop, otherwise the thread that called the
engine. So the engine's thread can begin the next step. Only an answer with stop strings is read in the
engine's thread, because its text decides in which step it ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from fovea.core.errors import EngineError, FoveaError, RequestError, Unavailable
from fovea.core.measure import stage
from fovea.core.sampling import SamplingParams
from fovea.core.types import TokenLogprob
from fovea.engine.events import PromptToken, Reading, SampledToken
from fovea.engine.request.detokenize import TextStream
from fovea.engine.request.tokenizer import ChatTokenizer

log = logging.getLogger("fovea.engine")


class AnswerReader:
    """The reader of one answer. seconds: time spent on reading."""

    def __init__(self, tokenizer: ChatTokenizer, sampling: SamplingParams, before: Seq[int] = ()) -> None:
        """before: tokens of another text, which the answer follows, see `TextStream`."""
        self._tokenizer = tokenizer
        self._skips = sampling.skip_special_tokens
        self._text = TextStream(
            self._decode,
            sampling.stop,
            min_tokens=sampling.min_tokens,
            keep_stop=sampling.include_stop_str_in_output,
            before=before,
        )
        self._first = True
        self.seconds = 0.0

    @property
    def found_stop(self) -> str | None:
        """The stop string that ended the answer; None: none has."""
        return self._text.found_stop

    def read(self, picks: Seq[SampledToken], *, ended: bool, last: bool) -> Reading:
        """Add new tokens to the text, up to the one that completes a stop string.

        ended: the last of them ends the answer, and is not a part of its text.
        last: the answer has no further tokens.
        """
        began = time.perf_counter()
        stream, text, logprobs = self._text, "", []
        with stage("detokenize"):
            for count, pick in enumerate(picks, 1):
                is_last = last and count == len(picks)
                is_end = ended and count == len(picks)
                offset = stream.length
                text += "" if is_end else stream.push(pick.token)
                hidden = is_end or (stream.length == offset and pick.token in self._tokenizer.special_ids)
                if is_last:
                    text += stream.finish()
                if is_end:  # its place is behind what was held back for an incomplete character
                    offset = stream.length
                if pick.logprob is not None:
                    logprobs.append(self._logprob(pick, pick.logprob, offset, hidden))
                self._first = False
                if stream.stopped:
                    picks = picks[:count]
                    break
        self.seconds += time.perf_counter() - began
        return Reading(text, tuple(logprobs), len(picks))

    def read_prompt(self, scored: Iterable[PromptToken]) -> dict[int, TokenLogprob]:
        """Return the log probabilities of tokens of the prompt by position."""
        return {
            entry.place: TokenLogprob(
                entry.token, self._written(entry.token), entry.logprob, self._top(entry.top), entry.rank
            )
            for entry in scored
        }

    def _decode(self, ids: Seq[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skips)

    def _logprob(self, pick: SampledToken, logprob: float, offset: int, hidden: bool) -> TokenLogprob:
        first = self._first
        top = self._top(pick.top, first=first)
        text = self._written(pick.token, first=first)
        return TokenLogprob(pick.token, text, logprob, top, offset=offset, hidden=hidden)

    def _top(
        self, top: Iterable[tuple[int, float]], *, first: bool = False
    ) -> tuple[tuple[int, str, float], ...]:
        return tuple((token, self._written(token, first=first), value) for token, value in top)

    def _written(self, token: int, *, first: bool = False) -> str:
        """Return the text of a token. first: whether it begins an answer."""
        text = self._tokenizer.token_bytes(token).decode("utf-8", "surrogateescape")
        return text.removeprefix(" ") if first and self._tokenizer.drops_first_space else text


def public_error(error: Exception, name: str) -> FoveaError:
    """Return the error that a client gets.

    Errors about the request are sent as they are. The text of any other error may hold file paths, or numbers
    of other requests. It only goes to the log, with the request's id, and the client gets this id.

    name: id of the request.
    """
    if isinstance(error, RequestError | Unavailable):
        return error
    log.error("request %s failed", name, exc_info=error)
    return EngineError(f"the request failed inside the engine; the server's log has the details under {name}")
