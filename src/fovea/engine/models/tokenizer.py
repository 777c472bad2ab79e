"""Reads a checkpoint's tokenizer, chat template and end-of-sequence ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fovea.core.errors import CheckpointError
from fovea.engine.files import read_json
from fovea.engine.request.tokenizer import ChatTokenizer

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
LLAVA_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{% for c in message['content'] %}{{ c['text'] }} {% endfor %}"
    "{% else %}{{ 'USER: ' if message['role'] == 'user' else 'ASSISTANT: ' }}"
    "{% for c in message['content'] if c['type'] == 'image' %}{{ '<image>\n' }}{% endfor %}"
    "{% for c in message['content'] if c['type'] == 'text' %}{{ c['text'] }}{% endfor %}"
    "{{ ' ' if message['role'] == 'user' else '</s>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def load_tokenizer(folder: Path, config: Any, *, template: str | None = None) -> ChatTokenizer:
    """The tokenizer of a checkpoint. template: replaces the checkpoint's own chat template.

    Raises CheckpointError when no tokenizer can be made.
    """
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in VOCABULARIES):
        # transformers makes an empty tokenizer of such a folder, and nothing fails before the first answer.
        raise CheckpointError(f"{folder} has no usable tokenizer: none of {', '.join(VOCABULARIES)} is there")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CheckpointError(f"{folder} has no usable tokenizer: {error}") from error
    chosen = template or tokenizer.chat_template or _template_file(folder)
    if chosen is None and config.model_type == "llava":
        chosen = LLAVA_TEMPLATE
    return ChatTokenizer(tokenizer, chosen, eos_ids=_eos_ids(folder, config, tokenizer))


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
    """Every id that ends an answer: the generation config's, else the model's, and always the tokenizer's own."""
    found: set[int] = set()
    sources = [read_json(folder / "generation_config.json").get("eos_token_id")]
    sources += [getattr(config, "eos_token_id", None), getattr(config.text_config, "eos_token_id", None)]
    for source in sources:
        if source is not None:
            found.update([source] if isinstance(source, int) else source)
            break
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(found)
