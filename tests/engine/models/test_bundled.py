"""fovea-tiny is an ordinary checkpoint: transformers loads its folder and generates equal tokens."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import Qwen3VLForConditionalGeneration

from fovea import Engine
from fovea.core.constraints import Tool, ToolCall
from fovea.core.errors import InvalidRequest
from fovea.core.names import bundled_model
from fovea.core.types import Completion, Message, TemplateInputs, TextPart
from fovea.engine.load import read_config
from fovea.engine.models.bundled import PARTS, PlainConfig
from fovea.engine.models.look_heads import read_heads
from fovea.engine.models.qwen_vl import vision_config
from fovea.engine.models.side_files import build_processors
from fovea.engine.models.text import decoder_config
from fovea.engine.models.tokenizer import load_tokenizer
from fovea.engine.request.plain_tokenizer import PlainTokenizer
from fovea.evaluation.scenes import HELD_OUT_SEED, Sample, generate
from tests.support.reference import Reference
from tests.support.thorough import is_thorough

pytestmark = pytest.mark.kernels

TOKENS = 64 if is_thorough() else 16
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(bundled_model())


@pytest.fixture(scope="module")
def their_answer(reference: Reference) -> Callable[[tuple[int, ...], Sample], list[int]]:
    """transformers' answer to a sample in float32. Both data types are compared with it."""
    found: dict[tuple[int, ...], list[int]] = {}

    def of(ids: tuple[int, ...], sample: Sample) -> list[int]:
        if ids not in found:
            found[ids] = reference.generate(list(ids), list(sample.images), TOKENS)
        return found[ids]

    return of


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine.from_pretrained("fovea-tiny", dtype=request.param, kv_cache_mib=16, threads=1) as engine:
        yield engine


def samples() -> list[Sample]:
    sizes = [(128, 128), (320, 192), (224, 448), (300, 211), (640, 448)]
    single = [
        next(iter(generate(HELD_OUT_SEED, 1, [kind], [size])))
        for kind, size in zip(KINDS, sizes, strict=True)
    ]
    return [*single, *generate(HELD_OUT_SEED, 2, ["compare", "motion"])]


QUICK = ("json", "compare")
"""Kinds of the default run: one image, and two images."""


KINDS = ["colour", "json", "reading", "listing", "describe"]


def answer(engine: Engine, sample: Sample) -> tuple[list[int], Completion]:
    request = engine.request(
        sample.turns[0].question, sample.images, temperature=0, max_tokens=TOKENS, ignore_eos=True
    )
    ids = engine.parts.preparer.builder.build(request.prompt).ids
    return ids, engine.generate(request.prompt, sampling=request.sampling)


@pytest.mark.parametrize(
    "sample",
    [pytest.param(sample, marks=[] if sample.kind in QUICK else [pytest.mark.slow]) for sample in samples()],
    ids=lambda s: f"{s.kind}-{s.images[0].width}x{s.images[0].height}",
)
def test_tokens_equal(
    engine: Engine,
    reference: Reference,
    their_answer: Callable[[tuple[int, ...], Sample], list[int]],
    sample: Sample,
) -> None:
    """Tokens are equal in float32. In bfloat16 the first difference must be a tie.

    The two libraries round differently in bfloat16. A tie means that transformers' float32 logits of both
    tokens differ by at most 0.5% of the row's range.
    """
    ids, done = answer(engine, sample)
    images: list[Image.Image] = list(sample.images)
    ours, theirs = list(done.token_ids[0]), their_answer(tuple(ids), sample)
    if ours != theirs:
        first = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
        row = reference.logits(ids, images, theirs)[first]
        allowed = 1e-4 if engine.info.dtype == "float32" else 0.005 * float(row.max() - row.min())
        assert abs(float(row[ours[first]] - row[theirs[first]])) <= allowed, (
            f"token {first}: {ours[first]} instead of {theirs[first]}"
        )


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({"dtype": "float32"}, 1e-3),
        ({"dtype": "bfloat16"}, 0.3),
        ({"dtype": "bfloat16", "quantization": "int8"}, 0.6),
        pytest.param({"dtype": "bfloat16", "kernels": "torch"}, 0.3, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_log_probabilities_of_a_prompt_with_images(
    reference: Reference, settings: dict[str, Any], tolerance: float
) -> None:
    """On the C++ kernels those of the last piece of a prompt were once those of other tokens."""
    sample = next(sample for sample in samples() if sample.kind == "compare")
    with Engine.from_pretrained(
        "fovea-tiny", kv_cache_mib=16, threads=1, max_step_tokens=33, **settings
    ) as engine:
        request = engine.request(
            sample.turns[0].question, sample.images, temperature=0, max_tokens=1, prompt_logprobs=0
        )
        ids = list(engine.parts.preparer.builder.build(request.prompt).ids)
        scored = engine.generate(request.prompt, sampling=request.sampling).prompt_logprobs
    rows = torch.log_softmax(reference.logits(ids[:1], list(sample.images), ids[1:]), -1)
    theirs = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    ours = torch.tensor([entry.logprob for entry in scored if entry is not None])  # of text, not of images
    text = torch.tensor(ids[1:]) != reference.image_token
    differences = (ours - theirs[text]).abs()
    assert float(differences.max()) < tolerance, differences


@pytest.fixture(scope="module")
def as_transformers_reads_it(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the folder: for this one there is no reader without transformers."""
    return Path(shutil.copytree(bundled_model(), tmp_path_factory.mktemp("copy") / "fovea-tiny"))


def test_its_configuration_is_read_as_transformers_does(as_transformers_reads_it: Path) -> None:
    plain, theirs = read_config(bundled_model()), read_config(as_transformers_reads_it)
    assert isinstance(plain, PlainConfig)
    assert not isinstance(theirs, PlainConfig)
    assert decoder_config(plain.text_config, tied=True) == decoder_config(theirs.text_config, tied=True)
    assert vision_config("qwen3_vl", plain.vision_config) == vision_config("qwen3_vl", theirs.vision_config)
    assert repr(build_processors(bundled_model(), plain)) == repr(build_processors(bundled_model(), theirs))
    renamed = {*PARTS, "dtype", "rope_scaling"}  # rope_scaling is an old name of rope_parameters
    for part, other in ((plain, theirs), *((getattr(plain, name), getattr(theirs, name)) for name in PARTS)):
        shared = {name: value for name, value in vars(part).items() if hasattr(other, name)}.keys() - renamed
        assert {name: getattr(part, name) for name in shared} == {
            name: getattr(other, name) for name in shared
        }


def test_its_tokenizer_is_read_as_transformers_does(as_transformers_reads_it: Path) -> None:
    """Ids, texts and chats are equal."""
    config = read_config(bundled_model())
    plain, theirs = load_tokenizer(bundled_model(), config), load_tokenizer(as_transformers_reads_it, config)
    assert isinstance(plain._tokenizer, PlainTokenizer)
    assert not isinstance(theirs._tokenizer, PlainTokenizer)
    for name in ("vocab_size", "eos_ids", "special_ids", "start_ids", "dialect", "drops_first_space"):
        assert getattr(plain, name) == getattr(theirs, name), name
    assert plain.agreement(theirs) == 1.0
    texts = [
        "What is it?",
        " Zwölf\u00a0Boxen\r\n\t",
        "e\u0301 \U0001f600 漢字",
        "<|im_start|>user\n<|image_pad|>",
        "",
    ]
    for text in texts:
        ids = theirs.encode(text)
        assert plain.encode(text) == ids
        assert plain.encode_sealed(plain.seal(text)) == theirs.encode_sealed(theirs.seal(text))
        assert plain.decode(ids) == theirs.decode(ids)
        assert plain.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)
        assert plain.offsets(ids, text) == theirs.offsets(ids, text)
    call = ToolCall("look", '{"at": "Zürich", "deep": {"a": [1, null]}}', "c1")
    talk = [
        Message("system", (TextPart("Be short."),)),
        Message("user", (TextPart("A"), TextPart("What <b>is</b> it?"))),
        Message("assistant", (TextPart("A cup"),), calls=(call,)),
        Message("tool", (TextPart("7"),), call_id="c1"),
        Message("user", (TextPart("<|im_end|> and?"),)),
    ]
    schema = {"properties": {"at": {}}}
    function = {"name": "look", "parameters": schema}
    tool = Tool("look", schema, {"type": "function", "function": function})
    for messages in (talk, talk[:2], talk[:3]):
        for inputs in (TemplateInputs(), TemplateInputs(tools=(tool,)), TemplateInputs(continues=True)):
            assert plain.render(messages, inputs) == theirs.render(messages, inputs)
            sealed = plain.render_sealed(messages, inputs)  # by characters that differ with each tokenizer
            assert plain.encode_sealed(sealed) == theirs.encode_sealed(theirs.render_sealed(messages, inputs))


def test_another_template_has_all_that_transformers_offers_it() -> None:
    other = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('begin with a user') }}{% endif %}"
        "{% for message in messages %}{{ message.role | tojson(indent=1) }}{% break %}{% endfor %}"
        "{{ tools is none }}"
    )
    tokenizer = load_tokenizer(bundled_model(), read_config(bundled_model()), template=other)
    assert tokenizer.render([Message("user", (TextPart("A"),))]) == '"user"True'
    with pytest.raises(InvalidRequest, match="refuses these messages: begin with a user"):
        tokenizer.render([Message("system", (TextPart("A"),))])


def test_a_question_is_asked_without_transformers_and_in_little_memory() -> None:
    """Its import took longer than all that `fovea ask` does after torch's, and a pool of zeros 1.5 GiB."""
    script = (
        "import sys; from fovea.cli.main import main\n"
        "assert main(['ask', 'examples/corner.png', 'What is it?']) == 0\n"
        "print(sorted({'transformers', 'huggingface_hub', 'pydantic', 'regex'} & set(sys.modules)))\n"
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=120
    )
    answer, modules, kib = done.stdout.rsplit("\n", 3)[:3]
    assert answer
    assert modules == "[]"
    assert int(kib) <= 350 * 1024


def test_it_is_small_and_complete() -> None:
    folder = bundled_model()
    assert (folder / "model.safetensors").stat().st_size <= 32 * MEGABYTE
    names = {path.name for path in folder.iterdir()}
    assert {
        "config.json",
        "tokenizer.json",
        "preprocessor_config.json",
        "chat_template.jinja",
        "README.md",
    } <= names


def test_size_and_type_of_the_model(reference: Reference) -> None:
    count = sum(p.numel() for p in reference.model.parameters())
    assert 4e6 <= count <= 15e6
    assert reference.model.config.vision_config.deepstack_visual_indexes
    assert reference.model.dtype is torch.float32


def test_the_folder_holds_no_foreign_tensors() -> None:
    """vLLM reads every *.safetensors file of a checkpoint, and refused one with other tensors."""
    folder = bundled_model()
    stored = {name for path in folder.glob("*.safetensors") for name in load_file(path)}
    _, report = Qwen3VLForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not report["unexpected_keys"]
    assert not report["missing_keys"]
    assert stored == set(load_file(folder / "model.safetensors"))


def test_the_heads_that_look_are_those_of_its_decoder() -> None:
    heads = read_heads(bundled_model())
    with Engine.from_pretrained("fovea-tiny", kv_cache_mib=16) as engine:
        assert heads
        assert set(heads) <= set(engine.runner.model.decoder.config.look_heads)
