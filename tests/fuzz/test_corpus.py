"""Every stored input of fuzzing gives a value or one of Fovea's own errors, and so do the seeds."""

from __future__ import annotations

import pytest

from tests.fuzz.mutate import Mutator
from tests.fuzz.refusals import take
from tests.fuzz.table import CORPUS, NAMES, load

MOST_BYTES = 1 << 20


@pytest.mark.parametrize("name", NAMES)
def test_replay(name: str) -> None:
    """Inputs that once raised something else, that were slow, or that reach rare code."""
    target = load(name)
    for data in (*target.seeds(), *target.corpus()):
        target.run(data)
    assert take(), "the target notes no outcome, by which a mutator could choose inputs"


@pytest.mark.parametrize("name", NAMES)
def test_mutants(name: str) -> None:
    """A few inputs of the mutator, the same in every run, so that a target that cannot run is noticed."""
    target = load(name)
    mutator = Mutator([*target.seeds(), *target.corpus()], target.words, target.longest, seed=1)
    for _ in range(20):
        data = mutator.next()
        assert len(data) <= target.longest
        target.run(data)


def test_the_corpus_is_small() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MOST_BYTES
    assert {path.parent.name for path in files} <= set(NAMES)
