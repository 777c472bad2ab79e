"""Videos over a real socket, with the public `openai` client: answers and refusals."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from fovea import Engine
from fovea.media.limits import MediaLimits
from fovea.server.settings import ServerSettings
from tests.server.support import Server, data_url, image, picture, running, user
from tests.support.checkpoints import write
from tests.support.clips import clip, sound

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12}
LIMITS: dict[str, Any] = {"max_videos": 2, "max_video_s": 30.0, "max_video_frame_pixels": 100_000}


def video(data: bytes, container: str = "mp4", **extra: Any) -> dict[str, Any]:
    return of_url(f"data:video/{container};base64,{base64.b64encode(data).decode()}", **extra)


def of_url(url: str, **extra: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url, **extra}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write("qwen3_vl", tmp_path_factory.mktemp("video") / "tiny")
    (folder / "clip.webm").write_bytes(clip(container="webm"))
    settings = ServerSettings(media=MediaLimits(file_root=folder, **LIMITS))
    with (
        Engine.from_pretrained(str(folder), dtype="float32", threads=1, kv_cache_mib=32) as engine,
        running(engine, settings, folder) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, *parts: Any, **extra: Any) -> Any:
    return client.chat.completions.create(
        messages=[user(*parts)], extra_body={"ignore_eos": True, **extra}, **GREEDY
    )


def visual_tokens(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.image_tokens)


def test_question_about_a_video(client: openai.OpenAI, server: Server) -> None:
    answer = ask(client, video(clip()), "what moved?")
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 12
    # 2 s at 2 frames per second are 4 frames: two groups of 64x64 pixels.
    assert visual_tokens(answer) == 2 * 4
    again = ask(client, video(clip()), "what moved?")
    assert again.choices[0].message.content == answer.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    other = ask(client, video(clip(23)), "what moved?")
    assert other.usage.prompt_tokens_details.cached_tokens < again.usage.prompt_tokens_details.cached_tokens


def test_stream_about_a_video_file(client: openai.OpenAI, server: Server) -> None:
    part = of_url(f"file://{server.files}/clip.webm")
    whole = ask(client, part, "what moved?").choices[0].message.content
    chunks = client.chat.completions.create(
        messages=[user(part, "what moved?")], stream=True, extra_body={"ignore_eos": True}, **GREEDY
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole


def test_frames_and_pruning_of_a_video(client: openai.OpenAI) -> None:
    few = visual_tokens(ask(client, video(clip(), max_frames=2, min_frames=2), "?"))
    many = visual_tokens(ask(client, video(clip(), fps=6), "?"))
    assert (few, many) == (1 * 4, 6 * 4)
    for rate, extra, part in ((0.5, {}, {"video_pruning_rate": 0.5}), (0.5, {"video_pruning_rate": 0.5}, {})):
        assert visual_tokens(ask(client, video(clip(), fps=6, **part), "?", **extra)) == int(24 * (1 - rate))
    assert (
        visual_tokens(ask(client, video(clip(), fps=6, video_pruning_rate=0), "?", video_pruning_rate=0.5))
        == 24
    )


def test_videos_and_images_in_one_message(client: openai.OpenAI) -> None:
    answer = ask(
        client, video(clip()), image(data_url(picture())), video(clip(container="webm"), "webm"), "?"
    )
    assert visual_tokens(answer) == 8 + 6 + 8


def test_tokenize_counts_the_tokens_of_a_video(server: Server, client: openai.OpenAI) -> None:
    message = user(video(clip(), fps=6, video_pruning_rate=0.5), "what moved?")
    counted = server.post("/tokenize", {"messages": [message]}).json()["count"]
    assert counted == ask(client, *message["content"][:-1], "what moved?", max_tokens=1).usage.prompt_tokens


TABLE: list[tuple[str, Any, str, str, str | None]] = [
    ("truncated", video(clip()[:900]), "video 0: the mp4 is truncated", "video_truncated", ".url"),
    ("not a video", video(b"hello, I am text"), "not a video of an accepted type but",
         "unsupported_video_type", ".url"),
    ("image as video", video(picture()), "not a video of an accepted type", "unsupported_video_type", ".url"),
    ("sound only", video(sound()), "the mp4 holds sound only", "video_empty", ".url"),
    ("too long", video(clip(40, rate=1)), "40.0 s long; accepted: at most 30 s", "video_too_long", ".url"),
    ("too many pixels", video(clip(2, width=640, height=480)), "640x480 pixels, 307200", "video_too_large",
         ".url"),
    ("image data URL", of_url(data_url(picture())), "declares 'image/png'; accepted: video/*",
         "invalid_video_url", ".url"),
    ("no URL", of_url("clip.mp4"), "accepted: data:video/...;base64,...", "invalid_video_url", ".url"),
    ("fps", video(clip(), fps=0), "greater than 0", "invalid_value", ".fps"),
    ("pruning", video(clip(), video_pruning_rate=1), "less than or equal to 0.95", "invalid_value",
         ".video_pruning_rate"),
    ("misspelt field", video(clip(), max_framse=2), "did you mean 'max_frames'", "unknown_field",
         ".max_framse"),
    ("min above max", video(clip(), min_frames=9, max_frames=3), "min_frames is 9, above max_frames",
         "invalid_value", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "part", "message", "code", "field"), TABLE, ids=[row[0] for row in TABLE])
def test_bad_videos(
    client: openai.OpenAI, name: str, part: Any, message: str, code: str, field: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, part, "what moved?")
    error: Any = caught.value.body
    assert message in error["message"]
    assert error["code"] == code
    if field:
        assert error["param"] == f"messages[0].content[0].video_url{field}"


def test_too_many_videos(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="the request has 3 videos; accepted: at most 2"):
        ask(client, *[video(clip())] * 3, "?")


def test_too_long_prompt_names_the_video(client: openai.OpenAI) -> None:
    """The length follows from the video's header, so nothing is decoded."""
    long = video(clip(2500, rate=100), fps=90, max_frames=2500)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, long, "what moved?")
    error: Any = caught.value.body
    assert error["code"] == "context_length_exceeded"
    assert "video 0: " in error["message"]
    assert "frames of" in error["message"]


def test_video_files_outside_the_folder_are_forbidden(client: openai.OpenAI) -> None:
    with pytest.raises(openai.PermissionDeniedError, match="leaves the folder that videos are read from"):
        ask(client, of_url("file:///etc/passwd"), "?")


def test_model_without_video_names_models_with_it(tmp_path: Path) -> None:
    folder = write("llava", tmp_path / "tiny")
    with (
        Engine.from_pretrained(str(folder), dtype="float32", threads=1, kv_cache_mib=16) as engine,
        running(engine, ServerSettings(), tmp_path) as server,
    ):
        answer = server.post("/v1/chat/completions", {"messages": [user(video(clip()), "?")]})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "video_not_supported"
        assert "models that do: Qwen3.5, Qwen3.5-MoE, Qwen3-VL, " in error["message"]
        assert engine.stats()["integrity_errors"] == 0
