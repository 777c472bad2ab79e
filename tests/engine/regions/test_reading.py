"""A model whose head reads: all content is encoded once, and each question only chooses tokens of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fovea import Engine
from fovea.core.errors import CheckpointError
from fovea.engine.files import read_json
from fovea.engine.models.relevance_head import PATH, read_head
from fovea.relevance import reading
from tests.support.engines import engine
from tests.support.reduced import GREEDY, features_of, patchy_page, prepared_prompt, reduced_prompt

PAGE = patchy_page(31, 700, 1000)


def write_head(folder: Path, width: int, depth: int = 8) -> None:
    """A head with random weights in a checkpoint's folder."""
    rng = np.random.default_rng(1)
    tensors = {}
    for layer, shape in reading.shapes(width, depth).items():
        tensors[f"{layer}.weight"] = rng.normal(size=shape).astype(np.float32) / shape[1] ** 0.5
        tensors[f"{layer}.bias"] = np.zeros(shape[0], np.float32)
    (folder / PATH).parent.mkdir(exist_ok=True)
    save_file(tensors, folder / PATH)


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    import shutil

    made = tmp_path_factory.mktemp("reading") / "model"
    shutil.copytree(checkpoint("qwen3_vl"), made)
    write_head(made, read_json(made / "config.json")["text_config"]["hidden_size"])
    return made


@pytest.fixture(scope="module")
def machine(folder: Path) -> Iterator[Engine]:
    with engine(folder) as machine:
        yield machine


def places(machine: Engine, text: str, keep: float) -> list[tuple[int, int]]:
    """Row and column of each token that a question gets."""
    prompt = reduced_prompt(text, PAGE, keep=keep)
    machine.generate(prompt, **GREEDY)
    (span,) = prepared_prompt(machine, prompt).spans
    found = features_of(machine, span).places
    assert found is not None
    return [(int(row), int(column)) for row, column in found.tolist()]


def test_questions_choose_tokens_of_the_same_regions(machine: Engine) -> None:
    """The second question finds every region in the cache, and the choice depends on the words."""
    one = places(machine, "what is the due date?", 0.2)
    encoded = machine.runner._encoder._encode.__self__._region_encoder.regions  # type: ignore[attr-defined]
    count = len(encoded)
    other = places(machine, "who sent the letter?", 0.2)
    assert len(encoded) == count
    assert len(one) == len(other)
    assert len(set(one)) == len(one)
    assert set(one) != set(other)


def test_the_number_of_tokens_is_exact(machine: Engine) -> None:
    """Also where blank cells must fill up the budget."""
    for keep in (0.05, 0.5, 0.97):
        prompt = reduced_prompt("total", PAGE, keep=keep)
        answer = machine.generate(prompt, **GREEDY)
        (planned,) = prepared_prompt(machine, prompt).images
        assert answer.usage.image == planned.plan.tokens
        assert len(places(machine, "total", keep)) == planned.plan.tokens


def test_an_answer_does_not_depend_on_the_cache(machine: Engine) -> None:
    prompt = reduced_prompt("what is the due date?", PAGE, keep=0.3)
    first = machine.generate(prompt, **GREEDY)
    machine.runner._encoder._encode.__self__._region_encoder.regions.clear()  # type: ignore[attr-defined]
    assert machine.generate(prompt, **GREEDY).text == first.text


def test_a_head_that_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    assert reading.reads(read_head(folder))
    write_head(tmp_path, 64)
    with pytest.raises(CheckpointError, match="is for embeddings of 64 values; the model's have 32"):
        read_head(tmp_path, 32)
