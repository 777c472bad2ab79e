"""Every rule of the checker is broken once, by an answer that breaks this rule alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.chaos.accounting import Receipt, compare_parts, compare_receipts, compare_sums
from tests.chaos.answers import read
from tests.chaos.batches import check_batch
from tests.chaos.checker import Context, Judgement, judge
from tests.chaos.client import Ending, Outcome
from tests.chaos.items import Item
from tests.chaos.levels import Level, compare
from tests.chaos.orders import Api, Order, secret

MARKER, KNOWN, OTHER = "chaos-a-1", "There are 3 stars.", 'The text is "B6F63".'
USAGE = {
    "prompt_tokens": 90, "completion_tokens": 7, "total_tokens": 97,
    "prompt_tokens_details": {"cached_tokens": 16, "image_tokens": 64},
}  # fmt: skip
KEYS = ("fovea-key-of-tenant-a",)
QUIET = Context(KNOWN, frozenset((OTHER,)), KEYS)
KILLED = Context(KNOWN, frozenset((OTHER,)), KEYS, active=frozenset(("kill engine",)))
DAMAGED = Context(KNOWN, active=frozenset(("engine flip-response",)))


def order(api: Api = "chat", media: str = "", *, stream: bool = False) -> Order:
    return Order(MARKER, "a", "image", api, stream, Item("one", "How many?"), media)


def outcome(
    body: bytes | dict[str, Any], status: int = 200, ending: Ending = "complete", **headers: str
) -> Outcome:
    given = {"x-request-id": MARKER} | {
        name.replace("_", "-"): value for name, value in headers.items() if value
    }
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Outcome(0.0, 1.0, ending, status, given, data)


def whole(text: str = KNOWN, finish: str = "stop") -> dict[str, Any]:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
    return {"id": f"chatcmpl-{MARKER}-1", "choices": [choice], "usage": USAGE}


def events(*texts: str, end: str = "data: [DONE]\n\n") -> bytes:
    chunks = [{"id": f"chatcmpl-{MARKER}-1", "choices": [{"delta": {"content": text}}]} for text in texts]
    return ("".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + end).encode()


def error(message: str = "no backend accepts requests", **fields: Any) -> dict[str, Any]:
    return {
        "error": {"message": message, "type": "server_error", "param": None, "code": "no_backend"} | fields
    }


def rules(judgement: Judgement) -> list[str]:
    return [violation.rule for violation in judgement.violations]


def test_right_answers_break_no_rule() -> None:
    streamed = judge(order(stream=True), outcome(events("There are ", "3 stars.")), QUIET)
    assert (streamed.verdict, rules(streamed)) == ("ok", [])
    complete = judge(order(), outcome(whole()), QUIET)
    assert (complete.verdict, rules(complete)) == ("ok", [])
    assert complete.answer is not None
    assert complete.answer.usage == USAGE
    fewer = judge(order(), outcome(whole("Two."), x_fovea_degraded="detail=low"), QUIET)
    assert (fewer.verdict, rules(fewer)) == ("degraded", [])
    stored = dict(whole(), id="chatcmpl-of-another-request")
    assert rules(judge(order(), outcome(stored, x_fovea_cache="hit"), QUIET)) == []


def test_answers_of_the_other_apis_are_read() -> None:
    message = {
        "id": "msg_1", "content": [{"type": "text", "text": KNOWN}], "stop_reason": "end_turn", "usage": {},
    }  # fmt: skip
    assert judge(order("messages"), outcome(message), QUIET).verdict == "ok"
    part = {"type": "output_text", "text": KNOWN}
    response = {"id": "resp_1", "status": "completed", "output": [{"type": "message", "content": [part]}]}
    assert judge(order("responses"), outcome(response), QUIET).verdict == "ok"
    lines = [
        {"type": "message_start", "message": {"id": "msg_1"}},
        {"type": "content_block_delta", "delta": {"text": KNOWN}},
        {"type": "message_delta", "usage": {"output_tokens": 7}},
        {"type": "message_stop"},
    ]
    stream = "".join(f"event: {line['type']}\ndata: {json.dumps(line)}\n\n" for line in lines).encode()
    assert judge(order("messages", stream=True), outcome(stream), QUIET).verdict == "ok"
    lines = [
        {"type": "response.created", "response": {"id": "resp_1"}},
        {"type": "response.output_text.delta", "delta": KNOWN},
        {"type": "response.completed", "response": {"usage": {"output_tokens": 7}}},
    ]
    stream = "".join(f"data: {json.dumps(line)}\n\n" for line in lines).encode()
    assert judge(order("responses", stream=True), outcome(stream), QUIET).verdict == "ok"
    failed = events("There", end='data: {"type": "error", "error": {"message": "away", "type": "x"}}\n\n')
    assert read("chat", failed, stream=True).error == {"message": "away", "type": "x"}


CASES = {
    "another text": (order(), outcome(whole("There are 4 stars.")), QUIET, ["wrong answer"]),
    "another text, although an engine was killed": (
        order(), outcome(whole("Two.")), KILLED, ["wrong answer"],
    ),
    "the answer of another request": (order(), outcome(whole(OTHER)), QUIET, ["crossing"]),
    "another request's id": (
        order(), outcome(dict(whole(), id="chatcmpl-chaos-b-2")), QUIET, ["crossing"],
    ),
    "another request's head": (order(), outcome(whole(), x_request_id="chaos-b-2"), QUIET, ["crossing"]),
    "a stream that goes wrong in the middle": (
        order(stream=True), outcome(events("There were"), ending="cut"), KILLED, ["wrong answer"],
    ),
    "a stream that is short, with [DONE]": (
        order(stream=True), outcome(events("There are ")), QUIET, ["wrong answer"],
    ),
    "a stream that ends without a mark": (
        order(stream=True), outcome(events("There are ", end="")), KILLED, ["short stream"],
    ),
    "a stream with an error and [DONE]": (
        order(stream=True),
        outcome(events("There", end=f"data: {json.dumps(error())}\n\ndata: [DONE]\n\n")),
        KILLED, ["wrong answer", "short stream"],
    ),
    "a stream that breaks without a fault": (
        order(stream=True), outcome(events("There", end=f"data: {json.dumps(error())}\n\n")), QUIET,
        ["no cause"],
    ),
    "a hang": (order(), Outcome(0.0, 37.0, "timeout"), KILLED, ["hang"]),
    "bytes that are not HTTP": (order(), Outcome(0.0, 1.0, "damaged"), KILLED, ["protocol"]),
    "a connection cut without a fault": (order(), Outcome(0.0, 1.0, "cut"), QUIET, ["no cause"]),
    "a body that is not JSON": (order(), outcome(b'{"id": '), KILLED, ["unreadable"]),
    "an error without a fault": (order(), outcome(error(), 503), QUIET, ["no cause"]),
    "an error while Redis is away": (
        order(), outcome(error(), 503), Context(KNOWN, active=frozenset(("kill redis",))), ["no cause"],
    ),
    "an error that is a page": (order(), outcome(b"<html>", 502), KILLED, ["error body"]),
    "an error without a type": (order(), outcome({"error": {"message": "x"}}, 502), KILLED, ["error body"]),
    "a defect": (order(), outcome(error(), 500), KILLED, ["status"]),
    "a right request is called wrong": (order(), outcome(error(), 400), KILLED, ["status"]),
    "429 without Retry-After": (order(), outcome(error(), 429), KILLED, ["status"]),
    "a trace": (
        order(), outcome(error('Traceback (most recent call last): File "/a"'), 502), KILLED,
        ["secret", "secret"],
    ),
    "a key": (order(), outcome(error(f"key {KEYS[0]}"), 502), KILLED, ["secret"]),
    "the token of a URL": (
        order(media="expired"), outcome(error(secret(MARKER)), 400), Context(None), ["secret"],
    ),
    "an answer about a file that is none": (
        order(media="bomb"), outcome(whole()), Context(None), ["media"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_rule_is_broken_by_an_answer(case: str) -> None:
    asked, came, context, expected = CASES[case]
    judgement = judge(asked, came, context)
    assert rules(judgement) == expected, judgement.violations
    assert judgement.verdict == "wrong"


@pytest.mark.parametrize(
    ("came", "context", "verdict"),
    [
        (outcome(error(), 503), KILLED, "refused"),
        (outcome(error(), 429, retry_after="3"), KILLED, "refused"),
        (Outcome(0.0, 1.0, "cut"), KILLED, "cut"),
        (Outcome(0.0, 37.0, "timeout"), Context(KNOWN, injected=frozenset(("silent",))), "cut"),
        (Outcome(0.0, 0.3, "cancelled"), QUIET, "cancelled"),
        (outcome(b"\xff{}"), DAMAGED, "damaged"),
        (outcome(error(), 400), DAMAGED, "refused"),
        (outcome(error(), 429, retry_after="1"), Context(KNOWN, limited=True), "refused"),
    ],
)
def test_faults_excuse_failures_that_say_so(came: Outcome, context: Context, verdict: str) -> None:
    judgement = judge(order(), came, context)
    assert (judgement.verdict, judgement.violations) == (verdict, [])


def line(**fields: Any) -> dict[str, Any]:
    return {
        "id": MARKER, "model_asked": "m", "status": 200, "backend": "one", "prompt_tokens": 90,
        "visual_tokens": 64, "cached_tokens": 16, "completion_tokens": 7,
    } | fields  # fmt: skip


def test_what_arrived_is_what_was_recorded() -> None:
    receipt = Receipt(MARKER, 1000.0, USAGE)
    assert compare_receipts([receipt], [line()], []) == []
    anthropic = {"input_tokens": 74, "cache_read_input_tokens": 16, "output_tokens": 7}
    assert compare_receipts([Receipt(MARKER, 1000.0, anthropic)], [line()], []) == []
    (wrong,) = compare_receipts([receipt], [line(completion_tokens=8)], [])
    assert "'completion_tokens': (7, 8)" in wrong.detail
    (twice,) = compare_receipts([receipt], [line(), line()], [])
    assert "2 records" in twice.detail
    (lost,) = compare_receipts([receipt], [], [900.0])
    assert "no record" in lost.detail
    assert compare_receipts([receipt], [], [1000.7]) == []


def test_a_part_of_a_stream_counts_what_arrived_at_least() -> None:
    assert compare_parts({MARKER: 7}, [line()], 48) == []
    assert compare_parts({"another": 9}, [line()], 48) == []
    (few,) = compare_parts({MARKER: 8}, [line()], 48)
    assert "8 tokens of the stream arrived, 7 are recorded" in few.detail
    (many,) = compare_parts({MARKER: 7}, [line(completion_tokens=49)], 48)
    assert "49 are recorded" in many.detail


def test_sums_are_those_of_the_audit_log_but_for_the_last_second_before_a_kill() -> None:
    counts = {name: line()[name] for name in
              ("prompt_tokens", "visual_tokens", "cached_tokens", "completion_tokens")}  # fmt: skip
    ends = {MARKER: 1000.0}
    row = counts | {"requests": 1}
    assert compare_sums([line()], [row], [], ends) == []
    assert len(compare_sums([line()], [], [], ends)) == 5
    assert compare_sums([line()], [], [1000.5], ends) == []
    assert len(compare_sums([line()], [row, row], [1000.5], ends)) == 5
    refused = line(status=400, backend="") | dict.fromkeys(counts, 0)
    assert compare_sums([refused], [], [], ends) == []


def test_levels_may_not_grow_by_more_than_their_share() -> None:
    before = {"engine": Level(500.0, 40, 3, 1)}
    assert compare(before, {"engine": Level(524.0, 43, 3, 1)}) == []
    assert compare(before, {"engine": Level(300.0, 10, 1, 2)}) == []
    grown = compare(before, {"engine": Level(530.0, 44, 3, 1)})
    assert [violation.detail for violation in grown] == [
        "500 MiB after the warm-up, 530 at the end",
        "40 descriptors after the warm-up, 44 at the end",
    ]


def result(name: str, text: str = KNOWN) -> dict[str, Any]:
    body = {"choices": [{"message": {"content": text}}]}
    return {"custom_id": name, "response": {"status_code": 200, "body": body}, "error": None}


def test_a_batch_has_one_right_result_for_each_line() -> None:
    wanted = {"a": KNOWN, "b": OTHER}
    both = [result("a"), result("b", OTHER)]

    def found(status: str, results: list[dict[str, Any]], *, full: bool = False) -> list[str]:
        return [each.rule for each in check_batch("batch", status, results, wanted, full=full)]

    assert found("completed", both) == []
    assert found("completed", both[:1]) == ["lost"]
    assert found("completed", [*both, both[0]]) == ["lost"]
    assert found("failed", both[:1]) == ["lost"]
    assert found("failed", both[:1], full=True) == []
    assert found("completed", [result("a", OTHER), both[1]]) == ["crossing"]
    assert found("completed", [result("a", "Two."), both[1]]) == ["wrong answer"]
    refused = {"custom_id": "b", "response": {"status_code": 503, "body": {}}, "error": None}
    assert found("completed", [both[0], refused]) == ["error body"]
