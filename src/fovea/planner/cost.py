"""Duration of a step in seconds, as a formula of its composition.

    step       = step_s + decodes * decode_s + chunks * chunk_s + together(memory, arithmetic)
    memory     = read_s + expert_s * (1 - (1 - expert_share)^rows) + decode_context * context_s
    arithmetic = prompt_tokens * token_s + decodes * row_s + pairs * pair_s
    image      = image_s + v * visual_s + v^2 * visual_pair_s    (v visual tokens; in slices of about slice_s)

rows is decodes + prompt_tokens.

together(m, a) is (m^overlap + a^overlap)^(1 / overlap): the sum for overlap 1, and nearly the larger of the
two for a large overlap. With overlap 1, without the parameters that are 0 by default, the formula is linear:
`fit` finds its parameters from measured steps. `roofline` derives all of them from a model's shape and a
machine's rates. The fixed cost of a chunk makes small chunks of prompts inefficient. docs/simulator.md names
what the formula leaves out.
"""

from __future__ import annotations

import difflib
import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from fovea.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Composition:
    """The amounts of work in a step.

    decodes: tokens of sequences that decode, drafts included.
    decode_context: sum of the tokens that each of these attends to.
    prompt_tokens: tokens of prompts.
    chunks: number of sequences to which these belong.
    pairs: pairs of a prompt token and a token that it attends to, summed over the chunks.
    """

    decodes: int = 0
    decode_context: int = 0
    prompt_tokens: int = 0
    chunks: int = 0
    pairs: int = 0

    @property
    def mean(self) -> Composition:
        """One decode with the mean context of the decodes."""
        return Composition(1, self.decode_context // max(1, self.decodes))

    @property
    def amounts(self) -> tuple[float, ...]:
        """1 for the step itself, then the fields in their order: the factors of the costs of a step."""
        return 1, self.decodes, self.decode_context, self.prompt_tokens, self.chunks, self.pairs

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prompt_tokens)


def pairs_of(start: int, count: int) -> int:
    """Return the pairs of `count` prompt tokens after `start` computed ones, and the tokens before them."""
    return count * start + count * (count + 1) // 2


def together(one: float, other: float, overlap: float) -> float:
    """Return the seconds of two kinds of work that hide each other, as the formula above says."""
    if overlap == 1:
        return one + other
    longer = max(one, other)
    if not longer:
        return 0.0
    return float(longer * ((one / longer) ** overlap + (other / longer) ** overlap) ** (1 / overlap))


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs of computation in seconds, and sizes in the pools.

    The defaults are those of benchmarks/costs/fovea-tiny.json.

    step_s: fixed cost of a step that computes tokens.
    decode_s: per decoded token, beside reading and arithmetic.
    context_s: per token that a decoding sequence attends to.
    token_s: per token of a prompt.
    chunk_s: per sequence that computes tokens of its prompt.
    pair_s: per pair of a prompt token and a token that it attends to.
    image_s: fixed cost of an image.
    visual_s: per visual token.
    visual_pair_s: per squared number of visual tokens.
    slice_s: length of a slice; the encoder can pause only between slices.
    between_s: time from one step to the next, for scheduling and sending events.
    read_s: reading the weights of the decoder and the head once.
    row_s: arithmetic per decoded token, which reading can hide.
    expert_s: reading the weights of all experts once.
    expert_share: share of the experts that one token uses.
    overlap: how well reading and arithmetic hide each other; 1: not at all.
    kv_token_bytes: size of a token in the KV pool.
    visual_token_bytes: size of a visual token in the encoder-output cache.
    max_context: limit of prompt and answer together, in tokens.
    made_from: source of the figures, in words.
    """

    step_s: float = 0.000235
    decode_s: float = 6.19e-05
    context_s: float = 3.32e-07
    token_s: float = 2.2e-05
    chunk_s: float = 0.000603
    pair_s: float = 3.51e-08
    image_s: float = 9.88e-05
    visual_s: float = 0.000109
    visual_pair_s: float = 1.99e-07
    slice_s: float = 0.00121
    between_s: float = 0.000205
    read_s: float = 0.0
    row_s: float = 0.0
    expert_s: float = 0.0
    expert_share: float = 0.0
    overlap: float = 1.0
    kv_token_bytes: int = 2560
    visual_token_bytes: int = 1536
    max_context: int = 8192
    made_from: str = "built in: fovea-tiny, bfloat16 on cpu, 1 threads: 4807 steps and 30 images"

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field.name, getattr(self, field.name))

    def step(self, composition: Composition) -> float:
        """Return the seconds of a step's tokens; 0 for a step that only encodes."""
        if not composition:
            return 0.0
        rows = composition.decodes + composition.prompt_tokens
        memory = self.read_s + composition.decode_context * self.context_s
        if self.expert_s:
            memory += self.expert_s * (1.0 - (1.0 - self.expert_share) ** rows)
        arithmetic = (
            composition.prompt_tokens * self.token_s
            + composition.decodes * self.row_s
            + composition.pairs * self.pair_s
        )
        return (
            self.step_s
            + composition.decodes * self.decode_s
            + composition.chunks * self.chunk_s
            + together(memory, arithmetic, self.overlap)
        )

    def image(self, visual_tokens: int) -> float:
        """Return the seconds of encoding one image."""
        return self.image_s + visual_tokens * self.visual_s + visual_tokens**2 * self.visual_pair_s

    def slices(self, visual_tokens: int) -> int:
        """Return the number of equal slices in which one image is encoded."""
        return max(1, math.ceil(self.image(visual_tokens) / self.slice_s))

    def save(self, path: Path) -> None:
        """Write the cost model to a JSON file. Raises ConfigError if the file cannot be written."""
        try:
            path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}", param="cost") from error

    @classmethod
    def load(cls, path: Path) -> CostModel:
        """Read a JSON file. Missing parameters have their defaults.

        Raises ConfigError, naming the file, the parameter and the accepted values.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}", param="cost") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not JSON: {error}", param="cost") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path} must hold a JSON object of cost parameters", param="cost")
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise ConfigError(f"{path}: unknown parameter {name!r}; {hint}", param="cost")
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.message}", param="cost") from error


RANGES = {"step_s": (1e-9, 1e12), "slice_s": (1e-9, 1e12), "expert_share": (0.0, 1.0), "overlap": (1.0, 64.0)}
"""Least and largest value of the parameters for which 0 and 1e12 are not the bounds."""
WHOLE = ("kv_token_bytes", "visual_token_bytes", "max_context")


def _check(name: str, value: object) -> None:
    """Raise ConfigError unless a parameter has its type and range. A step of 0 s would stop the clock."""
    if name == "made_from":
        if not isinstance(value, str):
            raise ConfigError(f"{name} is {value!r}; accepted: text", param=name)
        return
    whole = name in WHOLE
    number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    low, high = (1, 1e12) if whole else RANGES.get(name, (0.0, 1e12))
    if not number or not low <= value <= high:  # type: ignore[operator]
        kind = "a whole number" if whole else "seconds" if name.endswith("_s") else "a number"
        bound = f"from {low:g} on" if high == 1e12 else f"from {low:g} to {high:g}"
        raise ConfigError(f"{name} is {value!r}; accepted: {kind} {bound}", param=name)
