"""VisionZip and ToMe: what goes into what, and that every mean is the mean of its members."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fovea.engine.reduce.registry import reducer
from fovea.engine.reduce.tome import complexity
from tests.support.seen import seen


@pytest.mark.parametrize("name", ["visionzip", "tome"])
@pytest.mark.parametrize("keep", [1, 7, 20, 41])
def test_every_row_is_the_mean_of_its_members(name: str, keep: int) -> None:
    image = seen(6, 7)
    made = reducer(name).reduce(image, keep)
    assert made.members is not None
    level = seen(6, 7, 1).embeds.view(42, 2, 6)
    gathered = made.gather(level)
    for row, number in enumerate(made.index.tolist()):
        members = [i for i, into in enumerate(made.members.tolist()) if into == row]
        assert number in members
        torch.testing.assert_close(made.embeds[row], image.embeds[members].mean(0))
        torch.testing.assert_close(gathered[row], level[members].mean(0))


def test_visionzip_by_hand() -> None:
    """Thirteen kept of twenty: eleven dominant ones, two of what is left, at positions 0 and 4 of nine."""
    image = seen(4, 5)
    attention = torch.arange(20).float()
    made = reducer("visionzip").reduce(replace(image, attention=attention), 13)
    dominant, targets, others = list(range(9, 20)), [0, 4], [1, 2, 3, 5, 6, 7, 8]
    assert made.index.tolist() == [*targets, *dominant]
    assert made.members is not None
    assert torch.equal(made.embeds[2:], image.embeds[9:])
    assert image.keys is not None
    for other in others:
        likeness = [float(torch.cosine_similarity(image.keys[other], image.keys[t], dim=0)) for t in targets]
        assert int(made.members[other]) == likeness.index(max(likeness))


def test_visionzip_with_room_for_none_but_the_dominant() -> None:
    image = seen(4, 5)
    assert image.attention is not None
    made = reducer("visionzip").reduce(image, 3)
    assert made.index.tolist() == sorted(image.attention.topk(3).indices.tolist())
    assert torch.equal(made.embeds, image.embeds[made.index])
    assert made.members is not None
    assert int((made.members >= 0).sum()) == 3


def test_tome_merges_the_nearest_pair() -> None:
    image = seen(4, 5)
    image.embeds[12] = 2 * image.embeds[7]
    made = reducer("tome").reduce(image, 19)
    assert made.members is not None
    assert made.index.tolist() == [i for i in range(20) if i != 12]
    assert int(made.members[12]) == 7
    torch.testing.assert_close(made.embeds[7], 1.5 * image.embeds[7])


def test_tome_loses_no_token() -> None:
    image = seen(6, 7)
    made = reducer("tome").reduce(image, 10)
    assert made.members is not None
    assert torch.equal(made.members.unique(), torch.arange(10))
    sizes = torch.bincount(made.members).float()
    torch.testing.assert_close(
        (made.embeds * sizes[:, None]).sum(0), image.embeds.sum(0), atol=1e-4, rtol=1e-4
    )


def test_complexity_counts_what_is_not_a_copy() -> None:
    different = torch.eye(24)
    assert complexity(different, 0.9) == 24
    assert complexity(torch.ones(24, 24), 0.9) == 1
    half = torch.cat((different[:12], torch.ones(12, 24)))
    assert 13 <= complexity(half, 0.9) <= 14


def test_a_lower_threshold_never_leaves_more() -> None:
    embeds = seen(6, 7).embeds
    counts = [complexity(embeds, threshold) for threshold in (-1.0, 0.0, 0.3, 0.6, 1.0)]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 42)
