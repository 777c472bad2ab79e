"""VisionZip (arXiv 2412.04467): tokens that the encoder attends to stay, the rest is averaged into a few.

54 of 64 kept tokens are the dominant ones: those that received the most attention. The others are spread evenly over what is
left; each of them takes up those tokens whose keys are nearest to its own, and becomes the mean of all of them, itself
included. (The paper's code adds the mean of the others to it instead, which about doubles its length.)
"""

from __future__ import annotations

import torch

from fovea.engine.reduce.base import Reduced, Seen, averaged, highest, unit_rows

CONTEXTUAL = 10, 64
"""How many of so many kept tokens stand for what is left."""


def choose(seen: Seen, keep: int) -> Reduced:
    assert seen.attention is not None
    assert seen.keys is not None
    contextual = keep * CONTEXTUAL[0] // CONTEXTUAL[1]
    stays = torch.zeros(seen.count, dtype=torch.bool, device=seen.embeds.device)
    stays[highest(seen.attention, keep - contextual)] = True
    rest = (~stays).nonzero()[:, 0]
    if contextual:
        targets = rest[torch.arange(contextual, device=rest.device) * (len(rest) // contextual)]
        stays[targets] = True
    index = stays.nonzero()[:, 0]
    members = torch.full((seen.count,), -1, device=index.device)
    members[index] = torch.arange(keep, device=index.device)
    if contextual:
        keys = unit_rows(seen.keys)
        others = (members < 0).nonzero()[:, 0]
        nearest = (keys[others] @ keys[targets].T).argmax(1)
        members[others] = members[targets][nearest]
    return averaged(seen, index, members)
