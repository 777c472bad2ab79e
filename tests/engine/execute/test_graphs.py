"""Padded decodes without a GPU: the same launches over the same buffers, one by one."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fovea import Engine
from fovea.core.constraints import AnswerFormat
from fovea.core.errors import ConfigError
from fovea.core.types import ChatPrompt
from fovea.engine.execute.decode_rows import PaddedDecodes, _Batch
from fovea.engine.schedule import decode_batches
from tests.support.checkpoints import parts, write
from tests.support.engines import all_at_once, ask, assert_idle, picture
from tests.support.programs import need_kernels
from tests.support.thorough import others_slow

pytestmark = pytest.mark.kernels

SETTINGS: dict[str, Any] = {"device": "cpu", "threads": 1, "kv_blocks": 96, "max_running": 6}
PROMPTS = [
    ask("what is it?", picture(1, 64, 64)),
    ask("describe the picture", picture(1, 64, 64)),
    ask("the red circle"),
    ask("please"),
    ask("is in the image " * 9),
]


TOGETHER = [
    ask(text, picture(1, 64, 64)) for text in ("what is it?", "describe the picture", "the red", "please")
]


def answers(folder: str, prompts: list[ChatPrompt], tokens: int, **settings: Any) -> list[tuple[int, ...]]:
    """Return the answers of requests that run together and end one by one, so every batch size occurs."""
    with Engine.from_pretrained(folder, **(SETTINGS | settings)) as engine:
        with ThreadPoolExecutor(len(prompts)) as pool, all_at_once(engine, len(prompts)):
            futures = [
                pool.submit(
                    engine.generate, prompt, temperature=0, max_tokens=tokens + 2 * number, ignore_eos=True
                )
                for number, prompt in enumerate(prompts)
            ]
        tokens_of = [future.result().token_ids[0] for future in futures]
        assert_idle(engine)
    return tokens_of


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The size of every padded step, and whether its rows share a prefix."""
    steps: list[tuple[int, bool]] = []
    run = _Batch.run

    def recording_run(self: _Batch, ids: Any = None) -> Any:
        steps.append((len(self.arrays["ids"]), "members.0" in self.arrays))
        return run(self, ids)

    monkeypatch.setattr(_Batch, "run", recording_run)
    return steps


def test_padding_changes_no_answer(sizes: list[tuple[int, bool]]) -> None:
    """On the CPU's kernels, which give bit-identical results in every batch."""
    need_kernels()
    plain = answers("fovea-tiny", PROMPTS, 10, dtype="bfloat16")
    assert not sizes
    assert answers("fovea-tiny", PROMPTS, 10, dtype="bfloat16", decode_graphs="padded") == plain
    padded = {size for size, _ in sizes}
    assert padded <= {1, 2, 4, 8}
    assert max(padded) > 1, "no two requests shared a step"


@pytest.mark.parametrize("family", others_slow(["gemma3", "gemma4"], ["gemma4"]))
def test_padding_changes_no_answer_of_a_model_with_windows(
    family: str, tmp_path: Path, sizes: list[tuple[int, bool]]
) -> None:
    """The answers are longer than the window, so blocks leave it and rows begin in the middle of a table."""
    need_kernels()
    folder = str(write(family, tmp_path))
    settings: dict[str, Any] = {
        "dtype": "bfloat16", "block_size": 4, "kernels": "native", "max_step_tokens": 64
    }  # fmt: skip
    plain = answers(folder, PROMPTS[:4], 24, **settings)
    assert not sizes
    assert answers(folder, PROMPTS[:4], 24, **settings, decode_graphs="padded") == plain
    assert max(size for size, _ in sizes) > 1, "no two requests shared a step"


@pytest.mark.parametrize("family", others_slow(["qwen3_5", "qwen3_5_moe", "lfm2_vl"], ["qwen3_5", "lfm2_vl"]))
def test_padding_changes_no_answer_of_a_model_with_states(
    family: str, tmp_path: Path, sizes: list[tuple[int, bool]]
) -> None:
    """Rows that are padding write a slot of their own. A step with drafts is computed without padding."""
    need_kernels()
    folder = str(write(family, tmp_path))
    settings: dict[str, Any] = {
        "dtype": "bfloat16", "block_size": 4, "kernels": "native", "max_step_tokens": 64
    }  # fmt: skip
    plain = answers(folder, PROMPTS[2:], 12, **settings)
    assert not sizes
    padded = settings | {"decode_graphs": "padded"}
    assert answers(folder, PROMPTS[2:], 12, **padded) == plain
    assert {size for size, _ in sizes} <= {1, 2, 4}
    assert max(size for size, _ in sizes) > 1, "no two requests shared a step"
    form = AnswerFormat("regex", "[ab]{4}the red circle is (left|right) of the blue square")
    forced = []
    for each in (settings, padded):
        with Engine.from_pretrained(folder, **(SETTINGS | each)) as engine:
            forced.append(engine.generate(PROMPTS[2], temperature=0, max_tokens=64, format=form).token_ids)
            assert engine.stats()["accepted_draft_tokens"] > 0
            assert_idle(engine)
    assert forced[0] == forced[1]


def test_two_that_share_a_prefix_read_it_together_on_the_cpus_kernels(
    sizes: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded decodes share prefixes from as few rows on as unpadded ones: the kernels set that number."""
    need_kernels()
    monkeypatch.setattr(decode_batches.find_prefix_groups, "__kwdefaults__", {"least_tokens": 8})
    plain = answers("fovea-tiny", TOGETHER[:2], 8, dtype="bfloat16", block_size=4)
    assert (
        answers("fovea-tiny", TOGETHER[:2], 8, dtype="bfloat16", block_size=4, decode_graphs="padded")
        == plain
    )
    assert (2, True) in sizes


@pytest.mark.slow
def test_padding_changes_no_answer_on_tritons_kernels(
    tmp_path: Path, sizes: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four questions about one picture. In this test a short prefix is read together, too."""
    pytest.importorskip("triton", reason="triton is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("there is a GPU: tests/gpu runs these kernels on it")
    monkeypatch.setattr(parts, "TEXT_LAYERS", 1)
    folder = str(write("llava", tmp_path))
    plain = answers(folder, TOGETHER, 5, dtype="float32", block_size=4, kernels="torch")
    monkeypatch.setattr(decode_batches.find_prefix_groups, "__kwdefaults__", {"least_tokens": 8})
    assert (
        answers(folder, TOGETHER, 5, dtype="float32", block_size=4, kernels="triton", decode_graphs="padded")
        == plain
    )
    assert (4, True) in sizes


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "gemma4", "qwen3_5", "qwen3_5_moe", "lfm2_vl"])
def test_recorded_steps_change_no_answer_of_a_model_with_windows_or_states(
    family: str, tmp_path: Path, sizes: list[tuple[int, bool]]
) -> None:
    """A stand-in for CUDA's graphs repeats what was recorded, whatever Python computes in a later step."""
    pytest.importorskip("triton", reason="triton is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("there is a GPU: tests/gpu records these steps on it")
    from tests.support import fake_cuda

    folder = str(write(family, tmp_path))
    prompts = [ask("the red circle is left of the blue square"), ask("please")]
    settings: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_step_tokens": 64, "max_running": 2}
    plain = answers(folder, prompts, 5, **settings, kernels="torch")
    assert not sizes
    with fake_cuda.installed(graphs=True):
        recorded = answers(folder, prompts, 5, **settings, kernels="triton", decode_graphs="padded")
    assert recorded == plain
    assert (2, False) in sizes


def test_padding_needs_kernels_that_read_pages_in_place(tmp_path: Path) -> None:
    folder = str(write("llava", tmp_path))
    with pytest.raises(
        ConfigError, match="decode_graphs is 'padded', and these kernels group decodes by length"
    ):
        Engine.from_pretrained(folder, dtype="float32", kernels="torch", decode_graphs="padded")
    with Engine.from_pretrained(folder, dtype="float32", device="cpu", kv_blocks=8) as engine:
        assert engine.runner._padded is None


def test_padding_leaves_the_pool_as_large_as_before() -> None:
    need_kernels()
    counts = []
    for graphs in ("off", "padded"):
        with Engine.from_pretrained(
            "fovea-tiny", **SETTINGS, dtype="bfloat16", decode_graphs=graphs
        ) as engine:
            stats = engine.stats()
            counts.append((stats["kv_block_bytes"], stats["kv_blocks_total"]))
            assert isinstance(engine.runner._padded, PaddedDecodes) == (graphs == "padded")
    assert counts[0] == counts[1]
