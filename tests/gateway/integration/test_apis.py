"""Clients of other APIs before an engine that has only chat; ratings, and experiments from end to end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from fovea.access.log import request_id
from fovea.gateway.config import ModelConfig
from fovea.gateway.experiments.config import read_experiments
from fovea.gateway.settings import TimeoutSettings
from tests.gateway.hostile import keys_file
from tests.gateway.support import FakeEngine, Plan, data_url, picture, resilience, running, soon, tables

MESSAGE: dict[str, Any] = {"model": "m", "max_tokens": 16, "messages": [{"role": "user", "content": "hello"}]}
ITEM: dict[str, Any] = {"model": "m", "max_output_tokens": 16, "input": "hello"}


def events(text: str) -> list[tuple[str, Any]]:
    """The named events of a stream."""
    found = []
    for block in text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        found.append((lines.get("event", ""), json.loads(lines["data"])))
    return found


async def test_messages_are_translated_both_ways() -> None:
    async with FakeEngine("e") as engine, running(engine) as gateway:
        image = {"type": "base64", "media_type": "image/png", "data": data_url(picture()).partition(",")[2]}
        content = [{"type": "image", "source": image}, {"type": "text", "text": "What is it?"}]
        body = {**MESSAGE, "system": "Be brief.", "messages": [{"role": "user", "content": content}]}
        answer = await gateway.client.post("/v1/messages", json=body, headers={"x-api-key": "none"})
        value = answer.json()
        assert (value["type"], value["role"]) == ("message", "assistant")
        assert [block["text"] for block in value["content"]] == ["e e e"]
        assert value["usage"]["output_tokens"] == 3
        assert engine.received[0].path == "/v1/chat/completions"
        sent = engine.received[0].json["messages"]
        assert [message["role"] for message in sent] == ["system", "user"]
        assert sent[1]["content"][0]["image_url"]["url"] == data_url(picture())

        stream = await gateway.client.post("/v1/messages", json={**MESSAGE, "stream": True})
        found = events(stream.text)
        assert [name for name, _ in found][0] == "message_start"
        assert [name for name, _ in found][-1] == "message_stop"
        text = "".join(
            value["delta"].get("text", "") for name, value in found if name == "content_block_delta"
        )
        assert text == "e e e "
        last = next(value for name, value in found if name == "message_delta")
        assert last["usage"]["output_tokens"] == 3


async def test_responses_are_translated_both_ways_for_the_official_client() -> None:
    async with FakeEngine("e") as engine, running(engine) as gateway, gateway.openai() as client:
        answer = await client.responses.create(model="m", input="hello", max_output_tokens=16)
        assert answer.output_text == "e e e"
        assert answer.usage is not None
        assert answer.usage.output_tokens == 3
        stream = await client.responses.create(model="m", input="hello", stream=True)
        kinds, text = [], ""
        async for event in stream:
            kinds.append(event.type)
            text += event.delta if event.type == "response.output_text.delta" else ""
        assert (kinds[0], kinds[-1], text) == ("response.created", "response.completed", "e e e ")
    assert {received.path for received in engine.received} == {"/v1/chat/completions"}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_errors_have_the_form_of_the_api(path: str) -> None:
    """Errors come from the gateway, from a backend, and in the middle of a stream."""
    body = MESSAGE if path == "/v1/messages" else ITEM
    times = TimeoutSettings(idle_s=0.3)
    async with FakeEngine("e", plan=Plan(400)) as engine, running(engine, timeouts=times) as gateway:
        post = gateway.client.post
        refused = [await post(path, json=body), await post(path, json={**body, "model": "none"})]
        engine.plan = Plan(500)
        refused += [
            await post(path, json=body),
            await post(path, content=b"{", headers={"content-type": "application/json"}),
        ]
        assert [answer.status_code for answer in refused] == [400, 404, 502, 400]
        for answer in refused:
            value = answer.json()
            assert value["error"]["message"]
            assert value["error"]["type"]
            assert (value.get("type") == "error") == (path == "/v1/messages")
        for plan in (Plan(end="stall"), Plan(end="close"), Plan(end="error")):
            engine.plan = plan
            stream = await post(path, json={**body, "stream": True})
            assert stream.status_code == 200
            name, value = events(stream.text)[-1]
            assert "error" in name or value.get("type") in ("error", "response.failed"), stream.text[-300:]
            assert "message_stop" not in stream.text
            assert "response.completed" not in stream.text


async def test_the_official_client_raises_for_a_broken_response() -> None:
    async with (
        FakeEngine("e", plan=Plan(end="close")) as engine,
        running(engine) as gateway,
        gateway.openai() as client,
    ):
        stream = await client.responses.create(model="m", input="hello", stream=True)
        kinds = []
        try:
            async for event in stream:
                kinds.append(event.type)
        except openai.APIError:
            return
    assert "response.completed" not in kinds
    assert kinds[-1] in ("error", "response.failed")


def experiment(folder: Path, **more: Any) -> Any:
    variants = [
        {"name": "old", "model": "m1", "weight": 50},
        {"name": "new", "model": "m2", "weight": 50},
        {"name": "next", "model": "m3", "weight": 0},
    ]
    table = {"name": "trial", "model": "m", "sticky_by": "user", "variants": variants, **more}
    return read_experiments({"experiments": {"folder": str(folder)}, "experiment": [table]}, folder)


async def test_an_experiment_splits_users_copies_requests_and_takes_ratings(tmp_path: Path) -> None:
    """Users stay with their variant. Copies go to a third one, whose answers nobody sees, good or bad."""
    one, two, shadow = FakeEngine("a", "m1"), FakeEngine("b", "m2"), FakeEngine("c", "m3", plan=Plan(500))
    models = (ModelConfig("m"), ModelConfig("m1"), ModelConfig("m2"), ModelConfig("m3"))
    setup = experiment(tmp_path, shadow={"variant": "next", "share": 1.0, "in_flight": 100})
    async with one, two, shadow:
        table = tables((one, two, shadow), models=models)
        settings = resilience(breaker_failures=1000)
        async with running(tables=table, experiments=setup, resilience=settings) as gateway:
            variants: dict[str, str] = {}
            for repeat in range(3):
                for user in range(16):
                    answer = await gateway.ask(f"{repeat} {user}", user=f"user {user}", stream=repeat == 2)
                    assert answer.status_code == 200
                    variant = answer.headers["x-fovea-experiment"]
                    assert variants.setdefault(f"user {user}", variant) == variant
                    backend = {"trial=old": "a", "trial=new": "b"}[variant]
                    assert answer.headers["x-fovea-backend"] == backend
                    assert backend in answer.text
            assert set(variants.values()) == {"trial=old", "trial=new"}
            await soon(lambda: len(shadow.received) >= 40)
            assert len(one.received) + len(two.received) == 48
            counted = [
                await gateway.metric(
                    "experiment_requests_total", experiment="trial", variant=variant, outcome="answered"
                )
                for variant in ("old", "new")
            ]
            assert counted == [len(one.received), len(two.received)]

            shadow.plan = Plan()
            named = await gateway.ask(user="user 1", headers={"x-fovea-variant": "new"})
            assert named.headers["x-fovea-experiment"] == "trial=new"

            post = gateway.client.post
            request_id = answer.headers["x-request-id"]
            rated = await post("/v1/feedback", json={"request_id": request_id, "rating": "up"})
            assert rated.status_code == 200
            for body in (
                {"request_id": request_id, "rating": 9},
                {"rating": 3},
                {"request_id": request_id},
                {},
            ):
                assert (await post("/v1/feedback", json=body)).status_code == 400, body
            unknown = await post("/v1/feedback", json={"request_id": "none", "rating": 3})
            assert unknown.status_code == 404


async def test_slow_copies_hold_no_client_up(tmp_path: Path) -> None:
    one, two, shadow = (
        FakeEngine("a", "m1"),
        FakeEngine("b", "m2"),
        FakeEngine("c", "m3", plan=Plan(wait_s=30)),
    )
    models = (ModelConfig("m"), ModelConfig("m1"), ModelConfig("m2"), ModelConfig("m3"))
    setup = experiment(tmp_path, shadow={"variant": "next", "share": 1.0, "in_flight": 3})
    async with one, two, shadow:
        table = tables((one, two, shadow), models=models)
        async with running(tables=table, experiments=setup) as gateway:
            answers = await asyncio.gather(*(gateway.ask(str(number)) for number in range(20)))
            assert {answer.status_code for answer in answers} == {200}
            await soon(lambda: len(shadow.received) == 3)
        assert shadow.cut == 3  # the gateway has ended, and its copies with it


async def test_only_its_tenant_can_rate_an_answer(tmp_path: Path) -> None:
    """Whoever knew a request id could once rate another tenant's answer, and so decide an experiment.

    Request ids come from clients, so two tenants may have the same one.
    """
    keys = keys_file(tmp_path, [("alice", ""), ("bob", "")])
    folder = tmp_path / "experiments"
    folder.mkdir(mode=0o700)
    models = (ModelConfig("m"), ModelConfig("m1"), ModelConfig("m2"), ModelConfig("m3"))
    async with FakeEngine("a", "m1", "m2", "m3") as one:
        table = tables((one,), models=models)
        async with running(tables=table, experiments=experiment(folder), keys_file=keys) as gateway:

            def of(name: str) -> dict[str, str]:
                return {"authorization": f"Bearer {name}-key", "x-request-id": "the-same"}

            async def rated(name: str) -> int:
                body = {"request_id": "the-same", "rating": "down"}
                return (await gateway.client.post("/v1/feedback", json=body, headers=of(name))).status_code

            assert (await gateway.ask(user="u", headers=of("alice"))).status_code == 200
            assert await rated("bob") == 404
            assert await rated("alice") == 200
            assert (await gateway.ask(user="u", headers=of("bob"))).status_code == 200
            assert await rated("bob") == 200


@pytest.mark.parametrize("sent", ["a", "00-4bf92f3577b34da6:1.x_y", "x" * 128])
async def test_a_request_has_one_id_from_the_client_to_the_engine(sent: str) -> None:
    """The server once replaced ids that the gateway had passed on, so their logs could not be joined."""
    async with FakeEngine("a") as one, running(one) as gateway:
        answer = await gateway.ask(headers={"x-request-id": sent})
        forged = await gateway.ask(headers={"x-request-id": "a b"})
    ids = [got.headers["x-request-id"] for got in one.received]
    assert ids == [answer.headers["x-request-id"], forged.headers["x-request-id"]]
    assert ids[0] == sent
    assert [request_id(one.encode()) for one in ids] == ids, "the server takes them as they are"
