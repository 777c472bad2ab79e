"""Parts that the training loops share: attention over packed questions, number formats, and kept weights."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F


def test_packed_questions_attend_to_the_prefix_and_to_themselves(training: SimpleNamespace) -> None:
    """It equals masked attention over the whole sequence, with two questions in the first block."""
    generator = torch.Generator().manual_seed(1)
    prefix, number, block, heads, groups = 5, 2, 4, 4, 2
    length = prefix + number * block
    q, k, v = (torch.randn(2, count, length, 8, generator=generator) for count in (heads, groups, groups))
    branches = torch.tensor([[1, 1, 2, 2], [3, 3, 3, -1]])
    segment = torch.cat((torch.zeros(prefix, dtype=torch.long), branches.flatten()))
    mask = training.model.attention_mask(segment.expand(2, -1), prefix, block)
    found = training.model.attend(q, k, v, mask, prefix)
    allowed = (segment[None] == 0) | (segment[None] == segment[:, None])
    allowed &= torch.ones(length, length, dtype=torch.bool).tril()
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("units", [False, True])
def test_bfloat16_is_used_where_the_processor_computes_in_it(
    units: bool, training: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU without it, a linear layer took 2.7 times as long in bfloat16 as in float32."""
    precision = importlib.import_module("precision")
    monkeypatch.setattr(precision, "has_bf16_units", lambda: units)
    wanted = torch.bfloat16 if units else torch.float32
    assert precision.fast("cpu") == wanted
    assert precision.fast("cuda") == torch.bfloat16
    with precision.autocast("cpu"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == wanted


def test_a_kept_part_is_begun_with_again(
    training: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the averages of that part are kept; the rest of the new model stays as it is."""
    kept, spelling = (importlib.import_module(f"pages.{name}") for name in ("kept", "spelling"))
    file = tmp_path / "tower.safetensors"
    monkeypatch.setitem(kept.FOLLOWED, file, kept.FOLLOWED[kept.TOWER])
    torch.manual_seed(1)
    model: Any = spelling.Reading()
    averages = [torch.full_like(one, 0.5) for one in model.parameters()]
    kept.keep(SimpleNamespace(model=model, averages=averages), file)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    kept.begin(model, file)
    for name, one in model.named_parameters():
        is_tower = ".visual." in name and "deepstack" not in name
        assert bool((one == 0.5).all()) == is_tower, name
        assert is_tower or torch.equal(one, before[name])


def test_an_answer_is_right_if_all_of_its_tokens_are(training: SimpleNamespace) -> None:
    """Two turns of two tokens each, one of them with a wrong second token; counted by kind of question."""
    held_out = importlib.import_module("pages.held_out")
    states = F.one_hot(torch.tensor([[4, 5, 6, 0]]), 8).float()
    model: Any = SimpleNamespace(hidden=lambda _: (states, None, None), logits=lambda rows: rows)
    targets = torch.tensor([(0, 0, 4, 1), (0, 1, 5, 1), (0, 2, 6, 2), (0, 3, 7, 2)])
    pages = [held_out.HeldOut({"targets": targets.numpy()}, {1: "field", 2: "cell"})]
    assert held_out.exact(model, pages, torch.device("cpu")) == {"field": 1.0, "cell": 0.0}
