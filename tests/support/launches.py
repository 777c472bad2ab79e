"""Counts the launches of each decoder layer in a step that decodes, without a GPU.

    python -m tests.support.launches      # a table of all architectures

A launch is a launch of a Triton kernel, or an operation of torch that computes something. Views and
allocations are none. An operation that CUDA computes in several launches, such as a sort, counts as one.
Triton's kernels are not computed here.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it at its first import

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from fovea import Engine
from fovea.engine.layers.config import Attention, CrossAttention, Experts
from fovea.engine.layers.decoder import Decoder
from fovea.engine.layers.layer import CrossLayer, Layer
from fovea.kernels.triton.kernels import TritonStack
from tests.support.checkpoints import ARCHITECTURES, write
from tests.support.engines import ask, picture

SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "threads": 1, "kv_blocks": 512, "block_size": 4, "max_running": 1,
    "max_step_tokens": 512, "kernels": "triton",
}  # fmt: skip
ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view")


class _Counter(TorchDispatchMode):
    """Counts launches while it is active, under the name of the current layer."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = any(
            result.alias_info is not None and not result.alias_info.is_write
            for result in func._schema.returns
        )
        if not views and func.overloadpacket.__name__ not in ALLOCATIONS:
            self.count += 1
        return func(*args, **(kwargs or {}))


def kind(decoder: Decoder, number: int) -> str:
    """Return a name of the layer's kind."""
    shape = decoder.config.layers[number]
    mixer = shape.mixer
    if isinstance(mixer, CrossAttention):
        name = "cross-attention"
    elif not isinstance(mixer, Attention):
        name = "state"
    elif mixer.source is not None:
        name = "attention to another layer's keys"
    else:
        name = "attention" if mixer.window is None else "attention in a window"
    return f"{name}, experts" if isinstance(shape.feed_forward, Experts) else name


def launches_of_layers(folder: str, prompt: Any) -> dict[str, int]:
    """Return the launches of a layer by its kind, the most of all layers of this kind.

    The layers of a `Stack` are one call, so these have the mean.
    """
    found: dict[str, int] = {}
    with Engine.from_pretrained(folder, **SETTINGS) as engine:
        decoder = engine.runner.model.decoder
        numbers = {id(layer): number for number, layer in enumerate(decoder.layers)}

        def note(number: int, count: int) -> None:
            name = kind(decoder, number)
            found[name] = max(found.get(name, 0), count)

        def layer_forward(method: Callable[..., Any]) -> Callable[..., Any]:
            def forward(self: Any, x: torch.Tensor, *rest: Any) -> Any:
                if len(x) != 1:
                    return method(self, x, *rest)
                with counting() as counter:
                    result = method(self, x, *rest)
                note(numbers[id(self)], counter.count)
                return result

            return forward

        def stack_call(self: TritonStack, x: torch.Tensor, first: int, last: int, *rest: Any) -> torch.Tensor:
            if len(x) != 1:
                return run(self, x, first, last, *rest)
            with counting() as counter:
                result = run(self, x, first, last, *rest)
            note(first, -(-counter.count // (last - first)))
            return result

        run = TritonStack.__call__
        with (
            mock.patch.object(Layer, "forward", layer_forward(Layer.forward)),
            mock.patch.object(CrossLayer, "forward", layer_forward(CrossLayer.forward)),
            mock.patch.object(TritonStack, "__call__", stack_call),
            mock.patch.object(GridExecutor, "__call__", return_value=None),
        ):
            engine.generate(prompt, temperature=0, max_tokens=3, ignore_eos=True)
    return found


@contextmanager
def counting() -> Iterator[_Counter]:
    """Count the launches in the block."""
    counter = _Counter()

    def launch(*_args: Any, **_kwargs: Any) -> None:
        counter.count += 1

    with mock.patch.object(GridExecutor, "__call__", launch), counter:
        yield counter


def launches(architecture: str, folder: Path) -> dict[str, int]:
    """Return the launches of a tiny model of the architecture, see `launches_of_layers`."""
    prompt = ask("what is it?", picture(1, 32, 32)) if architecture == "mllama" else ask("what is it?")
    return launches_of_layers(str(write(architecture, folder)), prompt)


def main() -> None:
    print("| architecture | kind of layer | launches |\n|---|---|---|")
    for architecture in sorted(ARCHITECTURES):
        with tempfile.TemporaryDirectory() as folder:
            for name, count in launches(architecture, Path(folder)).items():
                print(f"| {architecture} | {name} | {count} |", flush=True)


if __name__ == "__main__":
    main()
