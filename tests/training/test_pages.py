"""The targets that fovea-page is trained on, for a page of two lines made by hand."""

from __future__ import annotations

import importlib
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fovea.evaluation.documents.content import Content, Field
from fovea.evaluation.documents.page import Page, Word
from fovea.evaluation.scenes.sample import Turn
from fovea.relevance.reading import couple_by_reading
from fovea.relevance.realizing import Layout, View
from fovea.relevance.regions import Region

WHOLE = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)


@pytest.fixture(scope="module")
def pages(training: SimpleNamespace) -> SimpleNamespace:
    """The modules of training/pages."""
    names = ("asked", "config", "glyphs", "heads", "letters", "looks", "parts", "read", "spelling", "start")
    names += ("state", "tower_start", "trainer")
    modules = {name: importlib.import_module(f"pages.{name}") for name in names}
    packer = training.packing.Packer(modules["config"].tokenizer())
    return SimpleNamespace(**modules, packer=packer, model=training.model)


def word(text: str, x: float, y: float, at: str = "") -> Word:
    """A word with characters 8 pixels wide and a line 20 pixels high."""
    starts = tuple(x + 8.0 * index for index in range(len(text)))
    return Word(text, (x, y, x + 8 * len(text), y + 20), starts, at)


def page() -> Page:
    words = (
        word("Total", 4, 4),
        word("12.50", 52, 4, "field:total"),
        word("paid", 4, 36),
        word("far", 120, 36),
    )
    content = Content("receipt", "Shop", (Field("total", "Total", "12.50", "amount"),))
    image = Image.new("RGB", (160, 64), "white")
    return Page("test", "receipt_test", "Test", image, content, words, {"field:total": (52, 4, 92, 24)})


def text_at(pages: SimpleNamespace, targets: dict[str, Any], row: int, column: int) -> str:
    """The stretch that is to be read from a patch, with "|" at its end and "_" where nothing is predicted."""
    glyphs = pages.glyphs
    token, patch = (row // 2) * 5 + column // 2, (row % 2) * 2 + column % 2
    names = {number: character for character, number in glyphs.NUMBER.items()}
    names |= {glyphs.END: "|", -1: "_", glyphs.NOTHING: ""}
    return "".join(names[int(code)] for code in targets["text"][token, patch])


def test_a_patch_holds_the_text_that_begins_in_it(pages: SimpleNamespace) -> None:
    """The stretch runs on over a space of the line, and ends where the run of words ends."""
    targets = pages.glyphs.dense(pages.glyphs.glyphs(page().words), WHOLE, (160, 64))
    assert targets["text"].shape == (10, 4, 4)
    assert text_at(pages, targets, 0, 0) == "Tota"
    assert text_at(pages, targets, 0, 1) == "tal "
    assert text_at(pages, targets, 0, 3) == "12.5"
    assert text_at(pages, targets, 2, 0) == "paid"
    assert text_at(pages, targets, 2, 7) == "far|"
    assert text_at(pages, targets, 1, 4) == "___"
    flags = targets["flag"]
    # A run begins at Total, a word of it at 12.50, and runs of their own at paid and far.
    assert [int(flags[t, p]) for t, p in ((0, 0), (0, 1), (1, 1), (5, 0), (8, 1))] == [3, 1, 2, 3, 3]


def test_the_targets_move_with_the_picture(pages: SimpleNamespace) -> None:
    """Half the size: the same characters, in a quarter of the patches, and none beyond the picture's edge."""
    half = (0.5, 0.0, 0.0, 0.0, 0.5, 0.0)
    targets = pages.glyphs.dense(pages.glyphs.glyphs(page().words), half, (64, 32))
    assert targets["text"].shape == (2, 4, 4)
    names = {number: character for character, number in pages.glyphs.NUMBER.items()}
    first = [names.get(int(code), "?") for code in targets["text"][0, 0]]
    assert "".join(first) == "Tota"
    # far begins at 60 pixels, and its second character lies beyond the edge at 64.
    assert [int(code) for code in targets["text"][1, 3][:3]] == [pages.glyphs.NUMBER["f"], -1, -1]


def test_what_is_cut_off_is_not_asked_for(pages: SimpleNamespace) -> None:
    shown = pages.asked.seen(page(), WHOLE, (96, 64))
    assert [one.text for one in shown.words] == ["Total", "12.50", "paid"]
    assert "field:total" in shown.places
    cut = pages.asked.seen(page(), (1.0, 0.0, -56.0, 0.0, 1.0, 0.0), (96, 64))
    assert "field:total" not in cut.places
    assert not pages.asked.ask(Random(1), cut, 3, {"field": 1.0})


def test_only_values_of_a_json_answer_are_learnt(pages: SimpleNamespace) -> None:
    """The grammar writes the keys, so the model is not made to guess them."""
    answer = '{"total":"12.50","paid_by":null}'
    sequences: list[Any] = []
    pages.asked.add(
        sequences,
        pages.packer,
        [Turn("Fill in the JSON.", answer, (answer,))],
        pages.asked.whole_media((160, 64)),
    )
    [sequence] = sequences
    learnt = pages.packer.tokenizer.decode([sequence.tokens[index] for index in sequence.target_indices])
    assert learnt == '"12.50"null}'
    assert len(sequence.groups) == len(sequence.target_indices)


def test_a_text_answer_is_learnt_as_a_whole(pages: SimpleNamespace) -> None:
    sequences: list[Any] = []
    pages.asked.add(
        sequences, pages.packer, [Turn("total?", "12.50 €", ("12.50 €",))], pages.asked.whole_media((160, 64))
    )
    [sequence] = sequences
    tokens = [sequence.tokens[index] for index in sequence.target_indices]
    assert pages.packer.tokenizer.decode(tokens, skip_special_tokens=False) == "12.50 €<|im_end|>"
    assert len(sequence.slots) == 10
    assert (np.diff(sequence.slots) == 1).all()


def test_an_answer_points_at_its_place_and_a_value_at_its_label(pages: SimpleNamespace) -> None:
    """12.50 begins at (52, 14): in the upper right patch of the second token. Total begins in the first."""
    sequences: list[Any] = []
    boxes = (page().places["field:total"], (4.0, 4.0, 44.0, 24.0))
    turn = Turn("total?", "12.50 €", ("12.50 €",), boxes)
    media = pages.asked.whole_media((160, 64))
    pages.asked.add(sequences, pages.packer, [turn], media, page().words)
    [sequence] = sequences
    [(state, token, patch)] = sequence.points
    assert (sequence.slots.index(token), patch) == (1, 1)
    assert sequence.tokens[state + 1 : state + 3] == pages.packer.text("12"), "the state before the answer"
    start = pages.start
    assert sequence.links == [(sequence.slots[1], sequence.slots[0], start.BESIDE[0])], "in the upper half"
    named, ended = sorted({at for _, at, _ in sequence.asks})
    assert pages.packer.tokenizer.decode(sequence.tokens[named - 2 : ended + 1]) == "total?"
    known = {register: (at, where) for at, register, where in sequence.places if register}
    total = sequence.slots[0]
    assert known == {1: (state, token), 2: (state, total), 3: (state, total), 5: (token, total)}
    letters = pages.packer.text("tot")
    assert sequence.labels == [(sequence.slots[1], 1, *letters), (state, 0, *letters)]
    # Both pairs of heads look at the only label, before the first, second and fourth byte of the answer.
    looks = {(named, start.NAMED), (named, start.ALSO_NAMED)}
    looks |= {(ended, start.NAMED_END), (ended, start.ALSO_NAMED_END)}
    assert {(at - state, *look) for at, *look in sequence.asks} == {
        (later, *look) for later in (0, 1, 3) for look in looks
    }


def test_each_letter_is_read_where_letters_before_it_are_seen(pages: SimpleNamespace) -> None:
    """12 begins in the upper right patch of the second token, .5 and 0 in the upper ones of the third."""
    sequences: list[Any] = []
    turn = Turn("total?", "12.50", ("12.50",), (page().places["field:total"],))
    pages.asked.add(sequences, pages.packer, [turn], pages.asked.whole_media((160, 64)), page().words)
    [sequence] = sequences
    [(state, *_)] = sequence.points
    _, second, third, *_ = sequence.slots
    assert {one for one in sequence.copies if one[2]} == {
        (0, state + 1, second, 3),  # the first of three heads for this patch looks for "1"
        (0, state + 2, second, 4),  # "12"
        (0, state + 3, second, 5),  # "12."
        (0, state + 3, third, 0),  # "."
        (0, state + 4, third, 1),  # ".5"
    }
    empty = [one for one in sequence.copies if not one[2]]
    assert {state for _, state, *_ in empty} == set(range(state + 1, state + 5))
    assert all(
        (layer, at, head) not in {(a, b, d) for a, b, c, d in sequence.copies if c}
        for layer, at, _, head in empty
    )
    places = {(state + 2, 0, second), (state + 3, 0, third), (state + 4, 0, third), (state + 5, 0, third)}
    assert {one for one in sequence.places if one[1] == 0} == places, "where the answer has come to"


def test_a_copied_page_is_read_over_the_ends_of_its_lines(pages: SimpleNamespace) -> None:
    """The end of a run of words is read nowhere, and what follows is not read from the run before."""
    sequences: list[Any] = []
    turn = pages.asked.copied(Random(1), page())
    pages.asked.add(sequences, pages.packer, [turn], pages.asked.whole_media((160, 64)), page().words)
    [sequence] = sequences
    [(state, *_)] = sequence.points
    read = {turn.answer[at - state] for _, at, token, _ in sequence.copies if token}
    assert read == set("Total 12.50paidfar") - {"T", "p", "f"}


def test_each_value_of_a_json_answer_points_at_its_place(pages: SimpleNamespace) -> None:
    sequences: list[Any] = []
    answer = '{"paid_by":null,"total":"12.50"}'
    turn = Turn("JSON", answer, (answer,), (page().places["field:total"],))
    pages.asked.add(sequences, pages.packer, [turn], pages.asked.whole_media((160, 64)), page().words)
    [sequence] = sequences
    [(state, token, _)] = sequence.points
    assert pages.packer.tokenizer.decode(sequence.tokens[state : state + 6]) == '"12.50'
    assert token == sequence.slots[1]
    named = sequence.asks[0][1]
    assert pages.packer.tokenizer.decode(sequence.tokens[named - 3 : named + 1]) == '"tot', "of its key"
    missing = Turn("JSON", answer, (answer,), ((0.0, 40.0, 160.0, 60.0),))
    pages.asked.add(sequences, pages.packer, [missing], pages.asked.whole_media((160, 64)), page().words)
    assert not sequences[-1].points, "the value is not where the evidence is"


def spelled_copy(pages: SimpleNamespace, model: Any) -> float:
    """The share of bytes that text layers predict when they copy the page, without the first two."""
    sequences: list[Any] = []
    text = "Total 12.50\npaid\nfar"
    turn = Turn("Copy all text.", text, (text,))
    pages.asked.add(sequences, pages.packer, [turn], pages.asked.whole_media((160, 64)))
    target = pages.glyphs.dense(pages.glyphs.glyphs(page().words), WHOLE, (160, 64))
    made = pages.asked.together(sequences, [[]], [target])
    batch = {name: torch.from_numpy(np.asarray(value)) for name, value in made.items()}
    with torch.no_grad():
        states, _, _ = model.hidden(batch)
        row, column, token, _ = batch["targets"].unbind(1)
        found = model.logits(states[row, column]).argmax(-1)
    return float((found == token)[2:].float().mean())


def test_the_first_weights_copy_what_was_begun(pages: SimpleNamespace) -> None:
    torch.manual_seed(1)
    begun = pages.letters.Spelled().eval()
    assert spelled_copy(pages, begun) > 0.4
    begun.reset()
    assert spelled_copy(pages, begun) < 0.2


def test_the_heads_of_the_tower_begin_with_the_patches_around(pages: SimpleNamespace) -> None:
    torch.manual_seed(1)
    config = pages.config.page_config(pages.packer.tokenizer)
    model = pages.model.Fovea(config, {})
    pages.tower_start.look_around(model)
    vision = model.model["visual"]
    attention, size = vision.blocks[0].attn, 64
    cos, sin = vision.rope(8, 8, torch.device("cpu"))
    grid = torch.stack(torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij"), -1)
    at = pages.model.merge_order(grid, 8, 8)
    middle = int((at == torch.tensor((4, 4))).all(1).nonzero())
    for head, offset in enumerate(pages.tower_start.AROUND[0]):
        query, key = (
            attention.qkv.bias[part * 256 :][head * size :][:size].expand(64, -1) for part in (0, 1)
        )
        scores = pages.model.rotate(query, cos, sin) @ pages.model.rotate(key, cos, sin).T
        assert (at[scores[middle].argmax()] - at[middle]).tolist() == list(offset)


def test_a_tower_that_spells_is_read_without_error(pages: SimpleNamespace) -> None:
    """Each letter has a place of its own in a token, and the nearest vector there tells which it is."""
    made = pages.glyphs.dense(pages.glyphs.glyphs(page().words), WHOLE, (160, 64))
    target = {name: torch.from_numpy(value) for name, value in made.items()}
    spelling = pages.spelling.Spelling(384)
    tokens = spelling(target["text"], target["flag"])
    right = pages.read.accuracy(spelling, tokens, target)
    assert {name: float(value) for name, value in right.items()} == {"char": 1, "all": 1, "stretch": 1}
    assert float(spelling.silence(tokens)) == 0.0
    losses = pages.read.losses(spelling, tokens, target)
    assert all(float(value) < 0.1 for value in losses.values())
    shifted = pages.read.losses(spelling, tokens.roll(1, 0), target)
    assert all(float(shifted[name]) > 1.0 for name in ("first", "rest", "flag"))


def test_letters_that_differ_in_case_are_alike(pages: SimpleNamespace) -> None:
    """A question names "total" where the page says "Total": the last dimension of labels is not compared."""
    known = pages.spelling.vectors()
    assert known.norm(dim=1).tolist() == pytest.approx([1.0] * len(known), abs=1e-5)
    small, large = (pages.packer.tokenizer.encode(letter).ids[-1] for letter in "tT")
    assert torch.equal(known[small, :-1], known[large, :-1])
    assert float(known[small, -1]) == -float(known[large, -1])
    alike = (known @ known.T).fill_diagonal_(-1)
    assert float(alike.max()) < 0.65


def test_what_is_known_of_a_label_is_compared_without_its_case(pages: SimpleNamespace) -> None:
    """The loss is small if the letters are where they belong, and large if others are."""
    spelling, state = pages.spelling.Spelling(384), pages.state
    states = torch.zeros(1, 2, 384)
    right, wrong = (pages.packer.text(text) for text in ("tot", "dat"))
    for place, token in ((0, 0), (2, 1)):
        letters = spelling.known[torch.tensor(pages.packer.text("Tot"))] * state.KNOWN_LETTER
        at = state.KNOWN[place]
        states[0, token, at : at + 3 * state.CODE] = letters.flatten()
    for letters, low, high in ((right, 0.0, 0.1), (wrong, 3.0, 9.0)):
        rows = torch.tensor([(0, 0, 0, *letters), (0, 1, 2, *letters)])
        assert low <= float(pages.trainer.label_loss(spelling, states, rows)) < high


def test_labels_are_looked_for_beside_and_above(pages: SimpleNamespace) -> None:
    """Before any training, the heads for labels look at the begin of a run of words in their direction.

    On a page of 8 x 12 tokens, words begin at the left edge of rows 1 and 4, and above at (0, 8).
    """
    torch.manual_seed(1)
    model = pages.letters.Spelled().eval()
    text, start = model.model["language_model"], pages.start
    rows, columns = 8, 12
    flag = torch.zeros(rows * columns, 4, dtype=torch.long)
    read = torch.full((rows * columns, 4, pages.glyphs.REACH), -1)
    for row, column in ((1, 3), (4, 3), (0, 8)):
        flag[row * columns + column, 0] = 3
        read[row * columns + column, 0] = torch.tensor([pages.glyphs.NUMBER[one] for one in "Date"])
    states = model.spelling(read, flag)
    grid = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), -1)
    positions = torch.cat((torch.zeros(1, 96, dtype=torch.long), grid.flatten(0, 1).T))[:, None]
    layer, found = text.layers[start.LABEL_LAYER], {}
    attention = layer.self_attn
    cos, sin = (one[0, 0] for one in text.rope(positions))
    normed = layer.input_layernorm(states)
    query = attention.q_norm(attention.q_proj(normed).view(96, attention.heads, -1))
    key = attention.k_norm(attention.k_proj(normed).view(96, attention.kv_heads, -1))
    query, key = (pages.model.rotate(one, cos[:, None], sin[:, None]) for one in (query, key))
    value = 4 * columns + 8
    for name, head in (("beside", start.BESIDE[0]), ("above", start.ABOVE)):
        found[name] = divmod(int((key[:, 0] @ query[value, head]).argmax()), columns)
    assert found == {"beside": (4, 3), "above": (0, 8)}


def lines_of_text(pages: SimpleNamespace, lines: tuple[str, ...], turn: Turn) -> tuple[Any, dict[str, Any]]:
    """The sequence and the batch of a question about lines of text, two rows of tokens apart."""
    words = []
    for number, line in enumerate(lines):
        x = 8.0
        for text in line.split():
            words.append(word(text, x, 8.0 + 64 * number))
            x += 8 * (len(text) + 1)
    size = (320, 64 * len(lines))
    sequences: list[Any] = []
    pages.asked.add(sequences, pages.packer, [turn], pages.asked.whole_media(size))
    target = pages.glyphs.dense(pages.glyphs.glyphs(tuple(words)), WHOLE, size)
    made = pages.asked.together(sequences, [[]], [target])
    return sequences[0], {name: torch.from_numpy(np.asarray(value)) for name, value in made.items()}


def test_bytes_find_where_their_letters_stand(pages: SimpleNamespace) -> None:
    """Before any training: visual tokens know their rows, and the end of a word is found where it stands."""
    torch.manual_seed(1)
    model, state, start = pages.letters.Spelled().eval(), pages.state, pages.start
    lines = ("grand stone house", "white stone mill", "large stone bridge", "clean stone tower")
    sequence, batch = lines_of_text(pages, lines, Turn("mill? tower?", "yes", ("yes",)))
    with torch.no_grad():
        states = model.states(batch, *model.visual(batch))
    places = states.inputs[start.MATCH_LAYER][0, batch["slots"]]
    places = places[:, state.PLACE : state.PLACE + state.CIRCLES] - pages.heads.HALFWAY
    rows = torch.arange(8).repeat_interleave(10)
    angle = (rows + 1) * 0.786
    circle = torch.stack((angle.cos(), angle.sin()), 1)
    assert float((torch.nn.functional.normalize(places[:, :2], dim=1) * circle).sum(1).min()) > 0.9
    found = states.inputs[start.LABEL_LAYER][0, :, state.FOUND : state.FOUND + state.CIRCLES]
    text = [pages.packer.tokenizer.decode(sequence.tokens[: at + 1]) for at in range(len(sequence.tokens))]
    ends = {end: next(at for at, seen in enumerate(text) if seen.endswith(end)) for end in ("mill", "tower")}
    for name, row in (("mill", 2), ("tower", 6)):
        assert int(rows[(places @ found[ends[name]]).argmax()]) == row


def test_a_question_is_asked_only_if_its_evidence_is_kept(pages: SimpleNamespace) -> None:
    held = np.zeros((4, 6), bool)
    held[1, 1:4] = True
    asked = Turn("?", "a", ("a",), ((34, 40, 126, 60),))
    assert pages.parts.answerable(asked, held)
    assert not pages.parts.answerable(asked._replace(focus=((34, 40, 130, 60),)), held)
    assert not pages.parts.answerable(asked._replace(focus=((34, 70, 60, 90),)), held)
    assert not pages.parts.answerable(asked._replace(focus=()), held), "most of the page is missing"
    assert pages.parts.answerable(asked._replace(focus=()), ~held)


def test_targets_of_parts_end_at_the_border_of_their_region(pages: SimpleNamespace) -> None:
    """The encoder of a region cannot see beyond it, and a region below native resolution is not read."""
    left, right = Region(0, 0, 2, 2), Region(0, 2, 2, 3)
    layout = Layout((2, 5), (View(left, (2, 2), (0, 1)), View(right, (1, 2), (0, 1))))
    targets = pages.parts.view_targets(pages.glyphs.glyphs(page().words), layout)
    assert targets["text"].shape == (4, 4, 4)
    names = {number: character for character, number in pages.glyphs.NUMBER.items()} | {-1: "_"}
    assert "".join(names[int(code)] for code in targets["text"][0, 0]) == "Tota"
    assert "".join(names[int(code)] for code in targets["text"][1, 1]) == "12__"
    assert (targets["text"][2:] == -1).all()


def test_the_head_couples_in_training_as_in_the_engine(training: SimpleNamespace) -> None:
    relevance = importlib.import_module("pages.relevance")
    torch.manual_seed(3)
    head = relevance.Head(16)
    rng = np.random.default_rng(3)
    features = rng.normal(size=(5, 7, 16)).astype(np.float32)
    words = rng.normal(size=(4, 16)).astype(np.float32)
    held = rng.random((5, 7)) < 0.6
    with torch.no_grad():
        logits = head(torch.from_numpy(features), torch.from_numpy(held), torch.from_numpy(words))
    coupled = couple_by_reading(head.arrays(), features, held, words)
    assert coupled[held] == pytest.approx(torch.sigmoid(logits).numpy(), abs=1e-5)
    assert (coupled[~held] == 0).all()


def test_the_loss_of_a_look_is_that_of_the_attention(pages: SimpleNamespace) -> None:
    """It is minus the logarithm of the weight that the layer's own attention gives to the target."""
    torch.manual_seed(1)
    model = pages.letters.Spelled().eval()
    text = model.model["language_model"]
    sequences: list[Any] = []
    boxes = (page().places["field:total"], (4.0, 4.0, 44.0, 24.0))
    turns = [Turn("total?", "12.50 €", ("12.50 €",), boxes), Turn("far?", "paid", ("paid",))]
    pages.asked.add(sequences, pages.packer, turns, pages.asked.whole_media((160, 64)), page().words)
    target = pages.glyphs.dense(pages.glyphs.glyphs(page().words), WHOLE, (160, 64))
    made = pages.asked.together(sequences, [[]], [target])
    batch = {name: torch.from_numpy(np.asarray(value)) for name, value in made.items()}
    nats: list[torch.Tensor] = []

    def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
        segment = batch["segment"][0]
        seen = (segment[None] == 0) | (segment[None] == segment[:, None])
        seen &= torch.ones(len(segment), len(segment), dtype=torch.bool).tril()
        scores = q @ k.repeat_interleave(3, 1).mT * q.shape[-1] ** -0.5
        nats.append(-scores.masked_fill(~seen, float("-inf")).log_softmax(-1)[0])
        return (-nats[-1]).exp() @ v.repeat_interleave(3, 1)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(pages.model, "attend", attended)
        states = model.states(batch, *model.visual(batch))
        for name, layer in pages.trainer.LOOKING.items():
            looks, alone = batch[name], name == "points"
            loss = pages.trainer.looking_loss(text, states.inputs, layer, batch, looks, alone=alone)
            _, state, at, head = looks.T
            if not alone:
                expected = nats[layer][head, state, at]
            else:
                pointers = torch.tensor(pages.start.POINTERS)
                others = nats[layer][pointers[:, None], state, 0]
                others[head, torch.arange(len(head))] = 0
                mine = nats[layer][pointers[head], state, at]
                expected = mine + pages.trainer.OTHERS * others.sum(0) / 3
            assert float(loss) == pytest.approx(float(expected.mean()), rel=1e-4)
