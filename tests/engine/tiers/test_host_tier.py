"""Encoder outputs that the device evicted are stored in host memory and copied back without the encoder."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fovea.engine.tiers import HostLink, HostTier, SlowerTiers
from fovea.engine.vision.encoding import VisualFeatures
from tests.support.engines import ask, assert_idle, engine, picture

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
CPU = torch.device("cpu")


def features(rows: int = 3, value: float = 1.0, created_at: float = 7.0) -> VisualFeatures:
    embeds = torch.full((rows, 4), value, dtype=torch.bfloat16)
    return VisualFeatures(embeds, (embeds + 1, embeds + 2), created_at)


def test_copies_are_complete_with_every_size_of_the_buffer() -> None:
    """A tensor has 24 bytes. A buffer of 16 bytes copies it in two sections, the second one shorter."""
    for size in (1, 16, 24, 1000):
        link = HostLink(CPU, staging_bytes=size)
        original = features()
        for copy in (link.to_host(original), link.to_device(original)):
            assert copy.created_at == original.created_at
            for ours, theirs in zip(copy.tensors, original.tensors, strict=True):
                assert torch.equal(ours, theirs)
                assert ours.data_ptr() != theirs.data_ptr(), "the copy must have memory of its own"


def test_a_copy_of_columns_has_only_those_columns() -> None:
    """Rows of a wider table are not contiguous."""
    table = torch.arange(24, dtype=torch.float32).view(3, 8)
    copy = HostLink(CPU, 8).to_host(VisualFeatures(table[:, 2:5]))
    assert torch.equal(copy.embeds, table[:, 2:5])


class Slow(HostTier):
    """A host tier whose `put` waits until the test opens the gate."""

    def __init__(self) -> None:
        super().__init__(10_000, HostLink(CPU))
        self.gate = threading.Event()

    def put(self, key: str, features: VisualFeatures) -> None:
        assert self.gate.wait(20)
        super().put(key, features)


def test_an_output_in_the_queue_is_found_without_waiting() -> None:
    host = Slow()
    tiers = SlowerTiers(host)
    original = features()
    tiers.add_evicted("a", original)
    assert tiers.find(["a", "b"]) == {"a"}
    assert tiers.get("a", 3) is original, "it is not copied yet"
    assert tiers.stats()["embed_host_leaving_bytes"] == original.nbytes
    host.gate.set()
    assert tiers.flush(10)
    copy = tiers.get("a", 3)
    assert copy is not None
    assert torch.equal(copy.embeds, original.embeds)
    assert tiers.get("a", 4) is None, "the plan has another number of tokens"
    stats = tiers.stats()
    assert (stats["embed_host_leaving_bytes"], stats["embed_host_misses"]) == (0, 1)
    tiers.close()


def test_without_tiers_nothing_is_stored() -> None:
    tiers = SlowerTiers()
    tiers.add_encoded("a", features())
    tiers.add_evicted("a", features())
    assert tiers.find(["a"]) == frozenset()
    assert tiers.get("a", 3) is None
    assert tiers.stats() == {}
    assert tiers.flush(0)
    tiers.close()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_an_evicted_output_is_read_and_not_encoded(qwen: Path, tmp_path: Path, tier: str) -> None:
    settings = {"host": {"embed_host_mib": 64}, "disk": {"embed_disk_dir": str(tmp_path)}}[tier]
    prompts = [ask("what is it?", picture(seed)) for seed in range(3)]
    with engine(qwen, embed_cache_mib=0, prefix_cache=False, **settings) as machine:
        first = [machine.generate(prompt, **GREEDY).token_ids for prompt in prompts]
        assert machine.parts.slower.flush(10)
        stats = machine.stats()
        assert (stats["images_encoded"], stats[f"embed_{tier}_entries"]) == (3, 3)
        assert [machine.generate(prompt, **GREEDY).token_ids for prompt in prompts] == first
        stats = machine.stats()
        assert (stats["images_encoded"], stats[f"embed_{tier}_hits"], stats[f"embed_{tier}_misses"]) == (
            3,
            3,
            3,
        )
        assert 0 < stats[f"embed_{tier}_bytes"] <= stats[f"embed_{tier}_capacity_bytes"]
        machine.parts.slower.check_integrity()
        machine.clear_caches(tier)  # type: ignore[arg-type]
        assert machine.stats()[f"embed_{tier}_bytes"] == 0
        assert machine.generate(prompts[0], **GREEDY).token_ids == first[0]
        assert machine.stats()["images_encoded"] == 4
        assert_idle(machine)


def test_host_memory_answers_before_the_disk(qwen: Path, tmp_path: Path) -> None:
    both = {"embed_host_mib": 64, "embed_disk_dir": str(tmp_path)}
    prompt = ask("what is it?", picture())
    with engine(qwen, embed_cache_mib=0, prefix_cache=False, **both) as machine:
        for _ in range(2):
            machine.generate(prompt, **GREEDY)
            assert machine.parts.slower.flush(10)
        stats = machine.stats()
        assert (stats["embed_host_hits"], stats["embed_disk_hits"], stats["images_encoded"]) == (1, 0, 1)
        machine.clear_caches("host")
        machine.generate(prompt, **GREEDY)
        assert machine.stats()["embed_disk_hits"] == 1


def test_an_expired_output_is_encoded_again(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = {"embed_host_mib": 64, "embed_disk_dir": str(tmp_path), "embed_ttl_s": 60}
    prompt = ask("what is it?", picture())
    with engine(qwen, prefix_cache=False, **tiers) as machine:
        machine.generate(prompt, **GREEDY)
        machine.generate(prompt, **GREEDY)
        assert machine.parts.slower.flush(10)
        assert machine.stats()["images_encoded"] == 1
        age = 61.0
        real = machine.parts.embeddings._ledger._clock
        folder = machine.parts.slower._disk.tier._store._folder  # type: ignore[union-attr]
        for clocked in (machine.parts.embeddings._ledger, folder):
            monkeypatch.setattr(clocked, "_clock", lambda: real() + age)
        machine.generate(prompt, **GREEDY)
        stats = machine.stats()
        assert (stats["images_encoded"], stats["embed_disk_hits"]) == (2, 0)
        assert_idle(machine)
