"""Trace files are checked line by line, and random traces are the same for the same seed."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fovea.core.errors import ConfigError
from fovea.core.trace import ARRIVALS, BURST, Workload, generate, read_trace, write_trace

LINE: dict[str, Any] = {"at": 0.5, "text": 3, "output": 4}


def test_a_file_is_read_back_in_order_of_arrival(tmp_path: Path) -> None:
    trace = generate(Workload(requests=50, timeout=3, system_tokens=5, images_per_request=2))
    write_trace(tmp_path / "t.jsonl", reversed(trace))
    assert read_trace(tmp_path / "t.jsonl") == trace


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":2: not JSON"),
        ("[]", ":2: not a JSON object"),
        (json.dumps({"at": 1, "text": 1}), ":2: output is missing"),
        (json.dumps(LINE | {"txt": 1}), ":2: unknown field 'txt'; did you mean 'text'?"),
        (json.dumps(LINE | {"zzz": 1}), ":2: unknown field 'zzz'; accepted: at, text"),
        (json.dumps(LINE | {"text": 0}), ":2: text is 0; accepted: a whole number from 1 on"),
        (json.dumps(LINE | {"output": 1.5}), ":2: output is 1.5"),
        (json.dumps(LINE | {"at": -1}), ":2: at is -1; accepted: seconds from 0 on"),
        (json.dumps(LINE | {"timeout": "x"}), ":2: timeout is 'x'"),
        (json.dumps(LINE | {"images": "cat"}), ":2: images is 'cat'; accepted: a list"),
        (json.dumps(LINE | {"images": [["cat", 0]]}), ":2: images[0] is ['cat', 0]"),
        (json.dumps(LINE | {"images": [["a", 1], ["cat"]]}), ":2: images[1] is ['cat']"),
    ],
)
def test_the_error_of_a_wrong_line_names_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f"{json.dumps(LINE)}\n{line}\n")
    with pytest.raises(ConfigError) as raised:
        read_trace(path)
    assert raised.value.message.startswith(f"{path}{message}")


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="holds no request"):
        read_trace(tmp_path / "t.jsonl")


@pytest.mark.parametrize("arrivals", ARRIVALS)
def test_a_seed_determines_the_trace(arrivals: str) -> None:
    workload = Workload(requests=200, arrivals=arrivals, seed=3)
    assert generate(workload) == generate(workload)
    assert generate(workload) != generate(replace(workload, seed=4))
    times = [request.at for request in generate(workload)]
    assert times == sorted(times)


def test_the_rate_changes_arrival_times_and_nothing_else() -> None:
    slow, fast = generate(Workload(requests=100, rate=1)), generate(Workload(requests=100, rate=50))
    assert [replace(r, at=0) for r in slow] == [replace(r, at=0) for r in fast]
    assert slow[-1].at > 10 * fast[-1].at


def test_arrivals_have_their_shapes() -> None:
    poisson = [r.at for r in generate(Workload(requests=4000, rate=10))]
    assert poisson[-1] == pytest.approx(400, rel=0.1)
    ramp = [r.at for r in generate(Workload(requests=4000, rate=10, arrivals="ramp"))]
    assert ramp[999] > 2 * (ramp[-1] - ramp[2999])
    burst = Counter(r.at for r in generate(Workload(requests=160, rate=10, arrivals="burst")))
    assert set(burst.values()) == {BURST}


def test_the_mix_of_requests_follows_the_parameters() -> None:
    workload = Workload(
        requests=4000, text=0.3, images=20, zipf=1.0, images_per_request=2, prompt_tokens=40, output_tokens=1
    )
    trace = generate(workload)
    with_images = [r for r in trace if r.images]
    assert len(with_images) == pytest.approx(2800, rel=0.05)
    assert all(len(r.images) == 2 for r in with_images)
    uses = Counter(key for r in with_images for key, _ in r.images)
    assert uses["image-0"] / uses["image-9"] == pytest.approx(10, rel=0.35)
    assert len({(key, size) for r in with_images for key, size in r.images}) == 20, "an image has one size"
    assert sum(r.text for r in trace) / len(trace) == pytest.approx(40, rel=0.1)
    assert {r.output for r in trace} == {1}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate": 0}, "rate is 0"),
        ({"text": 1.5}, "text is 1.5; accepted: 0 to 1"),
        ({"arrivals": "flood"}, "arrivals is 'flood'; accepted: poisson, ramp, burst"),
        ({"visual_tokens": ()}, "visual_tokens is ()"),
    ],
)
def test_a_wrong_parameter_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Workload(**values)
    assert message in raised.value.message
