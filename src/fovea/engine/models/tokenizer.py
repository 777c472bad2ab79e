"""Reads a checkpoint's tokenizer, chat template and end-of-sequence ids."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fovea.core.errors import CheckpointError
from fovea.dialects.dialect import Dialect, detect
from fovea.engine.files import BOUNDS, read_json, read_text
from fovea.engine.models.bundled import is_bundled
from fovea.engine.models.text import text_config
from fovea.engine.request.plain_tokenizer import PlainTokenizer
from fovea.engine.request.tokenizer import MARKER_FIELDS, ChatTokenizer
from fovea.engine.vision.processor.internvl import MARKER

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""A folder with a tokenizer has at least one of these files."""
LLAVA_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{% for c in message['content'] %}{{ c['text'] }} {% endfor %}"
    "{% else %}{{ 'USER: ' if message['role'] == 'user' else 'ASSISTANT: ' }}"
    "{% for c in message['content'] if c['type'] == 'image' %}{{ '<image>\n' }}{% endfor %}"
    "{% for c in message['content'] if c['type'] == 'text' %}{{ c['text'] }}{% endfor %}"
    "{{ ' ' if message['role'] == 'user' else '</s>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
"""Chat template of LLaVA-1.5, for checkpoints without one."""

INTERNVL = ("internvl", "internvl_chat")
"""Model types whose templates may take the content of a message as text, with markers for the images."""
INTERNVL_OLD_MARKER = "<image>"
"""Marker of an image in templates of InternVL, where it is not the image token, and not a token at all."""


def load_tokenizer(
    folder: Path,
    config: Any,
    *,
    template: str | None = None,
    dialect: Callable[[str | None], Dialect] = detect,
) -> ChatTokenizer:
    """Load the tokenizer of a checkpoint.

    config: the checkpoint's configuration, as transformers reads it.
    template: a chat template that replaces the checkpoint's own.
    dialect: tells by the template how the model writes reasoning and tool calls.

    Raises CheckpointError if there is no usable tokenizer.
    """
    if not any((folder / name).is_file() for name in VOCABULARIES):
        # For such a folder, transformers returns an empty tokenizer, which causes wrong answers but no error.
        raise CheckpointError(f"{folder} has no usable tokenizer: none of {', '.join(VOCABULARIES)} is there")
    try:
        # A template of the operator's may use what transformers alone offers it, such as raise_exception.
        plain = is_bundled(folder) and not template
        tokenizer = PlainTokenizer(folder) if plain else _of_transformers(folder, config)
        chat_template = template or _own_template(folder, tokenizer) or _template_file(folder)
    except CheckpointError:
        raise
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library's Rust code is not an Exception
        raise CheckpointError(f"{folder} has no usable tokenizer: {reason(error)}") from error
    _check_ids(folder, tokenizer)
    return make_tokenizer(
        tokenizer, config, chat_template, _eos_ids(folder, config, tokenizer), dialect=dialect
    )


def _of_transformers(folder: Path, config: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        str(folder), trust_remote_code=False, local_files_only=True, **_fixes(config)
    )


def make_tokenizer(
    tokenizer: Any,
    config: Any,
    chat_template: str | None,
    eos_ids: frozenset[int],
    *,
    dialect: Callable[[str | None], Dialect] = detect,
) -> ChatTokenizer:
    """Return a tokenizer with its chat template, which some families need to be changed.

    tokenizer: a transformers tokenizer, or that of the bundled model.
    config, dialect: see `load_tokenizer`.
    chat_template: Jinja source; None: there is none.
    eos_ids: ids that end an answer.

    Raises CheckpointError if the template is not Jinja.
    """
    tower = getattr(getattr(config, "vision_config", None), "model_type", "")
    if chat_template is None and config.model_type == "llava" and tower != "pixtral":
        chat_template = LLAVA_TEMPLATE
    image_text = None
    if config.model_type in INTERNVL:
        chat_template = chat_template and chat_template.replace(INTERNVL_OLD_MARKER, MARKER)
        image_text = MARKER + "\n"
    if config.model_type == "gemma3":
        # In Gemma's templates an image is the token that begins it, which the text of an image contains, too.
        begin, image = (
            str(tokenizer.convert_ids_to_tokens(i)) for i in (config.boi_token_id, config.image_token_id)
        )
        chat_template = chat_template and chat_template.replace(begin, image)
    markers = frozenset(
        token for name in MARKER_FIELDS if isinstance(token := getattr(config, name, None), int)
    )
    return ChatTokenizer(
        tokenizer,
        chat_template,
        eos_ids=eos_ids,
        marker_ids=markers,
        dialect=dialect(chat_template),
        image_text=image_text,
        decodes_by_backend=_decodes_by_backend(tokenizer),
    )


def _decodes_by_backend(tokenizer: Any) -> bool:
    """Whether `decode` of a tokenizer is that of the library `tokenizers`, in a wrapper that adds nothing.

    The wrapper takes many times as long as the library, for every token of an answer.
    """
    if isinstance(tokenizer, PlainTokenizer):
        return True
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind, own = type(tokenizer), PreTrainedTokenizerFast
    return (
        isinstance(tokenizer, own)
        and kind.decode is PreTrainedTokenizerBase.decode
        and kind._decode is own._decode
    )


def _fixes(config: Any) -> dict[str, bool]:
    """Options of transformers for tokenizers whose published files have a known fault.

    tokenizer.json of Mistral 3 splits words by a wrong pattern. transformers knows the right one, and uses it
    for files of its versions before 5 if it is told to.
    """
    return {"fix_mistral_regex": True} if config.model_type == "mistral3" else {}


def reason(error: BaseException) -> str:
    """Return what a library's error says, in at most 500 characters."""
    return f"{type(error).__name__}: {str(error)[:500]}"


def _own_template(folder: Path, tokenizer: Any) -> str | None:
    """Return the template that transformers has found. Of several, it is the one named "default".

    Raises CheckpointError.
    """
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            f"{folder}/tokenizer_config.json: chat_template is a {type(template).__name__}; accepted: text"
        )
    return template


def _check_ids(folder: Path, tokenizer: Any) -> None:
    """Raise CheckpointError if the tokenizer is empty, or an id is far outside of its vocabulary."""
    most = BOUNDS["vocab_size"]
    ids = {**tokenizer.get_vocab(), **_declared_ids(folder / "tokenizer.json")}
    token, largest = max(ids.items(), key=lambda item: item[1], default=("", -1))
    if not 0 <= largest < most:
        raise CheckpointError(
            f"{folder}/tokenizer.json: token {token[:50]!r} has id {largest}; accepted: 0 to {most - 1}"
        )


def _declared_ids(path: Path) -> dict[str, int]:
    """Return the ids of added tokens as tokenizer.json has them. The library replaces impossible ones."""
    match = re.search(r'"added_tokens"\s*:\s*', content := path.read_text("utf-8") if path.is_file() else "")
    try:
        tokens = json.JSONDecoder().raw_decode(content, match.end())[0] if match else []
        return {str(token["content"]): int(token["id"]) for token in tokens}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}  # the library has its own view of such a file


def added_ids(folder: Path) -> dict[str, int]:
    """Return the ids of the tokens that were added to a vocabulary, as the tokenizer's files declare them.

    The tokenizer itself is not loaded. Raises CheckpointError for a file that is not JSON.
    """
    ids: dict[str, Any] = {
        **_declared_ids(folder / "tokenizer.json"),
        **read_json(folder / "added_tokens.json"),
    }
    listed = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder")
    for number, token in listed.items() if isinstance(listed, dict) else ():
        if number.isdecimal() and isinstance(token, dict):
            ids[str(token.get("content"))] = int(number)
    return {token: number for token, number in ids.items() if isinstance(number, int) and number >= 0}


def _template_file(folder: Path) -> str | None:
    plain = folder / "chat_template.jinja"
    if plain.is_file():
        return read_text(plain)
    for name in ("chat_template.json", "processor_config.json"):
        path = folder / name
        if path.is_file():
            template = read_json(path).get("chat_template")
            if isinstance(template, str):
                return template
    return None


def _eos_ids(folder: Path, config: Any, tokenizer: Any) -> frozenset[int]:
    """All ids that end an answer: of the generation config, else of the model, and the tokenizer's own."""
    ids: set[int] = set()
    generation = folder / "generation_config.json"
    sources = [(generation, read_json(generation).get("eos_token_id"))]
    sources += [
        (folder / "config.json", getattr(part, "eos_token_id", None))
        for part in (config, text_config(config))
    ]
    for path, source in sources:
        if source is not None:
            ends = source if isinstance(source, list) else [source]
            if not all(isinstance(end, int) and not isinstance(end, bool) and end >= 0 for end in ends):
                raise CheckpointError(
                    f"{path}: eos_token_id is {str(source)[:100]}; accepted: an id, such as 2, or a list",
                    param="eos_token_id",
                )
            ids.update(ends)
            break
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
