"""FastV (arXiv 2403.06764): keep the tokens to which the prompt's last token attends most.

The paper drops tokens between two layers. Here the layers before that run only for the choice
(`probe.run_probe`). The kept tokens are then computed again from the first layer on, so that the KV of every
layer holds the same tokens. For the scores, one query row is recomputed.

FastV is known to lose text: in early layers the last row prefers late tokens, and printed text covers more
tokens than it ranks high.
"""

from __future__ import annotations

from fovea.engine.reduce.base import ReducedTokens, ReductionInput, pick_tokens, top_indices


def choose(image: ReductionInput, keep: int) -> ReducedTokens:
    assert image.probe is not None
    return pick_tokens(image, top_indices(image.probe.scores, keep))
