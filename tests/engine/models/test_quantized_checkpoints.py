"""Checkpoints that are quantized already: values, answers, and files whose tensors do not fit each other."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from fovea import Engine
from fovea.core.errors import CheckpointError, ModelError, UnsupportedModel
from fovea.core.types import Completion
from fovea.engine.check import check_checkpoint, shape_of_folder
from fovea.engine.config import EngineConfig
from fovea.engine.layers.experts import ExpertLinear
from fovea.engine.layers.linear import Linear
from fovea.engine.load import load_model
from fovea.engine.models.quantized import open_weights
from fovea.engine.models.stored import StoredWeights
from fovea.engine.models.targets import TensorEntry
from fovea.engine.request.inputs import to_image
from fovea.kernels.codes import CodedProduct
from tests.engine.models.test_internvl import TEXT, variant
from tests.support.checkpoints import write
from tests.support.engines import ask
from tests.support.internvl import to_original
from tests.support.programs import need_kernels
from tests.support.quantized import GROUP, SCHEMES, Scheme, awq, quantize_folder
from tests.support.reference import Reference
from tests.support.thorough import others_slow

PLAIN: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "kernels": "torch", "threads": 1, "kv_blocks": 128,
}  # fmt: skip
NAMES = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.o_proj.weight")
SHAPES = ((48, 112), (32, 64))
WEIGHTS = "model.safetensors"
PICTURE = Image.fromarray(np.random.default_rng(5).integers(0, 255, (75, 120, 3), dtype=np.uint8))


def stored(folder: Path, scheme: Scheme, *, shards: int = 1) -> dict[str, Tensor]:
    """Write two quantized weights and a norm to a folder, and return the values of the weights.

    shards: the tensors of a weight are spread over this many files.
    """
    torch.manual_seed(0)
    tensors, values = {"norm.weight": torch.ones(4, dtype=torch.bfloat16)}, {}
    for name, shape in zip(NAMES, SHAPES, strict=True):
        made, values[name] = scheme.make(torch.randn(shape) * 0.1)
        stem = name.removesuffix(".weight")
        tensors |= {stem + ending: part.contiguous() for ending, part in made.items()}
    names = sorted(tensors)
    for number in range(shards):
        chosen = {name: tensors[name] for name in names[number::shards]}
        save_file(chosen, folder / f"model-{number}.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": dict(scheme.config)}))
    return values


def entries(weights: StoredWeights) -> dict[str, tuple[int, TensorEntry]]:
    return {entry.name: (file, entry) for file, (_, found) in enumerate(weights.files) for entry in found}


def loaded_values(weights: StoredWeights, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    file, entry = entries(weights)[name]
    assert entry.shape is not None
    target = torch.empty(entry.shape, dtype=dtype)
    weights.read(file, entry, target)
    return target


@pytest.mark.parametrize("name", SCHEMES)
def test_values_are_those_of_the_codes(name: str, tmp_path: Path) -> None:
    """Bit for bit, in float32 and rounded once. Each weight is one entry, even with parts in two files."""
    scheme = SCHEMES[name]
    for shards in (1, 2):
        folder = tmp_path / str(shards)
        folder.mkdir()
        values = stored(folder, scheme, shards=shards)
        weights = open_weights(folder, None)
        assert weights.quantization == scheme.title
        assert entries(weights).keys() == {*NAMES, "norm.weight"}
        for weight, expected in values.items():
            file, entry = entries(weights)[weight]
            assert (entry.dtype, entry.shape, bool(entry.coded)) == ("BF16", expected.shape, scheme.kept)
            assert torch.equal(loaded_values(weights, weight), expected)
            assert torch.equal(loaded_values(weights, weight, torch.bfloat16), expected.bfloat16())
            if scheme.kept:
                assert torch.equal(weights.codes(file, entry).values(), expected)
        weights.close()


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    """Floats of 8 bits with three axes have blocks in each matrix; each one ends with a smaller block."""
    maps = [SCHEMES["fp8-blocks"].make(torch.randn(48, 112)) for _ in range(3)]
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {name: torch.stack([made[".weight"] for made, _ in maps])}
    tensors[f"{name}_scale_inv"] = torch.stack([made[".weight_scale_inv"] for made, _ in maps])
    save_file(tensors, tmp_path / WEIGHTS)
    config = {"quantization_config": dict(SCHEMES["fp8-blocks"].config)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = open_weights(tmp_path, None)
    expected = torch.stack([values for _, values in maps])
    assert torch.equal(loaded_values(weights, name), expected)
    file, entry = entries(weights)[name]
    transposed = torch.empty(3, 112, 48)
    weights.read(file, entry, transposed.transpose(1, 2))
    assert torch.equal(transposed, expected.transpose(1, 2).contiguous())
    weights.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name
        for name, scheme in SCHEMES.items()
        # Its newest release ignores weight_g_idx, which older ones and other engines read.
        if scheme.config["quant_method"] == "compressed-tensors" and name != "w4a16-act-order"
    ],
)
def test_compressed_tensors_computes_the_same_values(name: str) -> None:
    """The package's own arithmetic is that of the type of the scales."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    group = SCHEMES[name].config["config_groups"]["group_0"]
    made, values = SCHEMES[name].make(torch.randn(64, 128, generator=torch.Generator().manual_seed(1)))
    state = {ending[1:]: part.contiguous() for ending, part in made.items() if ending != ".input_scale"}
    compressor = BaseCompressor.get_value_from_registry(group["format"])
    theirs = compressor.decompress(state, QuantizationScheme(**group))["weight"]
    assert torch.equal(theirs, values.to(theirs.dtype))


@pytest.mark.slow
def test_compressed_tensors_reads_the_codes_of_awq() -> None:
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter as Converter

    made, values = awq().make(torch.randn(64, 128))
    codes, zeros = Converter.reverse_awq_order(*Converter.unpack_awq(made[".qweight"], made[".qzeros"], 4), 4)
    assert zeros is not None
    wide = [(part & 15).t().float() for part in (codes, zeros.repeat_interleave(GROUP, 0))]
    scale = made[".scales"].t().float().repeat_interleave(GROUP, 1)
    assert torch.equal((wide[0] - wide[1]) * scale, values)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_computes_the_same_values(kind: str, nested: bool, tmp_path: Path) -> None:
    """The package is no dependency of the tests: it is large."""
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(96, 160).bfloat16()
    codes, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
    tensors = {f"a.weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    save_file({"a.weight": codes, **tensors}, tmp_path / WEIGHTS)
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    weights = open_weights(tmp_path, None)
    assert torch.equal(
        loaded_values(weights, "a.weight", torch.bfloat16), functional.dequantize_4bit(codes, state)
    )
    weights.close()


PAIRS = [
    (scheme, architecture) for scheme in SCHEMES for architecture in ("internvl", "qwen2_5_vl", "qwen3_vl")
]
COMMON = [
    ("w4a16-asymmetric", "qwen3_vl"), ("w8a8", "internvl"), ("awq", "qwen2_5_vl"), ("gptq", "internvl"),
    ("fp8-blocks", "qwen3_vl"), ("nf4-nested", "qwen2_5_vl"),
]  # fmt: skip


def answer(folder: Path, **settings: Any) -> tuple[Completion, list[int]]:
    """Ask a model about a picture. Returns the answer and the ids of the prompt."""
    prompt = ask("what is it?", to_image(PICTURE))
    with Engine.from_pretrained(str(folder), **{**PLAIN, **settings}) as engine:
        ids = engine.parts.preparer.builder.build(prompt).ids
        done = engine.generate(prompt, temperature=0, max_tokens=8, ignore_eos=True, logprobs=True)
    return done, list(ids)


@pytest.mark.parametrize("pair", others_slow(PAIRS, COMMON), ids="-".join)
def test_answers_are_those_of_transformers(pair: tuple[str, str], tmp_path: Path) -> None:
    """Greedy tokens equal those of transformers with the dequantized weights, in float32."""
    name, architecture = pair
    plain = write(architecture, tmp_path / "plain")
    folder = quantize_folder(plain, tmp_path / "quantized", SCHEMES[name])
    assert check_checkpoint(str(folder)).errors == []
    done, ids = answer(folder)
    rows = Reference(plain).logits(ids, [PICTURE], list(done.token_ids[0])).log_softmax(-1)
    for row, entry in zip(rows, done.logprobs[0], strict=True):
        assert float(row.max() - row[entry.id]) < 1e-4
        assert float(row[entry.id]) == pytest.approx(entry.logprob, abs=1e-3)


@pytest.mark.kernels
@pytest.mark.parametrize(
    "pair", others_slow(PAIRS, [("awq", "qwen3_vl"), ("w8a8", "qwen2_5_vl")]), ids="-".join
)
def test_answers_of_the_native_kernels_are_close(pair: tuple[str, str], tmp_path: Path) -> None:
    """In bfloat16, where rows may be rounded to 8 bits."""
    name, architecture = pair
    need_kernels()
    plain = write(architecture, tmp_path / "plain")
    folder = quantize_folder(plain, tmp_path / "quantized", SCHEMES[name])
    done, ids = answer(folder, dtype="bfloat16", kernels="native")
    rows = Reference(plain).logits(ids, [PICTURE], list(done.token_ids[0])).log_softmax(-1)
    errors = [
        abs(float(row[entry.id]) - entry.logprob) for row, entry in zip(rows, done.logprobs[0], strict=True)
    ]
    assert sum(errors) / len(errors) < 0.25, errors


def kinds(folder: Path, quantization: str) -> dict[str, str]:
    """Load a model, and return what each map of the decoder multiplies with: bits of codes, or "plain"."""
    model = load_model(str(folder), EngineConfig.of(**PLAIN, quantization=quantization)).model
    found = {}
    for path, layer in model.decoder.named_modules():
        if isinstance(layer, Linear) and not isinstance(layer, ExpertLinear):
            coded = isinstance(layer.product, CodedProduct) and layer.format is not None
            found[path] = f"{layer.format.bits} bits" if coded and layer.format else "plain"
    return found


def test_what_becomes_of_the_codes_is_the_users_choice(qwen: Path, tmp_path: Path) -> None:
    plain = Path(shutil.copytree(qwen, tmp_path / "plain"))
    folder = quantize_folder(plain, tmp_path / "quantized", SCHEMES["w4a16"])
    assert {*kinds(folder, "none").values()} == {"4 bits"}
    assert {*kinds(folder, "dequantize").values()} == {"plain"}
    assert {*kinds(folder, "int8").values()} == {"8 bits"}
    cards = {
        quantization: load_model(
            str(folder), EngineConfig.of(**PLAIN, quantization=quantization)
        ).info.quantization
        for quantization in ("none", "dequantize", "int8")
    }
    assert cards == {"none": "compressed-tensors int4", "dequantize": "none", "int8": "int8"}


def test_the_log_says_what_is_kept(qwen: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = Path(shutil.copytree(qwen, tmp_path / "plain"))
    folder = quantize_folder(plain, tmp_path / "quantized", SCHEMES["w4a16"])
    edit_config(folder, lambda c: c["quantization_config"].update(kv_cache_scheme={"num_bits": 8}))
    with caplog.at_level(logging.INFO, logger="fovea.engine"):
        load_model(str(folder), EngineConfig.of(**PLAIN))
    lines = [record.getMessage() for record in caplog.records if "is quantized" in record.getMessage()]
    assert len(lines) == 3
    assert "21 of 21 quantized weights keep their codes: 4 bits in groups of 16" in lines[0]
    assert "keeps activations in 16 bits" in lines[1]
    assert "--quantization dequantize" in lines[1]
    assert "kv_cache_scheme is not used" in lines[2]


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((folder / "config.json").read_text())
    change(content)
    (folder / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize("original", others_slow(["internlm2", "experts"], ["internlm2"]))
def test_weights_that_other_layouts_join_or_split(original: str, tmp_path: Path) -> None:
    """InternLM2 stores queries, keys and values in one tensor; experts are stored one by one."""
    import transformers as hf

    if original == "internlm2":
        plain = to_original(variant(tmp_path / "plain", hf.LlamaConfig(**TEXT), {}), internlm2=True)
    else:
        plain = write("qwen3_vl_moe", tmp_path / "plain")
        split_experts(plain)
    folder = quantize_folder(plain, tmp_path / "quantized", SCHEMES["awq"])
    names = load_file(folder / WEIGHTS).keys()
    assert any(name.endswith(("wqkv.qweight", "experts.0.up_proj.qweight")) for name in names)
    ours, theirs = answer(folder)[0], answer(plain)[0]
    assert ours.token_ids == theirs.token_ids
    first, second = ([entry.logprob for entry in done.logprobs[0]] for done in (ours, theirs))
    assert first == pytest.approx(second, abs=1e-4)


def split_experts(folder: Path) -> None:
    """Store the maps of experts one by one, as tools that quantize do."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / WEIGHTS).items():
        stem, _, part = name.rpartition(".experts.")
        if part == "gate_up_proj":
            for number, one in enumerate(tensor):
                # transformers' own layout has the outputs last.
                gate, up = (one if one.shape[1] == 64 else one.t()).chunk(2)
                tensors[f"{stem}.experts.{number}.gate_proj.weight"] = gate.contiguous()
                tensors[f"{stem}.experts.{number}.up_proj.weight"] = up.contiguous()
        elif part == "down_proj":
            for number, one in enumerate(tensor):
                down = one if one.shape[0] == 64 else one.t()
                tensors[f"{stem}.experts.{number}.down_proj.weight"] = down.contiguous()
        else:
            tensors[name] = tensor
    save_file(tensors, folder / WEIGHTS)


def test_outputs_on_disk_of_encoders_with_other_codes_are_separate(qwen: Path, tmp_path: Path) -> None:
    """The tower's weights wait as codes while its fingerprint is computed."""
    marks = set()
    for shift in (0, 1):
        plain = Path(shutil.copytree(qwen, tmp_path / f"plain{shift}"))
        weights = load_file(plain / WEIGHTS)
        tower = {name: tensor for name, tensor in weights.items() if "visual" in name and "mlp" in name}
        changed = {n.replace("visual", "layers"): t + shift * 0.01 for n, t in tower.items() if t.ndim == 2}
        made = {n: SCHEMES["w8a8"].make(t) for n, t in changed.items()}
        stored = {n: t for n, t in weights.items() if n.replace("visual", "layers") not in made}
        for name, (parts, _) in made.items():
            stem = name.replace("layers", "visual").removesuffix(".weight")
            stored |= {stem + ending: part.contiguous() for ending, part in parts.items()}
        save_file(stored, plain / WEIGHTS)
        edit_config(plain, lambda c: c.update(quantization_config=dict(SCHEMES["w8a8"].config)))
        settings = EngineConfig.of(**PLAIN, embed_disk_dir=str(tmp_path / "disk"))
        marks.add(load_model(str(plain), settings).fingerprint)
    assert len(marks) == 2


Edit = Callable[[dict[str, Tensor], dict[str, Any]], Any]
STEM = NAMES[0].removesuffix("weight")
FAULTS: dict[str, tuple[str, Edit, type[ModelError], str]] = {
    "another method": ("awq", lambda t, c: c.update(quant_method="hqq"), UnsupportedModel,
        "is quantized by 'hqq'; accepted: awq, bitsandbytes, compressed-tensors"),
    "no method": ("awq", lambda t, c: c.clear() or c.update(bits=4), UnsupportedModel, "quantized by 'None'"),
    "gemv": ("awq", lambda t, c: c.update(version="gemv"), CheckpointError,
        "version is 'gemv'; accepted: gemm"),
    "3 bits": ("gptq", lambda t, c: c.update(bits=3), CheckpointError, "bits is 3; accepted: 2, 4, 8"),
    "no group": ("gptq", lambda t, c: c.update(group_size=0), CheckpointError, "group_size is 0"),
    "another layout": ("gptq", lambda t, c: c.update(checkpoint_format="marlin"), CheckpointError,
        "checkpoint_format is 'marlin'; accepted: gptq, gptq_v2"),
    "no scales": ("awq", lambda t, c: t.pop(STEM + "scales"), CheckpointError,
        "up_proj.weight is quantized, but has no tensor 'scales'"),
    "no codes": ("awq", lambda t, c: t.pop(STEM + "qweight"), CheckpointError, "has no tensor 'qweight'"),
    "twice": ("awq", lambda t, c: t.update({STEM + "weight": torch.ones(48, 112)}), CheckpointError,
        "is there twice: plain, and as codes and scales"),
    "fewer scales": ("awq", lambda t, c: t.update({STEM + "scales": torch.ones(6, 48)}), CheckpointError,
        r"up_proj.scales has shape \[6, 48\]; accepted: \[7, 48\]"),
    "fewer zero points": ("gptq", lambda t, c: t.update({STEM + "qzeros": torch.ones(7, 5).int()}),
        CheckpointError, r"qzeros has shape \[7, 5\]; accepted: \[7, 6\]"),
    "groups beyond": ("gptq", lambda t, c: t.update({STEM + "g_idx": torch.full((112,), 7).int()}),
        CheckpointError, "g_idx names groups beyond those of the scales; accepted: 0 to 6"),
    "codes of another type": ("gptq", lambda t, c: t.update({STEM + "qweight": torch.ones(14, 48)}),
        CheckpointError, "qweight has type F32; accepted: I32"),
    "scales that are not finite": ("gptq", lambda t, c: t[STEM + "scales"].fill_(torch.inf), CheckpointError,
        "up_proj.scales has scales that are not finite"),
    "another scheme": ("w4a16", lambda t, c: c["config_groups"]["group_0"]["weights"].update(group_size=32),
        CheckpointError, "weight_packed .* accepted by config_groups: int of 4 bits in groups of 32"),
    "no zero points": ("w4a16-asymmetric", lambda t, c: t.pop(STEM + "weight_zero_point"), CheckpointError,
        "no zero points; accepted by config_groups: int of 4 bits in groups of 16, with zero points"),
    "another shape": ("w4a16", lambda t, c: t.update({STEM + "weight_shape": torch.tensor([49, 112])}),
        CheckpointError, r"weight_shape says \[49, 112\]; accepted: 48 rows"),
    "a sparse format": ("w4a16", lambda t, c: c["config_groups"]["group_0"].update(format="marlin-24"),
        UnsupportedModel, "format is 'marlin-24'; accepted: pack-quantized"),
    "rotations": ("w4a16", lambda t, c: c.update(transform_config={"u": {}}), UnsupportedModel,
        "transform_config rotates activations"),
    "6 bits": ("w4a16", lambda t, c: c["config_groups"]["group_0"]["weights"].update(num_bits=6),
        UnsupportedModel, "num_bits is 6; accepted for int"),
    "groups that are a list": ("w4a16", lambda t, c: c.update(config_groups=[]), CheckpointError,
        "config_groups is no object"),
    "bytes without scales": ("w8a8", lambda t, c: t.pop(STEM + "weight_scale"), CheckpointError,
        "up_proj.weight is quantized, but has no tensor 'weight_scale'"),
    "blocks of another size": ("fp8-blocks", lambda t, c: c.update(weight_block_size=[128, 128]),
        CheckpointError, r"weight_scale_inv has shape \[2, 3\]; accepted: \[1, 1\]"),
    "a block that is a number": ("fp8-blocks", lambda t, c: c.update(weight_block_size=128), CheckpointError,
        "weight_block_size is '128'; accepted: two whole numbers"),
    "fewer blocks": ("nf4", lambda t, c: t.update({STEM + "weight.absmax": torch.ones(83)}), CheckpointError,
        r"absmax has shape \[83\]; accepted: \[84\]"),
    "state that is no JSON": (
        "nf4",
        lambda t, c: t.update({STEM + "weight.quant_state.bitsandbytes__nf4": torch.zeros(3).byte()}),
        CheckpointError, "quant_state.bitsandbytes__nf4 is not JSON"),
    "no state": ("nf4", lambda t, c: t.pop(STEM + "weight.quant_state.bitsandbytes__nf4"), CheckpointError,
        "has type U8, but neither SCB nor quant_state"),
    "scales of fewer rows": ("llm-int8", lambda t, c: t.update({STEM + "SCB": torch.ones(47)}),
        CheckpointError, r"SCB has shape \[47\]; accepted: \[48\] or \[48, 1\]"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_tensors_that_do_not_fit_are_refused_by_name(fault: str, tmp_path: Path) -> None:
    name, change, error, message = FAULTS[fault]
    stored(tmp_path, SCHEMES[name])
    path = tmp_path / "model-0.safetensors"
    tensors = load_file(path)
    content = json.loads((tmp_path / "config.json").read_text())
    change(tensors, content["quantization_config"])
    save_file(tensors, path)
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(error, match=message):  # noqa: PT012 - scales are read with the weights
        weights = open_weights(tmp_path, None)
        try:
            loaded_values(weights, NAMES[0])
        finally:
            weights.close()


def test_a_check_reports_every_tensor_that_does_not_fit(qwen: Path, tmp_path: Path) -> None:
    plain = Path(shutil.copytree(qwen, tmp_path / "plain"))
    folder = quantize_folder(plain, tmp_path / "quantized", SCHEMES["awq"])
    report = check_checkpoint(str(folder))
    assert (report.errors, report.warnings, report.unchecked) == ([], [], [])
    assert report.facts["quantization"] == "awq"
    assert report.facts["quantized_weights"] == report.facts["kept_weights"] == 21
    assert shape_of_folder(folder, "x") == shape_of_folder(qwen, "x")
    tensors = load_file(folder / WEIGHTS)
    for name in [name for name in tensors if name.endswith("o_proj.scales")]:
        tensors[name] = torch.ones(1, 2)
    tensors.pop(next(name for name in tensors if name.endswith("layers.0.mlp.up_proj.qzeros")))
    save_file(tensors, folder / WEIGHTS)
    messages = [finding.message for finding in check_checkpoint(str(folder)).errors]
    (message,) = messages
    assert "3 tensors 'model.language_model.layers.N.self_attn.o_proj.scales'" in message
    assert "have shape [1, 2]; accepted: [4, 64]" in message


def test_a_check_names_the_weights_of_files_that_are_not_there(qwen: Path, tmp_path: Path) -> None:
    plain = Path(shutil.copytree(qwen, tmp_path / "plain"))
    folder = quantize_folder(plain, tmp_path / "quantized", SCHEMES["gptq"])
    names = load_file(folder / WEIGHTS).keys()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, WEIGHTS)})
    )
    (folder / WEIGHTS).unlink()
    messages = [finding.message for finding in check_checkpoint(str(folder)).errors]
    assert messages == [f"{folder}: 1 of 1 shards are missing: ['model.safetensors']"]
