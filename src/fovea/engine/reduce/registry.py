"""Which function does which method. A file is imported when somebody first asks for what is in it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from fovea.core.errors import EngineError
from fovea.engine.reduce.base import Reducer
from fovea.engine.visual_budget.methods import method

_PLACES: Mapping[str, tuple[str, str]] = MappingProxyType(
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
    """Raises InvalidRequest for a method that there is not, EngineError for one that is not a reduction of encoded tokens."""
    found = method(name)
    if found.after != "encoder":
        raise EngineError(f"{name} comes before the encoder, and leaves out none of its tokens")
    module, function = _PLACES[name]
    return Reducer(found, getattr(import_module(f"fovea.engine.reduce.{module}"), function))
