"""Conversations with tools have the text in training that the chat template gives them in serving."""

from __future__ import annotations

import re
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from fovea.core.constraints import Tool, ToolCall
from fovea.core.types import ChatPrompt, ImagePart, Message, TemplateInputs, TextPart
from fovea.engine.simulate.serving import load_prompt_builder
from fovea.evaluation.scenes.compose import compose
from fovea.evaluation.scenes.scene import Turn
from fovea.evaluation.scenes.structured import TOOLS, tool_use
from tests.support.engines import picture

PIXELS = (160, 128)
CALL = re.compile(r'^<tool_call>\{"name": "(\w+)", "arguments": (\{.*\})\}</tool_call>$', re.DOTALL)


def turns(seed: int) -> list[Turn]:
    """Two requests that need a tool, with their results, and a question that needs none."""
    rng, found = Random(seed), list[Turn]()
    while len(found) < 4:
        scene = compose(rng, *PIXELS, labels=1)
        found += tool_use(rng, scene) or ()
    found.insert(rng.choice((0, 2, len(found))), Turn("Say yes.", "yes", ("yes",)))
    return found


def inputs(offered: list[Any]) -> TemplateInputs:
    """Return what the template gets for a request with these tools."""
    tools = [(tool["function"]["name"], tool["function"]["parameters"], tool) for tool in offered]
    return TemplateInputs(tuple(Tool(*each) for each in tools))


def messages(said: list[Turn], system: str | None, images_first: bool) -> list[Message]:
    """The conversation of a client of the API up to the last answer."""
    result = [Message("system", (TextPart(system),))] if system else []
    for number, turn in enumerate(said):
        parts: tuple[Any, ...] = (TextPart(turn.question),)
        if number == 0:
            image = ImagePart(picture(3, *PIXELS))
            parts = (image, *parts) if images_first else (*parts, image)
        result.append(Message(turn.role, parts))
        call = CALL.match(turn.answer)
        calls = (ToolCall(call[1], call[2]),) if call else ()
        result.append(Message("assistant", () if call else (TextPart(turn.answer),), calls))
    return result


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("system", [None, "Answer the question."])
@pytest.mark.parametrize("text_first", [False, True])
def test_a_conversation_with_tools(
    seed: int, system: str | None, text_first: bool, training: SimpleNamespace
) -> None:
    """Every prefix that ends before an answer is the prompt that the engine makes of it."""
    said = turns(seed)
    offered = Random(seed).sample(TOOLS, 1 + seed % len(TOOLS))
    head = training.batches.offer(offered, system)
    media = training.packing.PromptMedia((PIXELS[1] // 32, PIXELS[0] // 32))
    sequence = training.packing.conversation(training.packer, said, media, head, text_first)
    _, builder = load_prompt_builder()
    conversation = messages(said, system, not text_first)
    first = len(conversation) - 2 * len(said)
    for number in range(len(said)):
        asked = tuple(conversation[: first + 2 * number + 1])
        ids = builder.build(ChatPrompt(asked, template=inputs(offered))).ids
        targets = [
            at for at, group in zip(sequence.target_indices, sequence.groups, strict=True) if group == number
        ]
        assert sequence.tokens[: targets[0]] == ids
    whole = training.packer.tokenizer.decode(sequence.tokens, skip_special_tokens=False)
    text, marker = load_prompt_builder()[0].render(conversation, inputs(offered)), "<|image_pad|>"
    assert re.sub(f"({re.escape(marker)})+", marker, whole) + "\n<|im_start|>assistant\n" == text


def test_without_tools_nothing_is_offered(training: SimpleNamespace) -> None:
    assert training.batches.offer([], None) is None
    assert training.batches.offer([], "Be brief.") == "Be brief."


@pytest.mark.parametrize("seed", range(20))
def test_all_answers_are_read_as_calls_of_the_tools_on_offer(seed: int) -> None:
    """The model learns the format in which the server reads its calls."""
    names = {tool["function"]["name"] for tool in TOOLS}
    for turn in turns(seed):
        if turn.role == "user" and "tool_call" in turn.answer:
            call = CALL.match(turn.answer)
            assert call is not None
            assert call[1] in names
