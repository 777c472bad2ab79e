"""VisionZip and ToMe: which tokens are merged, and that each merged token is the mean of its members."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fovea.engine.reduce.methods import reducer
from tests.support.reduction import reduction_input


@pytest.mark.parametrize("name", ["visionzip", "tome"])
@pytest.mark.parametrize("keep", [1, 7, 20, 41])
def test_every_row_is_the_mean_of_its_members(name: str, keep: int) -> None:
    image = reduction_input(6, 7)
    output = reducer(name).reduce(image, keep)
    assert output.members is not None
    level = reduction_input(6, 7, 1).embeds.view(42, 2, 6)
    gathered = output.gather(level)
    for row, number in enumerate(output.index.tolist()):
        members = [i for i, target in enumerate(output.members.tolist()) if target == row]
        assert number in members
        torch.testing.assert_close(output.embeds[row], image.embeds[members].mean(0))
        torch.testing.assert_close(gathered[row], level[members].mean(0))


def test_visionzip_by_hand() -> None:
    """Thirteen of twenty tokens are kept: eleven dominant ones, the first and the fifth of the other nine."""
    image = reduction_input(4, 5)
    attention = torch.arange(20).float()
    output = reducer("visionzip").reduce(replace(image, attention=attention), 13)
    dominant, targets, others = list(range(9, 20)), [0, 4], [1, 2, 3, 5, 6, 7, 8]
    assert output.index.tolist() == [*targets, *dominant]
    assert output.members is not None
    assert torch.equal(output.embeds[2:], image.embeds[9:])
    assert image.keys is not None
    for other in others:
        cosines = [float(torch.cosine_similarity(image.keys[other], image.keys[t], dim=0)) for t in targets]
        assert int(output.members[other]) == cosines.index(max(cosines))


def test_visionzip_with_dominant_tokens_alone() -> None:
    image = reduction_input(4, 5)
    assert image.attention is not None
    output = reducer("visionzip").reduce(image, 3)
    assert output.index.tolist() == sorted(image.attention.topk(3).indices.tolist())
    assert torch.equal(output.embeds, image.embeds[output.index])
    assert output.members is not None
    assert int((output.members >= 0).sum()) == 3


def test_tome_merges_the_nearest_pair() -> None:
    image = reduction_input(4, 5)
    image.embeds[12] = 2 * image.embeds[7]
    output = reducer("tome").reduce(image, 19)
    assert output.members is not None
    assert output.index.tolist() == [i for i in range(20) if i != 12]
    assert int(output.members[12]) == 7
    torch.testing.assert_close(output.embeds[7], 1.5 * image.embeds[7])


def test_tome_loses_no_token() -> None:
    image = reduction_input(6, 7)
    output = reducer("tome").reduce(image, 10)
    assert output.members is not None
    assert torch.equal(output.members.unique(), torch.arange(10))
    sizes = torch.bincount(output.members).float()
    torch.testing.assert_close(
        (output.embeds * sizes[:, None]).sum(0), image.embeds.sum(0), atol=1e-4, rtol=1e-4
    )
