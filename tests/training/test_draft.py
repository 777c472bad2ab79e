"""The unrolled training of the draft layer computes what drafting row by row computes."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from fovea.evaluation.scenes.scene import Turn

pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype")  # norms under autocast

TURNS = [
    Turn("What does the text say, please?", 'The text is "K7Q".', ()),
    Turn("How many stars?", "There are 3 stars.", ()),
]
SIZE = (160, 128)


@pytest.fixture(scope="module")
def small(training: SimpleNamespace) -> Any:
    """A target with one vision layer, random weights."""
    torch.manual_seed(0)
    config = json.loads((training.common.ASSETS / "config.json").read_text())
    config["vision_config"] |= {"depth": 1, "deepstack_visual_indexes": [0]}
    return training.model.Fovea(config).eval()


def packed(training: SimpleNamespace, turns: list[Turn]) -> dict[str, Any]:
    media = training.packing.PromptMedia((SIZE[1] // 32, SIZE[0] // 32))
    sequence = training.packing.branches(training.packer, turns, media, None)
    rng = Random(4)
    scene = training.batches.compose(rng, *SIZE, labels=1)
    pixels = training.batches.fit_image(training.batches.draw(scene), SIZE)
    return dict(training.packing.collate([sequence], [[pixels]]))


def draft_row_by_row(draft: Any, batch: dict[str, Tensor], first: int, steps: int) -> list[Tensor]:
    """The logits of a chain of drafts that begins at row `first`, with one key and value for each row."""
    layer, attention = draft.midlayer, draft.midlayer.self_attn
    segment = batch["segment"][0]
    context = [i for i in range(first + 1) if int(segment[i]) in (0, int(segment[first]))]
    keys, values, logits = [], [], []
    out: Tensor | None = None
    for row in [*context, *range(first + 1, first + steps)]:
        feature = draft.fc(batch["features"][0, row]) if row <= first else out
        embedding = draft.embeddings[batch["following"][0, row]]
        pair = torch.cat((layer.input_layernorm(embedding), layer.hidden_norm(feature)))
        cos, sin = (t[0, 0, 0] for t in draft.rope(batch["positions"][:, :1, row : row + 1]))

        def turned(x: Tensor, cos: Tensor = cos, sin: Tensor = sin) -> Tensor:
            return x * cos + torch.cat((-x[..., 32:], x[..., :32]), dim=-1) * sin

        keys.append(turned(attention.k_proj(pair).view(2, 64)))
        values.append(attention.v_proj(pair).view(2, 64))
        if row < first:
            continue
        query = turned(attention.q_proj(pair).view(4, 64))
        heads = []
        for head in range(4):
            scores = torch.stack([query[head] @ key[head // 2] for key in keys]) / 8
            heads.append(scores.softmax(0) @ torch.stack([value[head // 2] for value in values]))
        x = feature + attention.o_proj(torch.cat(heads))
        out = x + layer.mlp(layer.post_attention_layernorm(x))
        logits.append(F.linear(draft.norm(out), draft.embeddings))
    return logits


@torch.no_grad()
def test_the_unrolled_steps_equal_drafting_row_by_row(training: SimpleNamespace, small: Any) -> None:
    draft = training.draft.Draft(small)
    batch = training.draft.features(small, packed(training, TURNS))
    batch["features"] = batch["features"].float()
    steps = draft(batch, 4)
    rows, chain = batch["rows"][0].tolist(), batch["chain"][0].tolist()
    assert chain.count(0) == 2
    for slot, (row, place) in enumerate(zip(rows, chain, strict=True)):
        depth = min(3, place)
        expected = draft_row_by_row(draft, batch, row - depth, depth + 1)
        torch.testing.assert_close(steps[depth].logits[0, slot], expected[depth], rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_rows_predict_all_tokens_of_an_answer_but_the_first(training: SimpleNamespace, small: Any) -> None:
    batch = training.draft.features(small, packed(training, TURNS[:1]))
    answer = [*training.packer.text(TURNS[0].answer), training.packer.end]
    assert batch["truth"][0].tolist() == answer[1:]
    assert batch["chain"][0].tolist() == list(range(len(answer) - 1))
    states = small.logits(batch["states"].float())
    assert states.shape[:2] == batch["truth"].shape
    lengths = training.draft.answer_lengths(torch.tensor([[0, 1, 2, 0, 1, -1]]))
    assert lengths.tolist() == [[3, 3, 3, 2, 2, 0]]


def test_characters_of_codes_are_printed_in_one_token(training: SimpleNamespace, small: Any) -> None:
    """The loss that leads the attention knows the visual token of each character of a label."""
    rng = Random(2)
    batch = training.draft.label_batch(rng, training.packer, SIZE, 3)
    classes = training.draft.code_tokens(training.packer)
    made = training.draft.features(small, batch, classes)
    is_code = (classes[made["truth"]] > 0) & (made["chain"] >= 0)
    shown = made["printed"].any(-1)
    assert int(shown.sum()) > 4
    assert not (shown & ~is_code & (made["chain"] >= 0)).any()
    slots = set(batch["slots"].tolist())
    length = batch["tokens"].shape[1]
    assert {row * length + at for row, _, at in made["printed"].nonzero().tolist()} <= slots
    assert torch.isfinite(
        training.draft.loss(training.draft.Draft(small), made | {"features": made["features"].float()})
    )


def test_decoding_counts_the_steps(training: SimpleNamespace) -> None:
    right, wrong = [True] * 6, [False] * 6
    assert training.draft.decode([right, right, right], 0, 6)["steps"] == 2
    assert training.draft.decode([wrong, right, right], 0, 6)["steps"] == 6
    assert training.draft.decode([right, wrong, right], 0, 6)["steps"] == 3


def test_the_export_has_the_names_of_eagle3(training: SimpleNamespace, small: Any, tmp_path: Path) -> None:
    draft = training.draft.Draft(small)
    training.draft.export(draft, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert sum(weight.numel() for weight in weights.values()) == 918_528
    assert weights["fc.weight"].shape == (256, 768)
    assert weights["midlayer.self_attn.q_proj.weight"].shape == (256, 512)
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
