"""The engines that are compared.

Each has a file that defines `ENGINE`, and `AVX2`: the same engine, kept to the instructions of AVX2.
"""

from __future__ import annotations

from importlib import import_module

from instructions import ALL, AVX2

from servers.base import Engine

NAMES = ("fovea", "vllm", "openvino", "llamacpp", "transformers")
ONLY_AVX2 = ("vllm32",)
"""Engines that are compared only on the page of AVX2."""


def names(instructions: str) -> tuple[str, ...]:
    """The engines of a page."""
    return NAMES if instructions == ALL else (*NAMES, *ONLY_AVX2)


def load(name: str, instructions: str = ALL) -> Engine:
    """An engine by its name."""
    module = import_module(f"servers.{name}")
    engine: Engine = module.AVX2 if instructions == AVX2 else module.ENGINE
    return engine
