"""Layouts of published EAGLE-3 checkpoints at a small size: each drafts as defined, or an error says why not.

The names, shapes and configurations are those of EAGLE's authors, AngelSlim, SpecForge, SGLang, NeMo and
vLLM's speculators.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from fovea.core.errors import CheckpointError, ConfigError, FoveaError, UnsupportedModel
from fovea.engine.models.draft_layer import load_eagle3
from tests.support.checkpoints import parts, write
from tests.support.checkpoints.text import write_text
from tests.support.draft_layers import (
    Definition,
    Eagle3Files,
    PlainEagle3,
    Target,
    Tensors,
    add_mtp,
    draft_always,
    eagle3,
)
from tests.support.engines import ask, assert_idle, engine, picture, shared_model

LAYERS = 7
DEFAULT_TAPS = (2, 3, 4)
"""The third layer, the middle one, and the third from the end."""
IMAGE = picture(1)
QUESTION = ask("What is in the image?", IMAGE)
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
INTERLEAVED = (0, 1, 2, 0, 1, 2, 0, 0)
IN_RUNS = (0, 0, 1, 1, 1, 2, 2, 2)


class Goal(NamedTuple):
    """A target, in Fovea and in transformers, and its answer without speculation."""

    folder: Path
    target: Target
    ids: tuple[int, ...]
    answer: tuple[int, ...]


@pytest.fixture(scope="module")
def goals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Goal]:
    found: dict[str, Goal] = {}

    def goal(architecture: str) -> Goal:
        if architecture not in found:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(parts, "TEXT_LAYERS", LAYERS)
                folder = write(architecture, tmp_path_factory.mktemp(architecture))
            with engine(folder) as machine:
                answer = machine.generate(QUESTION, **GREEDY).token_ids[0]
                ids = machine.parts.preparer.builder.build(QUESTION).ids
            found[architecture] = Goal(folder, Target(folder), tuple(ids), answer)
        return found[architecture]

    return goal


class Layout(NamedTuple):
    """A published layout.

    make: makes the checkpoint, by the names of the first publication, and what is on disk.
    taps, axes, theta, after_norm: see `PlainEagle3`.
    target: architecture of the target.
    """

    make: Callable[[Path, Path], Eagle3Files]
    taps: tuple[int, ...] = DEFAULT_TAPS
    axes: tuple[int, ...] | None = None
    theta: float = 10000.0
    after_norm: bool = False
    target: str = "qwen3_vl"


def plain(target: Path, **changed: Any) -> Eagle3Files:
    """A layer with a smaller vocabulary, in whose configuration nothing is said that need not be."""
    files = eagle3(target, **{"vocabulary": 150, "rope_theta": None, "rope_scaling": None, **changed})
    config = {name: value for name, value in files.config.items() if value is not None}
    if "eagle_aux_hidden_state_layer_ids" not in changed:
        config.pop("eagle_aux_hidden_state_layer_ids")
    return Eagle3Files(config, files.tensors)


def authors(target: Path, folder: Path) -> Eagle3Files:
    """A configuration without any RoPE, in a pickle of float16."""
    files = plain(target, architectures=["LlamaForCausalLMEagle3"], model_type="llama", vocab_size=384)
    halves = {name: t.half() if t.is_floating_point() else t for name, t in files.tensors.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(files.config))
    torch.save(halves, folder / "pytorch_model.bin")
    return files._replace(tensors={n: t.float() if t.is_floating_point() else t for n, t in halves.items()})


def angelslim(target: Path, folder: Path) -> Eagle3Files:
    files = plain(
        target,
        architectures=["Eagle3Qwen3vlForCausalLM"],
        rope_theta=5e6,
        rope_scaling={"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]},
        tie_word_embeddings=True,
        attention_bias=False,
        modal_type="VLM",
        target_model_type="qwen3_vl",
        aux_hidden_states_layer_ids=[1, 2, 3],
    )
    files.write(folder)
    return files


def angelslim_text(target: Path, folder: Path) -> Eagle3Files:
    files = plain(target, architectures=["Eagle3LlamaForCausalLM"], rope_theta=5e6)
    files.config["rope_scaling"] = files.config["target_hidden_size"] = None
    files.write(folder)
    return files


def specforge(target: Path, folder: Path) -> Eagle3Files:
    """M-RoPE of Qwen2.5-VL, which names no layout of the sections."""
    files = plain(
        target,
        architectures=["Eagle3Qwen2_5vlForCausalLM"],
        rope_theta=1e6,
        rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]},
        own_embedding=True,
    )
    del files.config["head_dim"]
    files.write(folder)
    return files._replace(config={**files.config, "head_dim": 16})


def sglang(target: Path, folder: Path) -> Eagle3Files:
    """Nested numbers of the layers whose outputs are read, and the whole vocabulary."""
    files = plain(target, vocabulary=384, eagle_aux_hidden_state_layer_ids=[1, 4, 7])
    del files.config["eagle_aux_hidden_state_layer_ids"], files.config["draft_vocab_size"]
    files.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}
    del files.tensors["d2t"], files.tensors["t2d"]
    files.write(folder)
    return files


def nested(files: Eagle3Files, folder: Path, kind: str, **more: Any) -> None:
    """Write a layer as vLLM's speculators name and nest everything."""
    outside = ("architectures", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
    inside = {name: value for name, value in files.config.items() if name not in outside}
    config = {name: files.config.get(name) for name in outside} | {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "norm_before_residual": True,
        "norm_before_fc": False,
        "norm_output": False,
        "fc_norm": False,
        "transformer_layer_config": {"model_type": kind, "vocab_size": 384, **inside},
        "speculators_config": {"algorithm": "eagle3"},
        **more,
    }
    training = {
        "verifier_lm_head.weight": torch.zeros(384, 64),
        "verifier_norm.weight": torch.zeros(64),
    }
    tensors = {renamed(name): tensor for name, tensor in files.tensors.items()} | training
    Eagle3Files(config, tensors).write(folder)


def renamed(name: str) -> str:
    return name.replace("midlayer.", "layers.0.")


def speculators(target: Path, folder: Path) -> Eagle3Files:
    files = plain(target, own_embedding=True, rope_theta=1e4, eagle_aux_hidden_state_layer_ids=[1, 2, 6])
    nested(files, folder, "llama")
    return files


def speculators_qwen3(target: Path, folder: Path) -> Eagle3Files:
    files = plain(target, rope_theta=1e6)
    random = torch.Generator().manual_seed(1)
    for name in ("q_norm", "k_norm"):
        files.tensors[f"midlayer.self_attn.{name}.weight"] = 1 + torch.randn(16, generator=random) / 8
    nested(files, folder, "qwen3", architectures=["Eagle3DraftModel"])
    return files


def nemo(target: Path, folder: Path) -> Eagle3Files:
    """A prefix before all names, and two files."""
    files = plain(target)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(files.config))
    named = [(f"model.{renamed(name)}", tensor) for name, tensor in files.tensors.items()]
    for number, part in enumerate((named[:5], named[5:])):
        save_file(dict(part), folder / f"model-0000{number + 1}-of-00002.safetensors")
    return files


def shared_head(target: Path, folder: Path) -> Eagle3Files:
    files = plain(target, vocabulary=0)
    files.write(folder)
    return files


def narrow(target: Path, folder: Path) -> Eagle3Files:
    """A layer of another width than the target, with an embedding and a head of its own."""
    files = plain(
        target, hidden_size=48, intermediate_size=80, num_attention_heads=3, num_key_value_heads=1,
        own_embedding=True,
    )  # fmt: skip
    files.write(folder)
    return files


LAYOUTS = {
    "authors": Layout(authors),
    "angelslim": Layout(angelslim, axes=INTERLEAVED, theta=5e6),
    "angelslim of text": Layout(angelslim_text, theta=5e6),
    "specforge": Layout(specforge, axes=IN_RUNS, theta=1e6, target="qwen2_5_vl"),
    "sglang": Layout(sglang, taps=(1, 4, 7)),
    "speculators": Layout(speculators, taps=(1, 2, 6), after_norm=True),
    "speculators of qwen3": Layout(speculators_qwen3, theta=1e6, after_norm=True),
    "nemo": Layout(nemo),
    "the head of the target": Layout(shared_head),
    "another width": Layout(narrow),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_published_layout_drafts_as_defined(
    layout: Layout, goals: Callable[[str], Goal], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goal = goals(layout.target)
    files = layout.make(goal.folder, tmp_path / "layer")
    options = {"theta": layout.theta, "after_norm": layout.after_norm}
    definition = Definition(
        goal.target,
        PlainEagle3(goal.target, files, layout.taps, layout.axes, **options),  # type: ignore[arg-type]
    )
    definition.add((*goal.ids, *goal.answer), [IMAGE])
    settings: dict[str, Any] = {"speculate": "layer", "speculative_tokens": 3}
    with engine(goal.folder, draft_layer=str(tmp_path / "layer"), **settings) as machine:
        log = draft_always(machine, monkeypatch)
        assert machine.generate(QUESTION, **GREEDY).token_ids[0] == goal.answer
        assert_idle(machine)
    definition.check(log.take())


Change = Callable[[dict[str, Any], Tensors], None]


def setting(**changed: Any) -> Change:
    """Return a change of the configuration."""
    return lambda config, tensors: config.update(changed)


def tensor(name: str, make: Callable[[torch.Tensor], torch.Tensor] | None) -> Change:
    """Return a change of a tensor; None: it is missing."""

    def change(config: dict[str, Any], tensors: Tensors) -> None:
        old = tensors.pop(name)
        if make is not None:
            tensors[name] = make(old)

    return change


def other_width(config: dict[str, Any], tensors: Tensors) -> None:
    config["hidden_size"] = 48
    del tensors["lm_head.weight"]


def further_layer(config: dict[str, Any], tensors: Tensors) -> None:
    tensors["layers.1.mlp.up_proj.weight"] = torch.zeros(2, 2)


MISTAKES: dict[str, tuple[type[FoveaError], str, Change]] = {
    "another architecture": (
        UnsupportedModel,
        "Bert.*LlamaForCausalLMEagle3",
        setting(architectures=["Bert"]),
    ),
    "norm_output": (UnsupportedModel, "norm_output", setting(norm_output=True)),
    "norm_before_fc": (UnsupportedModel, "norm_before_fc", setting(norm_before_fc=True)),
    "fc_norm": (UnsupportedModel, "fc_norm", setting(fc_norm=True)),
    "without states between layers": (
        UnsupportedModel,
        "use_aux_hidden_state",
        setting(eagle_config={"use_aux_hidden_state": False}),
    ),
    "several layers": (UnsupportedModel, "2 layers", setting(num_hidden_layers=2)),
    "taps outside of the model": (
        UnsupportedModel,
        r"\[1, 3, 8\].*7 layers",
        setting(eagle_aux_hidden_state_layer_ids=[1, 3, 8]),
    ),
    "taps that are no numbers": (
        UnsupportedModel,
        "layers",
        setting(eagle_aux_hidden_state_layer_ids=["a", 1, 2]),
    ),
    "no taps": (UnsupportedModel, "layers", setting(eagle_aux_hidden_state_layer_ids=[])),
    "taps in another order": (
        UnsupportedModel,
        "layers",
        setting(eagle_config={"eagle_aux_hidden_state_layer_ids": [5, 1, 2]}),
    ),
    "a RoPE that changes with the length": (
        UnsupportedModel,
        "longrope",
        setting(rope_scaling={"type": "longrope"}),
    ),
    "an unknown activation": (UnsupportedModel, "swish9", setting(hidden_act="swish9")),
    "sections that do not fit": (
        UnsupportedModel,
        "mrope_section",
        setting(rope_scaling={"type": "mrope", "mrope_section": [1, 1, 1]}),
    ),
    "no width": (CheckpointError, "hidden_size", setting(hidden_size=None)),
    "a width that is no number": (CheckpointError, "hidden_size", setting(hidden_size="64")),
    "kv heads that are no number": (
        CheckpointError,
        "num_key_value_heads",
        setting(num_key_value_heads="two"),
    ),
    "no kv heads": (CheckpointError, "num_key_value_heads", setting(num_key_value_heads=0)),
    "an epsilon that is no number": (CheckpointError, "rms_norm_eps", setting(rms_norm_eps="small")),
    "a RoPE that is no object": (CheckpointError, "config.json", setting(rope_scaling="yes")),
    "another width without an embedding": (CheckpointError, "width 48.*width 64", other_width),
    "d2t beyond the vocabulary": (CheckpointError, "d2t", tensor("d2t", lambda old: old + 300)),
    "d2t below 0": (CheckpointError, "d2t", tensor("d2t", lambda old: old - 300)),
    "d2t of another length": (CheckpointError, r"d2t.*\[149\].*150", tensor("d2t", lambda old: old[1:])),
    "d2t of floats": (CheckpointError, "d2t.*float32", tensor("d2t", lambda old: old.float())),
    "no d2t": (CheckpointError, "150 rows.*d2t", tensor("d2t", None)),
    "d2t without a head": (CheckpointError, "d2t", tensor("lm_head.weight", None)),
    "a missing tensor": (CheckpointError, r"missing.*fc\.weight", tensor("fc.weight", None)),
    "an unknown tensor": (CheckpointError, r"unknown.*layers\.1", further_layer),
    "a misshapen tensor": (
        CheckpointError,
        r"fc\.weight.*\[64, 190\].*\[64, 192\]",
        tensor("fc.weight", lambda old: old[:, :-2].contiguous()),
    ),
    "a head of no rows": (CheckpointError, "lm_head|d2t", tensor("lm_head.weight", lambda old: old[:0])),
    "weights of whole numbers": (
        CheckpointError,
        r"norm\.weight.*int64",
        tensor("norm.weight", lambda old: old.long()),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_checkpoint_that_does_not_fit_is_refused_with_a_reason(
    mistake: tuple[type[FoveaError], str, Change], goals: Callable[[str], Goal], tmp_path: Path
) -> None:
    kind, words, change = mistake
    folder = goals("qwen3_vl").folder
    files = plain(folder)
    change(files.config, files.tensors)
    files.write(tmp_path)
    with pytest.raises(kind, match=words) as caught:
        load_eagle3(tmp_path, shared_model(folder).model)
    assert type(caught.value) is kind


def no_configuration(folder: Path) -> None:
    (folder / "config.json").unlink()


def broken_configuration(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def a_list(folder: Path) -> None:
    no_weights(folder)
    torch.save([torch.zeros(2)], folder / "pytorch_model.bin")


def a_module(folder: Path) -> None:
    no_weights(folder)
    torch.save(torch.nn.Linear(2, 2), folder / "pytorch_model.bin")


FILES = {
    "no configuration": (no_configuration, "has no config.json"),
    "a broken configuration": (broken_configuration, "config.json"),
    "a truncated file": (truncated, "cannot be read"),
    "no weights": (no_weights, r"pytorch_model\.bin"),
    "a pickle of a list": (a_list, "other things than tensors"),
    "a pickle of code": (a_module, "cannot be read"),
}


@pytest.mark.parametrize(("spoil", "words"), FILES.values(), ids=FILES.keys())
def test_a_broken_file_is_refused_with_a_reason(
    spoil: Callable[[Path], None], words: str, goals: Callable[[str], Goal], tmp_path: Path
) -> None:
    folder = goals("qwen3_vl").folder
    plain(folder).write(tmp_path)
    spoil(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        load_eagle3(tmp_path, shared_model(folder).model)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_layer_that_is_found_and_does_not_fit_is_left_out(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "eagle3":
        folder = write("qwen3_vl", tmp_path)
        files = plain(folder)
        del files.tensors["norm.weight"]
        files.write(folder / "eagle3")
        files.config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
        files.write(folder / "eagle3")
    else:
        folder = add_mtp(write("qwen3_5", tmp_path))
        from safetensors.torch import load_file

        tensors = load_file(folder / "model.safetensors")
        del tensors["mtp.fc.weight"]
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with engine(folder, speculate="auto") as machine:
        assert machine.parts.speculator is None or not machine.parts.speculator.computed
        assert len(machine.generate(QUESTION, **GREEDY).token_ids[0]) == 6
        assert_idle(machine)
    (line,) = [each.getMessage() for each in caplog.records if "drafts are not computed" in each.getMessage()]
    assert ("norm.weight" if kind == "eagle3" else "mtp.fc.weight") in line


def test_a_layer_beside_the_model_is_found(goals: Callable[[str], Goal], tmp_path: Path) -> None:
    folder = write("qwen3_vl", tmp_path)
    eagle3(folder, eagle_aux_hidden_state_layer_ids=[1, 2, 3]).write(folder / "eagle3")
    with engine(folder, speculate="auto") as machine:
        assert machine.parts.speculator is not None
        assert [each.name for each in machine.parts.speculator.computed] == ["layer"]
    with engine(folder, speculate="auto", draft_layer="off") as machine:
        assert machine.parts.speculator is not None
        assert not machine.parts.speculator.computed


def test_a_scaled_rope_is_that_of_transformers(tmp_path: Path) -> None:
    """Layers for Llama 3 name the type "llama3"."""
    folder = write_text("llama", tmp_path / "target")
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    layer = tmp_path / "layer"
    plain(folder, rope_theta=10000.0, rope_scaling=scaling, eagle_aux_hidden_state_layer_ids=[0, 1, 2]).write(
        layer
    )
    target = shared_model(folder).model
    loaded = load_eagle3(layer, target)
    assert loaded.config.rotaries == target.decoder.config.rotaries


def test_a_layer_that_is_named_must_fit(qwen: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        engine(qwen, speculate="layer", draft_layer=str(tmp_path / "none"))
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        engine(qwen, speculate="layer", draft_layer=str(tmp_path))
