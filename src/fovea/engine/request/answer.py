"""Turns the events of a request into deltas: tokens become text and log probabilities.

The last delta carries the usage, the timings and the use of each image.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from fovea.core.errors import EngineError, FoveaError, OutOfMemory, RequestError, Unavailable
from fovea.core.measure import stage
from fovea.core.media import ImageUse, RelevanceRecord
from fovea.core.sampling import SamplingParams
from fovea.core.types import Delta, PromptLogprobs, TokenLogprob, Usage
from fovea.engine.job import Event, PromptToken, Reading, SampledToken
from fovea.engine.request.detokenize import TextStream
from fovea.engine.request.prompt_plan import PlannedImage, PreparedPrompt
from fovea.engine.request.tokenizer import ChatTokenizer
from fovea.engine.sequence import NO_DRAFT_USE
from fovea.relevance.pipeline import Realization

log = logging.getLogger("fovea.engine")
Ids = tuple[int, ...]


class AnswerState:
    """Reads the answers of a request, and counts their tokens, while its events become deltas."""

    def __init__(
        self,
        name: str,
        prepared: PreparedPrompt,
        readers: Sequence[AnswerReader],
        find_realization: Callable[[str], Realization | None] = lambda key: None,
        marks: tuple[Ids, Ids] | None = None,
        return_ids: bool = False,
        offsets: Sequence[int] = (),
    ) -> None:
        """name: id of the request, for errors.

        readers: turn the tokens of each answer into text.
        find_realization: returns the relevance result of an image, by the image's key; None if it is no
            longer known.
        marks: tokens that begin the model's reasoning, and those that end it; None: it does not reason.
        return_ids: whether the first delta holds the ids of the prompt.
        offsets: place of each token of the prompt in its text; (): unknown.
        """
        self._name = name
        self._readers = readers
        self._offsets = offsets
        self._reasoning = [ReasoningCount(marks, prepared.thinking) for _ in readers]
        self._images = prepared.images
        self._find_realization = find_realization
        self._prompt = len(prepared.ids)
        self._image = prepared.image_tokens
        self._thinking = prepared.thinking
        self._ids = tuple(prepared.ids) if return_ids else ()
        self._spans = prepared.spans
        self._open = len(readers)
        self._completion = 0
        self._cached = 0
        self._dropped = 0
        self._drafts = NO_DRAFT_USE

    @property
    def done(self) -> bool:
        return self._open == 0

    def take(self, event: Event) -> Delta:
        """Return the delta of an event. Raises the event's error."""
        if event.error is not None:
            raise event.error
        if event.finish_reason == "abort":
            # A client that cancels reads no further events, so the engine itself caused this end.
            raise Unavailable("the engine is shutting down")
        reader = self._readers[event.choice]
        try:
            text, logprobs, _ = event.reading or reader.read(
                event.picks, ended=event.ended, last=event.finish_reason is not None
            )
            scored = reader.read_prompt(event.prompt)
        except Exception as error:
            raise public_error(error, self._name) from error
        token_ids = tuple(pick.token for pick in event.picks)
        self._completion += len(token_ids)
        self._reasoning[event.choice].add(token_ids)
        if event.choice == 0:
            self._cached = event.cached_tokens
        usage = timings = None
        if event.finish_reason is not None:
            self._open -= 1
            self._dropped += event.dropped_tokens
            self._drafts = self._drafts.plus(event.drafts)
            if self.done:
                usage = self._usage()
                timings = replace(event.timings, detokenize=reader.seconds)
        ids, self._ids = self._ids, ()
        return Delta(
            event.choice,
            text,
            token_ids,
            logprobs,
            event.finish_reason,
            usage,
            timings,
            tuple(map(self._image_use, self._images)) if self.done else (),
            self._thinking,
            event.stop,
            self._prompt,
            self._cached,
            ids,
            self._prompt_logprobs(scored),
            tuple(event.offers),
        )

    def _usage(self) -> Usage:
        reasoning, drafts = sum(count.tokens for count in self._reasoning), self._drafts
        return Usage(
            self._prompt,
            self._completion,
            self._cached,
            self._image,
            reasoning,
            self._dropped,
            drafts.computed,
            drafts.accepted,
            drafts.accepted_hints,
            drafts.hinted - drafts.accepted_hints,
        )

    def _prompt_logprobs(self, scored: Mapping[int, TokenLogprob]) -> PromptLogprobs:
        """Return the log probabilities of the whole prompt; (): none were computed."""
        if not scored:
            return ()
        if self._offsets:
            scored = {at: replace(entry, offset=self._offsets[at]) for at, entry in scored.items()}
        visual = {at for span in self._spans for at in range(span.start, span.end)}
        return tuple(None if at in visual else scored.get(at) for at in range(self._prompt))

    def _image_use(self, image: PlannedImage) -> ImageUse:
        realization = None if image.reduction is None else self._find_realization(image.key)
        if realization is None:
            return image.use
        wish = image.budget.visual
        explanation = realization.explanation() if wish is not None and wish.explain else None
        return replace(image.use, record=_relevance_record(realization), relevance=explanation)


class ReasoningCount:
    """Counts the tokens of one answer in which the model reasons, the marks around them included.

    marks: tokens of the mark that begins the reasoning, and of the one that ends it; None: there are none.
    begun: whether the prompt ended inside of it.
    """

    def __init__(self, marks: tuple[Ids, Ids] | None, begun: bool) -> None:
        self.tokens = 0
        self._begin, self._end = marks or ((), ())
        self._reasons = begun and bool(self._end)
        self._waits = marks is not None and not begun
        self._last: list[int] = []

    def add(self, tokens: Sequence[int]) -> None:
        if not (self._reasons or self._waits):
            return
        for token in tokens:
            self._last.append(token)
            if self._waits:
                begins = tuple(self._last) == self._begin[: len(self._last)]
                if not begins or len(self._last) == len(self._begin):
                    self._waits, self._reasons = False, begins
                    self.tokens = len(self._last) if begins else 0
            elif self._reasons:
                self.tokens += 1
                self._reasons = tuple(self._last[-len(self._end) :]) != self._end


class AnswerReader:
    """The reader of one answer. seconds: time spent on reading.

    The receiver of the answer reads its tokens: in a server its event loop, otherwise the thread that
    called the engine. So the engine's thread can begin the next step. Only an answer with stop strings is
    read in the engine's thread, because its text decides in which step it ends.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, sampling: SamplingParams, before: Sequence[int] = ()
    ) -> None:
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

    def read(self, picks: Sequence[SampledToken], *, ended: bool, last: bool) -> Reading:
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
                if is_end:  # its place is after what was held back for an incomplete character
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

    def _decode(self, ids: Sequence[int]) -> str:
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
    if isinstance(error, RequestError | Unavailable | OutOfMemory):
        return error
    log.error("request %s failed", name, exc_info=error)
    return EngineError(f"the request failed inside the engine; the server's log has the details under {name}")


def _relevance_record(realization: Realization) -> RelevanceRecord:
    allocation, tensions, ways = realization.allocation, realization.tensions, realization.ways
    maps = ways.propositional, ways.perspectival, ways.participatory
    propositional, perspectival, participatory = (float(values.mean()) for values in maps)
    return RelevanceRecord(
        tuple(zip(allocation.scores, allocation.budgets, strict=True)),
        (tensions.compress, tensions.exploit, tensions.focus),
        (propositional, perspectival, participatory),
        realization.seconds,
    )
