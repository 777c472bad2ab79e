"""How an answer ends, and its report: stop strings and ids, lengths, logprobs, bias, usage, timings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fovea import Engine
from fovea.core.types import Completion, Delta, TokenPrompt
from tests.support.engines import ask, assert_idle, engine, picture

QUESTION = ask("What is in the image?", picture(1))
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}


@pytest.fixture(scope="module")
def machine(qwen: Path) -> Iterator[Engine]:
    with engine(qwen) as running:
        yield running
        assert_idle(running)


@pytest.fixture(scope="module")
def plain(machine: Engine) -> Completion:
    return machine.generate(QUESTION, **GREEDY)


def test_the_text_is_the_tokens(machine: Engine, plain: Completion) -> None:
    assert plain.text == machine.tokenizer.decode(plain.token_ids[0])
    assert len(plain.token_ids[0]) == 20
    assert plain.finish_reasons == ("length",)


def test_a_stop_string_ends_the_text_before_it(machine: Engine, plain: Completion) -> None:
    """This holds for a stop string across tokens, too: the text is searched, not the tokens."""
    place = len(plain.text) // 2
    stop = plain.text[place : place + 3]
    answer = machine.generate(QUESTION, **GREEDY, stop=(stop, "never written"))
    assert answer.finish_reasons == ("stop",)
    assert answer.text == plain.text[: plain.text.find(stop)]
    assert plain.token_ids[0][: len(answer.token_ids[0])] == answer.token_ids[0]
    assert len(answer.token_ids[0]) < 20


def test_no_delta_shows_a_part_of_a_stop_string(machine: Engine, plain: Completion) -> None:
    place = len(plain.text) // 2
    stop = plain.text[place : place + 4]
    shown = ""
    for delta in machine.iterate(machine.request(QUESTION, **GREEDY, stop=(stop,))):
        shown += delta.text
        assert plain.text[: plain.text.find(stop)].startswith(shown)


def test_a_stop_string_waits_for_min_tokens(machine: Engine, plain: Completion) -> None:
    stop = plain.text[1:3]
    early = machine.generate(QUESTION, **GREEDY, stop=(stop,))
    assert (early.text, early.finish_reasons) == (plain.text[:1], ("stop",))
    late = machine.generate(QUESTION, **GREEDY, stop=(stop,), min_tokens=20)
    assert (late.text, len(late.token_ids[0])) == (plain.text, 20)


def test_a_stop_id_ends_the_text_and_is_not_shown(machine: Engine, plain: Completion) -> None:
    ids = plain.token_ids[0]
    decode = machine.tokenizer.decode
    first = next(i for i in range(1, 20) if ids[i] not in ids[:i] and decode(ids[i : i + 1]).isalpha())
    answer = machine.generate(QUESTION, **GREEDY, stop_token_ids=(ids[first],))
    assert answer.finish_reasons == ("stop",)
    assert answer.token_ids[0] == ids[: first + 1]
    assert answer.text == decode(ids[:first]) != decode(ids[: first + 1])


def test_the_end_token_ends_unless_it_is_ignored(machine: Engine) -> None:
    end = min(machine.tokenizer.eos_ids)
    params: dict[str, Any] = {**GREEDY, "ignore_eos": False, "logit_bias": {end: 100.0}}
    answer = machine.generate(QUESTION, **params)
    assert (answer.text, answer.token_ids, answer.finish_reasons) == ("", ((end,),), ("stop",))
    ignored = machine.generate(QUESTION, **{**params, "ignore_eos": True})
    assert (ignored.token_ids[0], ignored.finish_reasons) == ((end,) * 20, ("length",))
    assert ignored.text == ""
    written = machine.generate(QUESTION, **{**params, "ignore_eos": True}, skip_special_tokens=False)
    assert written.text == "<|im_end|>" * 20


def test_min_tokens_hold_the_end_token_back(machine: Engine) -> None:
    end = min(machine.tokenizer.eos_ids)
    answer = machine.generate(
        QUESTION, **{**GREEDY, "ignore_eos": False, "logit_bias": {end: 100.0}}, min_tokens=7
    )
    ids = answer.token_ids[0]
    assert (len(ids), ids[-1], end in ids[:-1]) == (8, end, False)


@pytest.mark.parametrize("count", [1, 2, 19])
def test_max_tokens(machine: Engine, plain: Completion, count: int) -> None:
    answer = machine.generate(QUESTION, **{**GREEDY, "max_tokens": count})
    assert answer.token_ids[0] == plain.token_ids[0][:count]
    assert answer.finish_reasons == ("length",)
    assert answer.usage.completion == count


def test_logprobs_name_each_token_and_its_rivals(machine: Engine, plain: Completion) -> None:
    answer = machine.generate(QUESTION, **GREEDY, logprobs=True, top_logprobs=3)
    assert answer.token_ids == plain.token_ids
    assert [entry.id for entry in answer.logprobs[0]] == list(answer.token_ids[0])
    for entry in answer.logprobs[0]:
        shown = entry.text.encode(errors="surrogateescape").decode(errors="replace")
        assert shown == machine.tokenizer.decode([entry.id], skip_special_tokens=False)
        assert len(entry.top) == 3
        assert entry.top[0][0] == entry.id, "greedy takes the most likely"
        assert entry.top[0][2] == pytest.approx(entry.logprob)
        values = [value for _, _, value in entry.top]
        assert values == sorted(values, reverse=True)
        assert all(value <= 0 for value in values)
    assert machine.generate(QUESTION, **GREEDY).logprobs == ((),)


def test_choices_end_one_by_one_and_usage_comes_last(machine: Engine) -> None:
    params = {**GREEDY, "temperature": 1.0, "seed": 3}
    deltas: list[Delta] = list(machine.iterate(machine.request(QUESTION, **params, n=3)))
    assert [bool(delta.usage) for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert sorted(delta.index for delta in deltas if delta.finish_reason) == [0, 1, 2]
    usage, timings = deltas[-1].usage, deltas[-1].timings
    assert usage is not None
    assert usage.completion == 60
    assert usage.prompt == len(asyncio.run(machine.tokenize(QUESTION)))
    assert usage.image == 6
    assert timings is not None
    assert timings.ttft > 0
    assert min(timings.queue, timings.encode, timings.prefill, timings.decode, timings.preprocess) >= 0


def test_a_bare_continuation_of_ids(machine: Engine) -> None:
    ids = tuple(asyncio.run(machine.tokenize(ask("the red circle"))))
    assert (
        machine.generate(TokenPrompt(ids), **GREEDY).token_ids
        == machine.generate(ask("the red circle"), **GREEDY).token_ids
    )


def test_greedy_is_the_default_if_the_checkpoint_says_so(machine: Engine, plain: Completion) -> None:
    """The tiny checkpoint's generation_config.json says do_sample: false."""
    assert machine.sampling({}).greedy
    params = {name: value for name, value in GREEDY.items() if name != "temperature"}
    assert machine.generate(QUESTION, **params).token_ids == plain.token_ids


async def test_a_stream_gives_what_generate_gives(machine: Engine, plain: Completion) -> None:
    deltas = [delta async for delta in machine.stream(QUESTION, **GREEDY)]
    assert "".join(delta.text for delta in deltas) == plain.text
    assert tuple(i for delta in deltas for i in delta.token_ids) == plain.token_ids[0]


def test_leaving_early_frees_everything_before_the_next_step(machine: Engine) -> None:
    deltas = machine.iterate(machine.request(QUESTION, **{**GREEDY, "max_tokens": 3000}, n=2))
    next(deltas)
    deltas.close()  # type: ignore[attr-defined]
    assert_idle(machine)


async def test_leaving_a_stream_early_frees_everything_too(machine: Engine) -> None:
    stream = machine.stream(QUESTION, **{**GREEDY, "max_tokens": 3000}, n=2)
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert_idle(machine)


def test_a_token_has_exactly_its_own_bytes(machine: Engine) -> None:
    """Once, half a character was reported as the three bytes of a replacement character."""
    text = "né 図🙂 x"
    ids = machine.tokenizer.encode(text)
    parts = [machine.tokenizer.token_bytes(token) for token in ids]
    assert b"".join(parts) == text.encode()
    assert any(part.decode(errors="replace").endswith("\ufffd") for part in parts)
    assert machine.tokenizer.token_bytes(2) == b"<|im_end|>"
