"""The engines that are compared. Each has a file that defines `ENGINE`."""

from __future__ import annotations

from importlib import import_module

from servers.base import Engine

NAMES = ("fovea", "vllm", "openvino", "llamacpp", "transformers")


def load(name: str) -> Engine:
    engine: Engine = import_module(f"servers.{name}").ENGINE
    return engine
