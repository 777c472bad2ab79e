"""The decoder of Gemma 4 equals transformers', for each of its published kinds at tiny sizes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from fovea.core.errors import UnsupportedModel
from fovea.engine.layers.decoder import Decoder
from fovea.engine.layers.linear import checkpoint_targets
from fovea.engine.layers.step import DecoderMemory, DecoderPlan
from fovea.engine.models.targets import canonical
from fovea.engine.models.text import decoder_config, text_renames, unused_tensors
from fovea.kernels.attention import AttentionPlan, Chunk

hf = pytest.importorskip("transformers")
LENGTH, BLOCK = 30, 16
ROWS = 3
"""Rows that are compared at the end of the prompt when not all of them are read."""

KINDS: dict[str, dict[str, Any]] = {
    "small": {"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 16},
    "large": {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
    "experts": {
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
        "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24,
    },
    "plain": {"hidden_size_per_layer_input": 16},
}  # fmt: skip
"""Settings of E2B and E4B, of 31B, of 26B-A4B, and of none of them."""


def text_config(**settings: Any) -> Any:
    shape = {
        "vocab_size": 90, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32,
        "sliding_window": 12, "vocab_size_per_layer_input": 90, "final_logit_softcapping": 30.0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "max_position_embeddings": 512,
    }  # fmt: skip
    return hf.Gemma4TextConfig(**(shape | settings))


def reference(config: Any) -> Any:
    torch.manual_seed(5)
    model = hf.Gemma4ForCausalLM(config).eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name or name.endswith(("scale", "layer_scalar")) and "embed" not in name:
            tensor.data.uniform_(0.5, 1.5)
    return model


def decoder_of(model: Any, config: Any) -> Decoder:
    decoder = Decoder(decoder_config(config, tied=True))
    targets = dict(checkpoint_targets(decoder, "decoder."))
    renames = [(re.compile(pattern), replacement) for pattern, replacement in text_renames(config)]
    unused = [re.compile(pattern) for pattern in unused_tensors(config)]
    for name, tensor in model.state_dict().items():
        name = canonical(name.replace("model.", "model.language_model.", 1), renames)
        if name.startswith("decoder.") and not any(pattern.search(name) for pattern in unused):
            targets.pop(name).copy_(tensor)
    assert not targets
    return decoder


def plan_of(decoder: Decoder) -> DecoderPlan:
    table = torch.arange(-(-LENGTH // BLOCK))
    plans = []
    for group in decoder.config.kv_groups:
        ends = torch.arange(LENGTH) + 1
        limits = None
        if group.window is not None:
            limits = torch.stack(((ends - group.window).clamp(min=0), ends), dim=1)
        plans.append(AttentionPlan(torch.arange(LENGTH), (), (Chunk(0, LENGTH, 0, table, limits),)))
    return DecoderPlan(tuple(plans))


@pytest.mark.parametrize("read", [None, ROWS])
@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_equal_those_of_transformers(kind: str, read: int | None) -> None:
    config = text_config(**KINDS[kind])
    model = reference(config)
    decoder = decoder_of(model, config)
    ids = torch.arange(LENGTH) * 7 % 90
    count = -(-LENGTH // BLOCK)
    blocks = (count,) * len(decoder.config.kv_groups)
    memory = DecoderMemory.allocate(decoder.config, blocks, BLOCK, 0, torch.float32, torch.device("cpu"))
    x = decoder.embed(ids)
    with torch.inference_mode():
        hidden = decoder(
            x,
            torch.arange(LENGTH),
            memory,
            plan_of(decoder),
            read=None if read is None else torch.arange(LENGTH - read, LENGTH),
            per_layer=decoder.layer_embeddings(ids, x, None),
        )
        expected = model.model(ids[None]).last_hidden_state[0]
    torch.testing.assert_close(decoder.norm(hidden), expected[-len(hidden) :], rtol=1e-4, atol=1e-4)


def test_layers_that_read_the_keys_of_others_use_no_memory() -> None:
    own = decoder_config(text_config(**KINDS["plain"]), tied=True)
    shared = decoder_config(text_config(**KINDS["small"]), tied=True)
    assert [len(group.layers) for group in own.kv_groups] == [2, 4]
    assert [len(group.layers) for group in shared.kv_groups] == [1, 2]
    assert shared.places == ((1, 0), (1, 1), (0, 0), (1, 1), (1, 1), (0, 0))
    assert shared.kv_bytes_per_token(2) * 2 == own.kv_bytes_per_token(2)


def test_rows_of_images_get_the_padding_embedding() -> None:
    """An image's token has no word of its own in the table."""
    config = text_config(**KINDS["plain"])
    decoder = decoder_of(reference(config), config)
    ids, x = torch.tensor([3, 4, 5]), torch.randn(3, 64)
    got = decoder.layer_embeddings(ids, x, torch.tensor([1]))
    assert got is not None
    torch.testing.assert_close(got, decoder.layer_embeddings(torch.tensor([3, 0, 5]), x, None))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"layer_types": ["full_attention"] * 5 + ["chunked_attention"]}, "chunked_attention"),
    ],
)
def test_unsupported_settings_are_named(settings: dict[str, Any], named: str) -> None:
    config = text_config(**KINDS["plain"])
    for key, value in settings.items():
        setattr(config, key, value)
    with pytest.raises(UnsupportedModel, match=named):
        decoder_config(config, tied=True)
