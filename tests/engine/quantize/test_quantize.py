"""fovea quantize: weights and files of the copy, exceptions, calibration, runs that were stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fovea import Engine
from fovea.cli.main import main
from fovea.core.errors import ConfigError
from fovea.core.types import TokenPrompt
from fovea.engine.config import EngineConfig
from fovea.engine.layers.linear import Linear
from fovea.engine.load import load_model
from fovea.engine.quantize.layers import Checkpoint, LayerRun, stages
from fovea.engine.quantize.measure import Measured, measure
from fovea.engine.quantize.record import Sample, record
from fovea.engine.quantize.run import Quantizer, Wish
from fovea.engine.quantize.schemes import Scheme, parse_scheme, round_weight
from fovea.engine.quantize.search import Moments, round_by_columns, smooth
from fovea.evaluation.datasets import scene_cases
from fovea.kernels.codes import CodedProduct
from tests.support.checkpoints import write
from tests.support.checkpoints.text import write_text
from tests.support.engines import ask
from tests.support.thorough import others_slow

PLAIN: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "kernels": "torch",
    "threads": 1,
    "kv_blocks": 256,
}
TO = {name: parse_scheme(name, "to") for name in ("int4", "int8", "fp8", "int4-a8", "int8-a16")}
TEXT = "The quick brown fox jumps over the lazy dog. " * 12


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return record("fovea-tiny", list(scene_cases(1, ["colour"], seed=5)), [TEXT], 2, lambda: None)[0]


def quantize(
    model: str,
    out: Path,
    schemes: Mapping[str, Scheme | None],
    samples: list[Sample] | None = None,
    **wish: Any,
) -> Quantizer:
    run = Quantizer(Checkpoint(model), out, Wish(schemes, **wish), copies(samples or []), lambda: None)
    run.run()
    return run


def copies(samples: list[Sample]) -> list[Sample]:
    """Samples whose rows can change without changing those of other tests."""
    return [replace(sample, x=sample.x.clone()) for sample in samples]


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    "scheme", others_slow(["int8", "int4", "int4:64", "fp8", "int8-a16"], ["int8", "int4"])
)
def test_rounded_weights_are_close_and_stored_as_they_are_read(scheme: str, tmp_path: Path) -> None:
    chosen = parse_scheme(scheme, "to")
    assert chosen is not None
    quantize("fovea-tiny", tmp_path, {"decoder": chosen})
    plain = load_model("fovea-tiny", EngineConfig.of(**PLAIN)).model
    loaded = load_model(str(tmp_path), EngineConfig.of(**PLAIN, quantization="dequantize")).model
    bounds = {"int8": 0.02, "int4": 0.09, "int4:64": 0.1, "fp8": 0.03, "int8-a16": 0.02}
    for (path, before), (_, after) in zip(plain.named_modules(), loaded.named_modules(), strict=True):
        if isinstance(before, Linear) and path.startswith("decoder.layers"):
            assert isinstance(after, Linear)
            assert torch.equal(after.weight, round_weight(before.weight, chosen).values()), path
            error = float((after.weight - before.weight).norm() / before.weight.norm())
            assert 0 < error < bounds[scheme], path


def test_codes_are_kept_when_the_copy_is_loaded(tmp_path: Path) -> None:
    quantize("fovea-tiny", tmp_path, {"decoder": Scheme("int4", 32), "head": None})
    model = load_model(str(tmp_path), EngineConfig.of(**PLAIN)).model
    products = [layer.product for layer in model.decoder.layers.modules() if isinstance(layer, Linear)]
    assert products
    assert all(isinstance(product, CodedProduct) for product in products)
    with Engine.from_pretrained(str(tmp_path), **PLAIN) as engine:
        assert engine.info.quantization.startswith("compressed-tensors")


@pytest.mark.parametrize("scheme", others_slow(["int8", "int4"], ["int4"]))
def test_calibration_loses_less_than_rounding(scheme: str, samples: list[Sample], tmp_path: Path) -> None:
    """The last layer's outputs differ less from the exact ones than with the nearest weights."""
    chosen = parse_scheme(scheme, "to")
    exact = outputs("fovea-tiny", samples)

    def error(folder: Path, used: list[Sample]) -> float:
        quantize("fovea-tiny", folder, {"decoder": chosen}, used)
        ours = outputs(str(folder), samples)
        return float((ours - exact).norm() / exact.norm())

    calibrated, nearest = error(tmp_path / "a", samples), error(tmp_path / "b", [])
    assert calibrated < (0.8 if scheme == "int4" else 1.0) * nearest


def outputs(name: str, samples: list[Sample]) -> Tensor:
    """The rows after the last layer, for all samples."""
    model = load_model(name, EngineConfig.of(**PLAIN, quantization="dequantize")).model
    rows = copies(samples)
    with torch.no_grad():
        for number, layer in enumerate(model.decoder.layers):
            run = LayerRun(model, layer, number, rows)
            for sample in rows:
                sample.x = run.forward(sample)
    return torch.cat([sample.x for sample in rows])


def test_recorded_rows_are_those_of_the_engine(samples: list[Sample]) -> None:
    """The recorded rows, through all layers, give the log probabilities that an engine reports."""
    model = load_model("fovea-tiny", EngineConfig.of(**PLAIN)).model
    text = next(sample for sample in samples if not bool(sample.is_visual().any()) and len(sample.x) > 100)
    with torch.no_grad():
        logprobs = model.logits(outputs("fovea-tiny", [text])).log_softmax(-1)
    with Engine.from_pretrained("fovea-tiny", **PLAIN) as engine:
        ids = (*engine.tokenizer.start_ids, *engine.tokenizer.encode_plain(TEXT))[: len(text.x)]
        done = engine.generate(TokenPrompt(ids), max_tokens=1, prompt_logprobs=0)
    ours = logprobs[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
    theirs = [entry.logprob for entry in done.prompt_logprobs[1:] if entry is not None]
    assert ours.tolist() == pytest.approx(theirs, abs=1e-3)
    assert any(bool(sample.is_visual().any()) for sample in samples)


def test_factors_change_no_output(samples: list[Sample]) -> None:
    """A layer computes the same if columns are multiplied by what the step before is divided by."""
    source = Checkpoint("fovea-tiny")
    model = source.model
    from fovea.engine.layers.decoder import build_layer

    layer = model.decoder.layers[0] = build_layer(model.decoder.config, 0)
    with torch.no_grad():
        source.load(layer, "decoder.layers.0")
        run = LayerRun(model, layer, 0, copies(samples))
        before = [run.forward(sample) for sample in run.samples]
        folds = [(each, fold) for each, fold in stages(layer) if fold is not None]
        assert len(folds) == 4
        for each, fold in folds:
            factors = fold.apply(fold.reduce(0.5 + torch.rand(each.in_features)), torch.bfloat16)
            each.weight.data *= factors
        after = [run.forward(sample) for sample in run.samples]
    for ours, theirs in zip(after, before, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4 * float(theirs.abs().max()), rtol=1e-4)


def test_rounding_by_columns_beats_the_nearest_values() -> None:
    torch.manual_seed(0)
    mixing = torch.randn(128, 128)
    x, weight = torch.randn(2000, 128) @ mixing, torch.randn(64, 128)
    moments = Moments.empty(128)
    moments.add(x, torch.ones(len(x)))
    for scheme in (Scheme("int8"), Scheme("int4", 32), Scheme("fp8")):
        ours = round_by_columns(weight, moments, scheme).values()
        nearest = round_weight(weight, scheme).values()
        errors = [float((x @ (values - weight).T).norm()) for values in (ours, nearest)]
        assert errors[0] < 0.8 * errors[1], scheme


def test_inputs_that_are_large_get_finer_weights() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1000, 64), torch.randn(32, 64)
    x[:, 5] *= 50
    moments = Moments.empty(64)
    moments.add(x, torch.ones(len(x)))
    factors = smooth(weight, moments, Scheme("int4", 32))
    assert int(factors.argmax()) == 5
    exact = x @ weight.T
    errors = [
        float((x / f @ round_weight(weight * f, Scheme("int4", 32)).values().T - exact).norm())
        for f in (factors, torch.ones(64))
    ]
    assert errors[0] < 0.6 * errors[1]


def test_inputs_that_are_always_zero_are_no_error() -> None:
    moments = Moments.empty(64)
    moments.add(torch.zeros(10, 64), torch.ones(10))
    weight = torch.randn(8, 64)
    result = round_by_columns(weight, moments, Scheme("int4", 32))
    assert bool(result.values().isfinite().all())


def test_parts_and_exceptions(tmp_path: Path) -> None:
    schemes = {"decoder": Scheme("int4", 32), "tower": Scheme("int8"), "projector": Scheme("int8")}
    exceptions = {"layers.0.": Scheme("int8"), "down_proj": None}
    run = quantize("fovea-tiny", tmp_path, schemes, exceptions=exceptions)
    found = tensors(tmp_path)
    names = set(found)
    assert any("layers.0." in name and name.endswith("_proj.weight_scale") for name in names)
    assert not any("down_proj.weight_" in name and "layers.0." not in name for name in names)
    assert any(name.endswith("layers.1.self_attn.q_proj.weight_packed") for name in names)
    assert {(line.part, line.scheme) for line in run.lines} == {
        ("decoder", "int4:32"), ("decoder", "int8"), ("tower", "int8"), ("projector", "int8")
    }  # fmt: skip
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert len(config["config_groups"]) == 2
    with Engine.from_pretrained(str(tmp_path), **PLAIN) as engine:
        assert ask(engine, "What is this?")


OTHERS = ["qwen3_vl", "gemma3", "glm4v", "qwen3_5", "internvl", "lfm2_vl", "qwen3_vl_moe"]


@pytest.mark.parametrize("architecture", OTHERS)
def test_other_architectures(architecture: str, tmp_path: Path) -> None:
    """Fused tensors, centred norms, layers with states, experts: what cannot be rounded stays as it is."""
    folder = str(write(architecture, tmp_path / "plain"))
    samples, _ = record(folder, [], [TEXT], 2, lambda: None)
    run = quantize(folder, tmp_path / "copy", {"decoder": Scheme("int8")}, samples)
    assert run.lines
    load_model(str(tmp_path / "copy"), EngineConfig.of(**PLAIN))


LOADED = [(name, scheme) for name in ("qwen2_5_vl", "llama") for scheme in TO]


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("pair", others_slow(LOADED, [("qwen2_5_vl", "int4")]), ids="-".join)
def test_transformers_loads_the_copy(pair: tuple[str, str], tmp_path: Path) -> None:
    """The weights of transformers are those of Fovea, and so is the most likely next token.

    It computes values in the type of the scales, bfloat16. Its release 5.23 loads zero points only with
    dequantize=True, and then only copies in which all maps have one scheme.
    """
    import transformers as hf

    name, scheme = pair
    plain = write_text(name, tmp_path / "plain") if name == "llama" else write(name, tmp_path / "plain")
    copy = tmp_path / "copy"
    quantize(str(plain), copy, {"decoder": TO[scheme]}, exceptions={"layers.0.mlp": None, "o_proj": None})
    loader = hf.AutoModelForCausalLM if name == "llama" else hf.AutoModelForImageTextToText
    dequantized = hf.CompressedTensorsConfig(dequantize=True)
    theirs = loader.from_pretrained(copy, dtype=torch.float32, quantization_config=dequantized).eval()
    ours = load_model(str(copy), EngineConfig.of(**PLAIN, quantization="dequantize"))
    values = dict(ours.model.checkpoint_targets())
    compared = 0
    for path, weight in theirs.named_parameters():
        target = values.get("decoder.layers." + path.partition("layers.")[2])
        if target is not None and "visual" not in path:
            torch.testing.assert_close(weight.data.float(), target, rtol=2**-7, atol=0)
            compared += 1
    assert compared >= 7 * len(ours.model.decoder.layers)
    ids = list(range(30, 50))
    with Engine(ours, EngineConfig.of(**PLAIN)) as engine, torch.no_grad():
        done = engine.generate(TokenPrompt(tuple(ids)), max_tokens=1, logprobs=True, ignore_eos=True)
        row = theirs(input_ids=torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
    entry = done.logprobs[0][0]
    assert float(row[entry.id]) == pytest.approx(entry.logprob, abs=0.05)


@pytest.mark.slow
def test_transformers_loads_several_schemes(tmp_path: Path) -> None:
    """Schemes without zero points load as they are, also several in one copy."""
    import transformers as hf

    plain = write("qwen2_5_vl", tmp_path / "plain")
    parts = {"decoder": Scheme("int8", 0, True), "tower": Scheme("int8")}
    quantize(str(plain), tmp_path / "copy", parts, exceptions={"layers.0.mlp": Scheme("fp8"), "o_proj": None})
    loader = hf.AutoModelForImageTextToText
    before, after = (
        loader.from_pretrained(tmp_path / name, dtype=torch.float32) for name in ("plain", "copy")
    )
    ids = torch.arange(30, 50)[None]
    with torch.no_grad():
        ours, exact = after(input_ids=ids).logits, before(input_ids=ids).logits
    assert 0 < float((ours - exact).norm() / exact.norm()) < 0.1


def test_biases_do_not_shift_rows(tmp_path: Path) -> None:
    """Each tensor of the copy has its own rows, where maps have biases, too."""
    plain = write("qwen2_5_vl", tmp_path / "plain")
    quantize(str(plain), tmp_path / "copy", {"decoder": Scheme("int8")})
    before, after = tensors(plain), tensors(tmp_path / "copy")
    scales = [name for name in after if name.endswith("proj.weight_scale")]
    assert any("k_proj" in name for name in scales)
    for name in scales:
        weight = name.removesuffix("_scale")
        values = after[weight].float() * after[name].float()
        assert float((values - before[weight]).norm() / before[weight].norm()) < 0.02, name


@pytest.mark.parametrize("size", ["smallest", "half", "plain"])
def test_a_size_chooses_exceptions(size: str, samples: list[Sample], tmp_path: Path) -> None:
    """A copy is at most as large as asked for, and maps that lose most get more bits."""
    wish = Wish({"decoder": Scheme("int4", 32)}, size=1.0)
    measured = fake_costs("fovea-tiny")
    source = Checkpoint("fovea-tiny")
    smallest = quantize("fovea-tiny", tmp_path / "least", wish.schemes)
    least = stored_bytes(tmp_path / "least")
    plain = sum(file.stat().st_size for file in source.folder.glob("*.safetensors"))
    wanted = {"smallest": least, "half": (least + plain) / 2, "plain": 1.0}[size]
    wish = Wish({"decoder": Scheme("int4", 32)}, size=wanted)
    run = Quantizer(source, tmp_path / size, wish, [], lambda: None, measured=measured)
    run.run()
    names = [line.scheme for line in run.lines]
    if size == "smallest":
        assert names == [line.scheme for line in smallest.lines]
    elif size == "half":
        assert {"int4:32", "int8-a16"} <= set(names)
        assert stored_bytes(tmp_path / size) <= wanted
        last = f"layers.{len(source.model.decoder.layers) - 1}."
        assert not any(line.scheme == "int4:32" for line in run.lines if last in line.name)
    else:
        assert not names, "everything stays plain"
    load_model(str(tmp_path / size), EngineConfig.of(**PLAIN))


def fake_costs(name: str) -> Measured:
    """Costs that grow from layer to layer."""
    model = Checkpoint(name).model
    costs = {}
    for number, layer in enumerate(model.decoder.layers):
        paths = {module: path for path, module in layer.named_modules()}
        for each, _ in stages(layer):
            cost = 10.0**number * each.weight.numel()
            costs[f"decoder.layers.{number}.{paths[each]}"] = {"int4:32": cost, "int8-a16": cost / 100}
    return Measured(1.0, tuple(1.0 for _ in model.decoder.layers), costs)


def stored_bytes(folder: Path) -> int:
    return sum(tensor.nbytes for tensor in tensors(folder).values())


def test_a_size_that_is_too_small_is_an_error(tmp_path: Path) -> None:
    wish = Wish({"decoder": Scheme("int4", 32)}, size=0.01)
    run = Quantizer(
        Checkpoint("fovea-tiny"), tmp_path, wish, [], lambda: None, measured=fake_costs("fovea-tiny")
    )
    with pytest.raises(ConfigError, match="bytes less than the copy takes"):
        run.run()


def test_costs_of_schemes(samples: list[Sample], tmp_path: Path) -> None:
    """Costs are positive, those of 8 bits far smaller than those of 4, and kept for a run that continues."""
    source, scheme = Checkpoint("fovea-tiny"), Scheme("int4", 32)
    measured = measure(source, copies(samples), [scheme, Scheme("int8")], tmp_path, lambda: None)
    assert measured.loss > 0
    for costs in measured.costs.values():
        assert 0 < costs["int8"] < 0.2 * costs["int4:32"]
    assert len(measured.visual) == len(source.model.decoder.layers)
    assert all(0 < ratio < 100 for ratio in measured.visual)
    again = measure(source, copies(samples), [scheme, Scheme("int8")], tmp_path, lambda: None)
    assert again == measured, "read from the folder"


def test_tower_and_projector_are_calibrated(tmp_path: Path) -> None:
    cases = list(scene_cases(1, ["colour"], seed=5))
    samples, encoder = record("fovea-tiny", cases, [], 1, lambda: None, lambda path: True)
    assert len(samples) >= 1
    schemes = {"tower": Scheme("int4", 32), "projector": Scheme("int8")}
    run = Quantizer(Checkpoint("fovea-tiny"), tmp_path, Wish(schemes), [], lambda: None, encoder)
    run.run()
    assert {line.part for line in run.lines} == {"tower", "projector"}
    assert all(line.error is not None and line.error < 0.05 for line in run.lines)
    with Engine.from_pretrained(str(tmp_path), **PLAIN) as engine:
        assert ask(engine, "What is this?")


@pytest.mark.parametrize(
    "architecture", others_slow([*OTHERS, "qwen2_5_vl", "gemma4"], ["qwen3_5", "gemma3"])
)
def test_costs_of_other_architectures(architecture: str, tmp_path: Path) -> None:
    """Gradients pass windows, states, convolutions, cross-attention and experts."""
    folder = str(write(architecture, tmp_path / "plain"))
    samples, _ = record(folder, [], [TEXT], 2, lambda: None)
    measured = measure(Checkpoint(folder), samples, [Scheme("int8")], tmp_path / "copy", lambda: None)
    assert measured.costs
    assert all(cost >= 0 for costs in measured.costs.values() for cost in costs.values())
    assert any(cost > 0 for costs in measured.costs.values() for cost in costs.values())


def test_layers_that_attend_to_images_are_not_calibrated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write("mllama", tmp_path / "plain"))
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    command = ["quantize", folder, "--to", "int8", "--out", str(tmp_path / "copy")]
    assert main([*command, "--calibrate", str(text)]) != 0
    assert "without --calibrate" in capsys.readouterr().err
    assert main(command) == 0


@pytest.mark.slow
def test_a_run_that_was_stopped_continues(samples: list[Sample], tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    schemes = {"decoder": Scheme("int4", 32)}
    quantize("fovea-tiny", whole, schemes, samples)

    class Stop(Exception):
        pass

    def stop() -> None:
        if (parts / "layer-00001.safetensors").exists():
            raise Stop

    with pytest.raises(Stop):
        Quantizer(Checkpoint("fovea-tiny"), parts, Wish(schemes), copies(samples), stop).run()
    assert not (parts / "config.json").exists()
    with pytest.raises(ConfigError, match="other settings"):
        quantize("fovea-tiny", parts, {"decoder": Scheme("int8")}, samples)
    run = quantize("fovea-tiny", parts, schemes, samples)
    assert len(run.lines) == 4 * 5
    ours, theirs = tensors(parts), tensors(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not (parts / "calibration.safetensors").exists()
    with pytest.raises(ConfigError, match="not empty"):
        quantize("fovea-tiny", parts, schemes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "int3"], "--to|to is 'int3'.*int4"),
        (["--to", "int4:48"], "accepted groups: int4:32, int4:64, int4:128"),
        (["--to", "decoder=int4,eyes=int8"], "accepted parts: decoder, tower, projector, head"),
        (["--to", "int8", "--except", "down"], "NAME=SCHEME"),
        (["--to", "int8", "--calibrate", "/nowhere.txt"], "/nowhere.txt cannot be read"),
        (["--to", "int4", "--size", "3"], "accepted: a share of the plain size such as 0.35, or KB or MB"),
        (["--to", "int4", "--size", "0.5"], "--size needs calibration data"),
        (["--to", "int8", "--visual-weight", "-1"], "accepted: auto, and numbers above 0"),
    ],
)
def test_mistakes_are_named(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", "fovea-tiny", "--out", str(tmp_path / "out"), *arguments]) == 2
    import re

    assert re.search(message, capsys.readouterr().err)


def test_the_command_prints_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    command = ["quantize", "fovea-tiny", "--to", "decoder=int4", "--out", str(out), "--report"]
    command += ["--calibrate", str(text), "--prompts", "1"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "int4:32" in printed
    assert printed.rstrip().endswith(str(out))
    assert main(command) == 2, "the folder is not empty"
