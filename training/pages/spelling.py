"""The language of visual tokens: a vector for each letter at each place in a token.

A visual token is the sum of the vectors of the letters that can be read from it (`glyphs.dense`), and of the
flags of its patches. The tower learns to speak it and the text layers to understand it, each by itself: the
tower costs most, and the text layers need not wait until it reads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model import Fovea
from pages.config import page_config, tokenizer
from pages.glyphs import CHARACTERS, CLASSES, END, FLAGS, NOTHING, NUMBER, OTHER, REACH
from pages.state import (
    CODE,
    CONSTANT,
    FLAGS_AT,
    KNOWN,
    KNOWN_LETTER,
    LABEL_LETTERS,
    LETTER,
    PICTURE,
    SLOTS,
    codes,
)

CLOSE, CLOSE_FLAG = 0.5, 1.5
"""Factors that turn squared distances from vectors into logits: for letters, and for flags."""


def vectors() -> Tensor:
    """The vector of each byte and special token, (vocabulary, CODE)."""
    return codes(tokenizer())


class Spelling(nn.Module):
    """The vectors of letters and flags. They never change.

    known: of each byte and special token, (vocabulary, CODE).
    letters: of each class, (CLASSES, CODE). flags: of each class, (FLAGS, FLAGS - 1).
    rest: whether a dimension of a token belongs to neither, (hidden,).
    """

    known: Tensor
    letters: Tensor
    flags: Tensor
    base: Tensor
    rest: Tensor

    def __init__(self, hidden: int) -> None:
        super().__init__()
        made = tokenizer()
        token = {NUMBER[letter]: made.encode(letter).ids[-1] for letter in CHARACTERS}
        token |= {END: made.token_to_id("<|im_end|>"), OTHER: made.encode("\u00e9").ids[-1]}
        known = vectors()
        self.register_buffer("known", known, persistent=False)
        letters = torch.zeros(CLASSES, CODE)
        for number, index in token.items():
            letters[number] = LETTER * known[index]
        self.register_buffer("letters", letters, persistent=False)
        flags = torch.cat((torch.zeros(1, FLAGS - 1), torch.eye(FLAGS - 1)))
        self.register_buffer("flags", LETTER / 2 * flags, persistent=False)
        base = torch.zeros(hidden)
        base[PICTURE] = CONSTANT
        self.register_buffer("base", base, persistent=False)
        rest = torch.ones(hidden, dtype=torch.bool)
        rest[TEXT_PLACES] = rest[FLAG_PLACES] = False
        self.register_buffer("rest", rest, persistent=False)

    def forward(self, text: Tensor, flag: Tensor, noise: float = 0.0) -> Tensor:
        """Visual tokens, (n, hidden).

        text: (n, 4, REACH), -1 where nothing is known. flag: (n, 4).
        noise: share of letters that are read badly, as a tower that is unsure would read them.
        """
        letters = F.embedding(text.clamp(min=NOTHING), self.letters)
        if noise:
            other = F.embedding(torch.randint_like(text, NOTHING, CLASSES), self.letters)
            bad = torch.rand(text.shape, device=text.device) < noise
            share = (torch.rand(text.shape, device=text.device) * bad)[..., None]
            known = (text > NOTHING)[..., None]
            letters = torch.where(known, torch.lerp(letters, other, share), letters)
        tokens = self.base.repeat(len(text), 1)
        tokens[:, TEXT_PLACES] = letters.flatten(1)
        tokens[:, FLAG_PLACES] = F.embedding(flag, self.flags).flatten(1)
        return tokens

    def logits(self, visual: Tensor) -> tuple[Tensor, Tensor]:
        """How close visual tokens, (n, hidden), are to each class: of letters, (n, 4, REACH, CLASSES), and
        of flags, (n, 4, FLAGS)."""
        visual = visual.float()
        text = visual[:, TEXT_PLACES].unflatten(1, (4, REACH, CODE))
        flag = visual[:, FLAG_PLACES].unflatten(1, (4, FLAGS - 1))
        return closeness(text, self.letters, CLOSE), closeness(flag, self.flags, CLOSE_FLAG)

    def label_logits(self, states: Tensor, places: Tensor) -> Tensor:
        """How close the letters of labels in `states`, (n, hidden), are to each token's vector, without case:
        (n, LABEL_LETTERS, vocabulary). places: numbers of `start.KNOWN`, (n,)."""
        starts = torch.tensor(KNOWN, device=states.device)[places]
        within = torch.arange(LABEL_LETTERS * CODE, device=states.device)
        letters = states.float().gather(1, starts[:, None] + within).unflatten(1, (LABEL_LETTERS, CODE))
        letters = letters[..., :-1] * (LETTER / KNOWN_LETTER)
        capital = self.known[:, -1] < 0
        return closeness(letters, LETTER * self.known[:, :-1], CLOSE).masked_fill(capital, float("-inf"))

    def silence(self, visual: Tensor) -> Tensor:
        """The mean square of what visual tokens hold where nothing belongs."""
        return (visual.float() - self.base)[:, self.rest].square().mean()


class Reading(Fovea):
    """fovea-page, and the language of its visual tokens."""

    def __init__(self) -> None:
        super().__init__(page_config(tokenizer()), {})
        self.spelling = Spelling(self.config["text_config"]["hidden_size"])


TEXT_PLACES = slice(SLOTS[0][0], SLOTS[-1][-1] + CODE)
FLAG_PLACES = slice(FLAGS_AT, FLAGS_AT + 4 * (FLAGS - 1))


def closeness(points: Tensor, classes: Tensor, factor: float) -> Tensor:
    """Logits that a squared distance makes: minus the square of `points`, which is equal for all classes."""
    return factor * (2 * points @ classes.T - classes.square().sum(1))
