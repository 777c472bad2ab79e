"""The bundled model on the C++ kernels in bf16: as exact as torch, and bit-identical under any load."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fovea import Engine
from fovea.core.types import ChatPrompt, Completion, ImagePart, Message, TextPart
from fovea.engine.layers.step import DecoderMemory, DecoderPlan
from fovea.engine.load import pick_dtype
from fovea.engine.request.inputs import to_image
from fovea.evaluation.scenes import HELD_OUT_SEED, generate
from fovea.kernels.attention import AttentionPlan, Chunk
from fovea.kernels.native import build
from fovea.kernels.native.instruction_sets import chosen
from fovea.kernels.torch_kernels import TorchKernels
from tests.support.engines import all_at_once, assert_idle
from tests.support.programs import need_kernels
from tests.support.thorough import is_thorough

pytestmark = pytest.mark.kernels

KINDS = ("describe", "counting", "reading", "json", "motion", "listing", "position", "compare")
TOKENS = 24 if is_thorough() else 16


def bundled(**settings: object) -> Engine:
    return Engine.from_pretrained("fovea-tiny", kv_cache_mib=16, threads=1, device="cpu", **settings)


@pytest.fixture(scope="module", params=["none", "int8", "int4"])
def native(request: pytest.FixtureRequest) -> Iterator[Engine]:
    need_kernels()
    with bundled(dtype="bfloat16", kernels="native", quantization=request.param) as engine:
        yield engine


def prompts() -> list[ChatPrompt]:
    made = []
    for sample in generate(HELD_OUT_SEED, len(KINDS), KINDS):
        parts = [ImagePart(to_image(image)) for image in sample.images]
        made.append(ChatPrompt((Message("user", (*parts, TextPart(sample.turns[0].question))),)))
    return made


def answer(engine: Engine, prompt: ChatPrompt) -> Completion:
    return engine.generate(prompt, temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=True)


def written(done: Completion) -> list[tuple[int, float]]:
    return [(item.id, item.logprob) for item in done.logprobs[0]]


def test_an_answer_is_bit_identical_alone_and_in_a_batch(native: Engine) -> None:
    """Sums are added in one order for any number of rows, so other rows cannot change a near tie."""
    asked = prompts()
    alone = []
    for prompt in asked:
        native.clear_caches()
        alone.append(written(answer(native, prompt)))
    native.clear_caches()
    with ThreadPoolExecutor(len(asked)) as pool, all_at_once(native, len(asked)):
        together = list(pool.map(lambda prompt: written(answer(native, prompt)), asked))
    assert together == alone
    assert_idle(native)


def test_layers_in_one_call_equal_the_layers_one_by_one(native: Engine) -> None:
    decoder = native.runner.model.decoder
    assert decoder._stack is not None, "the decoder does not run as one call"
    prompt = prompts()[0]
    native.clear_caches()
    whole = written(answer(native, prompt))
    stack, decoder._stack = decoder._stack, None
    try:
        native.clear_caches()
        assert written(answer(native, prompt)) == whole
    finally:
        decoder._stack = stack


@pytest.mark.parametrize("at_once", [True, False], ids=["one call", "layer by layer"])
def test_rows_that_are_read_do_not_depend_on_the_others(native: Engine, at_once: bool) -> None:
    """The last layer computes only rows that are read. It writes the keys and values of all rows."""
    decoder, rows = native.runner.model.decoder, 20
    torch.manual_seed(0)
    x = torch.randn(rows, decoder.config.hidden).to(torch.bfloat16)
    slots = torch.arange(rows)
    plan = AttentionPlan(slots, (), (Chunk(0, rows, 0, torch.arange(2)),))
    stack, found = decoder._stack, {}
    try:
        decoder._stack = stack if at_once else None
        for read in (None, [rows - 1], [3, 4, 17], []):
            memory = DecoderMemory.allocate(decoder.config, (2,), 16, 0, x.dtype, x.device)
            kv = memory.kv[0].pages
            chosen = None if read is None else torch.tensor(read, dtype=torch.int64)
            with torch.inference_mode():
                hidden = decoder(x, slots.expand(3, -1), memory, DecoderPlan((plan,)), read=chosen)
            found[str(read)] = hidden, kv
            whole, all_kv = found["None"]
            assert torch.equal(hidden, whole if read is None else whole[read])
            assert torch.equal(kv, all_kv)
            assert bool(kv.any())
    finally:
        decoder._stack = stack


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        ("auto", torch.bfloat16),
        ("native", torch.bfloat16),
        ("torch", torch.float32),
        ("onednn", torch.float32),
    ],
)
def test_bf16_is_automatic_only_with_kernels_that_are_fast_in_it(
    monkeypatch: pytest.MonkeyPatch, kernels: str, expected: torch.dtype
) -> None:
    """Without bf16 instructions torch emulates it, and its products are four times slower than in float32."""
    monkeypatch.setattr("fovea.engine.load.has_bf16_units", lambda: False)
    monkeypatch.setattr("fovea.engine.load.library", lambda: object())
    assert pick_dtype("auto", torch.device("cpu"), torch.bfloat16, kernels) is expected


def test_without_a_compiler_torch_takes_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On a machine with the instructions: nothing is built, the log says why, and answers are in bf16."""
    if chosen() is None:
        pytest.skip("this machine has no instruction set of the kernels")
    monkeypatch.setattr(build, "BUILT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    build._load.cache_clear()
    try:
        with bundled(dtype="bfloat16") as engine:
            assert type(engine.runner.model.kernels) is TorchKernels
            assert answer(engine, prompts()[0]).usage.completion == TOKENS
    finally:
        build._load.cache_clear()
    assert "no C++ compiler: looked for c++, g++, clang++" in caplog.text
    assert not list(tmp_path.rglob("*.so"))


def test_the_kernels_are_as_close_to_float32_as_torch() -> None:
    """Logits of the first token, averaged over prompts, because one prompt alone is subject to chance."""
    need_kernels()
    rows: dict[str, torch.Tensor] = {}
    for name, settings in {
        "exact": {"dtype": "float32"},
        "torch": {"dtype": "bfloat16", "kernels": "torch"},
        "native": {"dtype": "bfloat16", "kernels": "native"},
        "rounded": {"dtype": "float32", "kernels": "torch", "quantization": "int8"},
        "int8": {"dtype": "bfloat16", "kernels": "native", "quantization": "int8"},
    }.items():
        with bundled(**settings) as engine:
            rows[name] = torch.stack([first_logits(engine, prompt) for prompt in prompts()])
    errors = {name: float((row - rows["exact"]).abs().mean()) for name, row in rows.items()}
    assert 0 < errors["native"] <= 1.5 * errors["torch"], errors
    # Rows and weights are both rounded to 8 bits, each by about 0.5%: about twice the error of rounded
    # weights alone.
    assert errors["rounded"] <= errors["int8"] <= 2.2 * errors["rounded"], errors


def first_logits(engine: Engine, prompt: ChatPrompt) -> torch.Tensor:
    model, seen = engine.runner.model, []
    compute = model.logits
    model.logits = lambda hidden: seen.append(compute(hidden)) or seen[-1]  # type: ignore[method-assign]
    try:
        engine.generate(prompt, temperature=0, max_tokens=1, ignore_eos=True)
    finally:
        model.logits = compute  # type: ignore[method-assign]
    return seen[0][0].clone()
