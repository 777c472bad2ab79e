"""Traces without a network: the header, sampling, the exporting thread, and the log of slow requests."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.core.sampling import SamplingParams
from fovea.core.types import StageTimings, Usage
from fovea.observe import spans as names
from fovea.observe import tracer
from fovea.observe.logs import JsonFormatter
from fovea.observe.request_log import Content, Run, SlowRequests, Timeline, row_of, ttft_of
from fovea.observe.request_spans import RequestEnd, spans_of
from fovea.observe.spans import Span, context_of, parent_of
from fovea.observe.tracer import Tracer, TraceSettings, check_endpoint

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADER = f"00-{TRACE}-{SPAN}-01".encode()


def span(name: str = "x") -> Span:
    return Span(name, TRACE, SPAN, "", 1.0, 2.0)


class Sink:
    """An exporter that takes spans, refuses them, or blocks."""

    def __init__(self, *, good: bool = True) -> None:
        self.good = good
        self.spans: list[Span] = []
        self.called = threading.Event()
        self.go = threading.Event()
        self.go.set()

    def export(self, spans: Sequence[Span]) -> bool:
        self.called.set()
        self.go.wait(20)
        self.spans += spans
        return self.good

    def close(self) -> None:
        self.go.set()


def test_the_callers_trace_is_continued() -> None:
    headers = {b"traceparent": HEADER, b"tracestate": b"vendor=1"}
    parent = parent_of(headers)
    assert parent is not None
    context = context_of(headers, parent, 0.0)
    assert context is not None
    assert (context.trace_id, context.parent_id, context.state) == (TRACE, SPAN, "vendor=1")
    assert context.span_id != SPAN
    assert parent_of({b"traceparent": context.header().encode()}) is not None


def test_a_caller_that_records_nothing_is_followed() -> None:
    headers = {b"traceparent": HEADER[:-1] + b"0"}
    assert context_of(headers, parent_of(headers), 1.0) is None


@pytest.mark.parametrize(
    "header",
    [
        b"", b"00", HEADER + b"-more", HEADER.upper(), HEADER.replace(b"00-", b"ff-", 1),
        f"00-{'0' * 32}-{SPAN}-01".encode(), f"00-{TRACE}-{'0' * 16}-01".encode(),
    ],
)  # fmt: skip
def test_a_header_that_is_not_valid_is_ignored(header: bytes) -> None:
    assert parent_of({b"traceparent": header}) is None


def test_a_later_version_of_the_header_may_say_more() -> None:
    parent = parent_of({b"traceparent": HEADER.replace(b"00-", b"01-", 1) + b"-more"})
    assert parent is not None
    assert parent.trace_id == TRACE


@given(st.binary(max_size=80))
def test_no_header_breaks_anything(header: bytes) -> None:
    parent = parent_of({b"traceparent": header})
    assert parent is None or len(parent.trace_id) == 32


def test_a_share_of_the_requests_is_traced() -> None:
    assert all(context_of({}, None, 1.0) for _ in range(50))
    assert not any(context_of({}, None, 0.0) for _ in range(50))
    traced = sum(context_of({}, None, 0.25) is not None for _ in range(4000))
    assert 800 < traced < 1200


def test_a_dead_collector_costs_a_bounded_queue(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No request waits, memory is bounded, and the log says it once."""
    monkeypatch.setattr(tracer, "WAITING", 10)
    sink = Sink(good=False)
    sink.go.clear()
    traces = Tracer(TraceSettings(), sink)
    with caplog.at_level(logging.WARNING, "fovea.trace"):
        traces.finish(lambda: [span()])
        assert sink.called.wait(20)
        for _ in range(100):
            traces.finish(lambda: [span()])
        assert traces.stats()["traces_waiting"] <= 10
        assert traces.dropped >= 90
        sink.go.set()
        traces.close()
    assert traces.exported == 0
    assert traces.dropped == 101
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_collector_that_failed_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile no span is made, and when it takes spans again, the log says so."""
    monkeypatch.setattr(tracer, "FIRST_REST_S", 3600.0)
    monkeypatch.setattr(tracer, "LONGEST_REST_S", 3600.0)
    sink, made = Sink(good=False), []
    sink.go.clear()
    traces = Tracer(TraceSettings(), sink)
    traces.finish(lambda: [span()])
    assert sink.called.wait(20)
    for _ in range(3):  # these wait while the call fails
        traces.finish(lambda: made.append(1) or [span()])  # type: ignore[func-returns-value]
    sink.go.set()
    while traces.dropped < 4:
        time.sleep(0.001)
    traces.finish(lambda: made.append(1) or [span()])  # type: ignore[func-returns-value]
    traces.close()
    assert (made, traces.dropped, len(sink.spans)) == ([], 5, 1)


def test_the_last_traces_are_exported_when_a_server_stops() -> None:
    sink = Sink()
    traces = Tracer(TraceSettings(), sink)
    for number in range(200):
        traces.finish(lambda number=number: [span(str(number))])  # type: ignore[misc]
    traces.close()
    assert [each.name for each in sink.spans] == [str(number) for number in range(200)]
    assert traces.exported == 200


def test_a_defect_in_one_trace_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink()
    traces = Tracer(TraceSettings(), sink)
    traces.finish(lambda: [span(str(1 // 0))])
    traces.finish(lambda: [span()])
    traces.close()
    assert (len(sink.spans), traces.dropped) == (1, 1)
    assert "a trace could not be made" in caplog.text


@pytest.mark.parametrize("value", ["collector:4318", "http://", "http://x?y", "ftp://x", "http://x:99999"])
def test_an_endpoint_that_is_no_url_is_refused(value: str) -> None:
    assert "the URL of a collector" in check_endpoint(value)
    assert check_endpoint("") == check_endpoint("https://otel.example.com/base") == ""


def timeline(**changes: object) -> Timeline:
    """A request of 3 s: 0.1 s to arrive, 0.2 s for images, 2.5 s in the engine, 0.2 s to be read."""
    timings = StageTimings(
        fetch=0.1, media_decode=0.2, preprocess=0.1, queue=1.0, encode=0.3, prefill=0.2, decode=0.8,
        detokenize=0.1, ttft=1.7,
    )  # fmt: skip
    run = Run(
        "id", "vlm", SamplingParams(max_tokens=9), submitted=100.3, fetch_s=0.1, media_decode_s=0.1,
        sizes=((640, 480),), first=102.0, last=102.8, timings=timings, usage=Usage(1500, 9, 0, 300),
        reasons=["stop"],
    )  # fmt: skip
    made = Timeline(100.0, 1e9, loading=100.1, runs=[run], trace_id=TRACE)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_stages_follow_one_another_and_fill_the_request() -> None:
    stages = timeline().stages(103.0)
    assert [each.stage for each in stages] == [
        "receive", "fetch", "media_decode", "media_decode", "preprocess", "queue", "encode", "prefill",
        "decode", "detokenize", "respond",
    ]  # fmt: skip
    assert sum(each.seconds for each in stages) == pytest.approx(3.0)
    for before, after in zip(stages, stages[1:], strict=False):
        assert after.start == pytest.approx(before.end)


def test_the_spans_of_a_request() -> None:
    headers = {b"traceparent": HEADER}
    context = context_of(headers, parent_of(headers), 1.0)
    ended = RequestEnd(103.0, "req", "POST", "/v1/chat/completions", 200, "acme", stream=True)
    root, *stages = spans_of(timeline(context=context), ended, legacy=True)
    assert (root.name, root.kind, root.parent_id, root.trace_id) == ("chat vlm", "server", SPAN, TRACE)
    assert (root.start, root.end) == (1e9, 1e9 + 3)
    assert root.attributes[names.INPUT_TOKENS] == 1500
    assert root.attributes[names.FIRST_CHUNK] == pytest.approx(2.0)
    assert root.attributes[names.IMAGE_SIZES] == ["640x480"]
    assert root.attributes["gen_ai.latency.time_in_queue"] == 1.0
    assert {stage.parent_id for stage in stages} == {root.span_id}
    assert names.INPUT_MESSAGES not in root.attributes


def test_an_error_is_in_the_span() -> None:
    context = context_of({}, None, 1.0)
    broken = timeline(context=context)
    broken.runs[0].error = "engine_error"
    ended = RequestEnd(103.0, "req", "POST", "/v1/chat/completions", 500, "-")
    root, *_ = spans_of(broken, ended, legacy=False)
    assert (root.error, root.attributes[names.ERROR_TYPE]) == ("engine_error", "engine_error")
    refused = next(iter(spans_of(timeline(context=context, runs=[]), ended, legacy=False)))
    assert refused.error == "status 500"


def test_several_generations_have_a_span_each() -> None:
    context = context_of({}, None, 1.0)
    two = timeline(context=context)
    two.runs.append(timeline().runs[0])
    ended = RequestEnd(103.0, "req", "POST", "/v1/completions", 200, "-")
    root, *rest = spans_of(two, ended, legacy=False)
    runs = [each for each in rest if each.name == "text_completion vlm"]
    assert len(runs) == 2
    assert {each.parent_id for each in runs} == {root.span_id}
    own = [each.name for each in rest if each.parent_id == root.span_id and each not in runs]
    assert own == ["receive", "fetch", "media_decode", "respond"]


def test_a_slow_request_says_why() -> None:
    row = row_of(timeline(), 103.0, request_id="req", route="/v1/chat/completions", caller="acme", status=200)
    assert row["reasons"] == [
        "queue took 1 s (33%): it waited in the queue: other requests held the engine or its memory",
        "1500 of 1500 prompt tokens were not cached",
    ]
    assert (row["trace_id"], row["images"]) == (TRACE, [{"width": 640, "height": 480}])
    assert row["stages"]["media_decode"] == 0.2


def test_a_slow_request_whose_images_could_not_be_loaded() -> None:
    """The engine never got it. Its time is that of the hosts of its images, not of its own arrival."""
    row = row_of(timeline(runs=[]), 130.0, request_id="req", route="/v1/messages", caller="-", status=400)
    assert row["stages"] == {"receive": 0.1, "fetch": 29.9}
    assert row["reasons"] == ["fetch took 29.9 s (100%): its images came from slow hosts"]


def test_a_slow_request_of_which_an_answer_is_missing() -> None:
    two = timeline()
    two.runs.append(Run("other", "vlm", SamplingParams(), submitted=100.3))
    row = row_of(two, 103.0, request_id="req", route="/v1/completions", caller="-", status=500)
    assert row["reasons"][-1] == "it ended before its answer was complete"


def test_the_texts_of_several_choices_are_apart() -> None:
    several = timeline(context=context_of({}, None, 1.0))
    several.runs[0].content = Content("why?", {1: ["no", "."], 0: ["yes"]})
    ended = RequestEnd(103.0, "req", "POST", "/v1/chat/completions", 200, "-")
    root, *_ = spans_of(several, ended, legacy=False)
    messages = json.loads(str(root.attributes[names.OUTPUT_MESSAGES]))
    assert [message["parts"][0]["content"] for message in messages] == ["yes", "no."]


def test_what_is_slow(caplog: pytest.LogCaptureFixture) -> None:
    slow = SlowRequests(3.0, 2.0)
    assert slow.is_slow(3.0, None)
    assert slow.is_slow(2.5, ttft_of(timeline()))
    assert not slow.is_slow(2.5, 1.9)
    assert not SlowRequests(0.0, 0.0).is_slow(1e9, 1e9)
    for number in range(150):
        slow.add({"number": number})
    rows = slow.rows()
    assert (len(rows), rows[0]["number"], rows[-1]["number"]) == (100, 149, 50)


def test_the_log_as_json() -> None:
    record = logging.LogRecord("fovea.x", logging.WARNING, "", 0, 'quoted "%s"\n', ("a",), None)
    values = json.loads(JsonFormatter().format(record))
    assert (values["level"], values["logger"], values["message"]) == ("warning", "fovea.x", 'quoted "a"\n')
    record.event, record.fields = "slow request", {"seconds": 1.5, "level": "forged"}
    values = json.loads(JsonFormatter().format(record))
    assert (values["message"], values["seconds"], values["level"]) == ("slow request", 1.5, "warning")
    assert "\n" not in JsonFormatter().format(record)


def test_a_long_tracestate_is_dropped_whole() -> None:
    headers = {b"traceparent": HEADER, b"tracestate": b"a=1," * 200}
    context = context_of(headers, parent_of(headers), 1.0)
    assert context is not None
    assert context.state == ""


def test_generations_side_by_side_are_not_added_up() -> None:
    """Four prompts of one request once took 333% of its time."""
    several = timeline()
    several.runs += [timeline().runs[0] for _ in range(3)]
    row = row_of(several, 103.0, request_id="req", route="/v1/completions", caller="-", status=200)
    assert sum(row["stages"].values()) == pytest.approx(3.0)
    assert row["prompt_tokens"] == 6000
