"""Visual tokens are counted by the rule of the model that answers."""

from __future__ import annotations

from typing import Any

import pytest

from fovea.core.errors import FoveaError, InvalidRequest
from fovea.gateway.config import ModelConfig
from fovea.gateway.inspect.demand import UNKNOWN_SIDE, VIDEO_TOKENS, VisualCounter
from fovea.gateway.inspect.images import RequestImage
from tests.gateway.samples import MODEL, parts


class Rule:
    """A rule that notes how it is called: a token per pixel."""

    name = "rule"

    def __init__(self, refuse: str = "") -> None:
        self.calls: list[dict[str, Any]] = []
        self._refuse = refuse

    def tokens(self, width: int, height: int, **options: Any) -> int:
        self.calls.append(options)
        if options["detail"] == self._refuse:
            raise InvalidRequest("that detail is not accepted")
        return width * height


def counted(rule: Rule, *details: Any, **fields: Any) -> int:
    content = [{"type": "image_url", "image_url": {"url": "u", "detail": each, **fields}} for each in details]
    found = parts({"messages": [{"content": content}]})
    images = [RequestImage("", b"", 3, 2, False, part) for part in found]
    return VisualCounter(lambda name: rule).count(MODEL, images)


def test_every_image_counts() -> None:
    rule = Rule()
    assert counted(rule, "low", None, "auto") == 18
    assert [call["detail"] for call in rule.calls] == ["low", "auto", "auto"]
    assert {call["images"] for call in rule.calls} == {3}
    assert counted(Rule()) == 0


@pytest.mark.parametrize("detail", ["ultra", 5, [], {"a": 1}])
def test_an_unknown_detail_counts_as_auto(detail: Any) -> None:
    rule = Rule()
    assert counted(rule, detail) == 6
    assert rule.calls[0]["detail"] == "auto"


def test_bounds_on_pixels() -> None:
    rule = Rule()
    counted(rule, "auto", min_pixels=5, max_pixels=9)
    counted(rule, "auto", min_pixels=True, max_pixels="9")
    counted(rule, "auto", min_pixels=-1, max_pixels=0)
    assert [(call["min_pixels"], call["max_pixels"]) for call in rule.calls] == [
        (5, 9),
        (None, None),
        (None, None),
    ]


def test_the_detail_of_an_input_image() -> None:
    rule = Rule()
    [part] = parts({"input": [{"type": "input_image", "image_url": "u", "detail": "high"}]})
    VisualCounter(lambda name: rule).count(MODEL, [RequestImage("", b"", 3, 2, False, part)])
    assert rule.calls[0]["detail"] == "high"


def test_unknown_sizes_and_videos() -> None:
    [part] = parts({"input": [{"image_url": "u"}]})
    remote = RequestImage("", b"n", 0, 0, False, part)
    video = RequestImage("", b"", 0, 0, True, part)
    count = VisualCounter(lambda name: Rule()).count(MODEL, [remote, video])
    assert count == UNKNOWN_SIDE * UNKNOWN_SIDE + VIDEO_TOKENS


def test_an_error_names_the_image() -> None:
    with pytest.raises(FoveaError) as caught:
        counted(Rule("high"), "low", "high")
    assert caught.value.message == "image 1: that detail is not accepted"
    assert caught.value.param == "messages[0].content[1].image_url.url"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (ModelConfig("a"), "a"),
        (ModelConfig("a", served="b"), "b"),
        (ModelConfig("a", served="b", visual_rule="c"), "c"),
    ],
)
def test_the_rule_is_looked_up_once(model: ModelConfig, name: str) -> None:
    asked: list[str] = []

    def find(each: str) -> Rule:
        asked.append(each)
        return Rule()

    counter = VisualCounter(find)
    assert counter.rule(model) is counter.rule(model)
    assert asked == [name]


def test_a_model_without_a_rule_is_estimated_by_area() -> None:
    counter = VisualCounter(lambda name: None)
    [part] = parts({"input": [{"image_url": "u"}]})
    small, large = (
        counter.count(MODEL, [RequestImage("", b"", side, side, False, part)]) for side in (512, 1024)
    )
    assert 0 < small < large
