"""Routers of others read metrics of these names, and find events and renders that agree.

The names are those of the Gateway API Inference Extension (proposal 003, "Model Server Protocol") and of
llm-d's router (docs/plugin-metric-protocol.md and pkg/kvcache of llm-d/llm-d-router). The index below does
with events and renders what llm-d's does: it names blocks anew, by their tokens and the images that they
touch, and takes the engine's own names only to find a block's parent, and what is removed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest
import uvloop
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from fovea.engine.config import EngineConfig
from fovea.engine.simulate.serving import SimulatedEngine
from fovea.server.app import create_app
from fovea.server.run import serving
from tests.engine.simulate.test_serving import FAST
from tests.engine.test_publish import Subscriber, free_ports
from tests.server.support import Json, Server, chat, data_url, image, picture, until, user

CHAT, RENDER = "/v1/chat/completions", "/v1/chat/completions/render"
BLOCK = 16
TOPIC = "kv@10.0.0.7:8000@fovea-simulated"

GAUGES = (
    "vllm:num_requests_waiting",  # TotalQueuedRequests
    "vllm:num_requests_running",  # TotalRunningRequests
    "vllm:kv_cache_usage_perc",  # KVCacheUtilization, as llm-d calls it
    "vllm:gpu_cache_usage_perc",  # the same in the proposal, which names the metric of an older vLLM
    "vllm:cache_config_info",  # BlockSize and NumGPUBlocks, in labels
)


def families(server: Server) -> dict[str, Metric]:
    return {found.name: found for found in text_string_to_metric_families(server.get("/metrics").text)}


@pytest.mark.parametrize("name", GAUGES)
def test_each_metric_of_the_protocol_is_a_gauge_with_one_series(server: Server, name: str) -> None:
    """llm-d reads the newest series of a name. With one, nobody has to guess which that is."""
    family = families(server)[name]
    assert family.type == "gauge"
    [sample] = family.samples
    assert sample.labels["model_name"] == server.engine.info.name
    assert 0 <= sample.value <= 1, "at rest; shares of a whole are from 0 to 1"


def test_block_size_and_number_of_blocks_are_whole_numbers_in_labels(server: Server) -> None:
    [sample] = families(server)["vllm:cache_config_info"].samples
    assert int(sample.labels["block_size"]) == server.engine.parts.scheduler.kv.block_size
    assert int(sample.labels["num_gpu_blocks"]) > 0
    assert sample.value == 1


def test_no_adapters_means_no_series_of_adapters(server: Server) -> None:
    """llm-d takes a missing name for that, as with a vLLM that has none, and any series for an adapter."""
    assert "vllm:lora_requests_info" not in families(server)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat()),
        ("/v1/completions", {"prompt": "the red circle", "max_tokens": 1}),
    ],
)
def test_the_apis_of_the_protocol_ignore_what_vllms_router_adds(
    server: Server, path: str, body: Json
) -> None:
    """vllm-router 0.1.17 fills in the defaults of another engine's fields."""
    added = {
        "no_stop_trim": False,
        "ignore_eos": False,
        "continue_final_message": False,
        "skip_special_tokens": True,
        "separate_reasoning": True,
        "stream_reasoning": True,
        "return_hidden_states": False,
        "include_reasoning": True,
        "logprobs": False,
        "stream": False,
    }
    if path != CHAT:
        added = {key: value for key, value in added.items() if key != "logprobs"}
    assert server.post(path, {**body, "model": server.engine.info.name, **added}).status_code == 200


def test_the_probes_of_routers_are_answered(server: Server) -> None:
    assert server.get("/health").status_code == 200
    [model, *_] = server.get("/v1/models").json()["data"]
    assert model["id"] == server.engine.info.name


class Block(NamedTuple):
    """A block of a prompt as an index of llm-d knows it."""

    tokens: tuple[int, ...]
    images: tuple[str, ...]


def names_of(blocks: Sequence[Block], parent: bytes = b"") -> list[bytes]:
    """The names of blocks, each of which depends on all before it."""
    found = []
    for block in blocks:
        parent = hashlib.sha256(repr((parent, block)).encode()).digest()
        found.append(parent)
    return found


@dataclass
class Index:
    """Blocks that an engine has, by its own names, and by those of the index. medium: the one that counts."""

    medium: str = "GPU"

    def __post_init__(self) -> None:
        self._own: dict[int, bytes] = {}
        self.held: set[bytes] = set()

    def apply(self, event: dict[str, Any]) -> None:
        """Take over an event. Fields have the names that llm-d reads."""
        if event["type"] == "AllBlocksCleared":
            self._own.clear()
            self.held.clear()
        elif event["medium"] != self.medium:
            return
        elif event["type"] == "BlockRemoved":
            self.held -= {self._own.pop(name) for name in event["block_hashes"]}
        else:
            assert event["type"] == "BlockStored"
            self._store(event)

    def _store(self, event: dict[str, Any]) -> None:
        parent, names, size = event["parent_block_hash"], event["block_hashes"], event["block_size"]
        assert size == BLOCK
        assert len(event["token_ids"]) == size * len(names)
        assert len(event["extra_keys"]) == len(names)
        assert all(0 < name < 2**64 for name in names), "0 means to llm-d that there is none"
        blocks = [
            Block(
                tuple(event["token_ids"][number * size : (number + 1) * size]),
                tuple(key if isinstance(key, str) else key[0] for key in keys or ()),
            )
            for number, keys in enumerate(event["extra_keys"])
        ]
        # llm-d drops blocks whose parent it does not know.
        before = b"" if parent is None else self._own[parent]
        for own, name in zip(names, names_of(blocks, before), strict=True):
            self._own[own] = name
            self.held.add(name)

    def known(self, rendered: Json) -> int:
        """Number of blocks at the beginning of a rendered prompt that the engine has."""
        names = names_of(blocks_of(rendered))
        return next((number for number, name in enumerate(names) if name not in self.held), len(names))


def blocks_of(rendered: Json) -> list[Block]:
    """The full blocks of a rendered prompt, each with the images that it touches, by their places."""
    features = rendered["features"] or {"mm_hashes": {}, "mm_placeholders": {}}
    spans = sorted(
        (place["offset"], place["offset"] + place["length"], name)
        for kind, names in features["mm_hashes"].items()
        for name, place in zip(names, features["mm_placeholders"][kind], strict=True)
    )
    ids = rendered["token_ids"]
    starts = range(0, len(ids) - BLOCK + 1, BLOCK)
    return [
        Block(
            tuple(ids[start : start + BLOCK]),
            tuple(name for first, last, name in spans if first < start + BLOCK and start < last),
        )
        for start in starts
    ]


@dataclass
class Announced:
    """A simulated engine that announces its blocks, seen by a client and by a router."""

    client: httpx.Client
    subscriber: Subscriber

    def render(self, body: Json) -> Json:
        return self.client.post(RENDER, json=body).raise_for_status().json()

    def answer(self, body: Json) -> Json:
        return self.client.post(CHAT, json=body).raise_for_status().json()

    def index(self) -> Index:
        """The index of a router that asks for all events now. The numbers of messages must have no gaps."""
        index = Index()
        for place, message in enumerate(self.subscriber.ask(0)):
            assert message.number == place
            stamp, events, *rank = msgspec.msgpack.decode(message.payload)
            assert stamp > 0
            assert rank in ([], [0])
            for event in events:
                index.apply(event)
        return index


@pytest.fixture(scope="module")
def announced() -> Iterator[Announced]:
    with _announced() as found:
        yield found


@contextmanager
def _announced() -> Iterator[Announced]:
    events, replay = free_ports(2)
    config = EngineConfig.of(
        kv_blocks=512, block_size=BLOCK, kv_events=events, kv_events_replay=replay, kv_events_topic=TOPIC
    )
    app = create_app(SimulatedEngine(config, FAST))
    with serving(app, uvloop.new_event_loop) as url, httpx.Client(base_url=url, timeout=60) as client:
        subscriber = Subscriber(events, replay)
        try:
            yield Announced(client, subscriber)
        finally:
            subscriber.close()


def about(seed: int, question: str = "what is it?", **extra: Any) -> Json:
    """A question about a picture that has this seed, and about one that they have in common."""
    urls = [data_url(picture(320, 240, seed)), data_url(picture(256, 256, 1))]
    return chat(user(image(urls[0]), "and", image(urls[1]), question), **extra)


def test_a_router_finds_the_blocks_of_a_prompt_by_its_render(announced: Announced) -> None:
    body = about(40)
    rendered = announced.render(body)
    blocks = blocks_of(rendered)
    assert len({block.images for block in blocks}) > 2, "blocks before, in and between images"
    assert announced.index().known(rendered) == 0
    announced.answer(body)
    until(lambda: announced.index().known(rendered) == len(blocks))

    other = announced.render(about(41))
    first = other["features"]["mm_placeholders"]["image"][0]["offset"]
    assert other["token_ids"] == rendered["token_ids"], "the pictures are as large as the others"
    assert announced.index().known(other) == first // BLOCK, "but they are others"
    asked = announced.render(about(40, "is it red?"))
    second = asked["features"]["mm_placeholders"]["image"][1]
    assert announced.index().known(asked) >= (second["offset"] + second["length"]) // BLOCK


def test_what_a_router_expects_is_what_the_answer_reuses(announced: Announced) -> None:
    announced.answer(about(50))
    again = about(50, "where is it?")
    rendered = announced.render(again)
    until(lambda: announced.index().known(rendered) > 0)
    known = announced.index().known(rendered)
    details = announced.answer(again)["usage"]["prompt_tokens_details"]
    assert known * BLOCK <= details["cached_tokens"] < (known + 1) * BLOCK, "rows of one more block at most"


def test_a_salted_prompt_is_not_found_without_its_salt(announced: Announced) -> None:
    announced.answer(about(60, cache_salt="tenant"))
    salted, plain = announced.render(about(60, cache_salt="tenant")), announced.render(about(60))
    marker = about(61)
    announced.answer(marker)  # announced later: what was before it has arrived, too
    until(lambda: announced.index().known(announced.render(marker)) > 0)
    assert announced.index().known(plain) == 0
    assert salted["features"]["mm_hashes"] != plain["features"]["mm_hashes"]


def test_cleared_blocks_are_announced(announced: Announced) -> None:
    body = about(70)
    rendered = announced.render(body)
    announced.answer(body)
    until(lambda: announced.index().known(rendered) > 0)
    announced.client.delete("/admin/caches/kv").raise_for_status()
    until(lambda: not announced.index().held)


def test_messages_have_the_topic_by_which_llm_d_finds_their_pod(announced: Announced) -> None:
    announced.answer(about(80))  # so that there is something to send, however late the subscriber connected
    kind, pod, model = TOPIC.split("@")
    until(lambda: bool(announced.subscriber.ask(0)))
    announced.answer(about(81))
    topic, number, (_, events, *_) = announced.subscriber.next()
    assert topic.decode().split("@") == [kind, pod, model] == ["kv", "10.0.0.7:8000", "fovea-simulated"]
    assert number >= 0
    assert events
