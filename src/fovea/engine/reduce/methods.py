"""Finds the function that implements a method. Its file is imported on first use."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from fovea.core.errors import EngineError
from fovea.engine.reduce.base import Reducer
from fovea.engine.visual_budget.methods import find_method

_FUNCTIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "uniform": ("uniform", "choose"),
        "random": ("random", "choose"),
        "dart": ("dart", "choose"),
        "dart_query": ("dart", "choose_with_query"),
        "dart_k": ("dart", "choose_in_decoder"),
        "dpp": ("dpp", "choose"),
        "dpp_query": ("dpp", "choose_with_query"),
        "visionzip": ("visionzip", "choose"),
        "tome": ("tome", "choose"),
        "fastv": ("fastv", "choose"),
    }
)


def reducer(name: str) -> Reducer:
    """Return the implementation of a method.

    Raises InvalidRequest for an unknown method, EngineError for one that does not reduce encoded tokens.
    """
    known = find_method(name)
    if known.kind != "encoder":
        raise EngineError(f"{name} works before the encoder, so it does not reduce encoded tokens")
    module, function = _FUNCTIONS[name]
    return Reducer(known, getattr(import_module(f"fovea.engine.reduce.{module}"), function))
