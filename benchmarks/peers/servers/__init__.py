"""The engines that are compared: one file each, holding one `ENGINE`."""

from __future__ import annotations

from importlib import import_module

from servers.base import Engine

NAMES = ("fovea", "vllm", "openvino", "llamacpp", "transformers")


def load(name: str) -> Engine:
    engine: Engine = import_module(f"servers.{name}").ENGINE
    return engine
