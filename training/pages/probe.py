"""Tells what the text layers of fovea-page do on held-out pages, with all letters given.

    python -m pages.probe                     # those in the repository
    python -m pages.probe --run runs/page     # those of a training by `pages.letters`

It prints the share of letters that are right, each after the right ones before it: by kind of question and
the letter's number in the answer, and by whether the letters before it tell what follows. Then it prints the
mean weight that heads give to where they should look.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from loop import tensors
from packing import Packer
from pages.config import folder, tokenizer
from pages.glyphs import END, NUMBER, REACH
from pages.held_out import HeldOut, held_out_pages
from pages.join import adopt
from pages.kept import TEXT, begin
from pages.letters import Spelled
from pages.start import POINTERS
from pages.trainer import LOOKING, looks_of
from precision import autocast

FIRST, NEXT = (0, 1, 2, 3), (4, 8, 16)
"""The letters of an answer that are counted alone, and where ranges of later ones begin."""
COPIED = ("field", "cell", "row", "line", "title", "bar")
"""The kinds of questions whose answers stand on the page as they are."""


@dataclass(frozen=True)
class Letter:
    """A letter of an answer. before: the answer up to it. hit: whether it is the most likely one there."""

    kind: str
    before: str
    text: str
    hit: bool


@torch.no_grad()
def letters(model: Spelled, page: HeldOut) -> tuple[list[Letter], dict[str, list[float]]]:
    """The letters of all answers about a page, and the weights of heads on their targets."""
    made = tokenizer()
    end = made.token_to_id("<|im_end|>")
    there = tensors(page.batch)
    with autocast("cpu"):
        states = model.states(there, *model.visual(there))
        row, column, token, group = there["targets"].unbind(1)
        found = model.logits(states.last[row, column]).argmax(-1)
    answers: defaultdict[int, str] = defaultdict(str)
    read: list[Letter] = []
    for number, right, hit in zip(group.tolist(), token.tolist(), (found == token).tolist(), strict=True):
        text = "\n" if right == end else made.decode([right])
        read.append(Letter(page.kinds[number], answers[number], text, hit))
        answers[number] += text
    text_layers = model.model["language_model"]
    asked = dict(zip(column.tolist(), (page.kinds[number] for number in group.tolist()), strict=True))
    weights: dict[str, list[float]] = {}
    for name, layer in LOOKING.items():
        looks = there[name].clone()
        if name == "points":
            looks[:, 3] = torch.tensor(POINTERS)[looks[:, 3]]
        nats = looks_of(text_layers, states.inputs, layer, there, looks)
        for (_, state, *_), one in zip(looks.tolist(), torch.cat(nats).tolist() if nats else (), strict=True):
            kind = f"{name} of {asked[state]}" if name == "points" else name
            weights.setdefault(kind, []).append(math.exp(-one))
    return read, weights


def stretches(page: HeldOut) -> list[str]:
    """The text from each patch on, with a line break for the end of a run of words."""
    names = {number: character for character, number in NUMBER.items()} | {END: "\n"}
    rows = page.batch["text"].reshape(-1, REACH).tolist()
    return ["".join(names.get(code, "") for code in row) for row in rows if row[0] > 0]


def context(before: str, right: str, page: list[str]) -> str:
    """How well the letters before tell what follows, if one looks for the longest stretch of them."""
    longest, follow = 0, Counter[str]()
    for stretch in page:
        for at in range(1, len(stretch)):
            alike = 0
            while alike < min(at, len(before)) and stretch[at - 1 - alike] == before[-1 - alike]:
                alike += 1
            if alike > longest:
                longest, follow = alike, Counter()
            if alike and alike == longest:
                follow[stretch[at]] += 1
    if not follow[right]:
        return f"{longest} letters found, but not what follows"
    return (
        f"{longest} letters found, {'and only this follows' if len(follow) == 1 else 'and others follow too'}"
    )


def table(rows: dict[str, list[bool]]) -> Iterator[str]:
    for name, some in sorted(rows.items()):
        yield f"  {name:52} {sum(some) / len(some):6.1%} of {len(some)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", default="")
    run = parser.parse_args().run
    model = Spelled().eval()
    if run:
        adopt(model, folder(run) / "letters.pt")
    else:
        begin(model, TEXT)
    by_number: defaultdict[str, list[bool]] = defaultdict(list)
    by_context: defaultdict[str, list[bool]] = defaultdict(list)
    looked: defaultdict[str, list[float]] = defaultdict(list)
    for page in held_out_pages(Packer(tokenizer())):
        read, weights = letters(model, page)
        shown = stretches(page)
        for letter in read:
            number = len(letter.before)
            start = number if number in FIRST else max(one for one in NEXT if one <= number)
            by_number[f"{letter.kind}, letter {start + 1:2}{'' if number in FIRST else ' on'}"].append(
                letter.hit
            )
            if letter.kind in COPIED and number >= REACH - 1:
                by_context[context(letter.before, letter.text, shown)].append(letter.hit)
        for name, some in weights.items():
            looked[name] += some
    print("letters by kind of question", *table(by_number), sep="\n")
    print("letters of copied answers by what stands on the page", *table(by_context), sep="\n")
    for name, some in looked.items():
        print(f"{name}: weight {sum(some) / len(some):.2f} of {len(some)}")


if __name__ == "__main__":
    main()
