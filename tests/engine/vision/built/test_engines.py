"""Built encoders equal the eager one, are chosen by grid alone, counted, and not used if they do not fit."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fovea import Engine
from fovea.core.errors import ConfigError, EngineError
from fovea.core.media import PixelBudget
from fovea.engine.config import EngineConfig
from fovea.engine.load import LoadedModel, load_model
from fovea.engine.models.compile import describe_site
from fovea.engine.vision.built import engines as building
from fovea.engine.vision.built.engines import Builder, largest_difference
from fovea.engine.vision.built.manifest import NAME, Manifest
from fovea.engine.vision.encoding import one_by_one
from fovea.engine.vision.processor.base import ProcessedImage
from fovea.engine.vision.qwen import QwenVisionTower
from tests.support.built import Eager
from tests.support.checkpoints import write
from tests.support.engines import SETTINGS, ask, picture

CONFIG = EngineConfig.of(**{**SETTINGS, "kernels": "torch"})
ARCHITECTURES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SIZE, OTHER = (96, 64), (64, 128)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Eager:
    """Replaces the format "aot", so that the tests of everything around it need no compiler."""
    format = Eager()
    monkeypatch.setattr("fovea.engine.vision.built.formats.AOT", format)
    return format


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(request.param, tmp_path_factory.mktemp("built") / request.param)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("qwen3_vl", tmp_path_factory.mktemp("built") / "one")


@cache
def plain_model(checkpoint: Path) -> LoadedModel:
    """The model without built encoders. It is loaded once, and no test changes it."""
    return load_model(str(checkpoint), CONFIG)


def build(
    checkpoint: Path, out: Path, format: str = "aot", blocks: int = 1, size: tuple[int, int] = SIZE
) -> Manifest:
    loaded = plain_model(checkpoint)
    encoder = loaded.model.static_encoder()
    assert encoder is not None
    grid = loaded.processor.plan(*size, PixelBudget()).grid
    here = describe_site(loaded.model, loaded.info.architecture)
    model = loaded.model
    return Builder(encoder, format, blocks, model.device, model.dtype, here, out).build({grid: ["a picture"]})


def loaded_with(checkpoint: Path, engines: object, **settings: object) -> LoadedModel:
    changed = {**SETTINGS, "kernels": "torch", **settings, "encoder_engines": str(engines)}
    return load_model(str(checkpoint), EngineConfig.of(**changed))  # type: ignore[arg-type]


def processed(loaded: LoadedModel, size: tuple[int, int] = SIZE) -> ProcessedImage:
    image = picture(1, *size)
    return loaded.processor.process(image, loaded.processor.plan(*size, PixelBudget()))


def compare(checkpoint: Path, engines: Path, size: tuple[int, int] = SIZE) -> float:
    """Largest difference between the built and the eager encoder, over all tokens and DeepStack features."""
    plain, fast = plain_model(checkpoint), loaded_with(checkpoint, engines)
    with torch.inference_mode():
        expected, actual = (
            plain.model.encode(processed(plain, size)),
            fast.model.encode(processed(fast, size)),
        )
    assert fast.model.engines.hits == 1
    assert len(actual.tensors) == len(expected.tensors)
    return max(largest_difference(a, b) for a, b in zip(actual.tensors, expected.tensors, strict=True))


@pytest.mark.parametrize(
    ("blocks", "size"),
    [
        *((blocks, SIZE) for blocks in (1, 2, 99)),
        (2, (280, 140)),
        *(pytest.param(blocks, (280, 140), marks=pytest.mark.slow) for blocks in (1, 99)),
    ],
)
def test_all_segments_together_equal_the_tower(
    checkpoint: Path, tmp_path: Path, eager: Eager, blocks: int, size: tuple[int, int]
) -> None:
    manifest = build(checkpoint, tmp_path, blocks=blocks, size=size)
    assert len(manifest.grids[0].parts) == -(-3 // blocks)
    assert manifest.grids[0].difference < 1e-5
    assert compare(checkpoint, tmp_path, size) < 1e-5


def test_a_segment_is_a_slice(one: Path, tmp_path: Path, eager: Eager) -> None:
    """The encoder can pause between two segments, so that running streams get tokens."""
    build(one, tmp_path)
    loaded = loaded_with(one, tmp_path)
    with torch.inference_mode():
        image = processed(loaded)
        tower = loaded.model.any_size_tower()
        assert isinstance(tower, QwenVisionTower)
        rows = tower.embed(loaded.model.array_tensor(image), image.plan.grid)
        before = sum(1 for _ in one_by_one(rows))
        assert sum(1 for _ in one_by_one(loaded.model.encode_slices(image))) == before + 3


def test_equal_blocks_are_built_once(tmp_path: Path, eager: Eager) -> None:
    """Blocks of Qwen2-VL before the last differ only in weights and share a file: five are two files."""
    checkpoint = write("qwen2_vl", tmp_path / "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["vision_config"]["depth"] == 3
    loaded = load_model(str(checkpoint), CONFIG)
    blocks = loaded.model.vision.blocks  # type: ignore[union-attr]
    for _ in range(2):
        blocks.insert(1, blocks[1])  # type: ignore[operator,arg-type,index,union-attr]
    tower = loaded.model.vision
    object.__setattr__(tower.config, "depth", 5)  # type: ignore[union-attr]
    encoder = loaded.model.static_encoder()
    assert encoder is not None
    here = describe_site(loaded.model, "x")
    manifest = Builder(encoder, "aot", 1, loaded.model.device, torch.float32, here, tmp_path / "out").build(
        {(1, 4, 6): ["x"]}
    )
    files = manifest.grids[0].parts
    assert len(files) == 5
    assert files[0] == files[1] == files[2] == files[3]
    assert len(set(files)) == 2


def test_the_grid_alone_chooses_the_encoder(one: Path, tmp_path: Path, eager: Eager) -> None:
    build(one, tmp_path)
    with Engine.from_pretrained(
        str(one), **SETTINGS, kernels="torch", encoder_engines=str(tmp_path)
    ) as engine:
        for size in (SIZE, OTHER, SIZE):
            engine.generate(ask("What is it?", picture(sum(size), *size)), temperature=0, max_tokens=2)
        stats = engine.stats()
        assert (stats["encoder_engines"], stats["encoder_engine_hits"], stats["encoder_engine_misses"]) == (
            1,
            1,
            1,
        )
        assert stats["images_encoded"] == 2  # the third is a cache hit


def test_answers_are_those_of_the_eager_encoder(one: Path, tmp_path: Path, eager: Eager) -> None:
    build(one, tmp_path)

    def answer(engines: str) -> tuple[int, ...]:
        with Engine.from_pretrained(str(one), **SETTINGS, encoder_engines=engines) as engine:
            prompt = ask("What is it?", picture(3, *SIZE))
            done = engine.generate(prompt, temperature=0, max_tokens=8, ignore_eos=True)
            assert engine.stats()["encoder_engine_hits"] == (engines != "off")
            return done.token_ids[0]

    assert answer(str(tmp_path)) == answer("off")


def test_auto_uses_the_folder_beside_the_checkpoint(
    tmp_path: Path, eager: Eager, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = write("qwen3_vl", tmp_path / "checkpoint")
    assert not loaded_with(checkpoint, "auto").model.engines
    assert "fovea build writes one" in caplog.text
    build(checkpoint, checkpoint / "fovea-engines")
    caplog.set_level(logging.INFO, "fovea.engine")
    assert len(loaded_with(checkpoint, "auto").model.engines) == 1
    assert "aot encoder engines of" in caplog.text
    assert "4x6 patches (a picture)" in caplog.text


def test_a_named_folder_must_have_a_manifest(one: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no manifest\.json; fovea build writes one"):
        loaded_with(one, tmp_path)


def _other_weights(tmp_path: Path, one: Path, out: Path) -> LoadedModel:
    other = write("qwen3_vl", tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    next(weights[name] for name in weights if name.endswith("patch_embed.proj.bias"))[0] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    return loaded_with(other, out)


def _damaged(tmp_path: Path, one: Path, out: Path) -> LoadedModel:
    for path in out.glob("*.eager"):
        path.write_text("damaged")
    return loaded_with(one, out)


def _no_json(tmp_path: Path, one: Path, out: Path) -> LoadedModel:
    (out / NAME).write_text("{")
    return loaded_with(one, out)


def _quantized(tmp_path: Path, one: Path, out: Path) -> LoadedModel:
    return loaded_with(one, out, quantization="int8")


def _other_type(tmp_path: Path, one: Path, out: Path) -> LoadedModel:
    return loaded_with(one, out, dtype="bfloat16")


def _no_architecture(tmp_path: Path, one: Path, out: Path) -> LoadedModel:
    return loaded_with(write("llava", tmp_path / "llava"), out)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_other_weights, "it was built for model"),
        (_damaged, "is not the file that was built"),
        (_no_json, "is not JSON"),
        (_quantized, "the encoder is quantized to int8"),
        (_other_type, "built for model"),
        (_no_architecture, "this architecture has no encoder that can be built"),
    ],
)
def test_an_engine_that_does_not_fit_is_ignored_with_a_warning(
    one: Path,
    tmp_path: Path,
    eager: Eager,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path, Path, Path], LoadedModel],
    reason: str,
) -> None:
    build(one, tmp_path / "out")
    loaded = spoil(tmp_path, one, tmp_path / "out")
    assert not loaded.model.engines
    assert reason in caplog.text
    with torch.inference_mode():
        assert loaded.model.encode(processed(loaded)).embeds.shape[0] == processed(loaded).plan.tokens


def test_a_wrong_result_leaves_the_old_build(one: Path, tmp_path: Path, eager: Eager) -> None:
    """A failed build deletes its own files, and the folder stays as it was."""
    old = build(one, tmp_path)
    before = sorted(tmp_path.iterdir())
    eager.scale = 1.01
    with pytest.raises(EngineError, match="differs from the eager encoder by 0.0"):
        build(one, tmp_path, size=OTHER)
    assert sorted(tmp_path.iterdir()) == before
    assert Manifest.read(tmp_path) == old


def test_nan_is_a_wrong_result(one: Path, tmp_path: Path, eager: Eager) -> None:
    eager.scale = float("nan")
    with pytest.raises(EngineError, match="differs from the eager encoder by nan"):
        build(one, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_new_build_replaces_the_old(one: Path, tmp_path: Path, eager: Eager) -> None:
    (tmp_path / "somebody's").touch()
    first = build(one, tmp_path)
    second = build(one, tmp_path, size=OTHER)
    assert not set(first.checksums) & set(second.checksums)
    assert {path.name for path in tmp_path.iterdir()} == {NAME, "somebody's", *second.checksums}


def test_a_folder_that_cannot_be_written(one: Path, tmp_path: Path, eager: Eager) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written.*--out names another"):
        build(one, tmp_path / "file")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch imports its deprecated module
@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_aot(checkpoint: Path, tmp_path: Path, kernels: str) -> None:
    """A real AOTInductor build. It keeps the plain weights even if the model's products are packed."""
    manifest = build(checkpoint, tmp_path, blocks=2)
    assert manifest.grids[0].difference < 1e-5
    assert compare(checkpoint, tmp_path) < 1e-5
    loaded = loaded_with(checkpoint, tmp_path, kernels=kernels)
    plain = load_model(str(checkpoint), CONFIG)
    with torch.inference_mode():
        for size in (SIZE, OTHER):  # OTHER runs the eager encoder, on packed products if there are any
            actual, expected = (one.model.encode(processed(one, size)).embeds for one in (loaded, plain))
            assert largest_difference(actual, expected) < 1e-5
    assert (loaded.model.engines.hits, loaded.model.engines.misses) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ARCHITECTURES, indirect=True)
def test_onnx(checkpoint: Path, tmp_path: Path) -> None:
    """The default tests build one in tests/cli/test_build.py, and compare the answers with it."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    manifest = build(checkpoint, tmp_path, "onnx", blocks=3)
    assert manifest.precision == "float32"
    assert 0 < manifest.grids[0].difference < 1e-4
    assert compare(checkpoint, tmp_path) < 1e-4


def test_every_type_has_a_tolerance() -> None:
    assert set(building.TOLERANCE) == {torch.float32, torch.float16, torch.bfloat16}
