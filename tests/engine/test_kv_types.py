"""Engines whose keys and values are in 8 bits: answers, memory, refusals, and keys with large biases."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fovea import Engine
from fovea.core.errors import ConfigError
from fovea.core.types import Completion
from fovea.engine.config import EngineConfig
from fovea.engine.layers.mixers import QueryKeyValue
from fovea.engine.load import LoadedModel, load_model
from fovea.kernels.native.kernels import NativeKernels
from tests.support.checkpoints import write
from tests.support.engines import SETTINGS, all_at_once, ask, assert_idle, engine, picture
from tests.support.programs import need_kernels
from tests.support.thorough import others_slow

TEXT = ask("the red circle is left of the blue square and what is above this one")
PICTURE = ask("What is in the image?", picture(1))
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
ARRANGED: dict[str, dict[str, Any]] = {
    "chunks": {"max_step_tokens": 7},
    "preempted": {"block_size": 4, "kv_blocks": 48, "max_step_tokens": 64},
    "host memory": {"kv_host_mib": 1, "kv_blocks": 12, "block_size": 16},
}


@pytest.mark.parametrize("kind", others_slow(("int8", "fp8"), ("int8",)))
def test_a_schedule_never_changes_an_answer(qwen: Path, kind: str) -> None:
    """On torch's kernels, with cached prefixes. test_one_order compares the bits on the C++ kernels."""
    prompts = [TEXT, PICTURE, ask("Describe the picture, please.", picture(1)), TEXT]

    def tokens(machine: Engine) -> list[tuple[int, ...]]:
        with ThreadPoolExecutor(len(prompts)) as pool, all_at_once(machine, len(prompts)):
            return [done.token_ids[0] for done in pool.map(lambda p: machine.generate(p, **GREEDY), prompts)]

    with engine(qwen, kv_dtype=kind, prefix_cache=False, max_running=1) as machine:
        alone = [machine.generate(prompt, **GREEDY).token_ids[0] for prompt in prompts]
        assert machine.info.kv_dtype == kind
    for name, settings in ARRANGED.items():
        with engine(qwen, kv_dtype=kind, **settings) as machine:
            for _ in range(2):
                assert tokens(machine) == alone, name
            assert_idle(machine)


def test_a_pool_holds_nearly_twice_as_many_tokens() -> None:
    blocks = {}
    for kind in ("auto", "int8"):
        settings = {"dtype": "bfloat16", "kernels": "torch", "kv_cache_mib": 4, "kv_dtype": kind}
        # The keys of a draft layer have the model's type.
        with Engine.from_pretrained("fovea-tiny", device="cpu", speculate="off", **settings) as machine:
            stats = machine.stats()
            blocks[kind] = stats["kv_blocks_total"]
            assert stats["kv_block_bytes"] * blocks[kind] <= 4 << 20
            assert stats["kv_block_bytes"] == machine.runner.memory.kv[0].block_bytes
    assert blocks["int8"] / blocks["auto"] > 1.93


def test_what_the_kernels_do_not_read_is_refused_at_the_start(qwen: Path) -> None:
    need_kernels()
    model = load_model("fovea-tiny", EngineConfig.of(device="cpu", dtype="bfloat16", kernels="native"))
    assert isinstance(model.model.kernels, NativeKernels)
    with pytest.raises(ConfigError, match=r"kv_dtype is 'fp8'.*accepted here: auto, int8") as raised:
        Engine(model, EngineConfig.of(device="cpu", kv_dtype="fp8", kv_blocks=64))
    assert raised.value.param == "kv_dtype"
    with pytest.raises(ConfigError, match="kv_dtype"):
        EngineConfig.of(kv_dtype="int4")


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose first and last layer have large biases of keys, as Qwen2 and Qwen2.5 have."""
    folder = write("qwen2_vl", tmp_path_factory.mktemp("biased"))
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    names = sorted(name for name in tensors if name.endswith("k_proj.bias"))
    dim = json.loads((folder / "config.json").read_text())
    dim = dim.get("text_config", dim)
    dim = dim["hidden_size"] // dim["num_attention_heads"]
    large = torch.tensor([1, 2, dim // 2 - 1])
    for name in (names[0], names[-1]):
        tensors[name].view(-1, dim)[:, large] += torch.tensor([300.0, -150.0, 200.0])
        # In trained models these numbers do not decide all scores: their queries are small.
        for part in ("weight", "bias"):
            query = tensors[name.replace("k_proj.bias", f"q_proj.{part}")].unflatten(0, (-1, dim))
            for place in (large, large + dim // 2):
                query[:, place] *= 0.01
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def scored(model: LoadedModel, **settings: Any) -> torch.Tensor:
    """Log probabilities of the tokens of a prompt."""
    with Engine(model, EngineConfig.of(**{**SETTINGS, **settings})) as machine:
        done: Completion = machine.generate(TEXT, max_tokens=1, temperature=0, prompt_logprobs=0)
    return torch.tensor([item.logprob for item in done.prompt_logprobs if item is not None])


def test_large_biases_of_keys_do_not_drown_the_other_numbers(
    biased: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(**settings: Any) -> LoadedModel:
        return load_model(str(biased), EngineConfig.of(**{**SETTINGS, **settings}))

    exact = scored(load())
    balanced = load(kv_dtype="int8")
    error = (scored(balanced, kv_dtype="int8") - exact).abs().max()
    torch.testing.assert_close(scored(balanced), exact, atol=1e-5, rtol=1e-5)
    monkeypatch.setattr(QueryKeyValue, "balance", lambda self: None)
    plain = (scored(load(kv_dtype="int8"), kv_dtype="int8") - exact).abs().max()
    assert error < plain / 5, (error, plain)


def test_balanced_keys_give_scores_of_the_same_bits(biased: Path) -> None:
    """Queries are multiplied by the powers of two by which keys are divided."""
    configs = [EngineConfig.of(**SETTINGS), EngineConfig.of(**SETTINGS, kv_dtype="int8")]
    plain, balanced = (load_model(str(biased), config).model.decoder for config in configs)
    x = torch.randn(3, plain.config.hidden)
    changed = 0
    for one, other in zip(plain.layers, balanced.layers, strict=True):
        shape = one.self_attn.qkv.shape
        heads, dim = shape.heads, shape.head_dim
        products = []
        for layer in (one, other):
            rows = layer.self_attn.qkv(x).view(3, -1, dim)
            keys = rows[:, heads : heads + shape.kv_heads].repeat_interleave(heads // shape.kv_heads, 1)
            products.append(rows[:, :heads] * keys)
        assert torch.equal(*products)
        changed += not torch.equal(one.self_attn.qkv.bias, other.self_attn.qkv.bias)
    assert changed == 2, "only layers with large biases"
