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

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from fovea.core.config_files import check_keys, errors_in, read_json
from fovea.core.errors import ConfigError
from fovea.core.settings import check_settings, setting


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

    Raises ConfigError for a value that is not accepted. A step of 0 s would stop the clock.
    """

    step_s: float = setting(0.000235, "Fixed cost of a step that computes tokens.", low=1e-9, high=1e12)
    decode_s: float = setting(6.19e-05, "Per decoded token, beside reading and arithmetic.", low=0, high=1e12)
    context_s: float = setting(3.32e-07, "Per token that a decoding sequence attends to.", low=0, high=1e12)
    token_s: float = setting(2.2e-05, "Per token of a prompt.", low=0, high=1e12)
    chunk_s: float = setting(0.000603, "Per sequence that computes tokens of its prompt.", low=0, high=1e12)
    pair_s: float = setting(
        3.51e-08, "Per pair of a prompt token and a token that it attends to.", low=0, high=1e12
    )
    image_s: float = setting(9.88e-05, "Fixed cost of an image.", low=0, high=1e12)
    visual_s: float = setting(0.000109, "Per visual token.", low=0, high=1e12)
    visual_pair_s: float = setting(1.99e-07, "Per squared number of visual tokens.", low=0, high=1e12)
    slice_s: float = setting(
        0.00121, "Length of a slice; the encoder can pause only between slices.", low=1e-9, high=1e12
    )
    between_s: float = setting(
        0.000205, "Time from one step to the next, for scheduling and sending events.", low=0, high=1e12
    )
    read_s: float = setting(0.0, "Reading the weights of the decoder and the head once.", low=0, high=1e12)
    row_s: float = setting(0.0, "Arithmetic per decoded token, which reading can hide.", low=0, high=1e12)
    expert_s: float = setting(0.0, "Reading the weights of all experts once.", low=0, high=1e12)
    expert_share: float = setting(0.0, "Share of the experts that one token uses.", low=0, high=1)
    overlap: float = setting(
        1.0, "How well reading and arithmetic hide each other; 1: not at all.", low=1, high=64
    )
    kv_token_bytes: int = setting(2560, "Size of a token in the KV pool.", low=1, high=1e12)
    visual_token_bytes: int = setting(
        1536, "Size of a visual token in the encoder-output cache.", low=1, high=1e12
    )
    max_context: int = setting(8192, "Limit of prompt and answer together, in tokens.", low=1, high=1e12)
    made_from: str = setting(
        "built in: fovea-tiny, bfloat16 on cpu, 1 threads: 4807 steps and 30 images",
        "Source of the figures, in words.",
    )

    def __post_init__(self) -> None:
        check_settings(self)

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
        values = read_json(path, param="cost")
        with errors_in(str(path)):
            check_keys("", values, [field.name for field in fields(cls)], "parameter")
            return cls(**values)
