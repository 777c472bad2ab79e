"""Answers of requests that keep a part of their keys and values: what they see, and always the same bits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fovea import Engine
from fovea.core.constraints import AnswerFormat
from fovea.core.errors import ConfigError, InvalidRequest, PromptTooLong
from fovea.core.types import ChatPrompt, Completion, Message, TextPart, TokenPrompt
from fovea.engine.config import EngineConfig
from fovea.engine.execute.kept_rows import NEAR, NEAR_SHARE, attention_scores, best_rows, copy_rows, spread
from fovea.engine.keep import Kept
from fovea.engine.kv.manager import Compaction, KVManager
from fovea.engine.load import LoadedModel, load_model
from fovea.engine.sequence import Sequence
from fovea.kernels.pages import FORMATS, KVPool, gather, store
from tests.support.checkpoints.text import write_text
from tests.support.engines import all_at_once, ask, assert_idle, engine, picture
from tests.support.programs import need_kernels
from tests.support.thorough import others_slow

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "logprobs": True}
NATIVE: dict[str, Any] = {
    "dtype": "bfloat16", "device": "cpu", "kernels": "native", "threads": 1, "kv_blocks": 256,
}  # fmt: skip
WORDS = "the red circle is left of the blue square and what is above this one " * 30


def written(done: Completion) -> list[tuple[int, float | None]]:
    return [(token.id, token.logprob) for token in done.logprobs[0]]


def test_later_tokens_do_not_see_what_was_left_out(tmp_path: Path) -> None:
    """Log probabilities are those of transformers with a mask over the tokens that were left out."""
    folder = write_text("llama", tmp_path)
    prompt = torch.randint(5, 90, (80,), generator=torch.manual_seed(3)).tolist()
    with engine(folder) as machine:
        done = machine.generate(TokenPrompt(tuple(prompt)), kv_keep="window:0.25", max_tokens=8, **GREEDY)
        whole = machine.generate(TokenPrompt(tuple(prompt)), max_tokens=8, **GREEDY)
    assert done.usage.dropped == 60
    ids = torch.tensor([[*prompt, *done.token_ids[0][:-1]]])
    sees = torch.ones(len(ids[0]), len(ids[0]), dtype=torch.bool).tril()
    sees[80:, 4:64] = False
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        logits = model(ids, attention_mask=mask[None, None]).logits[0, 79:].log_softmax(-1)
    for (token, logprob), expected in zip(written(done), logits, strict=True):
        assert logprob == pytest.approx(float(expected[token]), abs=2e-4)
    assert written(done)[0] == written(whole)[0], "the first token sees the whole prompt"
    assert written(done)[1:] != written(whole)[1:]


def test_scores_are_the_largest_attention_weights_of_the_tokens_that_decide() -> None:
    torch.manual_seed(0)
    query, keys = torch.randn(3, 4, 8), torch.randn(10, 2, 8)
    found = attention_scores(query, torch.tensor([7, 8, 9]), keys, 0.5)
    for head in range(2):
        expected = torch.zeros(10)
        for mine in (2 * head, 2 * head + 1):
            weights = torch.zeros(3, 10)
            for row in range(3):
                weights[row, : 8 + row] = (0.5 * keys[: 8 + row, head] @ query[row, mine]).softmax(0)
            expected += weights.amax(0)
        torch.testing.assert_close(found[head], expected)


def test_words_around_a_fact_count_with_it_but_not_images() -> None:
    scores, images = torch.zeros(1, 40), torch.zeros(40, dtype=torch.bool)
    scores[0, 10], scores[0, 30], images[25:] = 1.0, 1.0, True
    found = spread(scores, images)
    near = [at for at in range(40) if found[0, at] == NEAR_SHARE]
    assert near == [*range(10 - NEAR, 10), *range(11, 11 + NEAR)]
    assert found[0, 10] == found[0, 30] == 1.0
    assert found.sum() == 2 + 2 * NEAR * NEAR_SHARE


def test_the_first_and_last_rows_are_kept_and_kinds_get_their_numbers() -> None:
    scores = torch.rand(2, 60, generator=torch.manual_seed(1))
    visual = torch.zeros(60, dtype=torch.bool)
    visual[10:40] = True
    rows = best_rows(scores.clone(), visual, Kept(60, visual=5, text=15))
    for head in range(2):
        images, others = rows[head, :5].tolist(), rows[head, 5:].tolist()
        assert images == sorted(scores[head, 10:40].topk(5).indices.add(10).tolist())
        assert others == sorted(others)
        assert {0, 1, 2, 3, *range(52, 60)} <= set(others)
        rest = (*range(4, 10), *range(40, 52))
        best = sorted(rest, key=lambda row: -float(scores[head, row]))[:3]
        assert set(others) - {0, 1, 2, 3, *range(52, 60)} == set(best)


@pytest.mark.parametrize("kind", ["auto", "int8", "fp8"])
def test_rows_are_copied_head_by_head_even_onto_their_own_blocks(kind: str) -> None:
    format = FORMATS.get(kind)
    pool = KVPool((2, 6, 4), 3, 8, torch.bfloat16, format)
    torch.manual_seed(0)
    for layer in range(2):
        store(pool.kv[layer], torch.randn(24, 2, 3, 8).bfloat16(), torch.arange(24))
    before = [
        gather(pool.kv[layer], torch.tensor([4, 1, 3]), torch.bfloat16).flatten(0, 1) for layer in range(2)
    ]
    rows = torch.stack(
        [torch.stack([torch.randperm(12)[:6].sort().values for _ in range(3)]) for _ in range(2)]
    )
    copy_rows(pool, Compaction((4, 1, 3), (3, 0), "name"), rows)
    for layer in range(2):
        after = gather(pool.kv[layer], torch.tensor([3, 0]), torch.bfloat16).flatten(0, 1)
        for head in range(3):
            assert torch.equal(after[:6, :, head], before[layer][rows[layer, head], :, head])


@pytest.fixture(scope="module")
def bundled() -> LoadedModel:
    need_kernels()
    return load_model(
        "fovea-tiny", EngineConfig.of(dtype="bfloat16", device="cpu", kernels="native", threads=1)
    )


@contextmanager
def running(model: LoadedModel, **settings: Any) -> Iterator[Engine]:
    with Engine(model, EngineConfig.of(**{**NATIVE, **settings})) as machine:
        yield machine
        assert_idle(machine)


PROMPT = ask("Describe the picture. " + WORDS[:700], picture(1, 320, 256), picture(2, 256, 192))
RULES = ("snap:0.25", "snap:160", "text:128", "images:192", "window:128")


@pytest.mark.kernels
@pytest.mark.parametrize("rule", others_slow(RULES, ("snap:0.25", "text:128")))
def test_no_schedule_changes_a_bit(bundled: LoadedModel, rule: str) -> None:
    """Alone, in other chunks, beside others, behind cached prefixes, and after preemptions."""
    ours = {"kv_keep": rule, "max_tokens": 60, **GREEDY}
    everything = ours | {"kv_keep": "all"}
    with running(bundled, prefix_cache=False, embed_cache_mib=0) as machine:
        alone = machine.generate(PROMPT, **ours)
        whole = written(machine.generate(PROMPT, **everything))
    expected = written(alone)
    assert alone.usage.dropped > 100
    assert expected != whole
    arranged: list[dict[str, Any]] = [
        {"max_step_tokens": 33},
        {"max_step_tokens": 100, "kv_blocks": 48},
        {"decode_graphs": "padded"},
    ]
    for settings in arranged:
        with running(bundled, **settings) as machine:
            with ThreadPoolExecutor(4) as pool, all_at_once(machine, 4):
                calls = [pool.submit(machine.generate, PROMPT, **ours) for _ in range(2)]
                calls += [pool.submit(machine.generate, PROMPT, **everything) for _ in range(2)]
            assert [written(call.result()) for call in calls] == [expected] * 2 + [whole] * 2, settings
            again = machine.generate(PROMPT, **ours)
            assert written(again) == expected
            assert again.usage.cached > 0
            assert written(machine.generate(PROMPT, **everything)) == whole


@pytest.mark.kernels
def test_a_single_token_may_decide(bundled: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one after an image does. Its step looks like a decode, but recorded ones tell no queries."""
    monkeypatch.setattr(Sequence, "decides_from", lambda seq, point: point - 1)
    ours = {"kv_keep": "snap:160", "max_tokens": 60, **GREEDY}
    with running(bundled) as machine:
        plain = machine.generate(PROMPT, **ours)
    with running(bundled, decode_graphs="padded") as machine:
        assert written(machine.generate(PROMPT, **ours)) == written(plain)


@pytest.mark.kernels
def test_a_long_chat_continues_from_what_it_has_kept(
    bundled: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds no more rows than its bound, outgrows the pool, and answers as without a cache."""
    most = 0
    extend = KVManager.extend

    def noted(self: KVManager, seq: Sequence, tokens: int) -> None:
        nonlocal most
        extend(self, seq, tokens)
        most = max(most, len(seq.blocks))

    monkeypatch.setattr(KVManager, "extend", noted)
    messages: list[Message] = []
    turns: list[tuple[ChatPrompt, Completion]] = []
    with running(bundled, kv_keep="snap:256", kv_blocks=40) as machine:
        assert machine.info.max_context > 640
        with pytest.raises(PromptTooLong, match="the context of 640"):
            machine.generate(ask("Hello"), kv_keep="all", max_tokens=640)
        for turn in range(8):
            prompt = ask(f"{turn} {WORDS[:200]}", *([picture(turn, 256, 192)] if turn % 3 == 0 else []))
            messages += prompt.messages
            chat = ChatPrompt(tuple(messages))
            done = machine.generate(chat, max_tokens=24, **GREEDY)
            turns.append((chat, done))
            messages.append(Message("assistant", (TextPart(done.text),)))
    assert most == 256 // 16
    assert turns[-1][1].usage.prompt > 500
    assert turns[-1][1].usage.dropped > 300
    for before, (_, done) in zip(turns, turns[1:], strict=False):
        assert done.usage.cached >= before[1].usage.prompt - 48, "a turn continues from the one before"
    with running(bundled, kv_keep="snap:256", prefix_cache=False) as machine:
        for chat, done in turns:
            assert written(machine.generate(chat, max_tokens=24, **GREEDY)) == written(done)


@pytest.mark.kernels
def test_forced_tokens_of_a_form_stop_before_a_point(bundled: LoadedModel) -> None:
    """Drafts once ran past the point, or were the last token before it: then the request failed."""
    form = AnswerFormat.json_schema(
        {
            "type": "object",
            "properties": {f"a_rather_long_name_{n}": {"enum": ["yes", "no"]} for n in range(4)},
            "required": [f"a_rather_long_name_{n}" for n in range(4)],
            "additionalProperties": False,
        }
    )
    with running(bundled) as machine:
        encode = machine.tokenizer.encode_plain
        for length in range(84, 128, 4):
            prompt = TokenPrompt(tuple(encode(WORDS)[:length]))
            ours: dict[str, Any] = {"temperature": 0, "max_tokens": 120, "format": form}
            done = machine.generate(prompt, kv_keep="snap:128", **ours)
            assert list(json.loads(done.text)) == [f"a_rather_long_name_{n}" for n in range(4)]
            assert done.usage.dropped > 0


def test_logprobs_of_a_prompt_are_told_once(tmp_path: Path) -> None:
    """The tokens that decide may be the prompt's. Computed again, they replaced all log probabilities."""
    prompt = TokenPrompt(tuple(torch.randint(5, 90, (120,), generator=torch.manual_seed(3)).tolist()))
    with engine(write_text("llama", tmp_path)) as machine:
        for rule in ("all", "snap:128"):
            done = machine.generate(prompt, kv_keep=rule, max_tokens=30, prompt_logprobs=0, **GREEDY)
            assert sum(each is not None for each in done.prompt_logprobs) == 119, rule
        both = machine.generate(prompt, kv_keep="snap:0.25", max_tokens=4, n=2, **GREEDY)
        assert both.usage.dropped == 2 * 90, "of both choices"


@pytest.mark.parametrize("kind", others_slow(("windowed", "crossing", "tiled"), ("windowed",)))
def test_a_share_works_with_windows_and_images_outside_of_the_prompt(
    kind: str, request: pytest.FixtureRequest
) -> None:
    prompt = ask(WORDS[:300], picture(1))
    ours = {"kv_keep": "text:0.3", "max_tokens": 12, **GREEDY}
    with engine(request.getfixturevalue(kind)) as machine:
        first = machine.generate(prompt, **ours)
        assert first.usage.dropped > 0
        assert machine.generate(prompt, **ours).token_ids == first.token_ids
        assert_idle(machine)


def test_a_model_that_cannot_leave_out_tokens_says_so(hybrid: Path, windowed: Path) -> None:
    with engine(hybrid) as machine, pytest.raises(InvalidRequest, match="layers with a state"):
        machine.generate(ask("Hello"), kv_keep="snap:0.5")
    with engine(windowed) as machine, pytest.raises(InvalidRequest, match="a sliding window"):
        machine.generate(ask("Hello"), kv_keep="snap:512")
    with pytest.raises(ConfigError, match="layers with a state"), engine(hybrid, kv_keep="snap:0.5"):
        pass
    with pytest.raises(ConfigError, match="kv_keep is 'snop:0.5'; did you mean 'snap'"):
        EngineConfig.of(kv_keep="snop:0.5")
