"""The arithmetic behind the figures of the design documents, a few lines each.

The other files of this folder compare the documents with it. Bytes are bytes, times are
seconds, shares are 0 to 1.
"""

from __future__ import annotations

import math


def visual_tokens(height: int, width: int, patch: int = 14, merge: int = 1, extra: int = 0) -> int:
    """Return the visual tokens of an image that a vision transformer cuts into patches.

    height, width: pixels that the tower sees. patch: pixels of a patch's side; remainders are cut off.
    merge: patches of the side of a square that becomes one token. extra: tokens beside them: a class token.
    """
    return (height // patch // merge) * (width // patch // merge) + extra


def pooled_tokens(height: int, width: int, patch: int = 14, stride: int = 2) -> int:
    """Return the tokens that a function of the document about serving gives: pooled, with a class token."""
    return (height // patch) * (width // patch) // stride**2 + 1


def kv_bytes(tokens: float, layers: int, kv_heads: int, head_dim: int, itemsize: float = 2) -> float:
    """Return the bytes of keys and values of some tokens. itemsize: bytes of a number, 2 in 16 bits."""
    return 2 * tokens * layers * kv_heads * head_dim * itemsize


def weight_bytes(parameters: float, bits: float) -> float:
    """Return the bytes of a number of parameters, scales not counted."""
    return parameters * bits / 8


def feature_bytes(images: int, tokens: int, width: int, itemsize: int = 2) -> int:
    """Return the bytes of cached encoder outputs. width: numbers of a token."""
    return images * tokens * width * itemsize


def tower_parameters(hidden: int, layers: int, inner: int, patch: int, image: int) -> int:
    """Return the parameters of CLIP's vision transformer, without the projection to the texts' space.

    inner: width inside of the feed-forward part. image: pixels of the side of the image, for its positions.
    """
    attention = 4 * hidden * hidden + 4 * hidden
    feed_forward = 2 * hidden * inner + inner + hidden
    positions = (image // patch) ** 2 + 1
    embedding = 3 * patch * patch * hidden + hidden + positions * hidden
    return layers * (attention + feed_forward + 4 * hidden) + embedding + 4 * hidden


def whole(capacity: float, each: float) -> int:
    """Return how many whole items fit."""
    return math.floor(capacity / each)


def needed(total: float, each: float) -> int:
    """Return how many containers an amount needs."""
    return math.ceil(total / each)


def saved(before: float, after: float) -> float:
    """Return the share that is saved."""
    return 1 - after / before


def words(tokens: float, tokens_per_word: float = 1.3) -> float:
    """Return the words of a text of so many tokens. 100 words are about 130 tokens of English."""
    return tokens / tokens_per_word


def tokens_per_pass(drafts: int, acceptance: float) -> float:
    """Return the expected tokens of one pass of the target model in speculative decoding.

    Each draft is accepted with the same probability, if all before it were; the pass adds one token of its
    own. This is (1 - a^(k+1)) / (1 - a): Leviathan et al., "Fast Inference from Transformers via Speculative
    Decoding", 2023, equation 1.
    """
    if acceptance == 1:
        return drafts + 1
    return (1 - acceptance ** (drafts + 1)) / (1 - acceptance)


def speculation_gain(drafts: int, acceptance: float, draft_cost: float) -> float:
    """Return how many times faster speculative decoding is, while reading weights takes the time.

    draft_cost: time of one draft, as a share of a pass of the target model. The same paper, theorem 3.8.
    """
    return tokens_per_pass(drafts, acceptance) / (1 + drafts * draft_cost)


def read_seconds(size: float, bandwidth: float) -> float:
    """Return the least seconds in which bytes can be read: of one token's weights, at batch size 1."""
    return size / bandwidth


def compute_seconds(parameters: float, tokens: float, rate: float) -> float:
    """Return the least seconds of a prompt: two operations for each parameter and token."""
    return 2 * parameters * tokens / rate


def cost_per_request(price: float, requests_per_second: float) -> float:
    """Return the price of one request. price: of one hour of the machine."""
    return price / 3600 / requests_per_second
