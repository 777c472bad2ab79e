"""Savings by speculation, caches and fewer visual tokens, by their own formulas."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Speculation:
    """The gain of speculative decoding.

    tokens_per_step: tokens that one step of verification yields, in the mean.
    speedup: through decoding without drafts.
    """

    tokens_per_step: float
    speedup: float


def speculation(
    drafts: int, acceptance: float, verify_s: float, step_s: float, draft_s: float
) -> Speculation:
    """Return the gain of verifying some drafts in each step.

    Each draft is accepted with the same probability if those before it were: then a step yields
    (1 - a^(k+1)) / (1 - a) tokens, its own included (Leviathan and others, arXiv 2211.17192, equation 1).

    drafts: drafts per step (k).
    acceptance: their probability (a), 0 to 1.
    verify_s: seconds of a step that verifies them.
    step_s: seconds of a step without drafts.
    draft_s: seconds in which one draft is made.
    """
    a, k = acceptance, drafts
    tokens = float(k + 1) if a == 1 else (1 - a ** (k + 1)) / (1 - a)
    return Speculation(tokens, tokens * step_s / (verify_s + k * draft_s))


@dataclass(frozen=True, slots=True)
class Saving:
    """Seconds of encoder and prompt per request that something saves.

    name: what saves them.
    seconds: saved, in the mean over all requests.
    share: of the busy seconds of a request without it.
    kv_bytes: of KV that one request less needs.
    """

    name: str
    seconds: float
    share: float
    kv_bytes: float = 0.0
