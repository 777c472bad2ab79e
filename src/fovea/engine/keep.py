"""Which keys and values a sequence keeps: the rule that a request asks for, and where it is applied.

A rule leaves out keys and values of earlier tokens in layers that see all tokens. Shared prefixes stay whole:
what is kept is copied to blocks of the sequence's own. Positions do not change, because keys are rotated
before they are stored. After tokens were left out, the token at position p is in row `p - kept.dropped`.

A rule is applied at points, which depend on nothing but the tokens and the rule. At a point the last WINDOW
tokens are computed in one step, and how their queries weight the earlier tokens decides what is kept
(SnapKV, arXiv 2404.14469). So an answer has the same bits in any company, in any chunks and after a
preemption.

- A share (`snap:0.25`) is applied once, at the end of the prompt. What the answer adds stays.
- A number of tokens (`snap:2048`) bounds the rows of a sequence, prompt and answer together. Each time they
  are full, three quarters are kept. Their blocks have names, so the next turn of a chat continues from them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from fovea.core.config_files import nearest
from fovea.core.errors import InvalidRequest

ALL: Final = "all"
METHODS = ("window", "snap", "text", "images")
"""window: the first tokens and the last ones (StreamingLLM, arXiv 2309.17453). snap: those that the last
tokens attend to most (SnapKV, arXiv 2404.14469). text: as snap, but tokens of images go first (LOOK-M, arXiv
2406.18139, without its merging). images: as snap, but text goes first."""
BY_KIND = ("text", "images")
"""Methods that divide what is kept between images and text."""
WINDOW = 32
"""At most so many tokens before a point decide: those after the last image (VL-Cache, arXiv 2410.23317)."""
RECENT = 8
"""Tokens before a point that are always kept; of text alone, if images are counted apart."""
SINKS = 4
"""The first tokens, or the first ones of text, which are always kept: much attention goes to them."""
LEAST = 128
"""The smallest bound in tokens."""
NEVER = 1 << 62
"""A point that is never reached."""


@dataclass(frozen=True, slots=True)
class KeepRule:
    """A rule: which keys and values a request keeps.

    method: one of METHODS.
    share: share of the prompt, above 0 and below 1; 0: the rule has `tokens` instead.
    tokens: most tokens that a sequence keeps, at least LEAST; 0: the rule has `share` instead.
    """

    method: str
    share: float = 0.0
    tokens: int = 0

    def __str__(self) -> str:
        return f"{self.method}:{self.share or self.tokens}"

    def bound(self, block_size: int) -> int:
        """Most rows of a sequence, rounded down to whole blocks; only of a rule with a number of tokens."""
        return self.tokens // block_size * block_size


def parse_keep(text: str) -> KeepRule | None:
    """Return the rule of a text such as "snap:0.25" or "window:2048"; None for "all".

    Raises InvalidRequest, which names the field kv_keep and what is accepted.
    """
    if text == ALL:
        return None
    method, _, amount = text.partition(":")
    accepted = (
        f"all, or METHOD:AMOUNT with a method of {', '.join(METHODS)}, and a share between 0 and 1 or a "
        f"whole number of tokens from {LEAST} on"
    )
    if method not in METHODS:
        near = nearest(method, (ALL, *METHODS))
        raise InvalidRequest(f"kv_keep is {text!r}; {near} A rule is {accepted}", param="kv_keep")
    try:
        number = float(amount)
    except ValueError:
        number = 0.0
    if 0 < number < 1:
        return KeepRule(method, share=number)
    if LEAST <= number < NEVER and number == int(number):
        return KeepRule(method, tokens=int(number))
    raise InvalidRequest(f"kv_keep is {text!r}; accepted: {accepted}", param="kv_keep")


@dataclass(frozen=True, slots=True)
class KeepPolicy:
    """The rules that requests to an engine may name.

    default: the rule of requests that name none; None: they keep all.
    block_size: tokens per KV block.
    rows: tokens that the KV pool holds.
    refusal: why the engine takes no rule; "": it takes some.
    only_shares: why it takes no number of tokens; "": it does.
    """

    default: KeepRule | None = None
    block_size: int = 16
    rows: int = NEVER
    refusal: str = ""
    only_shares: str = ""

    @classmethod
    def of(
        cls, text: str, block_size: int, rows: int, *, states: bool, windows: bool, whole_images: bool
    ) -> KeepPolicy:
        """Return the policy of an engine, whose setting is `text`.

        block_size, rows: as above.
        states, windows: whether layers have a state, or a sliding window. whole_images: whether the tokens of
        an image see each other.
        Raises InvalidRequest if the engine cannot take the rule.
        """
        refusal = "the model has layers with a state, which cannot leave out tokens" if states else ""
        shares = (
            "a sliding window" if windows else "images whose tokens see each other" if whole_images else ""
        )
        policy = cls(None, block_size, rows, refusal, shares and f"the model has {shares}")
        return replace(policy, default=policy.rule(text))

    def most_context(self, most: int, rule: KeepRule | None) -> int:
        """Return how many tokens of prompt and answer a request with this rule may have.

        A bound makes room for more than the pool holds. most: what the model allows.
        """
        bounded = rule is not None and rule.tokens and rule.tokens <= self.rows
        return most if bounded else min(most, self.rows)

    def rule(self, text: str | None) -> KeepRule | None:
        """Return the rule of a request. text: its field kv_keep; None: the default.

        Raises InvalidRequest if the engine cannot take it.
        """
        if text is None:
            return self.default
        rule = parse_keep(text)
        if rule is None:
            return None
        if self.refusal:
            raise InvalidRequest(
                f"kv_keep is {text!r}, but {self.refusal}; this model accepts only all", param="kv_keep"
            )
        if rule.tokens and self.only_shares:
            raise InvalidRequest(
                f"kv_keep is {text!r}, but {self.only_shares}; accepted: all, or a share such as snap:0.25",
                param="kv_keep",
            )
        if rule.tokens and rule.bound(self.block_size) < 2 * self.block_size:
            raise InvalidRequest(
                f"kv_keep is {text!r}; a number of tokens must be at least two KV blocks (block_size is "
                f"{self.block_size}), {2 * self.block_size} tokens",
                param="kv_keep",
            )
        return rule


@dataclass(frozen=True, slots=True)
class Kept:
    """The rows that a sequence has kept at its latest point.

    until: the point, a number of tokens; those from there on are all in place.
    visual, text: rows kept of the tokens before: first so many of images, then so many others. Methods that
        do not divide by kind count all as text.
    """

    until: int = 0
    visual: int = 0
    text: int = 0

    @property
    def rows(self) -> int:
        return self.visual + self.text

    @property
    def dropped(self) -> int:
        """Tokens that were left out. The row of a later token is its position minus this."""
        return self.until - self.rows


NOTHING_DROPPED = Kept()
KEEP_ALL = KeepPolicy()


def next_point(rule: KeepRule, prompt: int, kept: Kept, block_size: int) -> int:
    """Return after how many tokens the rule is applied next; NEVER: it is not.

    prompt: number of tokens of the prompt. kept: what is kept so far.
    """
    if not rule.share:
        return kept.dropped + rule.bound(block_size)
    return prompt if not kept.until and _share(rule, prompt) < prompt else NEVER


def room(rule: KeepRule, point: int, block_size: int) -> int:
    """Return how many rows are kept at a point."""
    if rule.share:
        return _share(rule, point)
    bound = rule.bound(block_size)
    return min(3 * bound // 4, bound - WINDOW) // block_size * block_size


def _share(rule: KeepRule, prompt: int) -> int:
    return max(RECENT + SINKS, ceil(rule.share * prompt))


def kept_at(rule: KeepRule, point: int, kept: Kept, visual: int, block_size: int) -> Kept:
    """Return what is kept at a point.

    kept: what was kept before.
    visual: number of tokens of images in [kept.until, point).
    """
    images = kept.visual + visual
    text = point - kept.dropped - images
    most = room(rule, point, block_size)
    if rule.method == "text":
        text = min(text, most)
        return Kept(point, most - text, text)
    if rule.method == "images":
        # Text stays for the question, which is about as long as the tokens that decide.
        question = max(RECENT + SINKS, min(WINDOW + SINKS, most // 2))
        images = min(images, most - min(text, question))
        return Kept(point, images, most - images)
    return Kept(point, 0, most)
