"""When the device's memory is full, steps become smaller and images are encoded alone: no request is lost."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fovea import Engine
from fovea.core.errors import OutOfMemory
from fovea.engine.execute.device_memory import is_out_of_memory
from fovea.engine.vision.encoding import one_by_one
from fovea.engine.vision.processor.base import ProcessedImage
from tests.engine.test_errors import outcomes
from tests.support.engines import ask, assert_idle, engine, picture

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
PROMPTS = [ask("one", picture(1)), ask("two"), ask("what is it?", picture(2)), ask("three", picture(1))]


class Activation:
    """Memory that a failed step holds."""


@pytest.fixture
def machine(qwen: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Engine]:
    with caplog.at_level(logging.CRITICAL, "fovea.engine"), engine(qwen) as made:
        yield made


def full() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. Process 4711 has 77 GiB")


@pytest.mark.parametrize("room", [17, 40])
def test_steps_that_do_not_fit_are_halved_and_answers_stay_the_same(
    machine: Engine, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that was too large ended one of its requests, whichever was left over when it was halved."""
    truth = [machine.generate(prompt, **GREEDY).token_ids[0] for prompt in PROMPTS]
    machine.clear_caches()
    forward, held = machine.runner._forward, []

    def limited(work: list[Any], rows: list[int]) -> Any:
        if sum(item.count for item in work) > room:
            activation = Activation()
            held.append(activation.__class__)
            raise full()
        return forward(work, rows)

    def count_activations() -> None:
        assert not any(isinstance(thing, Activation) for thing in gc.get_objects())

    monkeypatch.setattr(machine.runner, "_forward", limited)
    monkeypatch.setattr(machine.runner, "_free_memory", count_activations)
    assert outcomes(machine, PROMPTS) == truth
    stats = machine.stats()
    assert held
    assert stats["memory_retries"] == len(held)
    assert stats["memory_failures"] == stats["failed_steps"] == 0
    assert stats["step_tokens_allowed"] < machine.config.schedule.max_step_tokens
    assert_idle(machine)


def test_a_request_that_does_not_fit_even_alone_ends_with_an_error_about_memory(
    machine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = [machine.generate(prompt, **GREEDY).token_ids[0] for prompt in PROMPTS]
    forward = machine.runner._forward

    def limited(work: list[Any], rows: list[int]) -> Any:
        if any(item.seq.spans and item.stop > len(item.seq.prompt_ids) + 2 for item in work):
            raise full()
        return forward(work, rows)

    monkeypatch.setattr(machine.runner, "_forward", limited)
    found = outcomes(machine, PROMPTS)
    assert found[1] == truth[1]
    for error in (found[0], found[2], found[3]):
        assert isinstance(error, OutOfMemory)
        assert error.code == "out_of_memory"
        assert "memory" in str(error)
        assert "4711" not in str(error)
    assert machine.stats()["memory_failures"] == 3
    assert machine.status == "ready"
    assert_idle(machine)


def test_an_image_that_does_not_fit_beside_others_is_encoded_alone(
    machine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = [machine.generate(prompt, **GREEDY).token_ids[0] for prompt in PROMPTS]
    machine.clear_caches()
    encode, encoder, alone = machine.runner.model.encode_slices, machine.runner._encoder, []
    encode_alone = encoder.encode_alone

    def limited(image: ProcessedImage) -> Any:
        slices = one_by_one(encode(image))
        yield next(slices)
        if not alone:
            raise full()
        return (yield from slices)

    def note(free: Any) -> Any:
        alone.append(True)
        result = encode_alone(free)
        alone.clear()
        return result

    monkeypatch.setattr(machine.runner.model, "encode_slices", limited)
    monkeypatch.setattr(encoder, "encode_alone", note)
    assert outcomes(machine, PROMPTS) == truth
    assert machine.stats()["memory_image_retries"] == 2
    assert_idle(machine)


def test_an_image_that_does_not_fit_alone_is_named(machine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request of the other image goes on, although both were to be encoded in one step."""
    truth = machine.generate(PROMPTS[0], **GREEDY).token_ids[0]
    machine.clear_caches()
    encode = machine.runner.model.encode_slices

    def limited(image: ProcessedImage) -> Any:
        if image.identity == picture(5).identity:
            raise full()
        return encode(image)

    monkeypatch.setattr(machine.runner.model, "encode_slices", limited)
    found = outcomes(machine, [ask("compare", picture(1), picture(5)), PROMPTS[0]])
    assert isinstance(found[0], OutOfMemory)
    assert str(found[0]).startswith("image 1: its encoder does not fit into the device's memory")
    assert found[1] == truth
    assert_idle(machine)


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (full(), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: not enough memory"),
            True,
        ),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_that_mean_a_lack_of_memory(error: Exception, memory: bool) -> None:
    assert is_out_of_memory(error) == memory
