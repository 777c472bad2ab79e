"""Inputs from Python callers, and the errors for inputs that are not accepted."""

from __future__ import annotations

import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from fovea.api.convert import chat_prompt
from fovea.api.schema import ChatRequest
from fovea.core.constraints import ToolCall
from fovea.core.errors import InvalidRequest
from fovea.core.sampling import SamplingParams
from fovea.core.types import ChatPrompt, ImagePart, TextPart
from fovea.engine.request.inputs import to_image, to_prompt

RED = Image.new("RGB", (8, 4), "red")
CALL = {"id": "c1", "type": "function", "function": {"name": "save", "arguments": '{"count": 1}'}}

BAD_PROMPTS: list[tuple[Any, str]] = [
    ([], "at least one.*got \\[\\]"),
    (5, "text, messages"),
    ([{"role": "user"}], "a role, and content or .*; got the fields role"),
    ([{"role": 3, "content": "x"}], "role must be text"),
    ([{"role": "user", "content": 5}], "text or a list of parts, got a value of type int"),
    ([{"role": "user", "content": [{"type": "text"}]}], "needs the field 'text'"),
    ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "needs the field 'text'"),
    ([{"role": "user", "content": [{"type": "image"}]}], "needs the field 'image'"),
    ([{"role": "user", "content": [{"type": "image", "image": 3}]}], "int is not an image"),
    ([{"role": "user", "content": [{"type": "sound"}]}], "accepted: parts of type text, image"),
    ([{"role": "user", "content": "x", "images": [RED]}], "field 'images', got .* type list; images"),
    ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "not in those of user"),
    ([{"role": "assistant", "tool_calls": [{"function": "save"}]}], "a tool call is .* got .* type str"),
    ([{"role": "assistant", "content": None}], "text or a list"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS, ids=range(len(BAD_PROMPTS)))
def test_the_error_names_the_wrong_part(prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        to_prompt(prompt)


def test_images_come_before_a_question(tmp_path: Path) -> None:
    """A path, bytes and a PIL image of the same file: three parts in order, then the text."""
    path = tmp_path / "red.png"
    RED.save(path)
    prompt = to_prompt("what?", [path, path.read_bytes(), RED])
    assert isinstance(prompt, ChatPrompt)
    *images, text = prompt.messages[0].parts
    assert text == TextPart("what?")
    assert all(isinstance(part, ImagePart) and part.image.width == 8 for part in images)
    first, second = (part.image.identity for part in images[:2] if isinstance(part, ImagePart))
    assert first == second


def test_one_image_needs_no_list(tmp_path: Path) -> None:
    """A path alone was once taken for a list of its characters, and a PIL image raised a TypeError."""
    path = tmp_path / "red.png"
    RED.save(path)
    data = path.read_bytes()
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    for image in (path, str(path), data, bytearray(data), RED, to_image(path), url, [url]):
        prompt = to_prompt("what?", image)
        assert isinstance(prompt, ChatPrompt)
        picture, text = prompt.messages[0].parts
        assert isinstance(picture, ImagePart)
        assert (picture.image.width, picture.image.height, text) == (8, 4, TextPart("what?"))
    with pytest.raises(InvalidRequest, match="images is a int; accepted: a list, or one alone"):
        to_prompt("what?", 5)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="image 0: .* nothing, got 'https://example.com/a.png';"):
        to_prompt("what?", "https://example.com/a.png")
    with pytest.raises(InvalidRequest, match="video 0: .*cannot be read"):
        to_prompt("what?", videos=str(tmp_path / "missing.mp4"))


def test_conversations_with_tools_are_those_of_the_server() -> None:
    """Calls of the assistant were dropped, and the role developer reached templates that do not know it."""
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "How many?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I count.",
            "tool_calls": [CALL, {"id": "c2", "function": {"name": "look", "arguments": {"at": "left"}}}],
        },
        {"role": "tool", "tool_call_id": "c2", "content": "nothing"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "saved"}]},
    ]
    prompt = to_prompt(messages)
    assert isinstance(prompt, ChatPrompt)
    assert [message.role for message in prompt.messages] == ["system", "user", "assistant", "tool", "tool"]
    answer, first, second = prompt.messages[2:]
    assert answer.calls == (ToolCall("save", '{"count": 1}', "c1"), ToolCall("look", '{"at": "left"}', "c2"))
    assert (answer.parts, answer.reasoning) == ((), "I count.")
    assert [(m.call_id, m.name, m.parts) for m in (first, second)] == [
        ("c1", "save", (TextPart("saved"),)),
        ("c2", "look", (TextPart("nothing"),)),
    ]
    on_the_wire = [*messages[:2], messages[2] | {"content": None}, *messages[3:]]
    on_the_wire[2]["tool_calls"][1]["function"]["arguments"] = '{"at": "left"}'
    body = ChatRequest.model_validate({"model": "m", "messages": on_the_wire})
    assert chat_prompt(body, []).messages == prompt.messages


def test_the_error_names_the_index_of_a_bad_image() -> None:
    with pytest.raises(InvalidRequest, match="image 1: "):
        to_prompt("what?", [RED, b"nothing"])


@pytest.mark.parametrize(
    "values",
    [{"ignore_eos": "yes"}, {"logprobs": "no"}, {"logit_bias": {"5": 1.0}}, {"stop_token_ids": ("5",)}],
    ids=str,
)
def test_sampling_parameters_of_a_wrong_type_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(values))):
        SamplingParams(**values)


def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, 48 MB of text kept one of four preparing threads busy for 53 seconds before its refusal."""
    from fovea.core.errors import PromptTooLong
    from fovea.core.types import TextPrompt
    from fovea.engine.request.prompt import PromptBuilder
    from fovea.engine.request.tokenizer import ChatTokenizer
    from fovea.engine.vision.processor.base import Capabilities
    from tests.support.checkpoints import QWEN_TEMPLATE, tokenizer

    words = ChatTokenizer(tokenizer(QWEN_TEMPLATE), QWEN_TEMPLATE, eos_ids=frozenset({2}))
    processor: Any = SimpleNamespace(capabilities=Capabilities())
    builder = PromptBuilder(words, processor, image_token_id=5)
    fitting = builder.build(TextPrompt("the red circle " * 20), limit=4096)
    assert len(fitting.ids) >= words.fewest_tokens("the red circle " * 20)

    def encode(text: str) -> list[int]:
        raise AssertionError("the text was tokenized")

    monkeypatch.setattr(words, "encode", encode)
    with pytest.raises(PromptTooLong, match="7500000 characters"):
        builder.build(TextPrompt("the red circle " * 500_000), limit=4096)
