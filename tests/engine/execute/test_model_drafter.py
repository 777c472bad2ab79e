"""A draft model beside the target: right where it must be, never in the way, and its blocks all come back."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from fovea import Engine
from fovea.core.errors import CheckpointError, ConfigError, UnsupportedModel
from fovea.core.media import PixelBudget
from fovea.core.types import ChatPrompt
from fovea.engine.execute import model_drafter
from fovea.engine.execute.model_drafter import FORMS, TRIALS, ModelDrafter
from fovea.engine.sequence import Sequence as Answer
from tests.support.checkpoints import write
from tests.support.checkpoints.text import write_text
from tests.support.draft_layers import Drafted, Target, computed, draft_always
from tests.support.engines import all_at_once, ask, assert_idle, engine, picture, shared_model
from tests.support.thorough import examples

TOKENS = 12
LONGER = 24
"""Length of the known answers, which drafts beyond the end of an answer are compared with."""
PROMPTS: dict[str, ChatPrompt] = {
    "text": ask("the red circle is left of the blue square"),
    "other": ask("What is in the image? Describe the picture, please."),
    "short": ask("compare"),
    "picture": ask("What is in the image?", picture(1)),
    "large": ask("and here?", picture(4, 224, 192)),
    "twice": ask("the same?", picture(4, 224, 192), picture(4, 224, 192)),
}
TEXTS = ("text", "other", "short")
Ids = tuple[int, ...]


def greedy(tokens: int = TOKENS) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}


@pytest.fixture(scope="module")
def answers(qwen: Path) -> dict[str, Ids]:
    """Long answers without speculation."""
    with engine(qwen, prefix_cache=False) as machine:
        return {name: machine.generate(each, **greedy(LONGER)).token_ids[0] for name, each in PROMPTS.items()}


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the tokenizer of `qwen` and other weights."""
    return write("qwen3_vl", tmp_path_factory.mktemp("stranger"), seed=1)


def drafting(folder: Path, draft: Path | None = None, **more: Any) -> Engine:
    """Return an engine with a draft model; None: the model itself."""
    options = {"speculate": "model", "speculative_tokens": 3, "draft_model": str(draft or folder)}
    return engine(folder, **{**options, **more})


def drafter_of(machine: Engine) -> ModelDrafter:
    drafter = computed(machine)
    assert isinstance(drafter, ModelDrafter)
    return drafter


def together(machine: Engine, names: Sequence[str]) -> dict[str, Ids]:
    with ThreadPoolExecutor(len(names)) as pool, all_at_once(machine, len(names)):
        jobs = {name: pool.submit(machine.generate, PROMPTS[name], **greedy()) for name in names}
        return {name: job.result().token_ids[0] for name, job in jobs.items()}


def assert_free(machine: Engine) -> None:
    """Assert that neither the engine nor the draft model holds anything."""
    assert_idle(machine)
    drafter = drafter_of(machine)
    assert sorted(drafter.free) == list(range(drafter._memory.kv[0].pages.shape[1]))
    assert not drafter._inputs
    assert not drafter._pixels
    assert not drafter._shadows


def are_right(drafts: Sequence[Drafted], answers: dict[str, Ids]) -> list[bool]:
    """Whether all tokens of each draft are what the answer, whose beginning they follow, goes on with."""
    verdicts = []
    for each in drafts:
        following = [
            whole[at : at + len(each.tokens)]
            for whole in answers.values()
            for at in range(2, TOKENS + 1)
            if each.text[-at:] == whole[:at]
        ]
        verdicts.append(each.tokens in following)
    return verdicts


@pytest.mark.parametrize("schedule", [{}, {"max_step_tokens": 7}, {"block_size": 3}, {"prefix_cache": False}])
def test_a_model_is_always_right_about_itself(
    schedule: dict[str, Any], qwen: Path, answers: dict[str, Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    with drafting(qwen, **schedule) as machine:
        log = draft_always(machine, monkeypatch)
        for _ in range(2):
            assert together(machine, TEXTS) == {name: answers[name][:TOKENS] for name in TEXTS}
        stats = machine.stats()
        assert_free(machine)
    drafts = log.take()
    assert drafts
    assert all(are_right(drafts, answers))
    assert stats["accepted_draft_tokens"] == stats["draft_tokens"] > 6 * 3
    assert stats["engine_steps"] < 2 * TOKENS * len(TEXTS)


@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    names=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3, unique=True),
    step=st.integers(4, 40),
    size=st.sampled_from([1, 3, 16]),
    rows=st.integers(1, 40),
    verified=st.integers(0, 4),
    most=st.integers(1, 6),
)
def test_a_model_is_right_about_itself_under_any_schedule(
    qwen: Path,
    answers: dict[str, Ids],
    names: list[str],
    step: int,
    size: int,
    rows: int,
    verified: int,
    most: int,
) -> None:
    """rows: of prompts that the draft model computes in a step. verified: drafts that a step verifies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_drafter, "MOST_ROWS", rows)
        options: dict[str, Any] = {"max_step_tokens": step, "block_size": size, "speculative_tokens": most}
        with drafting(qwen, kv_blocks=1024, **options) as machine:
            log = draft_always(machine, patch)
            verify(machine, verified)
            assert together(machine, names) == {name: answers[name][:TOKENS] for name in names}
            assert_free(machine)
        assert all(are_right(log.take(), answers))


def verify(machine: Engine, most: int) -> None:
    """Let steps verify at most so many drafts of a sequence."""
    assert machine.parts.speculator is not None

    def choose(sequences: Sequence[Answer]) -> None:
        for seq in sequences:
            seq.keep_drafts(most)

    machine.parts.speculator._budget.choose = choose  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("verified", [0, 1, 2])
def test_drafts_go_on_when_a_step_verifies_a_part_of_them(
    verified: int, qwen: Path, answers: dict[str, Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer goes on with drafts that were not verified, so the model has computed all of it."""
    with drafting(qwen, speculative_tokens=5) as machine:
        log = draft_always(machine, monkeypatch)
        verify(machine, verified)
        answer = machine.generate(PROMPTS["text"], **greedy()).token_ids[0]
        assert answer == answers["text"][:TOKENS]
        assert_free(machine)
    drafts = log.take()
    assert len(drafts) >= (TOKENS - 2) // (1 + verified)
    assert all(each.tokens for each in drafts)
    assert all(are_right(drafts, answers))


def test_a_strange_model_is_mostly_wrong_and_changes_nothing(
    qwen: Path, stranger: Path, answers: dict[str, Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    with drafting(qwen, stranger) as machine:
        log = draft_always(machine, monkeypatch)
        for _ in range(2):
            assert together(machine, list(PROMPTS)) == {name: answers[name][:TOKENS] for name in PROMPTS}
        stats = machine.stats()
        assert_free(machine)
    assert sum(are_right(log.take(), answers)) == 0
    assert stats["draft_tokens"] > 100
    assert stats["accepted_draft_tokens"] < stats["draft_tokens"] / 10


def test_sampled_answers_do_not_change(qwen: Path, stranger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {
        "temperature": 1.1,
        "seed": 5,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "n": 2,
    }
    with engine(qwen) as machine:
        alone = machine.generate(PROMPTS["large"], **options).token_ids
    for draft in (qwen, stranger):
        with drafting(qwen, draft) as machine:
            draft_always(machine, monkeypatch)
            assert machine.generate(PROMPTS["large"], **options).token_ids == alone
            assert_free(machine)


def test_a_preempted_sequence_goes_on_with_its_drafts(
    qwen: Path, answers: dict[str, Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model keeps its blocks meanwhile."""
    with drafting(qwen, block_size=4, kv_blocks=16, max_step_tokens=64) as machine:
        log = draft_always(machine, monkeypatch)
        assert together(machine, TEXTS) == {name: answers[name][:TOKENS] for name in TEXTS}
        assert machine.stats()["preemptions"] > 0
        assert_free(machine)
    assert all(are_right(log.take(), answers))


def test_without_free_blocks_there_are_no_drafts(
    qwen: Path, answers: dict[str, Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    with drafting(qwen, block_size=4) as machine:
        log = draft_always(machine, monkeypatch)
        drafter = drafter_of(machine)
        held = [drafter.free.pop() for _ in range(len(drafter.free) - 9)]
        assert together(machine, TEXTS) == {name: answers[name][:TOKENS] for name in TEXTS}
        assert len(drafter.free) == 9
        drafter.free += held
        assert_free(machine)
    assert all(are_right([each for each in log.take() if each.tokens], answers))


def test_a_client_that_leaves_frees_the_blocks(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def leave(machine: Engine, name: str) -> None:
        stream = machine.stream(PROMPTS[name], **greedy(200))
        count = 0
        async for _ in stream:
            count += 1
            if count == 4:
                break
        await stream.aclose()  # type: ignore[attr-defined]

    async def all_leave(machine: Engine) -> None:
        await asyncio.gather(*(leave(machine, name) for name in PROMPTS))

    with drafting(qwen) as machine:
        draft_always(machine, monkeypatch)
        asyncio.run(all_leave(machine))
        machine.generate(PROMPTS["short"], **greedy(2))
        assert_free(machine)


def naive(draft: Path, prompt: Ids, images: int, form: int, answer: Ids, count: int) -> list[int]:
    """Drafts after a prompt and an answer, by transformers' own language model.

    Each image is the means of `form` tokens of the draft model's tower, at the positions of the first, the
    last, and those between at equal distances. 0: there is no image.
    """
    target = Target(draft)
    loaded = shared_model(draft)
    source = picture(4, 224, 192)
    text = target.read([*prompt, *answer], [source] * images, beyond=count)
    pixels = loaded.processor.process(
        source, loaded.processor.plan(source.width, source.height, PixelBudget())
    )
    rows = loaded.model.encode(pixels).embeds
    means = torch.stack([part.mean(0) for part in torch.split(rows, form)]) if form else rows[:0]
    image_token = target.reference.image_token
    columns: list[int] = []
    embeds: list[torch.Tensor] = []
    at = 0
    while at < len(prompt):
        if prompt[at] != image_token:
            columns.append(at)
            embeds.append(target.table[prompt[at]])
            at += 1
            continue
        columns += np.linspace(at, at + len(rows) - 1, len(means)).astype(int).tolist()
        embeds += list(means)
        at += len(rows)
    drafts: list[int] = []
    for _ in range(count):
        ids = [*answer, *drafts]
        places = [*columns, *range(len(prompt), len(prompt) + len(ids))]
        x = torch.stack([*embeds, *(target.table[token] for token in ids)])[None]
        out = target.decoder(inputs_embeds=x, position_ids=text.positions[:, None, places])
        drafts.append(int((out.last_hidden_state[0, -1] @ target.head.T).argmax()))
    return drafts


@pytest.mark.parametrize("name", ["large", "twice"])
@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_an_image_is_as_defined(
    form: int, name: str, qwen: Path, stranger: Path, answers: dict[str, Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    with drafting(qwen, stranger) as machine:
        log, drafter = draft_always(machine, monkeypatch), drafter_of(machine)
        monkeypatch.setattr(drafter, "_choose", lambda: form)
        assert machine.generate(PROMPTS[name], **greedy(4)).token_ids[0] == answers[name][:4]
        assert_free(machine)
        assert drafter._forms[form][0] == 1
        prompt = machine.parts.preparer.builder.build(PROMPTS[name]).ids
    first = log.take()[0]
    assert first.text == (*prompt, *answers[name][:2])
    with torch.inference_mode():
        images = 2 if name == "twice" else 1
        expected = naive(stranger, tuple(prompt), images, form, answers[name][:2], len(first.tokens))
    assert list(first.tokens) == expected


def test_each_form_is_tried_and_the_best_is_taken(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers without images do not count."""
    with drafting(qwen) as machine:
        draft_always(machine, monkeypatch)
        drafter = drafter_of(machine)
        for _ in range(TRIALS * len(FORMS) + 1):
            machine.generate(PROMPTS["picture"], **greedy(4))
            machine.generate(PROMPTS["text"], **greedy(4))
        counts = {form: count for form, (count, _) in drafter._forms.items()}
        best = max(drafter._forms, key=lambda form: drafter._forms[form][1])
        assert sum(counts.values()) == TRIALS * len(FORMS) + 1
        assert all(count >= TRIALS for count in counts.values())
        assert counts[best] == TRIALS + 1 or len({gain for _, gain in drafter._forms.values()}) > 1
        assert_free(machine)


def test_a_model_for_text_alone_drafts_for_prompts_with_images(
    qwen: Path, tmp_path: Path, answers: dict[str, Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    with drafting(qwen, write_text("qwen3", tmp_path)) as machine:
        log = draft_always(machine, monkeypatch)
        names = ["picture", "twice", "text"]
        assert together(machine, names) == {name: answers[name][:TOKENS] for name in names}
        assert_free(machine)
    assert len(log.take()) >= 3 * (TOKENS - 4)


def test_tokens_that_the_draft_model_lacks_do_no_harm(
    qwen: Path, answers: dict[str, Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    with drafting(qwen) as machine:
        log = draft_always(machine, monkeypatch)
        monkeypatch.setattr(drafter_of(machine), "_rows_of_table", 200)
        answer = machine.generate(PROMPTS["text"], **greedy()).token_ids[0]
        assert answer == answers["text"][:TOKENS]
        assert_free(machine)
    assert log.take()


@pytest.mark.parametrize("kind", ["qwen3_5", "mistral", "gemma3_text"])
def test_a_model_with_windows_or_states_is_refused(kind: str, qwen: Path, tmp_path: Path) -> None:
    draft = write(kind, tmp_path) if kind == "qwen3_5" else write_text(kind, tmp_path)
    with pytest.raises(UnsupportedModel, match="attention to all tokens"):
        drafting(qwen, draft)


def test_a_model_with_another_tokenizer_is_refused(qwen: Path, stranger: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(stranger, draft)
    file = draft / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    plain = [token for token in vocabulary if vocabulary[token] >= 100]
    numbers = [vocabulary[token] for token in plain]
    vocabulary |= dict(zip(plain, numbers[1:] + numbers[:1], strict=True))
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"another tokenizer: \d+%.*99%") as caught:
        drafting(qwen, draft)
    assert caught.value.param == "draft_model"


def test_a_folder_without_a_model_is_refused(qwen: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        drafting(qwen, tmp_path)
