"""Chooses the tokens of many rows of logits at once, on the device. The host waits once, for all of them.

The tokens are those of `logits`, which does one row after the other. All numbers that the host knows (ids,
biases, masks, random numbers) go to the device in one copy per ROWS rows. The counts of an answer's tokens
stay there (`TokenCounts`).

Rows are sorted by how they are drawn, so that each kind of draw is a slice of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Sequence as Seq
from enum import IntEnum
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.core.sampling import LOWEST_LOGPROB, SamplingParams
from fovea.engine.job import SampledToken
from fovea.engine.sample.logits import (
    HIGHEST,
    LIMIT,
    LOWEST,
    NUCLEUS_GUESS,
    ROWS,
    TINY,
    has_filter,
    needs_adjusting,
)
from fovea.engine.sequence import Sequence
from fovea.kernels.transfer import HostCopy, upload

IN_PROMPT = 1 << 30
"""Added to the count of a token that occurs in the prompt."""

Ids = NDArray[np.int64]


class Draw(IntEnum):
    """How the token of a row is found. Rows are sorted by it.

    SORTED, GUESSED: drawn after filters, from all tokens or from the most likely ones.
    PLAIN: drawn without filters.
    BEST: the most likely token after adjustments.
    UNCHANGED: the most likely token as the model computed it.
    """

    SORTED = 0
    GUESSED = 1
    PLAIN = 2
    BEST = 3
    UNCHANGED = 4


class TokenLists:
    """The ids in a request's allowed_token_ids and logit_bias, ready to be copied.

    Raises IndexError for an id outside the vocabulary. On a device it would break all requests.
    """

    def __init__(self, params: SamplingParams, size: int) -> None:
        """size: number of logits."""
        self.allowed: Ids = np.array(params.allowed_token_ids, dtype=np.int64)
        self.biased: Ids = np.array(list(params.logit_bias), dtype=np.int64)
        self.biases = np.array(list(params.logit_bias.values()), dtype=np.float32)
        for ids in (self.allowed, self.biased):
            if ids.size and ids.max() >= size:
                raise IndexError(f"token {ids.max()} is outside the {size} logits")


class BatchRow(NamedTuple):
    """A row of logits that needs more than its most likely token.

    row: its number.
    drafts: the tokens between the answer and the row's token.
    forbidden: ids that must not come now, because of min_tokens or bad_words.
    mask: tokens that the grammar allows, as in `Masks.bits`; None: all.
    point: the random number in [0, 1) of the token; of a greedy row, any.
    draw: how the token is found.
    """

    row: int
    seq: Sequence
    drafts: list[int]
    lists: TokenLists
    forbidden: frozenset[int]
    mask: NDArray[np.int32] | None
    point: float
    draw: Draw

    @property
    def penalized(self) -> bool:
        """Whether the tokens of the answer so far count."""
        return penalized(self.seq.sampling)

    @property
    def repaired(self) -> bool:
        """Whether a row of a broken model is repaired. Its most likely token alone needs no repair."""
        params = self.seq.sampling
        return not params.greedy or params.logprobs or needs_adjusting(params, self.forbidden)


def penalized(params: SamplingParams) -> bool:
    """Whether a request has a penalty for tokens that occurred."""
    return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)


def choose_draw(params: SamplingParams, adjusted: bool, size: int) -> tuple[Draw, bool]:
    """Return how the token of a row is found, and whether its candidates are complete in any case.

    adjusted: whether the row gets other logits than the model's.
    size: number of logits.
    """
    if params.greedy:
        return Draw.BEST if adjusted else Draw.UNCHANGED, True
    if not has_filter(params):
        return Draw.PLAIN, True
    if min(params.top_k, size) > NUCLEUS_GUESS:
        return Draw.SORTED, True
    return Draw.GUESSED, bool(params.top_k) or size <= NUCLEUS_GUESS


class TokenCounts:
    """The number of times that each token occurs in the answers of sequences with penalties, on the device.

    The table has a row of 4 bytes per logit for each such sequence, at most twice as many as there are at a
    time. It is freed with the last of them.
    """

    def __init__(self) -> None:
        self._table = torch.empty(0, 0, dtype=torch.int32)
        self._rows: dict[str, int] = {}
        self._read: dict[str, int] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def remove(self, name: str) -> None:
        self._read.pop(name, None)
        if self._rows.pop(name, None) is not None and not self._rows:
            self._table = torch.empty(0, 0, dtype=torch.int32)

    def row(self, name: str, like: Tensor) -> int:
        """Return the row of a sequence; a new one is zero. like: logits, for device and vocabulary."""
        if name not in self._rows:
            used, count = set(self._rows.values()), len(self._table)
            if len(used) == count:
                table = torch.zeros(max(4, 2 * count), like.shape[1], dtype=torch.int32, device=like.device)
                if count:
                    table[:count] = self._table
                self._table = table
            row = next(row for row in range(len(self._table)) if row not in used)
            self._table[row].zero_()
            self._rows[name] = row
        return self._rows[name]

    def unread(self, seq: Sequence) -> tuple[Ids, NDArray[np.int32]]:
        """Return the places in the flat table of tokens that are not counted yet, and what to add there."""
        size = self._table.shape[1]
        tokens = np.array(seq.output_ids[self._read.get(seq.id, 0) :], dtype=np.int64)
        values = np.ones(len(tokens), dtype=np.int32)
        if seq.id not in self._read and seq.sampling.repetition_penalty != 1.0:
            # Ids beyond the logits, which some models have for images, cannot come anyway.
            prompt = np.unique(np.array(seq.prompt_ids, dtype=np.int64))
            prompt = prompt[prompt < size]
            tokens = np.concatenate((tokens, prompt))
            values = np.concatenate((values, np.full(len(prompt), IN_PROMPT, dtype=np.int32)))
        return self._rows[seq.id] * size + tokens, values

    def add(self, sequences: Collection[Sequence], places: Tensor, values: Tensor) -> None:
        """Count the tokens that `unread` returned for some sequences."""
        self._table.view(-1).index_add_(0, places, values)
        self._read.update((seq.id, len(seq.output_ids)) for seq in sequences)

    def of(self, rows: Tensor) -> Tensor:
        """Return a copy of some rows, (len(rows), vocabulary)."""
        return self._table.index_select(0, rows)


class Batch:
    """The tokens of a step's rows, which the device is choosing. Creating it launches all work.

    tokens: (rows,) int64 on the device: a token for each row. It is the row's token unless `read` says
        otherwise, as it may for rows with `Draw.GUESSED`.
    """

    def __init__(self, logits: Tensor, rows: Seq[BatchRow], counts: TokenCounts) -> None:
        """logits: (rows, vocabulary) float32. They must stay as they are until the tokens are read.

        rows: the rows that need more than their most likely token.
        """
        self.tokens = logits.argmax(-1)
        self._logits, self._counts = logits, counts
        rows = sorted(rows, key=lambda row: row.draw)
        self._parts = [
            _Part(logits, rows[at : at + ROWS], self.tokens, counts) for at in range(0, len(rows), ROWS)
        ]
        parts = [self.tokens, *(values for part in self._parts for values in part.results)]
        # Numbers of both kinds, ids and float32, are exact in float64.
        self._results = HostCopy(torch.cat([values.double().view(-1) for values in parts]))

    def read(self) -> list[SampledToken]:
        """Wait for the tokens of all rows.

        If the candidates of a row were incomplete, the row is drawn again, from all tokens. The host waits a
        second time for all such rows. It happens with top_p or min_p, if NUCLEUS_GUESS tokens do not hold all
        candidates and no top_k within them is set.
        """
        values = self._results.read()
        count = len(self.tokens)
        picks = [SampledToken(int(token)) for token in values[:count]]
        values = values[count:]
        unsure: list[BatchRow] = []
        for part in self._parts:
            unsure += part.write(values[: part.size], picks)
            values = values[part.size :]
        # The counts of a sequence that was removed meanwhile are gone, and nobody needs its token.
        unsure = [row for row in unsure if not row.penalized or row.seq.id in self._counts]
        if unsure:
            again = Batch(self._logits, [row._replace(draw=Draw.SORTED) for row in unsure], self._counts)
            new = again.read()
            for row in unsure:
                picks[row.row] = new[row.row]
        return picks


class _Part:
    """Up to ROWS rows of a batch.

    results: tensors for the host: for each row with `Draw.GUESSED`, whether its candidates were complete, and
        log probabilities.
    size: the number of values in them.
    """

    def __init__(self, logits: Tensor, rows: list[BatchRow], tokens: Tensor, counts: TokenCounts) -> None:
        """tokens: the most likely token of each row of the logits; gets the tokens of these rows."""
        self._rows = rows
        self._reported = [row for row in rows if row.seq.sampling.logprobs]
        self._most = min(
            max((row.seq.sampling.top_logprobs for row in self._reported), default=0), logits.shape[1]
        )
        inputs = _inputs(logits, rows, counts)
        x = logits.index_select(0, inputs.rows)
        if any(row.repaired for row in rows):
            broken = ~x.amax(-1, keepdim=True).isfinite() & (inputs.table[:, REPAIRED] > 0)[:, None]
            x = torch.where(broken, x.nan_to_num(nan=LOWEST, posinf=HIGHEST, neginf=LOWEST), x)
        logprobs = x.index_select(0, inputs.reported).log_softmax(-1) if self._reported else None
        _adjust(x, rows, inputs, counts)
        self.results = [self._draw(x, inputs, tokens)]
        if logprobs is not None:
            own = logprobs.gather(1, tokens[inputs.rows[inputs.reported]][:, None])
            values, ids = logprobs.topk(self._most)
            self.results += [torch.cat((own, values), 1).clamp(min=LOWEST_LOGPROB), ids]
        self.size = sum(values.numel() for values in self.results)

    def _draw(self, x: Tensor, inputs: _Inputs, tokens: Tensor) -> Tensor:
        """Choose tokens by adjusted logits. Returns whether the candidates of GUESSED rows were complete."""
        sure, start = x.new_ones(0, dtype=torch.bool), 0
        for kind, rows in groupby(self._rows, key=lambda row: row.draw):
            end = start + len(list(rows))
            if kind == Draw.BEST:
                tokens.index_copy_(0, inputs.rows[start:end], x[start:end].argmax(-1))
            elif kind != Draw.UNCHANGED:
                chosen, complete = draw(x[start:end], inputs.table[start:end], kind)
                tokens.index_copy_(0, inputs.rows[start:end], chosen)
                sure = complete if kind == Draw.GUESSED else sure
            start = end
        return sure

    def write(self, values: list[float], picks: list[SampledToken]) -> list[BatchRow]:
        """Add log probabilities to the rows' tokens, and return the rows whose candidates were incomplete.

        values: those of `results`.
        """
        guessed = [row for row in self._rows if row.draw == Draw.GUESSED]
        sure, values = values[: len(guessed)], values[len(guessed) :]
        width, count = self._most + 1, len(self._reported)
        ids = values[count * width :]
        for number, row in enumerate(self._reported):
            own, *tops = values[number * width : (number + 1) * width]
            pairs = zip(
                map(int, ids[number * self._most :]), tops[: row.seq.sampling.top_logprobs], strict=False
            )
            picks[row.row] = picks[row.row]._replace(logprob=own, top=tuple(pairs))
        return [row for row, complete in zip(guessed, sure, strict=True) if not complete]


TEMPERATURE, TOP_K, TOP_P, MIN_P, POINT, REPETITION, PRESENCE, FREQUENCY, REPAIRED, BANNED = range(10)
"""Columns of a batch's table of parameters, (rows, 10) float32."""


def parameters(
    params: SamplingParams, point: float, repaired: bool = False, banned: bool = False
) -> list[float]:
    """Return a row of the table of parameters.

    banned: ids are forbidden, but not all.
    """
    return [
        max(params.temperature, TINY), params.top_k, params.top_p, params.min_p, point,
        params.repetition_penalty, params.presence_penalty, params.frequency_penalty, repaired, banned,
    ]  # fmt: skip


class _Inputs(NamedTuple):
    """The numbers of a part of a batch, on the device. Its rows are counted within the part.

    A place is that of a logit in the flattened rows.

    rows: (rows,), rows of the logits.
    table: (rows, 10), from `parameters`.
    reported: rows with log probabilities.
    limited, allowed: rows with allowed_token_ids, and places of these ids.
    biased, biases: places of biases, and their values.
    penalized, counts: rows with penalties, and their rows in the table of counts.
    drafts: places, in the rows with penalties, of drafts before them.
    forbidden: places of forbidden ids.
    masked, bits: rows with a grammar, and their allowed tokens as in `Masks.bits`.
    """

    rows: Tensor
    table: Tensor
    reported: Tensor
    limited: Tensor
    allowed: Tensor
    biased: Tensor
    biases: Tensor
    penalized: Tensor
    counts: Tensor
    drafts: Tensor
    forbidden: Tensor
    masked: Tensor
    bits: Tensor


def _inputs(logits: Tensor, rows: Seq[BatchRow], counts: TokenCounts) -> _Inputs:
    """Copy the numbers of some rows to the device, and count the new tokens of their answers."""
    size = logits.shape[1]

    def places(lists: Seq[list[int] | Ids]) -> Ids:
        """Places of the ids of each row."""
        arrays = [np.asarray(ids, dtype=np.int64) + at * size for at, ids in enumerate(lists) if len(ids)]
        return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)

    def numbers(flags: Seq[object]) -> Ids:
        return np.flatnonzero([bool(flag) for flag in flags])

    known = [[token for token in row.forbidden if token < size] for row in rows]
    forbidden = [ids if len(ids) < size else [] for ids in known]
    banned = [bool(row.forbidden) and len(ids) < size for row, ids in zip(rows, known, strict=True)]
    penalized = [row for row in rows if row.penalized]
    slots = [counts.row(row.seq.id, logits) for row in penalized]
    sequences = list({row.seq.id: row.seq for row in penalized}.values())
    unread = [counts.unread(seq) for seq in sequences]
    table = [
        parameters(row.seq.sampling, row.point, row.repaired, ban)
        for row, ban in zip(rows, banned, strict=True)
    ]
    masks = [row.mask for row in rows if row.mask is not None]
    arrays = [
        np.array([row.row for row in rows]),
        np.array(table, dtype=np.float32),
        numbers([row.seq.sampling.logprobs for row in rows]),
        numbers([len(row.lists.allowed) for row in rows]),
        places([row.lists.allowed for row in rows]),
        places([row.lists.biased for row in rows]),
        np.concatenate([row.lists.biases for row in rows]),
        numbers([row.penalized for row in rows]),
        np.array(slots, dtype=np.int64),
        places([[token for token in row.drafts if token < size] for row in penalized]),
        places(forbidden),
        numbers([row.mask is not None for row in rows]),
        np.array(masks, dtype=np.int32),
        *map(np.concatenate, zip(*unread, strict=True)),
    ]
    tensors = upload(arrays, logits.device)
    if any(len(places) for places, _ in unread):
        counts.add(sequences, *tensors[len(_Inputs._fields) :])
    return _Inputs(*tensors[: len(_Inputs._fields)])


def _adjust(x: Tensor, rows: Seq[BatchRow], inputs: _Inputs, counts: TokenCounts) -> None:
    """Change logits in place as `logits.adjust` does row by row, and then forbid what the grammar forbids."""
    flat = x.view(-1)
    if len(inputs.allowed):
        values = flat.index_select(0, inputs.allowed)
        x.index_fill_(0, inputs.limited, -math.inf)
        flat.index_copy_(0, inputs.allowed, values)
    if len(inputs.biased):
        flat.index_add_(0, inputs.biased, inputs.biases)
    if len(inputs.penalized):
        seen = counts.of(inputs.counts)
        if len(inputs.drafts):
            seen.view(-1).index_add_(0, inputs.drafts, torch.ones_like(inputs.drafts, dtype=torch.int32))
        x.index_copy_(0, inputs.penalized, _penalize(inputs, x.index_select(0, inputs.penalized), seen))
    if any(row.forbidden for row in rows):
        flat.index_fill_(0, inputs.forbidden, -math.inf)
        # If the model considers only forbidden tokens possible, all others are equally likely.
        dead = (x.amax(-1) == -math.inf) & (inputs.table[:, BANNED] > 0)
        x.masked_fill_(dead[:, None], 0.0)
        flat.index_fill_(0, inputs.forbidden, -math.inf)
    if len(inputs.masked):
        forbidden = ~unpack(inputs.bits, x.shape[1])
        masked = x.index_select(0, inputs.masked).masked_fill_(forbidden, -math.inf)
        # If the request's own parameters exclude all tokens of the grammar, these are equally likely.
        masked.masked_fill_(masked.amax(-1, keepdim=True) == -math.inf, 0.0)
        x.index_copy_(0, inputs.masked, masked.masked_fill_(forbidden, -math.inf))


def _penalize(inputs: _Inputs, x: Tensor, seen: Tensor) -> Tensor:
    """Apply the penalties of rows. seen: counts of their tokens, as in `TokenCounts`."""
    table = inputs.table.index_select(0, inputs.penalized)
    repetition = table[:, REPETITION, None]
    repeated = torch.where(x > 0, x / repetition, x * repetition).clamp_(-LIMIT, LIMIT)
    x = torch.where((seen > 0) & (x != -math.inf), repeated, x)
    count = (seen & (IN_PROMPT - 1)).to(x.dtype)
    penalty = table[:, PRESENCE, None] + table[:, FREQUENCY, None] * count
    return torch.where(count > 0, x - penalty, x)


def unpack(bits: Tensor, size: int) -> Tensor:
    """Return packed masks as booleans, (rows, size). bits: as `Masks.bits`."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    allowed = bits.view(torch.uint8)[:, :, None] >> places & 1
    return allowed.view(torch.bool).flatten(1)[:, :size]


def draw(logits: Tensor, table: Tensor, kind: Draw) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    logits: (rows, vocabulary) float32.
    table: (rows, columns), from `parameters`.
    kind: SORTED, GUESSED or PLAIN.

    Returns tokens, (rows,), and a mask (rows,) that is False for rows whose candidates may be incomplete.
    """
    rows = (logits - logits.amax(-1, keepdim=True)) / table[:, TEMPERATURE, None]
    point = table[:, POINT, None]
    if kind == Draw.PLAIN:
        drawn = _pick(rows.softmax(-1), point)
        return drawn, torch.ones_like(drawn, dtype=torch.bool)
    if kind == Draw.GUESSED:
        values, candidates = rows.topk(min(NUCLEUS_GUESS, rows.shape[1]))
    else:
        values, candidates = rows.sort(descending=True)
    probabilities, sure = _filter(rows, values, table)
    index = _pick(probabilities, point)
    return candidates.gather(1, index[:, None])[:, 0], sure


def _filter(rows: Tensor, values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the filters to the candidates of each row.

    rows: (rows, vocabulary), logits divided by the temperature.
    values: (rows, candidates), those of the candidates, highest first.

    Returns probabilities (rows, candidates), 0 for a candidate that a filter removes, and a mask (rows,):
    True if no token outside the candidates passes the filters.
    """
    top_k, top_p, min_p = table[:, TOP_K, None], table[:, TOP_P, None], table[:, MIN_P, None]
    count, everything = values.shape[1], rows.shape[1]
    rank = torch.arange(count, device=rows.device)
    limited = top_k > 0
    within = ~limited | (rank < top_k)
    masked = torch.where(within, values, -torch.inf)
    total = torch.where(limited, masked.logsumexp(-1, keepdim=True), rows.logsumexp(-1, keepdim=True))
    p = (masked - total).exp()
    before = p.cumsum(-1) - p
    floor = min_p * p[:, :1]
    passes = within & ((top_p >= 1) | (before < top_p)) & (p >= floor)
    passes[:, 0] = True
    # The candidates are complete if a filter ends before the last of them.
    ends = limited
    ends = ends | (top_p < 1) & (p.sum(-1, keepdim=True) >= top_p)
    ends = ends | (min_p > 0) & (p[:, -1:] < floor)
    # A top-k larger than the number of candidates needs a sum over more tokens than these.
    sure = (ends & (top_k <= count))[:, 0] | (count == everything)
    return torch.where(passes, p, 0.0), sure


def _pick(p: Tensor, point: Tensor) -> Tensor:
    """First index in each row at which the cumulative sum of p exceeds `point` times the total, (rows,)."""
    bounds = p.cumsum(-1)
    index = torch.searchsorted(bounds, point * bounds[:, -1:], right=True)
    # Rounding may lead past the last candidate whose probability is not 0.
    last = p.shape[1] - 1 - (p > 0).flip(-1).int().argmax(-1, keepdim=True)
    return torch.minimum(index, last)[:, 0]
