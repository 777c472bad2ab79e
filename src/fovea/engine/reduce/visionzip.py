"""VisionZip (arXiv 2412.04467): keep the tokens that the encoder attends to, and merge the rest into a few.

54 of 64 kept tokens are dominant: those that received the most attention. The other kept tokens are
contextual, and are spread evenly over the rest. Each remaining token is merged into the contextual token with
the nearest key. A contextual token becomes the mean of itself and all tokens merged into it. (The paper's
code instead adds the mean of the others to it, which about doubles its length.)
"""

from __future__ import annotations

import torch

from fovea.engine.reduce.base import ReducedTokens, ReductionInput, merge_tokens, top_indices, unit_rows

CONTEXTUAL = 10, 64
"""Number of contextual tokens, and the number of kept tokens that contain them."""


def choose(image: ReductionInput, keep: int) -> ReducedTokens:
    assert image.attention is not None
    assert image.keys is not None
    contextual = keep * CONTEXTUAL[0] // CONTEXTUAL[1]
    stays = torch.zeros(image.count, dtype=torch.bool, device=image.embeds.device)
    stays[top_indices(image.attention, keep - contextual)] = True
    rest = (~stays).nonzero()[:, 0]
    if contextual:
        targets = rest[torch.arange(contextual, device=rest.device) * (len(rest) // contextual)]
        stays[targets] = True
    index = stays.nonzero()[:, 0]
    members = torch.full((image.count,), -1, device=index.device)
    members[index] = torch.arange(keep, device=index.device)
    if contextual:
        keys = unit_rows(image.keys)
        others = (members < 0).nonzero()[:, 0]
        nearest = (keys[others] @ keys[targets].T).argmax(1)
        members[others] = members[targets][nearest]
    return merge_tokens(image, index, members)
