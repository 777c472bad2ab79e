"""Generated pictures and texts for requests.

Equal seeds and nonces give equal contents. Contents of another nonce are new to every cache.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
from random import Random

import numpy as np
from PIL import Image

GRAIN = 16
"""Pixels between two random colours.

The noise is smooth enough that the JPEG is about as large as a photograph's.
"""
QUALITY = 90
WORDS = [
    "the", "a", "one", "this", "that", "which", "small", "large", "red", "green", "blue", "left",
    "right", "top", "first", "last", "near", "far", "old", "new", "round", "long", "picture", "line",
    "box", "house", "tree", "water", "light", "road", "hand", "table", "door", "name", "part", "place",
    "side", "colour", "number", "letter", "page", "is", "has", "shows", "holds", "says", "looks",
    "stands", "lies", "above", "below", "behind", "before", "and", "or", "but", "with", "without", "for",
    "from", "into",
]  # fmt: skip
MARK_WORDS = 8
"""Approximate number of tokens of the marker with which every text begins."""


def picture(seed: str, visual_tokens: int, token_side: int) -> bytes:
    """A JPEG of coloured noise that becomes about `visual_tokens` visual tokens.

    seed: equal seeds give equal bytes. token_side: side of the square of pixels that becomes one token.
    """
    rows = max(1, math.isqrt(visual_tokens))
    width, height = max(1, round(visual_tokens / rows)) * token_side, rows * token_side
    digest = hashlib.sha256(seed.encode()).digest()
    rng = np.random.default_rng(int.from_bytes(digest[:16]))
    shape = (height // GRAIN + 2, width // GRAIN + 2, 3)
    coarse = Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8))
    out = io.BytesIO()
    coarse.resize((width, height), Image.Resampling.BILINEAR).save(out, "JPEG", quality=QUALITY)
    return out.getvalue()


class Content:
    """A generator of pictures and texts.

    seed, nonce: together they determine every picture and text.
    token_side: side of a visual token in pixels.
    """

    def __init__(self, seed: int, nonce: str, token_side: int) -> None:
        self._seed = f"{seed} {nonce}"
        self._nonce = nonce
        self._token_side = token_side
        self._texts = 0

    def picture_url(self, key: str, visual_tokens: int) -> str:
        """The picture with this name, as a data URL. Equal keys give equal pictures."""
        data = picture(f"{self._seed} {key}", visual_tokens, self._token_side)
        return f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"

    def text(self, tokens: int) -> str:
        """A new text of about `tokens` tokens.

        Its first words are unique, so no prefix cache holds any of it.
        """
        self._texts += 1
        return self._words(f"{self._texts}.{self._nonce}", tokens)

    def system(self, tokens: int) -> str:
        """A system prompt of about `tokens` tokens. A shorter one is a prefix of a longer one."""
        return self._words(f"system.{self._nonce}", tokens)

    def _words(self, mark: str, tokens: int) -> str:
        random = Random(f"{self._seed} {mark}")
        return " ".join([f"{mark}:", *random.choices(WORDS, k=max(1, tokens - MARK_WORDS))])
