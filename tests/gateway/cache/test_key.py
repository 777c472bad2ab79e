"""Keys of the response cache: what changes them, what does not, and which requests have none."""

from __future__ import annotations

import copy
import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fovea.api.schema import ChatRequest, CompletionRequest
from fovea.core.media import content_identity
from fovea.gateway.cache.key import (
    EXCLUDED,
    MEDIA_MARK,
    cacheability,
    permissions,
)

CAT = content_identity("image/png", 8, 8, b"cat")
DOG = content_identity("image/png", 8, 8, b"dog")


def image(number: int = 0, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"{MEDIA_MARK}{number}", **fields}}


def request(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    text = {"type": "text", "text": "What is it?"}
    return {
        "model": "m",
        "messages": [{"role": "user", "content": [*parts, text]}],
        "temperature": 0,
        **fields,
    }


def key(body: dict[str, Any], *images: str, scope: str = "a", version: str = "m@1", **options: Any) -> str:
    found = cacheability(body, images, scope=scope, model_version=version, **options).key
    assert found is not None
    return found


def reason(body: dict[str, Any], *images: str, **options: Any) -> str:
    found = cacheability(body, images, scope="a", model_version="m@1", **options)
    assert (found.key is None) == bool(found.reason)
    return found.reason


def test_a_key_is_64_hex_digits_and_the_same_every_time() -> None:
    first = key(request(image()), CAT)
    assert len(first) == 64
    assert int(first, 16) >= 0
    assert first == key(copy.deepcopy(request(image())), CAT)


def test_another_image_with_the_same_text_is_another_key() -> None:
    assert key(request(image()), CAT) != key(request(image()), DOG)


def test_the_order_and_the_number_of_images_count() -> None:
    two = request(image(0), image(1))
    keys = {key(two, CAT, DOG), key(two, DOG, CAT), key(two, CAT, CAT), key(request(image()), CAT)}
    assert len(keys) == 4


def test_two_images_that_change_places_inside_one_part_are_another_key() -> None:
    first = request({"type": "image_url", "a": image(0), "b": image(1)})
    second = request({"type": "image_url", "b": image(0), "a": image(1)})
    assert key(first, CAT, DOG) != key(second, CAT, DOG)


def test_tenants_models_versions_and_paths_do_not_share() -> None:
    body = request()
    keys = {
        key(body),
        key(body, scope="b"),
        key(body, version="m@2"),
        key(body, path="/v1/completions"),
        # The parts are framed: moving a character from one to the next changes the key.
        key(body, scope="am", version="@1"),
    }
    assert len(keys) == 5


VALUES: dict[str, Any] = {
    "messages": [{"role": "user", "content": "other"}],
    "prompt": "other",
    "response_format": {"type": "json_object"},
    "stream_options": {"include_usage": True},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "metadata": {"a": "b"},
    "temperature": 0.0,
}


@pytest.mark.parametrize("name", sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields}))
def test_every_field_changes_the_key_or_is_excluded(name: str) -> None:
    changed = {**request(), name: VALUES.get(name, "changed")}
    assert (key(changed) == key(request())) == (name in EXCLUDED)


def test_excluded_fields_exist_in_the_schema() -> None:
    """A name that no schema has could hide a field of another API that does matter."""
    assert set(ChatRequest.model_fields) >= EXCLUDED


def test_an_unknown_field_changes_the_key_also_deep_inside() -> None:
    keys = {
        key(request()),
        key(request(new_field=1)),
        key(request(new_field=None)),
        key(request(image(), new_field=1), CAT),
        key(request(image(detail="high")), CAT),
        key(request(image(min_pixels=100)), CAT),
    }
    assert len(keys) == 6


def test_the_order_of_fields_counts_inside_of_them_only() -> None:
    body = request(response_format={"a": 1, "b": 2})
    assert key(dict(reversed(body.items()))) == key(body)
    assert key(request(response_format={"b": 2, "a": 1})) != key(body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
# Without "url" and "file_id", whose requests have no key.
BODIES = st.dictionaries(st.text("abcxyz", max_size=3), JSON, max_size=4)


def written(value: Any) -> str:
    """JSON of a body, in which 1, 1.0 and True differ; only the order of the fields does not matter."""
    return json.dumps({name: value[name] for name in sorted(value)})


@given(BODIES, BODIES, st.lists(st.sampled_from([CAT, DOG]), max_size=2), st.text(max_size=3))
def test_keys_are_equal_exactly_if_requests_are(
    first: dict[str, Any], second: dict[str, Any], images: list[str], scope: str
) -> None:
    marks = [image(number) for number in range(len(images))]
    one, two = {**first, **request(*marks)}, {**second, **request(*marks)}
    assert (key(one, *images, scope=scope) == key(two, *images, scope=scope)) == (
        written(one) == written(two)
    )
    assert key(one, *images, scope=scope) != key(one, *images, scope=scope + "x")


@pytest.mark.parametrize("temperature", [None, 0.1, 1, True, False, "0", -1])
def test_only_temperature_zero_is_deterministic(temperature: Any) -> None:
    body = request(temperature=temperature)
    assert reason(body) == "not_deterministic"
    assert reason(body, asked=True) == ""
    assert reason({**body, "seed": 1}) == "not_deterministic"


def test_an_omitted_temperature_is_not_zero() -> None:
    body = request()
    del body["temperature"]
    assert reason(body) == "not_deterministic"


@pytest.mark.parametrize("temperature", [0, 0.0, -0.0])
def test_several_choices_at_temperature_zero_have_a_key(temperature: float) -> None:
    assert reason(request(temperature=temperature, n=3)) == ""


@pytest.mark.parametrize(
    "identity", [None, "", "https://example.org/cat.png", CAT[:-1], CAT.upper(), CAT + "0"]
)
def test_an_image_without_identity_has_no_key(identity: Any) -> None:
    assert reason(request(image()), identity) == "no_identity"
    assert reason(request(image()), identity, asked=True) == "no_identity"


@pytest.mark.parametrize("images", [(), (CAT, DOG)])
def test_marks_and_identities_have_to_agree(images: tuple[str, ...]) -> None:
    assert reason(request(image()), *images) == "no_identity"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}},
        {"type": "image_url", "image_url": "https://example.org/cat.png"},
        {"type": "video_url", "video_url": {"url": f"{MEDIA_MARK}x"}},
        {"type": "file", "file": {"file_id": "file-1"}},
    ],
)
def test_media_behind_a_reference_have_no_key(part: dict[str, Any]) -> None:
    assert reason(request(part)) == "reference"


@pytest.mark.parametrize("text", ['"url":"https://example.org"', f'"{MEDIA_MARK}0"', f"see {MEDIA_MARK}0"])
def test_a_text_that_looks_like_a_reference_is_a_text(text: str) -> None:
    assert reason(request({"type": "text", "text": text})) == ""


def test_tools_that_the_backend_runs_have_no_key() -> None:
    assert reason(request(tools=[{"type": "web_search"}])) == "server_tools"
    assert reason(request(web_search_options={"a": 1})) == "server_tools"
    assert reason(request(tools=VALUES["tools"])) == ""


def test_running_token_counts_have_no_key() -> None:
    assert reason(request(stream_options={"continuous_usage_stats": True})) == "running_usage"


@pytest.mark.parametrize(
    "value", [object(), b"bytes", {1, 2}, 10**5000], ids=["object", "bytes", "set", "digits"]
)
def test_what_json_cannot_write_has_no_key(value: Any) -> None:
    assert reason(request(field=value)) == "unreadable"


def test_halves_of_characters_are_no_failure() -> None:
    assert key(request(user_text="\ud800")) != key(request(user_text="\ud801"))


@pytest.mark.parametrize(
    ("header", "directives"),
    [
        (None, (True, True)),
        ("", (True, True)),
        ("max-age=60", (True, True)),
        ("No-Cache", (False, True)),
        ("max-age = 0", (False, True)),
        ("no-cache, no-store", (False, False)),
        (" no-store ", (False, False)),
        ("x-no-store", (True, True)),
    ],
)
def test_cache_control(header: str | None, directives: tuple[bool, bool]) -> None:
    assert permissions(header) == directives
