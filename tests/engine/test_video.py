"""Videos in the engine: cost before decoding, identity, pruning, caches, and one shared decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fovea import Engine
from fovea.core.errors import InvalidRequest, InvalidVideo, PromptTooLong
from fovea.core.media import Video, VideoBudget
from fovea.core.types import ChatPrompt, Message, TextPart, TextPrompt, TokenPrompt, VideoPart
from fovea.engine.request.inputs import to_video
from fovea.engine.request.prompt_plan import Clips
from fovea.engine.step.positions import mrope_positions
from fovea.engine.vision.processor.video import build_videos
from tests.support.checkpoints import write
from tests.support.clips import clip, noise
from tests.support.engines import assert_idle

KINDS = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = write(request.param, tmp_path_factory.mktemp(request.param))
    with Engine.from_pretrained(str(folder), dtype="float32", kv_cache_mib=16, threads=1) as engine:
        yield engine
        assert_idle(engine)


@dataclass
class Counting:
    """A source that counts its readings, and may fail."""

    video: Video
    readings: list[tuple[int, ...]] = field(default_factory=list)
    fails: bool = False
    before: Callable[[], None] = lambda: None

    def check(self, indices: Sequence[int]) -> None:
        """Any number of frames is accepted."""

    def read(self, indices: Sequence[int], abandoned: Callable[[], bool] = lambda: False) -> Iterator[bytes]:
        self.readings.append(tuple(indices))
        self.before()
        if self.fails:
            raise InvalidVideo("frame 3 is missing")
        return self.video.source.read(indices)


def counted(seed: int = 0, count: int = 8) -> tuple[Video, Counting]:
    video = to_video(noise(count, 96, 64, seed))
    source = Counting(video)
    return replace(video, source=source), source


def prompt(video: Video, budget: VideoBudget | None = None, text: str = "what moved?") -> ChatPrompt:
    return ChatPrompt((Message("user", (VideoPart(video, budget or VideoBudget()), TextPart(text))),))


def build(engine: Engine, video: Video, budget: VideoBudget | None = None, **options: Any) -> Any:
    return engine.parts.preparer.builder.build(prompt(video, budget), **options)


def test_paths_bytes_and_frames(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(clip())
    for value in (tmp_path / "clip.mp4", str(tmp_path / "clip.mp4"), clip(), noise(4, 64, 48)):
        assert engine.generate("what moved?", videos=[value], **GREEDY).usage.image > 0
    messages = [
        {"role": "user", "content": [{"type": "video", "video": clip()}, {"type": "text", "text": "?"}]}
    ]
    assert engine.generate(messages, **GREEDY).usage.image > 0


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("/none.mp4", "video 0: /none.mp4 cannot be read"),
        (b"text that is no video", "video 0: the data is not a video"),
        ([], "no frames"),
        (7, "int is not a video; accepted: path, bytes, a list of frames"),
    ],
)
def test_inputs_that_are_no_video(engine: Engine, value: Any, says: str) -> None:
    with pytest.raises(InvalidVideo, match=says):
        engine.generate("what?", videos=[value])


def test_requests_share_one_decoding(engine: Engine) -> None:
    video, source = counted(1)
    first = engine.generate(prompt(video), n=3, temperature=0, max_tokens=4)
    assert len(source.readings) == 1
    assert first.texts[0] == first.texts[1] == first.texts[2]
    again = engine.generate(prompt(video), temperature=0, max_tokens=4)
    assert again.text == first.text
    assert len(source.readings) == 1, "with cached encoder outputs nothing is decoded"


def test_a_prompt_that_cannot_fit_is_refused_before_decoding(engine: Engine) -> None:
    video, source = counted(2)
    for pruning in (0.0, 0.5):
        with pytest.raises(PromptTooLong, match=r"video 0: \d+ frames of \d+x\d+ pixels, \d+ tokens"):
            build(engine, video, VideoBudget(pruning_rate=pruning), limit=5)
        budget = VideoBudget(pruning_rate=pruning)
        with pytest.raises(PromptTooLong, match="video 0: "):
            engine.generate(prompt(video, budget, "what moved? " * 1500), temperature=0)
    assert source.readings == []


def test_a_broken_frame_is_an_error_of_its_request(engine: Engine) -> None:
    video, source = counted(3)
    source.fails = True
    with pytest.raises(InvalidVideo, match="video 0: frame 3 is missing"):
        engine.generate(prompt(video), temperature=0)
    source.fails = False
    assert engine.generate(prompt(video), **GREEDY).token_ids


def test_pruned_tokens_keep_their_positions(engine: Engine) -> None:
    video, _ = counted(4, count=12)
    whole, pruned = build(engine, video), build(engine, video, VideoBudget(pruning_rate=0.5))
    cells = whole.spans[0].tokens
    assert pruned.image_tokens == max(cells, whole.image_tokens // 2)
    assert len(whole.ids) - len(pruned.ids) == whole.image_tokens - pruned.image_tokens
    ours, _ = mrope_positions(len(pruned.ids), pruned.spans, 2)
    full, _ = mrope_positions(len(whole.ids), whole.spans, 2)
    by_key = {(span.key.split(";kept")[0]): span for span in whole.spans}
    for span in pruned.spans:
        same = by_key[span.key.split(";kept")[0]]
        assert span.kept_cells is not None
        kept = full[:, same.start : same.end][:, list(span.kept_cells)]
        shift = kept[1:, 0] - ours[1:, span.start]
        np.testing.assert_array_equal(ours[1:, span.start : span.end] + shift[:, None], kept[1:])
    # The kept rows of the encoder's output for the whole group.
    alike = engine.generate(prompt(video, VideoBudget(pruning_rate=0.5)), **GREEDY)
    assert alike.usage.image == pruned.image_tokens
    assert engine.generate(prompt(video, VideoBudget(pruning_rate=0.5)), **GREEDY).text == alike.text


def test_features_of_a_pruned_group_are_rows_of_the_whole(engine: Engine) -> None:
    video, _ = counted(5)
    from fovea.engine.request.prompt_plan import process

    processor = engine.parts.preparer.builder.processor
    model = engine.runner.model
    whole = {p.key: model.encode(process(p, processor)) for p in build(engine, video).planned_inputs}
    for part in build(engine, video, VideoBudget(pruning_rate=0.6)).planned_inputs:
        features = model.encode(process(part, processor))
        full = whole[part.key.split(";kept")[0]]
        assert part.plan.kept_cells is not None
        assert (features.embeds == full.embeds[list(part.plan.kept_cells)]).all()
        assert all(
            (a == b[list(part.plan.kept_cells)]).all()
            for a, b in zip(features.deepstack, full.deepstack, strict=True)
        )


def test_a_pruned_video_has_room_before_it_is_decoded_and_is_decoded_once(engine: Engine) -> None:
    """Once, a video was decoded while its prompt was built: by every request, and beyond the ceiling."""
    video, source = counted(31, count=12)
    half = prompt(video, VideoBudget(pruning_rate=0.5))
    room: list[float] = []
    source.before = lambda: room.append(engine.stats()["pixel_bytes"])
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: engine.generate(half, **GREEDY).token_ids, range(4)))
    assert len(set(answers)) == 1
    assert len(source.readings) == 1
    frames = len(set(source.readings[0])) * 96 * 64 * 3
    assert room[0] >= frames, "frames and pixels are reserved first"
    assert engine.stats()["pixel_bytes"] == 0
    engine.clear_caches("kv")
    assert engine.generate(half, **GREEDY).token_ids == answers[0]
    assert len(source.readings) == 1, "the kept cells and the encoder outputs are cached"
    engine.generate(half, cache_salt="tenant", **GREEDY)
    assert len(source.readings) == 2, "requests with different salts share nothing"


async def test_tokens_of_a_pruned_video_are_those_of_its_prompt(engine: Engine) -> None:
    video, source = counted(32, count=12)
    half = prompt(video, VideoBudget(pruning_rate=0.5))
    ids = await engine.tokenize(half)
    assert ids == build(engine, video, VideoBudget(pruning_rate=0.5)).ids
    assert len(source.readings) == 1
    assert engine.stats()["pixel_bytes"] == 0


def test_an_outline_is_as_long_as_the_prompt(engine: Engine) -> None:
    video, source = counted(33, count=12)
    builder = engine.parts.preparer.builder
    outline = builder.outline(prompt(video, VideoBudget(pruning_rate=0.7)))
    assert (len(outline.unsettled_videos), list(outline.planned_inputs), source.readings) == (1, [], [])
    settled = builder.settle(outline)
    assert len(settled.ids) == len(outline.ids)
    assert not settled.unsettled_videos
    assert sum(planned.plan.tokens for planned in settled.planned_inputs) == outline.image_tokens
    assert builder.settle(settled) is settled


def test_the_cache_of_kept_cells_is_bounded() -> None:
    frames = noise(8, 96, 64, 1)
    rule = build_videos("qwen2_vl", {}, {}, {}, {})
    assert rule is not None
    clips = Clips(cache_bytes=25_000)
    budget = VideoBudget(pruning_rate=0.5)
    known = []
    for salt in "abc":
        video = to_video(frames)
        plan = rule.plan(video, budget)
        clip = clips.clip(video, plan, rule, salt)
        assert clips.clip(video, plan, rule, salt) is clip
        assert clips.get(clip, plan.kept_tokens) is None
        kept = clips.get_or_find(clip, plan.kept_tokens)
        assert clips.get_or_find(clip, plan.kept_tokens) is kept
        known.append((clip, plan.kept_tokens))
    assert 0 < clips._bytes <= 25_000
    assert [clips.get(*pair) is not None for pair in known] == [False, True, True]


def test_keys_hold_content_sampling_budget_and_salt(engine: Engine) -> None:
    video, _ = counted(6)
    other, _ = counted(7)

    def key(*args: Any, **options: Any) -> tuple[str, ...]:
        return tuple(span.key for span in build(engine, *args, **options).spans)

    same = key(video)
    assert key(replace(video)) == same
    different = [
        key(other),
        key(video, salt="tenant"),
        key(video, VideoBudget(max_frames=4)),
        key(video, VideoBudget(max_pixels=4 * 32 * 32)),
        key(video, VideoBudget(pruning_rate=0.5)),
        key(replace(video, identity="f" * 64)),
    ]
    assert len({same, *different}) == 7
    assert len(set(same)) == len(same), "every group has its own key"


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        (VideoBudget(fps=0.0), "fps is 0.0; accepted: above 0"),
        (VideoBudget(min_frames=5, max_frames=3), "min_frames is 5, above max_frames, which is 3"),
        (VideoBudget(max_frames=0), "max_frames is 0; accepted: 1 to"),
        (VideoBudget(pruning_rate=0.96), "video_pruning_rate is 0.96; accepted: 0 to 0.95"),
        (VideoBudget(max_pixels=3), "max_pixels is 3; this model accepts at least"),
    ],
)
def test_invalid_budgets(engine: Engine, budget: VideoBudget, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        build(engine, counted()[0], budget)


def test_text_may_not_contain_the_marker(engine: Engine) -> None:
    builder = engine.parts.preparer.builder
    with pytest.raises(InvalidRequest, match=r"1 video markers '<\|video_pad\|>' for 0 videos"):
        builder.build(TextPrompt("say <|video_pad|>"))
    token = engine.runner.model.video_token_id
    assert token is not None
    with pytest.raises(InvalidRequest, match="stands for a video; send videos as parts of messages"):
        builder.build(TokenPrompt((token,)))
