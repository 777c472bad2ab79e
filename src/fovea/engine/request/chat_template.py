"""A checkpoint's chat template: messages become text, and what clients wrote stays text.

How client text is kept apart from control tokens (`render_sealed`). A template may trim, join, replace and
examine the text of messages, so one cannot tell from its output alone who wrote `<|im_end|>`. Therefore the
conversation is rendered once more with stand-ins: in all client text, the characters that mark control tokens
(`<`, `|`, `>`) are replaced by private-use characters that occur nowhere else. In this second text a control
token can only be the template's. It is sealed there, and the stand-ins become the client's characters again.

    client writes    hi<|im_end|>
    plain            <|im_start|>user\nhi<|im_end|><|im_end|>\n
    with stand-ins   <|im_start|>user\nhi???im_end??<|im_end|>\n        ? is a stand-in
    sealed           [S1]user\nhi<|im_end|>[S2]\n                       [Si] is a sealed form

If the second text is not the first one, the template examines the characters themselves
(`'</think>' in content`). Then fewer characters are replaced: those in control tokens, and in beginnings and
ends of them. If that text is equal, and has as many special tokens, it counts; else the safer one does.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fovea.core.constraints import ToolCall
from fovea.core.errors import CheckpointError, InvalidRequest
from fovea.core.json_text import is_nested_deeper
from fovea.core.types import Message, TemplateInputs, TextPart, VideoPart
from fovea.engine.request.control_tokens import ControlTokens

log = logging.getLogger("fovea.engine")
LONGEST_REASON = 300
"""Most characters of a template's own message that a client gets."""
GROWTH, ROOM = 8, 1 << 20
"""A rendered conversation has at most GROWTH times the characters of its texts, and ROOM more."""
MOST_LEVELS = 100
"""Deepest nesting of arguments that a template gets as an object. Deeper ones are text."""
CLIENT = "client"
"""The role of text in tools and calls, which is never the model's own."""
_STAND_INS = range(0x100000, 0x10FFFE)

NOTHING = TemplateInputs()
RESERVED = (
    "messages", "conversation", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt",
    "continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
)  # fmt: skip
"""Arguments that the library or this module sets, and clients do not."""

Rewrite = Callable[[str, str], str]
"""A function from the role and the text of a part to the text that the template gets."""


class ChatTemplate:
    """Turns messages into the text of the model's chat format.

    tokenizer: an object with `apply_chat_template` of a transformers tokenizer, which runs Jinja sandboxed.
    source: Jinja source; None: conversations are refused.
    controls: the control tokens.
    image_text: what an image is for a template that takes the content of a message as text; None: such a
        template cannot write images.

    Raises CheckpointError if the source is not Jinja.
    """

    def __init__(
        self, tokenizer: Any, source: str | None, controls: ControlTokens, image_text: str | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._source = source
        self._controls = controls
        self._image_text = image_text
        self._content_as_list = self._accepts_lists()

    @property
    def exists(self) -> bool:
        """Whether there is a template at all."""
        return self._source is not None

    def render(
        self, messages: Sequence[Message], inputs: TemplateInputs = NOTHING, rewrite: Rewrite | None = None
    ) -> str:
        """Return a conversation as text, ending where the answer begins.

        Raises InvalidRequest if there is no template, if it refuses the messages, or if it has no place for
        tools.
        """
        if self._source is None:
            raise InvalidRequest(
                "this checkpoint has no chat template; use a text prompt, or start with --chat-template FILE",
                param="messages",
            )
        if inputs.tools and "tools" not in self._source:
            raise InvalidRequest(
                "this model's chat template has no place for tools: it has not learnt to call any",
                param="tools",
                code="unsupported_field",
            )
        written = list(_texts(messages, inputs))
        size = sum(map(len, written))
        text = self._apply(
            [self._message(message, rewrite) for message in messages], self._arguments(inputs, rewrite)
        )
        most = GROWTH * size + ROOM
        if len(text) > most:
            raise InvalidRequest(
                f"the chat template made {len(text)} characters of {size}; accepted: at most {most}",
                param="messages",
            )
        return text

    def render_sealed(self, messages: Sequence[Message], inputs: TemplateInputs = NOTHING) -> str:
        """Return the conversation, sealed if messages contain control tokens; these are plain text then.

        Raises InvalidRequest as `render`, and for a role that contains a control token.
        """
        for index, message in enumerate(messages):
            if self._controls.any_case.search(message.role):
                raise InvalidRequest(
                    f"role {message.role[:50]!r} contains a control token", param=f"messages[{index}].role"
                )
        plain = self.render(messages, inputs)
        texts = list(_texts(messages, inputs))
        if not any(char in text for text in texts for char in self._controls.characters):
            return plain
        stand_ins = StandIns(self._controls, [plain, *texts])
        return self._controls.relax(self._seal(messages, inputs, plain, stand_ins))

    def _seal(
        self, messages: Sequence[Message], inputs: TemplateInputs, plain: str, stand_ins: StandIns
    ) -> str:
        wide = self.render(messages, inputs, stand_ins.everywhere)
        if stand_ins.restore(wide) == plain:
            return stand_ins.restore(self._controls.seal(wide))
        narrow = self.render(messages, inputs, stand_ins.in_tokens)
        if stand_ins.restore(narrow) == plain and self._turns(narrow) == self._turns(wide):
            return stand_ins.restore(self._controls.seal(narrow))
        return stand_ins.restore(self._controls.seal(wide))

    def _turns(self, text: str) -> list[str]:
        """Return the control tokens of a text without those that an assistant's answer may contain."""
        tokens = self._controls.pattern.findall(text)
        return [token for token in tokens if not self._controls.answer_words.fullmatch(token)]

    def _apply(
        self,
        messages: list[dict[str, Any]],
        arguments: dict[str, Any] | None = None,
        level: int = logging.WARNING,
    ) -> str:
        """Run the template. Only messages of its author (`raise_exception`) are passed on to clients.

        level: the level at which the cause of another failure is logged.
        """
        from jinja2 import TemplateError, TemplateSyntaxError

        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                chat_template=self._source,
                tokenize=False,
                **{"add_generation_prompt": True, **(arguments or {})},
            )
        except TemplateSyntaxError:
            raise
        except Exception as error:
            if type(error) is TemplateError:  # subclasses are errors of Jinja itself
                reason = f"the chat template refuses these messages: {str(error)[:LONGEST_REASON]}"
            else:
                log.log(level, "the chat template failed: %s: %.300s", type(error).__name__, error)
                reason = "the chat template of this model cannot write these messages; accepted: messages of "
                reason += "the roles and contents that the template expects (the server's log has the cause)"
            raise InvalidRequest(reason, param="messages") from error
        return text

    def _arguments(self, inputs: TemplateInputs, rewrite: Rewrite | None) -> dict[str, Any]:
        """Return the arguments of the template beside the messages."""
        wrong = [name for name in inputs.arguments if name in RESERVED or not name.isidentifier()]
        if wrong:
            raise InvalidRequest(
                f"chat_template_kwargs.{wrong[0][:50]} cannot be set; accepted: variables of the "
                "template, such as enable_thinking",
                param="chat_template_kwargs",
            )
        arguments: dict[str, Any] = {
            name: _rewritten(value, rewrite)
            for name, value in inputs.arguments.items()
            if name in (self._source or "")
        }
        if inputs.tools:
            arguments["tools"] = [_rewritten(tool.definition, rewrite) for tool in inputs.tools]
        if inputs.continues:
            arguments |= {"add_generation_prompt": False, "continue_final_message": True}
        return arguments

    def _message(self, message: Message, rewrite: Rewrite | None) -> dict[str, Any]:
        """Return a message as the template gets it, with only those fields that have a value.

        Some clients send empty text beside calls or reasoning, and others none. A list with an empty part
        would be another prompt, because templates begin a line for it.
        """
        fields: dict[str, Any] = {"role": message.role, "content": self._content(message, rewrite)}
        empty = all(isinstance(part, TextPart) and not part.text for part in message.parts)
        if empty and (message.calls or message.reasoning):
            fields["content"] = ""
        if message.calls:
            fields["tool_calls"] = [
                {
                    "type": "function",
                    "id": _rewritten(call.id, rewrite),
                    "function": {
                        "name": _rewritten(call.name, rewrite),
                        "arguments": _rewritten(_arguments_of(call), rewrite),
                    },
                }
                for call in message.calls
            ]
        if message.call_id:
            fields["tool_call_id"] = _rewritten(message.call_id, rewrite)
        if message.name:
            fields["name"] = _rewritten(message.name, rewrite)
        if message.reasoning:
            fields["reasoning_content"] = (
                message.reasoning if rewrite is None else rewrite(message.role, message.reasoning)
            )
        return fields

    def _content(self, message: Message, rewrite: Rewrite | None) -> Any:
        def text(part: TextPart) -> str:
            return part.text if rewrite is None else rewrite(message.role, part.text)

        only_text = all(isinstance(part, TextPart) for part in message.parts)
        if not self._content_as_list and (only_text or self._image_text):
            image = self._image_text or ""
            return "".join(text(part) if isinstance(part, TextPart) else image for part in message.parts)
        return [
            {"type": "text", "text": text(part)}
            if isinstance(part, TextPart)
            else {"type": "video" if isinstance(part, VideoPart) else "image"}
            for part in message.parts
        ]

    def _accepts_lists(self) -> bool:
        """Test with a probe message whether the template takes content as a list of parts, or as text."""
        from jinja2 import TemplateSyntaxError

        if self._source is None:
            return True
        probe = "fovea-probe-7f3a"
        try:
            message = {"role": "user", "content": [{"type": "text", "text": probe}]}
            text = self._apply([message], level=logging.DEBUG)  # many templates for text alone fail here
        except TemplateSyntaxError as error:
            raise CheckpointError(
                f"the chat template is not Jinja: line {error.lineno}: {str(error.message)[:LONGEST_REASON]}"
            ) from error
        except InvalidRequest:
            return False
        return probe in text and "{'type'" not in text


def _texts(messages: Sequence[Message], inputs: TemplateInputs) -> Iterator[str]:
    """Yield all texts of a request that the template gets."""
    for message in messages:
        yield from (part.text for part in message.parts if isinstance(part, TextPart))
        yield from (message.name, message.reasoning, message.call_id)
        for call in message.calls:
            yield from (call.name, call.arguments, call.id)
    for tool in inputs.tools:
        yield from _strings(tool.definition)
    yield from _strings(inputs.arguments)


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings of a JSON value, names of properties included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            yield name
            yield from _strings(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _strings(entry)


def _rewritten(value: Any, rewrite: Rewrite | None) -> Any:
    """Return a JSON value with all of its strings rewritten."""
    if isinstance(value, str):
        return value if rewrite is None else rewrite(CLIENT, value)
    if isinstance(value, Mapping):
        return {_rewritten(name, rewrite): _rewritten(entry, rewrite) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_rewritten(entry, rewrite) for entry in value]
    return value


def _arguments_of(call: ToolCall) -> Any:
    """Return the arguments of a call as templates expect them: an object, or else the text itself."""
    try:
        value = json.loads(call.arguments) if call.arguments else {}
    except (ValueError, RecursionError):
        return call.arguments
    return value if isinstance(value, dict) and not is_nested_deeper(value, MOST_LEVELS) else call.arguments


class StandIns:
    """Private-use characters that replace the characters of control tokens in one conversation.

    texts: all texts of the conversation. None of them contains a stand-in.
    Raises InvalidRequest if the texts leave no private-use character.
    """

    def __init__(self, controls: ControlTokens, texts: Sequence[str]) -> None:
        used = {ord(char) for text in texts for char in set(text) if ord(char) >= _STAND_INS.start}
        free = (chr(code) for code in _STAND_INS if code not in used)
        self._controls = controls
        self._pairs = list(zip(sorted(controls.characters), free, strict=False))
        if len(self._pairs) < len(controls.characters):
            raise InvalidRequest(
                "the messages use all private-use characters of Unicode plane 16", param="messages"
            )

    def everywhere(self, role: str, text: str) -> str:
        """Replace all characters of control tokens. In messages of the assistant, keep `answer_words`."""
        if role != "assistant":
            return self._replace(text)
        pieces, at = [], 0
        for match in self._controls.answer_words.finditer(text):
            pieces += [self._replace(text[at : match.start()]), match[0]]
            at = match.end()
        return "".join((*pieces, self._replace(text[at:])))

    def in_tokens(self, role: str, text: str) -> str:
        """Replace the characters only in control tokens, and in parts of them at both ends of the text."""
        head, tail = self._controls.fragments(text)
        pieces, at = [self._replace(text[:head])], head
        for match in self._controls.any_case.finditer(text, head):
            is_kept = role == "assistant" and self._controls.answer_words.fullmatch(match[0])
            pieces += [text[at : match.start()], match[0] if is_kept else self._replace(match[0])]
            at = match.end()
        if tail > at:
            pieces += [text[at:tail], self._replace(text[tail:])]
        else:
            pieces.append(self._replace(text[at:]))
        return "".join(pieces)

    def restore(self, text: str) -> str:
        """Replace the stand-ins by the characters that they stand for."""
        for char, stand_in in self._pairs:
            text = text.replace(stand_in, char)
        return text

    def _replace(self, text: str) -> str:
        for char, stand_in in self._pairs:
            text = text.replace(char, stand_in)
        return text
