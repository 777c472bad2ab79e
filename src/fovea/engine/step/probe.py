"""A trivial job that tells a dead device from steps that fail because of their requests."""

from __future__ import annotations

from fovea.core.sampling import SamplingParams
from fovea.engine.events import Event
from fovea.engine.job import Job, SequenceInputs
from fovea.engine.request.reader import AnswerReader
from fovea.engine.request.tokenizer import ChatTokenizer
from fovea.engine.sequence import Sequence

PROBE = "fovea-probe:0"
"""Id of the job's sequence."""


def probe_job(tokenizer: ChatTokenizer, arrival: float) -> Job:
    """Return a job that computes one token after a prompt of one token. No client waits for it.

    arrival: time of arrival on the monotonic clock.
    """
    sampling = SamplingParams(temperature=0, max_tokens=1)
    seq = Sequence(PROBE, [0], sampling, 1, salt=PROBE, arrival=arrival)
    return Job(seq, SequenceInputs(), _ignore, AnswerReader(tokenizer, sampling))


def _ignore(event: Event) -> None:
    """A sink that nobody reads."""
