"""Every setting has a range. A value outside it is an error before anything is loaded."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
import torch

from fovea.core.errors import ConfigError
from fovea.core.settings import flat_values, settings_of
from fovea.engine.config import MIB, EngineConfig, EngineOptions
from fovea.engine.execute.pool_sizes import host_slots, pool_sizes
from fovea.engine.layers.ranks import ALONE

BOUNDS = {
    "threads": (0, 1024),
    "block_size": (1, 256),
    "kv_cache_mib": (0, 1 << 24),
    "kv_blocks": (0, 1 << 30),
    "max_context": (0, 1 << 24),
    "max_running": (1, 4096),
    "max_step_tokens": (1, 1 << 20),
    "max_step_visual_tokens": (1, 1 << 20),
    "max_queue": (0, 1 << 20),
    "embed_cache_mib": (0, 1 << 24),
    "region_cache_mib": (0, 1 << 24),
    "preprocess_workers": (1, 64),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_ranges_include_both_ends(name: str) -> None:
    low, high = BOUNDS[name]
    for value in (low, high):
        assert flat_values(EngineConfig.of(**{name: value}))[name] == value  # type: ignore[misc]
    for value in (low - 1, high + 1, 1.5, True, "1", None):
        with pytest.raises(ConfigError, match=rf"^{name} is .*; accepted: {low} to {high}") as caught:
            EngineConfig.of(**{name: value})  # type: ignore[misc]
        assert caught.value.param == name


def test_errors_list_the_accepted_words() -> None:
    with pytest.raises(ConfigError, match="dtype is 'int8'; accepted: auto, float32, bfloat16, float16"):
        EngineConfig.of(dtype="int8")
    with pytest.raises(ConfigError, match="device is 'tpu'; accepted: auto, cpu, cuda, cuda:N"):
        EngineConfig.of(device="tpu")
    assert EngineConfig.of(device="cuda:3").model.device == "cuda:3"


@pytest.mark.parametrize("value", ["off", "document", "general", "fast", "dart", "relevance:0.5", "dpp:1"])
def test_policies_of_visual_tokens(value: str) -> None:
    assert EngineConfig.of(visual_tokens=value).visual.visual_tokens == value


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("visual_tokens", "half", "there is no method 'half'; accepted: resize, uniform, "),
        ("visual_tokens", "", "there is no method ''; accepted: resize, "),
        ("visual_tokens", "dart:0", "keep is 0.0; accepted: more than 0, at most 1"),
        ("visual_tokens", "dart:1.5", "keep is 1.5; accepted: more than 0, at most 1"),
        ("visual_tokens", "dart:nan", "keep is nan; accepted: more than 0, at most 1"),
        ("visual_tokens", "dart:few", "'few' is not a share; accepted: more than 0, at most 1"),
        ("visual_tokens", None, "visual_tokens is None; accepted: off, METHOD:SHARE, or a preset"),
        ("visual_tokens", 0.5, "visual_tokens is 0.5; accepted: off, METHOD:SHARE, or a preset"),
        ("degrade_by", "level", "there is no method 'level'; accepted: resize, "),
        ("degrade_by", "fast", "there is no method 'fast'; accepted: resize, "),
    ],
)
def test_policies_are_checked_before_anything_is_loaded(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.of(**{name: value})
    assert caught.value.param == name
    assert message in caught.value.message
    assert caught.value.message.startswith(name)
    assert caught.value.message.count("visual_tokens") <= 1


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().model.dtype = "auto"  # type: ignore[misc]


def test_the_keyword_arguments_are_the_settings() -> None:
    """Type checkers know the flat names by a TypedDict. Only this test keeps it complete."""
    hints = get_type_hints(EngineOptions)
    assert hints == {entry.name: entry.hint for entry in settings_of(EngineConfig)}


def test_a_copy_differs_only_in_the_changed_settings() -> None:
    config = EngineConfig.of(kv_blocks=7, pace=3.0)
    changed = config.changed(pace=0, dtype="float32")
    assert flat_values(changed) == flat_values(config) | {"pace": 0, "dtype": "float32"}
    with pytest.raises(ConfigError, match="unknown setting 'max_queu'; known: "):
        config.changed(max_queu=3)  # type: ignore[call-arg]


def model(kv_bytes: int, positions: int = 1024) -> Any:
    decoder = SimpleNamespace(
        kv_bytes_per_token=lambda itemsize, format: kv_bytes,
        max_positions=positions,
        stateful=False,
        window=None,
        state_bytes=lambda itemsize: 0,
    )
    return SimpleNamespace(
        decoder=SimpleNamespace(config=decoder),
        ranks=ALONE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_the_pool_has_the_configured_size_but_no_more_than_is_useful() -> None:
    assert pool_sizes(EngineConfig.of(kv_blocks=7), model(1)).blocks == 7
    assert pool_sizes(EngineConfig.of(kv_cache_mib=1, block_size=16), model(1024)).blocks == MIB // (
        1024 * 16
    )
    few = EngineConfig.of(kv_cache_mib=1024, max_running=2, block_size=16)
    assert pool_sizes(few, model(1, positions=100)).blocks == 2 * 7
    assert pool_sizes(EngineConfig(), model(4096)).blocks >= 1


def test_a_pool_too_small_for_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_mib: 1 MiB hold no block of"):
        pool_sizes(EngineConfig.of(kv_cache_mib=1), model(MIB))
    with pytest.raises(ConfigError, match=r"free memory allows \d+ MiB, which hold no block of"):
        pool_sizes(EngineConfig(), model(1 << 50))


def test_host_memory_without_cached_prefixes_is_refused() -> None:
    """Once, such a setting silently turned the feature off."""
    assert host_slots(EngineConfig.of(kv_host_mib=1, block_size=16), model(1024)) == MIB // (1024 * 16)
    assert host_slots(EngineConfig.of(prefix_cache=False), model(1024)) == 0
    with pytest.raises(ConfigError, match="kv_host_mib: 1 MiB hold no block of"):
        host_slots(EngineConfig.of(kv_host_mib=1), model(MIB))
    with pytest.raises(ConfigError, match="prefix_cache is off"):
        host_slots(EngineConfig.of(kv_host_mib=1, prefix_cache=False), model(1024))
