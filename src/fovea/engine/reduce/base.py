"""What every method of token reduction sees, and what it hands back."""

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
    """States of a whole prompt after its first decoder layers; `probe.run_probe` makes one.

    hidden (L, D): of every token of the prompt, through the decoder's last norm. keys (L, kv_heads, d): of the last layer that
    ran, rotated. scores (N,): attention of the prompt's last token to the visual ones in that layer, mean over heads.
    start: the row of the first visual token.
    """

    hidden: Tensor
    keys: Tensor
    scores: Tensor
    start: int


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """One image's visual tokens, and whatever else a method may look at.

    embeds (N, D): the encoder's output in raster order of the merged grid. grid: its (rows, columns), rows * columns == N.
    seed: names the image; what a method leaves to chance depends on it and on nothing else.
    query (Q, D): the user's words as the decoder's input embeddings; none of them counts like None.
    attention (N,), keys (N, K): what tokens received and were in the encoder's attention, see `taps`.
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
        """The words are the one thing that a method can do without."""
        return need == "query" or getattr(self, need) is not None


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """What is left of an image's N visual tokens.

    index (k,) int64, ascending: the tokens that stay; their places in the image are those of the rows of `embeds` (k, D).
    members (N,) int64, for methods that merge: the row of `index` whose mean each token went into, -1 for none. None: tokens
    were picked as they are.
    """

    index: Tensor
    embeds: Tensor
    members: Tensor | None = None

    def gather(self, rows: Tensor) -> Tensor:
        """Any rows (N, ...) that belong to the visual tokens, as those of the kept ones, (k, ...): picked, or averaged over
        the same members as `embeds` were. DeepStack's levels go through here."""
        return _gather(rows, self.index, self.members)


def _gather(rows: Tensor, index: Tensor, members: Tensor | None) -> Tensor:
    if members is None:
        return rows[index]
    used = members >= 0
    into = members[used]
    sums = torch.zeros((len(index), *rows.shape[1:]), dtype=torch.float32, device=rows.device)
    sums.index_add_(0, into, rows[used].float())
    sizes = torch.bincount(into, minlength=len(index)).float()
    return (sums / sizes.view(-1, *[1] * (rows.dim() - 1))).to(rows.dtype)


def picked(seen: Seen, chosen: Tensor) -> Reduced:
    """chosen: numbers of tokens, in any order, each once."""
    index = chosen.sort().values
    return Reduced(index, seen.embeds[index])


def averaged(seen: Seen, index: Tensor, members: Tensor) -> Reduced:
    """See `Reduced.members`."""
    return Reduced(index, _gather(seen.embeds, index, members), members)


def highest(scores: Tensor, count: int) -> Tensor:
    """Numbers of the `count` highest of scores (N,), highest first; of equal ones the earlier."""
    return scores.float().argsort(descending=True, stable=True)[:count]


def unit_rows(rows: Tensor) -> Tensor:
    """Rows (N, D) scaled to length 1 in float32; a row of zeros stays one."""
    return functional.normalize(rows.float(), dim=-1)


Choose = Callable[[Seen, int], Reduced]
"""Exactly that many of the tokens: at least one, and fewer than all."""


@dataclass(frozen=True, slots=True)
class Reducer:
    """A method with what does it.

    Depends on what it is shown alone, never on other images, and gives the same for the same. Sums are float32 whatever the
    type of the embeddings, which stay on their device and keep their type.
    """

    method: Method
    choose: Choose

    def reduce(self, seen: Seen, keep: int) -> Reduced:
        """Exactly `keep` tokens, 1 <= keep <= N; all of them, as they are, where keep is N."""
        if not 1 <= keep <= seen.count:
            raise EngineError(f"{self.method.name} was to keep {keep} of {seen.count} visual tokens")
        missing = sorted(need for need in self.method.needs if not seen.has(need))
        if missing:
            raise EngineError(f"{self.method.name} was not shown the image's {', '.join(missing)}")
        if keep == seen.count:
            return Reduced(torch.arange(keep, device=seen.embeds.device), seen.embeds)
        return self.choose(seen, keep)
