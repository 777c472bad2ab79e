"""Reads the objects of a folder, as kustomize would build them.

It knows what the renderers use: resources, components, generated ConfigMaps, and patches. `kubectl kustomize`
judges a kustomization itself. Here objects keep the names that they have in the files.
"""

from __future__ import annotations

import copy
import posixpath
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from fovea.deploy.lint.objects import Cluster, Object, fields_of, selects

NAME = "kustomization.yaml"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The parser of libyaml, which is ten times as fast, where PyYAML has it."""


class Unreadable(ValueError):
    """A file is missing, or is no YAML. The message names it."""


def load(files: Mapping[str, str], folder: str) -> Cluster:
    """Return the objects of a folder. Raises Unreadable."""
    return Cluster(tuple(Object(each) for each in _folder(files, folder, []) if each))


def _folder(files: Mapping[str, str], folder: str, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the objects of a folder. before: those to which a component is added."""
    path = posixpath.normpath(posixpath.join(folder, NAME))
    if path not in files:
        inside = [each for each in sorted(files) if each.startswith(f"{folder.rstrip('/')}/")]
        if not inside:
            raise Unreadable(f"{folder} is named, but does not exist")
        return [
            *before,
            *(found for each in inside if each.endswith(".yaml") for found in _parse(files, each)),
        ]
    found = list(before)
    for kustomization in _parse(files, path):
        for resource in kustomization.get("resources") or []:
            place = posixpath.normpath(posixpath.join(folder, resource))
            found += _parse(files, place) if place in files else _folder(files, place, [])
        found += [_config_map(files, folder, each) for each in kustomization.get("configMapGenerator") or []]
        for component in kustomization.get("components") or []:
            found = _folder(files, posixpath.normpath(posixpath.join(folder, component)), found)
        for patch in kustomization.get("patches") or []:
            found = [_patched(each, patch) for each in found]
    return found


def _parse(files: Mapping[str, str], path: str) -> Iterator[dict[str, Any]]:
    if path not in files:
        raise Unreadable(f"{path} is named, but does not exist")
    try:
        documents = list(yaml.load_all(files[path], LOADER))
    except yaml.YAMLError as error:
        raise Unreadable(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    for document in documents:
        if document is not None and not isinstance(document, dict):
            raise Unreadable(f"{path} holds {type(document).__name__}; accepted: objects of Kubernetes")
        yield document or {}


def _config_map(files: Mapping[str, str], folder: str, generator: Mapping[str, Any]) -> dict[str, Any]:
    data = {}
    for entry in generator.get("files") or []:
        key, _, place = entry.rpartition("=")
        path = posixpath.normpath(posixpath.join(folder, place))
        if path not in files:
            raise Unreadable(f"{path} is named, but does not exist")
        data[key or posixpath.basename(place)] = files[path]
    metadata = {"name": generator.get("name"), "namespace": generator.get("namespace")}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _patched(data: dict[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    target, found = fields_of(patch.get("target")), Object(data)
    labels = fields_of(found.metadata.get("labels"))
    wanted = dict(
        entry.split("=", 1) for entry in str(target.get("labelSelector", "")).split(",") if "=" in entry
    )
    if target.get("kind", found.kind) != found.kind or target.get("name", found.name) != found.name:
        return data
    if not selects({"matchLabels": wanted}, labels):
        return data
    change = yaml.safe_load(str(patch.get("patch", "")))
    if isinstance(change, list):
        changed = copy.deepcopy(data)
        for step in change:
            _apply(changed, step)
        return changed
    body = {key: value for key, value in fields_of(change).items() if key not in ("metadata", "kind")}
    merged = _merged(data, body)
    return merged if isinstance(merged, dict) else data


def _apply(data: Any, step: Mapping[str, Any]) -> None:
    """Apply one step of a JSON patch. Raises Unreadable if its path does not exist."""
    path = str(step.get("path", ""))
    *parents, last = (part.replace("~1", "/") for part in path.strip("/").split("/"))
    try:
        for part in parents:
            data = data[int(part)] if isinstance(data, list) else data[part]
        key = int(last) if isinstance(data, list) else last
        if step["op"] == "remove":
            del data[key]
        elif step["op"] == "replace" and key not in data:
            raise KeyError(key)
        else:
            data[key] = step["value"]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Unreadable(f"a patch names {path!r}, which does not exist") from error


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}
    return new
