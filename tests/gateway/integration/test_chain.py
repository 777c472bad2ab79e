"""A large request passes nginx, Envoy, the gateway and a simulated engine, all of them real processes."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from fovea.core.media import content_identity
from tests.gateway.support import CHAT, PATIENCE_S, chat, words
from tests.support.programs import needs
from tests.support.servers import envoy_proxy, folder, forked, free_port, nginx_proxy
from tests.support.thorough import others_slow

SIDES = (840, 360)
"""Three PNGs of noise with these sides have about 8.5 and 1.5 MiB as base64."""


@contextlib.contextmanager
def command(name: str, *options: str) -> Iterator[str]:
    """Run a command of fovea that serves on a free port. Yields its URL."""
    port = free_port()
    with folder(name) as home, forked([name, "--port", str(port), *options], port, home / "log"):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def chain(urls: Sequence[str]) -> Iterator[str]:
    """nginx before Envoy before some servers."""
    with envoy_proxy(urls) as envoy, nginx_proxy([envoy]) as nginx:
        yield nginx


def pngs_of(side: int) -> list[bytes]:
    """Three images that no coder makes smaller."""
    found = []
    for seed in range(3):
        noise = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
        out = io.BytesIO()
        Image.fromarray(noise).save(out, "PNG", compress_level=0)
        found.append(out.getvalue())
    return found


def wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + 2 * PATIENCE_S
    while httpx.get(f"{url}/ready", trust_env=False, verify=False).status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@needs("nginx", "envoy")
@pytest.mark.parametrize("side", others_slow(SIDES, [360]))
def test_three_large_images_arrive_and_have_the_same_identities_on_both_sides(
    side: int, tmp_path: Path
) -> None:
    pngs = pngs_of(side)
    audit = tmp_path / "audit"
    with (
        command("serve", "--simulate") as engine,
        command("gateway", "--backend", engine, "--audit-log", str(audit)) as gateway,
        chain([gateway]) as front,
    ):
        wait_until_ready(gateway)
        model = httpx.get(f"{front}/v1/models", trust_env=False, verify=False).json()["data"][0]["id"]
        images = [
            {
                "type": "image_url",
                "image_url": {"url": "data:image/png;base64," + base64.b64encode(png).decode()},
            }
            for png in pngs
        ]
        content = [*images, {"type": "text", "text": "What differs?"}]
        body = chat(model=model, messages=[{"role": "user", "content": content}], max_tokens=8)
        assert len(json.dumps(body)) > 12 * side * side
        with httpx.Client(base_url=front, timeout=3 * PATIENCE_S, trust_env=False, verify=False) as client:
            complete = client.post(CHAT, json=body)
            stream = client.post(CHAT, json={**body, "stream": True})
        identities = [content_identity("image/png", side, side, png) for png in pngs]
        for answer in (complete, stream):
            assert answer.status_code == 200, answer.text[:500]
            assert answer.headers["x-fovea-images"].split(",") == identities
            assert answer.headers["x-fovea-backend"] == engine.removeprefix("http://")
        assert complete.json()["choices"][0]["message"]["content"].strip()
        assert complete.json()["usage"]["prompt_tokens_details"]["image_tokens"] > 0
        assert words(stream.text)
        assert stream.text.strip().endswith("data: [DONE]")
        with openai.OpenAI(base_url=f"{front}/v1", api_key="none", max_retries=0) as sdk:
            said = sdk.chat.completions.create(**body)
        assert said.choices[0].message.content == complete.json()["choices"][0]["message"]["content"]
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    logged = [[side, side, identity[:16]] for identity in identities]
    assert [(line["images"], line["image_list"]) for line in lines] == [(3, logged)] * 3
    assert os.path.getsize(audit) < 10_000, "identities are logged, not images"
