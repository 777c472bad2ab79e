"""Reads a checkpoint's tokenizer, chat template and end-of-sequence ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fovea.core.errors import CheckpointError
from fovea.engine.files import read_json
from fovea.engine.request.tokenizer import MARKER_FIELDS, ChatTokenizer

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Files of which a folder with a tokenizer has at least one."""
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


def load_tokenizer(folder: Path, config: Any, *, template: str | None = None) -> ChatTokenizer:
    """Load the tokenizer of a checkpoint.

    config: the checkpoint's configuration, as transformers reads it.
    template: a chat template that replaces the checkpoint's own.

    Raises CheckpointError if there is no usable tokenizer.
    """
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in VOCABULARIES):
        # For such a folder, transformers returns an empty tokenizer, which causes wrong answers but no error.
        raise CheckpointError(f"{folder} has no usable tokenizer: none of {', '.join(VOCABULARIES)} is there")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CheckpointError(f"{folder} has no usable tokenizer: {error}") from error
    chat_template = template or tokenizer.chat_template or _template_file(folder)
    if chat_template is None and config.model_type == "llava":
        chat_template = LLAVA_TEMPLATE
    markers = frozenset(
        token for name in MARKER_FIELDS if isinstance(token := getattr(config, name, None), int)
    )
    return ChatTokenizer(
        tokenizer, chat_template, eos_ids=_eos_ids(folder, config, tokenizer), marker_ids=markers
    )


def _template_file(folder: Path) -> str | None:
    plain = folder / "chat_template.jinja"
    if plain.is_file():
        return plain.read_text()
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
    sources = [read_json(folder / "generation_config.json").get("eos_token_id")]
    sources += [getattr(config, "eos_token_id", None), getattr(config.text_config, "eos_token_id", None)]
    for source in sources:
        if source is not None:
            ids.update([source] if isinstance(source, int) else source)
            break
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
