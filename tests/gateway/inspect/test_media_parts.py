"""Images and videos are found in the forms of all APIs, and nothing hides one."""

from __future__ import annotations

from typing import Any

import pytest

from fovea.core.errors import InvalidRequest
from tests.gateway.samples import parts

URL = {"type": "image_url", "image_url": {"url": "u"}}
BASE64 = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "d"}}


def nested(part: dict[str, Any], levels: int) -> dict[str, Any]:
    """A body whose part lies under so many lists, the one of its messages included."""
    for _ in range(levels - 1):
        part = {"type": "tool_result", "content": [part]}
    return {"messages": [part]}


@pytest.mark.parametrize(
    ("part", "path", "is_video", "bare"),
    [
        (URL, "image_url.url", False, ""),
        ({"image_url": {"url": "u"}}, "image_url.url", False, ""),
        ({"type": "image_url", "image_url": "u"}, "image_url", False, ""),
        ({"type": "video_url", "video_url": {"url": "u"}}, "video_url.url", True, ""),
        ({"type": "video_url", "video_url": "u"}, "video_url", True, ""),
        ({"type": "input_image", "image_url": "u", "detail": "low"}, "image_url", False, ""),
        ({"type": "image", "source": {"type": "url", "url": "u"}}, "source.url", False, ""),
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/gif", "data": "u"}},
            "source.data",
            False,
            "image/gif",
        ),
        ({"type": "image", "source": {"type": "base64", "data": "u"}}, "source.data", False, "image/any"),
    ],
)
@pytest.mark.parametrize("field", ["messages", "input"])
def test_all_forms(part: dict[str, Any], path: str, is_video: bool, bare: str, field: str) -> None:
    [found] = parts({field: [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]})
    assert found.param == f"{field}[0].content[1].{path}"
    assert (found.url, found.is_video, found.bare) == ("u", is_video, bare)
    assert found.owner[found.key] == "u"
    assert found.part is part


def test_the_order_is_that_of_the_messages() -> None:
    content = [{"type": "image_url", "image_url": {"url": str(number)}} for number in range(3)]
    more = {"role": "user", "content": [{"type": "video_url", "video_url": {"url": "3"}}, URL]}
    found = parts({"messages": [{"role": "user", "content": content}, {"content": "text"}, more]})
    assert [part.url for part in found] == ["0", "1", "2", "3", "u"]
    assert [part.param for part in found[2:4]] == [
        "messages[0].content[2].image_url.url", "messages[2].content[0].video_url.url",
    ]  # fmt: skip


def test_results_of_tools() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x"}, BASE64]}
    [found] = parts({"messages": [{"role": "user", "content": [result]}]})
    assert found.param == "messages[0].content[0].content[1].source.data"
    output = {"type": "function_call_output", "output": [{"type": "input_image", "image_url": "u"}]}
    assert [part.param for part in parts({"input": [output]})] == ["input[0].output[0].image_url"]
    assert [part.url for part in parts({"input": [{"type": "input_image", "image_url": "u"}]})] == ["u"]


@pytest.mark.parametrize("levels", [2, 10, 40])
def test_content_is_searched_at_any_depth(levels: int) -> None:
    [found] = parts(nested(URL, levels))
    assert found.url == "u"
    assert len(found.param) < 400


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"messages": "text"},
        {"messages": [[None], None, 3, "x"]},
        {"messages": [{"content": [{"image_url": 5}, {"image_url": {"url": 5}}, {"source": "x"}]}]},
        {"tools": [{"content": [URL]}], "metadata": [URL]},
    ],
)
def test_other_values_are_no_images(value: dict[str, Any]) -> None:
    assert parts(value) == []


@pytest.mark.parametrize("value", [{"content": [URL]}, [[URL]], [{"content": {"x": URL}}]])
def test_images_at_unusual_places_are_found(value: Any) -> None:
    assert [part.url for part in parts({"messages": value})] == ["u"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": ["u"]}},
        {"type": "image_url", "uuid": "1"},
        {"type": "audio_url", "audio_url": {"url": "http://10.0.0.1"}},
        {"type": "image", "image": "http://10.0.0.1"},
    ],
)
def test_media_that_cannot_be_checked_are_refused(part: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parts({"messages": [{"content": [URL, part]}]})
    assert caught.value.code == "unsupported_media"
    assert str(caught.value.param).startswith("messages[0].content[1]")


@pytest.mark.parametrize(
    "decoy",
    [
        {"type": "video_url", "image_url": "decoy", "video_url": {"url": "hidden"}},
        {"type": "image", "image_url": {"url": "decoy"}, "source": {"type": "url", "url": "hidden"}},
        {"type": "image", "source": {"type": "base64", "url": "decoy", "data": "hidden"}},
        {
            "type": "tool_result",
            "source": {"type": "url", "url": "decoy"},
            "content": [{"type": "image_url", "image_url": {"url": "hidden"}}],
        },
    ],
)
def test_one_image_does_not_hide_another_one(decoy: dict[str, Any]) -> None:
    """A backend may go by `type`, and read the field that was not the first."""
    assert [part.url for part in parts({"messages": [{"content": [decoy]}]})] == ["decoy", "hidden"]


def test_a_field_of_a_message_does_not_hide_its_content() -> None:
    message = {"role": "user", "image_url": "decoy", "content": [URL]}
    assert [part.url for part in parts({"messages": [message]})] == ["decoy", "u"]
