"""The fields of custom resources that the renderers use.

A cluster checks custom resources by the schemas of their operators. These are not installed here, so the
tables of fields.yml stand for them. For each kind they list its API version, its fields, and which are
needed. A field that is not listed is taken for a misspelt one. Pods and other parts marked `any` are not
looked into.

The tables were written after the reference of each API: KEDA 2.20, Istio 1.30, Gateway API 1.6 with inference
extension 1.5, KServe 0.20, LeaderWorkerSet 0.10, KubeRay 1.7, cert-manager 1.20, prometheus-operator 0.93.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from fovea.deploy.lint.objects import LOADER, Cluster

DURATION = re.compile(r"([0-9]{1,5}(h|m|s|ms)){1,4}")
TYPES = {"text": (str, "a text"), "number": (int, "a whole number"), "flag": (bool, "true or false")}
Shape = Any
"""The name of a type, a list of one shape, or a table of shapes."""


@functools.cache
def specifications() -> Mapping[str, Shape]:
    """Return the shape of the specification of each kind."""
    text = Path(__file__).with_name("fields.yml").read_text(encoding="utf-8")
    shapes: Mapping[str, Shape] = yaml.load(text, LOADER)
    return shapes


def check_fields(cluster: Cluster) -> Iterator[str]:
    """Yield a sentence for every field that is unknown, missing, or of another type."""
    known = specifications()
    groups = {name.partition("/")[0] for name in known}
    for each in cluster.objects:
        if each.api.partition("/")[0] not in groups:
            continue
        shape = known.get(f"{each.api} {each.kind}")
        if shape is None:
            yield f"{each}: {each.api} {each.kind} is not known; accepted: {', '.join(sorted(known))}"
        else:
            yield from (f"{each}: {text}" for text in _faults("spec", each.spec, shape))


def _faults(where: str, value: Any, shape: Shape) -> Iterator[str]:
    if isinstance(shape, Mapping):
        yield from _table(where, value, shape)
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{where} is {value!r}; accepted: a list"
            return
        for number, entry in enumerate(value):
            yield from _faults(f"{where}[{number}]", entry, shape[0])
    elif shape != "any":
        yield from _simple(where, value, shape)


def _table(where: str, value: Any, shape: Mapping[str, Shape]) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield f"{where} is {value!r}; accepted: a table"
        return
    known = {key.rstrip("!"): inner for key, inner in shape.items()}
    for key, entry in value.items():
        if key not in known:
            yield f"{where} has an unknown field {key!r}; accepted: {', '.join(sorted(known))}"
        else:
            yield from _faults(f"{where}.{key}", entry, known[key])
    for key in shape:
        if key.endswith("!") and key[:-1] not in value:
            yield f"{where} lacks {key[:-1]}"


def _simple(where: str, value: Any, shape: str) -> Iterator[str]:
    if shape == "duration":
        if not isinstance(value, str) or not DURATION.fullmatch(value):
            yield f"{where} is {value!r}; accepted: a duration, such as 30s"
        return
    kind, words = TYPES[shape]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        yield f"{where} is {value!r}; accepted: {words}"
