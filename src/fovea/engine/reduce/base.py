"""Input and output of every method of token reduction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fovea.core.errors import EngineError
from fovea.engine.visual_budget.methods import Method, Need


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """States of a whole prompt after its first decoder layers, from `probe.run_probe`.

    hidden: (L, D), hidden states of every token of the prompt, through the decoder's last norm.
    keys: (L, kv_heads, d), rotated keys of the last layer that ran.
    scores: (N,), attention of the prompt's last token to the visual tokens in that layer, mean over heads.
    start: row of the first visual token.
    """

    hidden: Tensor
    keys: Tensor
    scores: Tensor
    start: int


@dataclass(frozen=True, slots=True, eq=False)
class ReductionInput:
    """The visual tokens of one image, and what else a method may read.

    embeds: (N, D), the encoder's output in raster order of the grid of visual tokens.
    grid: (rows, columns) of that grid; rows * columns == N.
    seed: identifies the image. A method's random choices depend on it and on nothing else.
    query: (Q, D), the user's words as input embeddings of the decoder. A query of no words counts as None.
    attention: (N,), attention that each token received in the encoder; see `encoder_taps`.
    keys: (N, K), keys of the tokens in the encoder's attention; see `encoder_taps`.
    probe: states of the prompt in the decoder.

    Raises EngineError if a field does not have one row per cell of the grid.
    """

    embeds: Tensor
    grid: tuple[int, int]
    seed: str
    query: Tensor | None = None
    attention: Tensor | None = None
    keys: Tensor | None = None
    probe: Probe | None = None

    def __post_init__(self) -> None:
        count = self.grid[0] * self.grid[1]
        rows = {"embeds": self.embeds, "attention": self.attention, "keys": self.keys}
        if self.probe is not None:
            rows["probe"] = self.probe.scores
        for name, tensor in rows.items():
            if tensor is not None and len(tensor) != count:
                raise EngineError(
                    f"{name} has {len(tensor)} rows for a grid of {self.grid[0]}x{self.grid[1]}"
                )

    @property
    def count(self) -> int:
        return self.embeds.shape[0]

    def has(self, need: Need) -> bool:
        """Whether a need is met. A missing query is accepted, because every method works without it."""
        return need == "query" or getattr(self, need) is not None


@dataclass(frozen=True, slots=True, eq=False)
class ReducedTokens:
    """The k visual tokens that remain of an image's N.

    index: (k,) int64, ascending, numbers of the remaining tokens. Their places in the image are those of
        `embeds`.
    embeds: (k, D), the remaining tokens.
    members: (N,) int64, for methods that merge: the row of `index` whose mean contains the token, or -1 for
        none. None: nothing was merged.
    """

    index: Tensor
    embeds: Tensor
    members: Tensor | None = None

    def gather(self, rows: Tensor) -> Tensor:
        """Reduce other rows (N, ...) of the visual tokens as `embeds` were reduced, to (k, ...).

        They are selected, or averaged over the same members. DeepStack's features are reduced by this method.
        """
        return _gather(rows, self.index, self.members)


def _gather(rows: Tensor, index: Tensor, members: Tensor | None) -> Tensor:
    if members is None:
        return rows[index]
    used = members >= 0
    targets = members[used]
    sums = torch.zeros((len(index), *rows.shape[1:]), dtype=torch.float32, device=rows.device)
    sums.index_add_(0, targets, rows[used].float())
    sizes = torch.bincount(targets, minlength=len(index)).float()
    return (sums / sizes.view(-1, *[1] * (rows.dim() - 1))).to(rows.dtype)


def pick_tokens(image: ReductionInput, numbers: Tensor) -> ReducedTokens:
    """Keep the tokens with these numbers, which are in any order and all different."""
    index = numbers.sort().values
    return ReducedTokens(index, image.embeds[index])


def merge_tokens(image: ReductionInput, index: Tensor, members: Tensor) -> ReducedTokens:
    """Replace the tokens of `index` by the means of their members; see `ReducedTokens`."""
    return ReducedTokens(index, _gather(image.embeds, index, members), members)


def top_indices(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest of scores (N,), highest first; of equal scores the earlier first."""
    return scores.float().argsort(descending=True, stable=True)[:count]


def unit_rows(rows: Tensor) -> Tensor:
    """Rows (N, D) scaled to length 1 in float32. A row of zeros stays zero."""
    return functional.normalize(rows.float(), dim=-1)


ReduceFunction = Callable[[ReductionInput, int], ReducedTokens]
"""Function that keeps exactly that many tokens: at least one, and fewer than all."""


@dataclass(frozen=True, slots=True)
class Reducer:
    """A method of token reduction and the function that implements it.

    Results are deterministic and depend on the input alone, never on other images. Sums are computed in
    float32. The embeddings stay on their device and keep their type.
    """

    method: Method
    choose: ReduceFunction

    def reduce(self, image: ReductionInput, keep: int) -> ReducedTokens:
        """Keep exactly `keep` of the N tokens, 1 <= keep <= N. With keep == N nothing changes.

        Raises EngineError for another `keep`, or if a field is missing that the method needs.
        """
        if not 1 <= keep <= image.count:
            raise EngineError(f"{self.method.name} cannot keep {keep} of {image.count} visual tokens")
        missing = sorted(need for need in self.method.needs if not image.has(need))
        if missing:
            raise EngineError(f"{self.method.name} needs the image's {', '.join(missing)}")
        if keep == image.count:
            return ReducedTokens(torch.arange(keep, device=image.embeds.device), image.embeds)
        return self.choose(image, keep)
