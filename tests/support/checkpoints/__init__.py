"""Tiny random checkpoints of every supported architecture, in the format that transformers writes."""

from __future__ import annotations

from tests.support.checkpoints.architectures import ARCHITECTURES
from tests.support.checkpoints.folders import randomise, write, write_gemma4
from tests.support.checkpoints.templates import INTERNVL_TEMPLATE, QWEN_TEMPLATE
from tests.support.checkpoints.tokens import SPECIALS, VOCABULARY, tokenizer

__all__ = [
    "ARCHITECTURES",
    "INTERNVL_TEMPLATE",
    "QWEN_TEMPLATE",
    "SPECIALS",
    "VOCABULARY",
    "randomise",
    "tokenizer",
    "write",
    "write_gemma4",
]
