"""FastV (arXiv 2403.06764): the tokens that the prompt's last one looks at.

The paper drops tokens between two layers; here the layers before are run for the choice alone (`probe.run_probe`) and the kept
tokens computed anew from the first, so that every layer's KV holds the same tokens. One query row is recomputed for the
scores. A single row ranks by what the prompt's end looks at so early, late tokens first, and print is spread over more tokens
than it ranks high: known to lose text.
"""

from __future__ import annotations

from fovea.engine.reduce.base import Reduced, Seen, highest, picked


def choose(seen: Seen, keep: int) -> Reduced:
    assert seen.probe is not None
    return picked(seen, highest(seen.probe.scores, keep))
