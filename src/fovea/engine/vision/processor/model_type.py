"""Reads the model_type of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

TYPES_BY_CLASS: Mapping[str, str] = MappingProxyType({"LightOnOCRForConditionalGeneration": "lighton_ocr"})
"""The model_type of checkpoints whose config.json has another one, by the name of their class.

LightOnOCR was published with the model_type of Mistral 3, before transformers had a class for it. It has the
same tower, but no text between the rows of visual tokens.
"""


def stated_type(content: Mapping[str, Any]) -> str:
    """Return the model_type of a config.json; "" if it has none. `architectures` overrides `model_type`."""
    names = content.get("architectures")
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and name in TYPES_BY_CLASS:
            return TYPES_BY_CLASS[name]
    return str(content.get("model_type", ""))[:100]
