"""Texts of Triton's model configurations (config.pbtxt)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Tensor(NamedTuple):
    """An input or output of a model.

    kind: Triton's type without TYPE_. dims: sizes; -1: any.
    """

    name: str
    kind: str
    dims: tuple[int, ...]
    optional: bool = False


class Step(NamedTuple):
    """One model of an ensemble. inputs, outputs: tensors of the ensemble by those of the model."""

    model: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


def tensors(field: str, entries: Sequence[Tensor]) -> str:
    """Return the field `input` or `output`."""
    texts = []
    for each in entries:
        dims = ", ".join(map(str, each.dims))
        optional = "\n    optional: true" if each.optional else ""
        head = f'  {{\n    name: "{each.name}"\n    data_type: TYPE_{each.kind}\n'
        texts.append(f"{head}    dims: [ {dims} ]{optional}\n  }}")
    return f"{field} [\n" + ",\n".join(texts) + "\n]\n"


def python_model(
    name: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    *,
    decoupled: bool,
    instances: str,
    settings: Mapping[str, Any],
) -> str:
    """Return the configuration of a Python model.

    instances: the body of instance_group. settings: the value of the parameter `fovea`, which `model.py`
        reads.
    """
    value = json.dumps(json.dumps(settings, sort_keys=True))
    return f"""\
name: "{name}"
backend: "python"
max_batch_size: 0

model_transaction_policy {{
  decoupled: {str(decoupled).lower()}
}}

{tensors("input", inputs)}
{tensors("output", outputs)}
instance_group [ {{ {instances} }} ]

parameters {{
  key: "fovea"
  value: {{ string_value: {value} }}
}}
"""


def ensemble(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], steps: Sequence[Step]) -> str:
    """Return the configuration of an ensemble."""
    texts = []
    for step in steps:
        maps = [
            f'      {field} {{ key: "{key}" value: "{value}" }}\n'
            for field, entries in (("input_map", step.inputs), ("output_map", step.outputs))
            for key, value in entries.items()
        ]
        texts.append(
            f'    {{\n      model_name: "{step.model}"\n      model_version: -1\n{"".join(maps)}    }}'
        )
    return f"""\
name: "{name}"
platform: "ensemble"
max_batch_size: 0

{tensors("input", inputs)}
{tensors("output", outputs)}
ensemble_scheduling {{
  step [
{",".join(chr(10) + text for text in texts).lstrip(chr(10))}
  ]
}}
"""
