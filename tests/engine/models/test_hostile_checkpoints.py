"""A checkpoint that somebody made to do harm, or by mistake, ends in an error that names file and field."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fovea.core.errors import CheckpointError, ModelError
from fovea.engine.assemble import prompt_builder
from fovea.engine.files import MOST_BYTES, MOST_DEPTH, MOST_TOKENIZER_BYTES, is_too_deep
from fovea.engine.load import load_model
from tests.engine.models.test_checkpoints import (
    CONFIG,
    WEIGHTS,
    Damage,
    edit_json,
    entry,
    header,
    load,
    overwrite,
)
from tests.support.hub import hub_cache

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(qwen: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint, for the test to damage."""
    return Path(shutil.copytree(qwen, tmp_path / "checkpoint"))


def index(*names: Any) -> Damage:
    return overwrite(
        INDEX, json.dumps({"weight_map": {str(i): name for i, name in enumerate(names)}}).encode()
    )


def config(**fields: Any) -> Damage:
    return edit_json("config.json", lambda content: content.update(fields))


def text(**fields: Any) -> Damage:
    return edit_json("config.json", lambda content: content["text_config"].update(fields))


def vision(**fields: Any) -> Damage:
    return edit_json("config.json", lambda content: content["vision_config"].update(fields))


def generation(eos: Any) -> Damage:
    return edit_json("generation_config.json", lambda content: content.update(eos_token_id=eos))


def pixels(**fields: Any) -> Damage:
    return edit_json("preprocessor_config.json", lambda content: content.update(fields))


def vocabulary(change: Callable[[dict[str, Any]], Any]) -> Damage:
    return edit_json("tokenizer.json", lambda content: change(content) and None)


def added(**fields: Any) -> Damage:
    token = {
        "id": 383,
        "content": "<x>",
        "special": True,
        "normalized": False,
        "lstrip": False,
        "rstrip": False,
        "single_word": False,
    }
    return vocabulary(lambda content: content["added_tokens"].append({**token, **fields}))


def grow(name: str, size: int) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).touch()
        os.truncate(folder / name, size)

    return damage


def link(name: str, target: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return damage


def pipe(folder: Path) -> None:
    (folder / "added_tokens.json").unlink(missing_ok=True)
    os.mkfifo(folder / "added_tokens.json")


def numeric_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    edit_json("tokenizer_config.json", lambda content: content.update(chat_template=7))(folder)


def look_heads(content: bytes) -> Damage:
    def damage(folder: Path) -> None:
        (folder / "fovea").mkdir()
        (folder / "fovea" / "look.json").write_bytes(content)

    return damage


NOT_AN_INDEX = f"{INDEX} is not a weight index: it names .*accepted: names of"
DEEP = b'{"a":' * 3000 + b"1" + b"}" * 3000
NO_MODEL = "config.json: no model can be built of its values|config.json cannot be used"

DAMAGES: dict[str, tuple[Damage, str]] = {
    "index above the folder": (index("../../etc/x.safetensors"), NOT_AN_INDEX),
    "index of an absolute path": (index("/etc/x.safetensors"), NOT_AN_INDEX),
    "index into a subfolder": (index(WEIGHTS, "sub/x.safetensors"), NOT_AN_INDEX),
    "index of another kind of file": (index("config.json"), NOT_AN_INDEX),
    "index of lists": (index(["a", "b"]), NOT_AN_INDEX),
    "index with a zero byte": (index("x\0.safetensors"), NOT_AN_INDEX),
    "index without names": (overwrite(INDEX, b'{"weight_map": [1]}'), "it has no mapping weight_map"),
    "deep index": (overwrite(INDEX, DEEP), f"{INDEX} has too many lists and objects inside each other"),
    "large index": (grow(INDEX, MOST_BYTES[".json"] + 1), f"{INDEX} has 33554433 bytes; accepted: at most"),
    "deep config": (overwrite("config.json", DEEP), "config.json has too many lists"),
    "config that never ends": (overwrite("config.json", b"[" * 10**6), "config.json is not JSON"),
    "a billion layers": (
        text(num_hidden_layers=10**9),
        r"text_config.num_hidden_layers is 1000000000; accepted",
    ),
    "a size that is a word": (text(hidden_size="64"), r"hidden_size is 64; accepted: integers"),
    "a size that is true": (text(vocab_size=True), r"vocab_size is True; accepted: integers"),
    "a size of many digits": (text(vocab_size=10**40), r"vocab_size is 10000"),
    "no head": (vision(num_heads=0), r"vision_config.num_heads is 0; accepted: integers from 1 to 4096"),
    "an image token far outside": (config(image_token_id=2**40), r"image_token_id is 1099511627776; acc"),
    "rope without its base": (text(rope_parameters={"rope_type": "default"}), "mrope_section None does not"),
    "rope that is a number": (text(rope_parameters=7), NO_MODEL),
    "an unknown activation": (text(hidden_act="magic"), "activation 'magic' is not supported"),
    "deep stack of words": (vision(deepstack_visual_indexes="0"), NO_MODEL),
    "heads that do not divide": (
        vision(num_heads=7),
        "vision_config.hidden_size is 32; accepted: a multiple of vision_config.num_heads",
    ),
    "groups of heads that differ": (
        text(num_key_value_heads=3),
        "text_config.num_attention_heads is 4; accepted: a multiple of text_config",
    ),
    "eos that is a word": (generation("end"), "generation_config.json: eos_token_id is end; accepted: an id"),
    "deep tokenizer": (overwrite("tokenizer.json", DEEP), "has no usable tokenizer"),
    "large tokenizer": (
        grow("tokenizer.json", MOST_TOKENIZER_BYTES + 1),
        "tokenizer.json has 134217729 bytes",
    ),
    "vocabulary of lists": (vocabulary(lambda c: c["model"].update(vocab=[[]])), "has no usable tokenizer"),
    "vocabulary far outside": (
        vocabulary(lambda c: c["model"]["vocab"].update(huge=2**32 - 1)),
        "token 'huge' has id 4294967295|has no usable tokenizer",
    ),
    "ids that are no numbers": (
        vocabulary(lambda c: c["model"]["vocab"].update(huge=2**70)),
        "has no usable tokenizer",
    ),
    "an added token far outside": (added(id=10**9), "token '<x>' has id 1000000000; accepted"),
    "merges of nothing": (vocabulary(lambda c: c["model"].update(merges=[["q", "zz"]])), "has no usable tok"),
    "a broken expression": (
        vocabulary(
            lambda c: c.update(
                pre_tokenizer={
                    "type": "Split",
                    "pattern": {"Regex": "("},
                    "behavior": "Isolated",
                    "invert": False,
                }
            )
        ),
        "has no usable tokenizer",
    ),
    "template that is a number": (
        numeric_template,
        "chat_template is a int; accepted: text|no usable tokenizer",
    ),
    "template that is not text": (
        overwrite("chat_template.jinja", b"\xff\xfe"),
        "has no usable tokenizer: UnicodeDecodeError",
    ),
    "large template": (
        grow("chat_template.jinja", MOST_BYTES[".jinja"] + 1),
        "chat_template.jinja has 1048577",
    ),
    "template that is not Jinja": (
        overwrite("chat_template.jinja", b"{% if %}"),
        "the chat template is not Jinja",
    ),
    "a patch of many digits": (
        pixels(patch_size=10**30),
        "patch_size is 10*; accepted: a positive integer up to",
    ),
    "a mean of words": (pixels(image_mean=["a", "b", "c"]), "image_mean is .*accepted: three numbers"),
    "a mean that is infinite": (
        pixels(image_mean=[1e999, 0, 0]),
        "preprocessor_config.json: no processor can be built",
    ),
    "sizes of many digits": (
        pixels(max_pixels=10**30),
        "max_pixels is 10*; accepted: a positive integer up to",
    ),
    "a header of all memory": (
        overwrite(WEIGHTS, b"\xff" * 7 + b"\x7f" + bytes(64)),
        "is not a safetensors file",
    ),
    "a deep header": (overwrite(WEIGHTS, header(b'{"x":' * 50_000)), "has a broken header"),
    "a shape beyond memory": (
        overwrite(WEIGHTS, entry(shape=[2**62, 2**62])),
        "tensor 'x' is not part of this",
    ),
    "offsets beyond the file": (overwrite(WEIGHTS, entry(data_offsets=[0, 2**62])), "is truncated"),
    "a link to a file elsewhere": (
        link("config.json", "/etc/hostname"),
        "is a link to /etc/hostname, outside of",
    ),
    "a link above the folder": (
        link("extra.json", "../other.json"),
        "extra.json cannot be read: No such file",
    ),
    "a link to itself": (link("extra.json", "extra.json"), "extra.json cannot be read"),
    "a link to a device": (
        link("vocab.txt", "/dev/zero"),
        "is a link to /dev/zero, outside of the checkpoint",
    ),
    "a pipe": (pipe, "added_tokens.json is not a regular file"),
    "heads that are no JSON": (look_heads(b"x" * 100), "look.json cannot be read"),
    "heads in deep JSON": (look_heads(DEEP), "look.json cannot be read"),
    "heads of no list": (look_heads(b'{"heads": {"3": 2}}'), "look.json: heads must be a list of 1 to"),
    "heads that the model lacks": (look_heads(b'{"heads": [[99, 0]]}'), "look.json: .*no head 0 .*layer 99"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES.keys())
def test_the_error_names_the_file_and_the_field(folder: Path, damage: Damage, message: str) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=message) as caught:
        load(folder)
    assert len(str(caught.value)) < 1500


def test_an_image_token_that_the_tokenizer_lacks(folder: Path) -> None:
    config(image_token_id=10**6)(folder)
    with pytest.raises(CheckpointError, match="the tokenizer has no token 1000000"):
        prompt_builder(load_model(str(folder), CONFIG))


def test_a_download_of_the_hub_consists_of_links(folder: Path, tmp_path: Path) -> None:
    """Their targets are outside of the folder, in a folder of the same cache. They must stay readable."""
    snapshot, blobs = hub_cache(folder, tmp_path)
    assert (snapshot / "config.json").is_symlink()
    assert not any(path.is_symlink() for path in blobs.iterdir())
    load(snapshot)
    (tmp_path / "elsewhere").symlink_to(snapshot)
    load(tmp_path / "elsewhere")


CODE = "from pathlib import Path\nPath({!r}).write_text('code of the checkpoint ran')\nclass Mine: pass\n"


def test_code_of_a_checkpoint_never_runs(folder: Path, tmp_path: Path) -> None:
    """transformers would import these files with trust_remote_code, and asks on a terminal without it."""
    for name in ("configuration_mine.py", "tokenization_mine.py", "modeling_mine.py"):
        (folder / name).write_text(CODE.format(str(tmp_path / "ran")))
    classes = {
        "AutoConfig": "configuration_mine.Mine",
        "AutoTokenizer": ["tokenization_mine.Mine", "tokenization_mine.Mine"],
        "AutoModel": "modeling_mine.Mine",
        "AutoProcessor": "tokenization_mine.Mine",
    }
    for name in ("config.json", "tokenizer_config.json", "preprocessor_config.json"):
        edit_json(name, lambda content: content.update(auto_map=classes))(folder)
    load(folder)
    edit_json("tokenizer_config.json", lambda content: content.update(tokenizer_class="Mine"))(folder)
    with contextlib.suppress(CheckpointError):
        load(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "deep"),
    [
        (b"[" * MOST_DEPTH + b"]" * MOST_DEPTH, False),
        (b"[" * (MOST_DEPTH + 1) + b"]" * (MOST_DEPTH + 1), True),
        (b'{"a":[' * 40 + b"1" + b"]}" * 40, True),
        (b'{"a": "' + b"[" * 500 + b"]" * 500 + b'"}', False),
        (b'"\\"' + b"[" * 100 + b"]" * 100 + b'"', False),
        (b"[]," * 10_000, False),
        (b"[{" * 500, False),
    ],
)
def test_nesting_is_measured_without_recursion(content: bytes, deep: bool) -> None:
    assert is_too_deep(content) is deep
