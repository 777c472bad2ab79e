"""Turns a prepared request into jobs, one per choice. The real and the simulated engine both use it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ids

from fovea.core.types import GenerationRequest
from fovea.engine.events import Sink
from fovea.engine.job import Job, SequenceInputs
from fovea.engine.request.prompt_plan import PreparedPrompt
from fovea.engine.request.reader import AnswerReader
from fovea.engine.request.tokenizer import ChatTokenizer
from fovea.engine.sequence import Sequence

FULL_STOP = "."
"""Text that an answer with a form follows, see `TextStream`."""


def build_jobs(
    request: GenerationRequest,
    prompt: PreparedPrompt,
    max_tokens: int,
    tokenizer: ChatTokenizer,
    sink: Sink,
    *,
    arrival: float,
    preprocess_s: float,
    decode_s: float = 0.0,
    inputs: Callable[[int], SequenceInputs] = SequenceInputs,
) -> list[Job]:
    """Return one job per choice of the request.

    max_tokens: length limit of each answer.
    arrival: time of arrival on the monotonic clock; deadlines count from it.
    preprocess_s: seconds spent on template, tokens and pixels, without decoding images.
    decode_s: seconds spent on decoding images after arrival.
    inputs: returns the executor's inputs of a choice, by the choice's number.
    """
    sampling = request.sampling

    def before(inputs: SequenceInputs) -> Ids[int]:
        exact = inputs.grammar is not None and not inputs.grammar_after
        return tokenizer.encode_plain(FULL_STOP) if exact else ()

    return [
        Job(
            seq=to_sequence(request, prompt, max_tokens, arrival, choice),
            inputs=own,
            sink=sink,
            reader=AnswerReader(tokenizer, sampling, before(own)),
            fetch_s=request.fetch_s,
            media_decode_s=request.media_decode_s,
            preprocess_s=preprocess_s,
            decode_s=decode_s,
        )
        for choice, own in enumerate(map(inputs, range(sampling.n)))
    ]


def to_sequence(
    request: GenerationRequest, prompt: PreparedPrompt, max_tokens: int, arrival: float, choice: int = 0
) -> Sequence:
    """Return the sequence of one choice of a request. The arguments are those of `build_jobs`."""
    return Sequence(
        id=f"{request.id}:{choice}",
        prompt_ids=prompt.ids,
        sampling=request.sampling,
        max_tokens=max_tokens,
        spans=prompt.spans,
        salt=request.cache_salt,
        client=request.client,
        arrival=arrival,
        deadline=None if request.timeout is None else arrival + request.timeout,
        priority=request.priority,
        encode_only=request.encode_only,
        scores_prompt=request.sampling.prompt_logprobs is not None and choice == 0,
    )
