"""One configuration and the choice among several: problems, money, energy, savings, reasons, files."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.cli.deploy import known_settings
from fovea.cli.options import read_file, setting_names
from fovea.core.errors import ConfigError
from fovea.deploy.read import read_spec
from fovea.deploy.target import render
from fovea.engine.config import EngineConfig
from fovea.planner import emit
from fovea.planner import option as extras
from fovea.planner import workload as reduction
from fovea.planner.option import HEADROOM, Option, savings
from fovea.planner.parallel import PlayedSplit, Split, best_split, divisions, split_sentence
from fovea.planner.precision import RECIPES, Precision, parse_precision
from fovea.planner.recommend import Choice, recommend
from fovea.planner.shape import AttentionLayers
from fovea.planner.stages import request_bytes, request_stages
from fovea.planner.workload import Kind, Workload
from tests.planner.small import CPU, GPU, SHAPE, option_of, pixels_by_64, setup_of
from tests.support.thorough import examples

ROOT = Path(__file__).parents[2]
IMAGE = Kind("image", images=((640, 640),))


def small_gpu(size: int, **changes: object) -> Option:
    device = replace(GPU, memory_bytes=size, **changes)  # type: ignore[arg-type]
    return option_of(setup_of(device=device))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (option_of(setup_of(devices=8)), "4 heads cannot be divided among 8 devices"),
        (
            option_of(workload=Workload((Kind("talk", text=1000, answer=1000, follow_ups=2),))),
            "a conversation of kind 'talk' takes 6,000 tokens; small has 4,096 positions",
        ),
        (small_gpu(300_000), "the weights take 0.0 GB; 1 x small-gpu have 0.0 GB"),
        (small_gpu(360_000), "one request takes 0.00 GB of KV and states"),
        (
            option_of(workload=Workload((IMAGE,), ttft_ms=1)),
            "an undisturbed request has its first token after",
        ),
        (
            option_of(workload=Workload((IMAGE,), itl_ms=1)),
            "an undisturbed stream has a token every 1.9 ms; the target is 1 ms",
        ),
    ],
)
def test_impossible_configurations_say_why(option: Option, words: str) -> None:
    assert words in option.problem
    assert option.replicas == 0
    assert option.speed is None
    assert option.price_per_hour == 0
    assert option.joules_per_request(Workload((IMAGE,))) is None


def test_money_and_energy_are_replicas_times_time() -> None:
    workload = Workload((IMAGE, Kind("text", follow_ups=1)), rate=1000)
    option = option_of(workload=workload)
    assert option.replicas > 1
    requests = workload.requests_per_s
    assert option.price_per_hour == 2.0 * option.replicas
    assert option.price_per_request(workload) == pytest.approx(2.0 * option.replicas / 3600 / requests)
    per_image = option.price_per_thousand_images(workload)
    assert per_image == pytest.approx(1000 * 2.0 * option.replicas / 3600 / 500)  # 500 images a second
    joules = option.joules_per_request(workload)
    assert option.speed is not None
    watts = 100 * (option.speed.busy + 0.3 * (1 - option.speed.busy))
    assert joules == pytest.approx(watts * option.replicas / requests)
    text = Workload((Kind("text"),))
    assert option_of(workload=text).price_per_thousand_images(text) is None


def test_replicas_have_headroom_and_keep_the_targets() -> None:
    workload = Workload((IMAGE,), rate=2000, ttft_ms=100, itl_ms=30)
    option = option_of(workload=workload)
    assert option.speed is not None
    assert option.replicas * option.rate * HEADROOM >= workload.requests_per_s
    assert (option.replicas - 1) * option.rate * HEADROOM < workload.requests_per_s
    assert option.speed.ttft_p_s <= 0.1
    assert option.speed.itl_p_s <= 0.03


@settings(max_examples=examples(20), deadline=None)
@given(st.floats(0.1, 2000), st.floats(1, 10))
def test_a_higher_rate_never_needs_fewer_replicas(rate: float, factor: float) -> None:
    one, more = (option_of(workload=Workload((IMAGE,), rate=value)) for value in (rate, rate * factor))
    assert more.replicas >= one.replicas


def test_follow_ups_spread_the_first_tokens() -> None:
    once = option_of(workload=Workload((IMAGE,), rate=2))
    talk = Workload((replace(IMAGE, follow_ups=3),), rate=0.5)
    often = option_of(workload=talk)
    assert sum(share for share, _ in often.mix) == pytest.approx(1)
    assert sorted({one.encode for _, one in often.mix})[0] == 0
    assert max(one.first for _, one in often.mix) == pytest.approx(once.mix[0][1].first)
    assert often.speed is not None
    assert often.speed.ttft_p_s > 1.1 * often.speed.ttft_s  # a quarter of the requests has the image


def test_savings_are_the_work_that_is_not_done() -> None:
    kind = replace(IMAGE, follow_ups=1, seen=0.5)
    workload = Workload((kind,), system=50, keep=0.5)
    option = option_of(workload=workload)
    found = {saving.name: saving for saving in savings(option, workload, pixels_by_64)}
    assert list(found) == ["encoder cache", "prefix cache", "fewer visual tokens"]
    image = option.cost.image(50)
    assert found["encoder cache"].seconds == pytest.approx(0.25 * image)
    assert found["encoder cache"].kv_bytes == 0
    assert found["fewer visual tokens"].kv_bytes == pytest.approx(50 * 256)
    assert all(0 < saving.share < 1 for saving in found.values())
    plain = Workload((Kind("text"),))
    assert savings(option_of(workload=plain), plain, pixels_by_64) == []


def test_stages_count_operations_bytes_and_seconds() -> None:
    option = option_of()
    one = option.kinds[0]
    encode, prefill, decode = request_stages(option, one)
    decoder = 8 * 64 * 64 + 4 * 64 * 256
    assert encode.operations == 2 * 100 * (4 * 32 * 32 + 64 * 32) + 4 * 32 * 100**2
    assert encode.seconds == one.demand.encode
    assert prefill.operations == 160 * (2 * decoder + 4 * 2 * 4 * 16 * 80)
    assert prefill.bytes == 2 * (decoder + 64_000) + 256 * 160
    assert decode.operations == 119 * (2 * (decoder + 64_000) + 4 * 2 * 4 * 16 * 220)
    assert decode.bytes == 119 * (2 * (decoder + 64_000) + 256 * 220)
    assert {stage.bound for stage in (encode, prefill, decode)} == {"fixed times"}  # the model is tiny
    heavy = replace(
        SHAPE,
        maps={**SHAPE.maps, "decoder": tuple(replace(maps, count=9000) for maps in SHAPE.maps["decoder"])},
    )
    large = option_of(setup_of(heavy, replace(GPU, memory_bytes=10**12)))
    _, prefill, decode = request_stages(large, large.kinds[0])
    assert (prefill.bound, decode.bound) == ("arithmetic", "memory")
    text = option_of(workload=Workload((Kind("text"),)))
    assert request_stages(text, text.kinds[0])[0].bound == ""


def test_memory_of_a_request_by_kind_of_token() -> None:
    option = option_of()
    memory = request_bytes(option, option.kinds[0])
    assert memory.visual_kv == pytest.approx(100 * 256)
    assert memory.text_kv == pytest.approx((60 + 120) * 256)
    assert memory.encoder_outputs == 100 * 64 * 2
    assert memory.visual_kv + memory.text_kv + memory.states == pytest.approx(option.capacity.request_bytes)


def test_the_cheapest_is_recommended_unless_a_finer_precision_costs_little_more() -> None:
    workload = Workload((IMAGE,), rate=2000)
    dear = replace(GPU, name="dear", price=2.5)
    found = recommend(SHAPE, [dear, GPU], workload, pixels_by_64, devices=(1,))
    assert found.best is not None
    assert found.best.precision == "none"
    assert found.best.option.setup.hardware.name == "small-gpu"
    assert [choice.option.setup.hardware.name for choice in found.others][0] == "dear"
    assert "1.25 times the price" in found.others[0].reasons
    assert any(reason.startswith("weights take") for reason in found.best.reasons)
    assert found.impossible == ()


def test_devices_that_cannot_work_at_all_are_explained() -> None:
    tiny = replace(GPU, name="tiny", memory_bytes=60_000)
    found = recommend(SHAPE, [tiny, GPU], Workload((IMAGE,)), pixels_by_64, devices=(1, 2))
    assert [title for title, _ in found.impossible] == ["1 x tiny, int4", "2 x tiny, int4"]
    assert all("the weights take" in problem for _, problem in found.impossible)
    none = recommend(SHAPE, [tiny], Workload((IMAGE,)), pixels_by_64, devices=(1,))
    assert none.best is None
    assert none.others == ()


def test_devices_without_a_price_and_with_a_price_of_zero() -> None:
    own, free = replace(GPU, name="own", price=None), replace(GPU, name="free", price=0.0)
    found = recommend(SHAPE, [own], Workload((IMAGE,)), pixels_by_64)
    assert found.best is not None
    assert found.best.option.price_per_hour is None
    found = recommend(SHAPE, [free, own, GPU], Workload((IMAGE,)), pixels_by_64)
    assert found.best is not None
    assert found.best.option.setup.hardware.name == "free"
    against = {choice.option.setup.hardware.name: choice.reasons for choice in found.others}
    assert "no price is known; state yours in a hardware file" in against["own"]


def test_formats_by_part_are_searched_beside_recipes() -> None:
    text = "decoder=int4,kv=fp8"
    found = recommend(SHAPE, [GPU], Workload((IMAGE,)), pixels_by_64, precisions=(text,), devices=(1,))
    assert found.best is not None
    assert found.best.option.setup.precision == Precision(decoder="int4", kv="fp8")
    assert found.best.title == f"1 x (small-gpu), {text}"
    with pytest.raises(ConfigError, match="has no setting for it; accepted: none, int8"):
        emit.engine_toml(found.best, Workload((IMAGE,)))


def test_types_follow_the_arithmetic_of_the_device() -> None:
    turing = replace(GPU, peaks={"fp16": 1e13, "fp32": 1e12, "int8": 2e13})
    old = replace(CPU, peaks={"fp32": 1e12}, capability="")
    for device, dtype, storage in (
        (turing, "float16", "plain"),
        (old, "float32", "plain"),
        (CPU, "bfloat16", "panels"),
        (replace(CPU, peaks={"fp32": 1e12}, capability="avx2"), "bfloat16", "panels"),
    ):
        found = recommend(
            SHAPE, [device], Workload((IMAGE,)), pixels_by_64, precisions=("int8",), devices=(1,)
        )
        assert found.best is not None
        precision = found.best.option.setup.precision
        assert (precision.dtype, precision.storage, precision.decoder) == (dtype, storage, "int8")


def test_precisions_as_text() -> None:
    assert parse_precision("int8") == RECIPES["int8"]
    assert parse_precision("decoder=int4, encoder=int8, kv=fp8") == Precision(
        decoder="int4", encoder="int8", kv="fp8"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("int9", "'int9' is not known; did you mean 'int"),
        ("decoder", "accepted: none, int8"),
        ("decodr=int4", "no part 'decodr'; did you mean 'decoder'?"),
        ("decoder=int4,decoder=int8", "names 'decoder' twice"),
        ("decoder=", "names no format"),
        ("decoder=int4,head", "'head' names no format"),
        ("decoder=int7", "decoder is 'int7'; did you mean 'int"),
        ("kv=int4", "kv is 'int4'"),
    ],
)  # fmt: skip
def test_errors_of_precisions_name_the_part(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match="precision '") as caught:
        parse_precision(text)
    assert words in caught.value.message


def losses(page: str) -> dict[str, dict[float, float]]:
    """Points lost by method and share, from a page of measurements."""
    right: dict[str, dict[str, float]] = {}
    for line in (ROOT / "benchmarks" / "results" / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 9 and cells[3][:2].isdigit():
            method, _, keep = cells[0].partition(" ")
            right.setdefault(method, {})[keep] = float(cells[3].split()[0])
    full = right.pop("full")[""]
    return {
        method: {float(keep): round(full - value, 1) for keep, value in values.items() if keep != "auto"}
        for method, values in right.items()
    }


def test_reduction_has_the_measured_table() -> None:
    assert losses("relevance_before.md") | losses("relevance.md") == reduction.MEASURED


def test_a_loss_is_that_of_the_next_smaller_measured_share() -> None:
    assert reduction.loss("dart", 1.0) == reduction.Loss(0.0, 1.0)
    assert reduction.loss("dart", 0.8) == reduction.loss("dart", 0.5) == reduction.Loss(12.2, 0.5)
    assert reduction.loss("dart", 0.2) == reduction.Loss(26.7, 0.1)
    assert reduction.loss("dart", 0.05) is None
    with pytest.raises(ConfigError, match="did you mean 'dart'"):
        reduction.loss("dat", 0.5)


def test_speculation_is_the_published_formula() -> None:
    gain = extras.speculation(4, 0.75, 1.0, 1.0, 0.0)
    assert gain.tokens_per_step == pytest.approx(3.05, abs=0.005)
    assert extras.speculation(3, 1.0, 2.0, 1.0, 0.0).speedup == 2.0
    assert extras.speculation(0, 0.5, 1.0, 1.0, 9.0).speedup == 1.0
    assert extras.speculation(2, 0.5, 1.0, 1.0, 0.25).speedup == pytest.approx(1.75 / 1.5)


def test_divisions_balance_weights_and_count_copies() -> None:
    setup = setup_of(devices=4)
    found = {(one.tensor, one.pipeline): one for one in divisions(setup, 10)}
    assert set(found) == {(2, 2), (4, 1)}  # two layers cannot fill four stages
    tower = 2 * (4 * 32 * 32 + 64 * 32)
    rest = 2 * (8 * 64 * 64 + 4 * 64 * 256 + 64_000)
    assert all(one.weight_bytes == rest // 4 + tower for one in found.values())
    assert (found[4, 1].kv_copies, found[2, 2].kv_copies) == (2, 1)
    assert found[2, 2].bubble == pytest.approx(1 / 5)
    assert found[4, 1].bubble == 0
    many = replace(SHAPE, attention=(AttentionLayers(2, 2, 8, 8, 16),))
    assert divisions(setup_of(many, devices=8), 10)[0].tensor == 8


def test_a_split_balances_encoders_and_decoders() -> None:
    workload = Workload((IMAGE,))
    option = option_of(workload=workload)
    split = best_split(option, workload, 4)
    assert split is not None
    assert split.replicas == split.encoders + split.decoders == 4
    assert split.requests_per_s <= split.integrated_per_s * 1.001  # encoders or decoders idle
    assert split.integrated_per_s == pytest.approx(4 * option.rate)
    assert split.transfer_s == pytest.approx(100 * 128 / 1e10)
    assert split.itl_s <= split.integrated_itl_s
    assert split.itl_p_s <= split.integrated_itl_p_s
    assert not split.recommended
    sentence = split_sentence(split, workload)
    assert sentence.startswith("Encoders apart: no, let all 4 replicas do everything: ")
    assert f"if {split.encoders} of 4 replicas only encode, and " in sentence
    assert best_split(option, workload, 1) is None


def test_without_images_there_is_nothing_to_split() -> None:
    workload = Workload((Kind("text"),))
    assert best_split(option_of(workload=workload), workload, 4) is None
    assert "no request has an image" in split_sentence(None, workload)


@settings(max_examples=40, deadline=None)
@given(
    text=st.floats(0, 0.95),
    side=st.sampled_from([100, 400, 1000]),
    answer=st.integers(1, 500),
    replicas=st.integers(2, 9),
)
def test_without_targets_encoders_apart_never_serve_more(
    text: float, side: int, answer: int, replicas: int
) -> None:
    kinds = (Kind("text", text, answer=answer), Kind("image", 1 - text, images=((side, side),)))
    workload = Workload(kinds)
    split = best_split(option_of(workload=workload), workload, replicas)
    assert split is not None
    assert split.requests_per_s <= split.integrated_per_s * 1.06  # a mean over whole numbers of sequences
    assert 1 <= split.encoders < replicas


SPLIT = Split(1, 3, 5.0, 3.0, 2.0, 0.02, 0.03, 0.021, 0.04, 0.001, True)
"""Encoders apart that are recommended by formulas."""


def test_a_recommended_split_needs_the_simulator() -> None:
    workload = Workload((IMAGE,), itl_ms=30)
    alone = split_sentence(SPLIT, workload)
    assert alone == (
        "Encoders apart: yes, let 1 of 4 replicas only encode (role encode): 5 requests/s within the targets "
        "instead of 3, and 21.0 ms instead of 40.0 ms between tokens at 95% with 2 requests/s (by formulas "
        "alone)."
    )
    agreed = SPLIT.judged(PlayedSplit(True, False, 0.022, 0.036, 0.5, 0.5))
    assert agreed.recommended
    assert "22.0 ms instead of 36.0 ms between tokens at 95% with 5 requests/s (the simulator agrees)" in (
        split_sentence(agreed, workload)
    )
    for met in ((True, True), (False, False), (False, True)):
        refused = SPLIT.judged(PlayedSplit(*met, 0.022, 0.021, 0.5, 0.5))
        assert not refused.recommended
        assert "but the simulator does not confirm it: 22.0 ms instead of 21.0 ms" in (
            split_sentence(refused, workload)
        )


def test_emitted_roles_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOVEA_PEER_KEY", "secret")
    workload = Workload((IMAGE,))
    choice = Choice(option_of(workload=workload), "none", ())
    texts = {
        "engine": emit.engine_toml(choice, workload, replace(SPLIT, encoders=2)),
        "encode": emit.encode_toml(choice, workload),
    }
    configs = {}
    for name, text in texts.items():
        path = tmp_path / f"{name}.toml"
        path.write_text(text, encoding="utf-8")
        values = read_file(str(path), ["model", *setting_names(EngineConfig)])
        del values["model"]
        configs[name] = EngineConfig.of(**values, peer_key="secret")
    assert configs["engine"].peers.role == "prefill-decode"
    assert configs["engine"].peers.encode_peers == "http://encoder-0:8000,http://encoder-1:8000"
    assert configs["encode"].peers.role == "encode"
    assert "fovea deploy knows no roles" in emit.deploy_toml(choice, workload, {}, SPLIT)
    assert "roles" not in emit.deploy_toml(choice, workload, {})


HYBRID = replace(SHAPE, state=(100_000, 0))


@pytest.mark.parametrize("setup", [setup_of(device=CPU), setup_of(HYBRID, GPU, RECIPES["fp8"])])
def test_emitted_files_are_accepted(setup: object, tmp_path: Path) -> None:
    workload = Workload((IMAGE,), ttft_ms=900, itl_ms=80, percentile=90)
    option = option_of(setup, workload)  # type: ignore[arg-type]
    choice = Choice(option, "none" if option.setup.hardware is CPU else "fp8", ("it is cheap",))
    engine = tmp_path / "engine.toml"
    engine.write_text(emit.engine_toml(choice, workload), encoding="utf-8")
    values = read_file(str(engine), ["model", *setting_names(EngineConfig)])
    assert values.pop("model") == "small"
    config = EngineConfig.of(**values)
    assert config.schedule.target_itl_ms == 80
    assert config.schedule.target_ttft_ms == 900
    assert config.schedule.target_percentile == 90
    assert config.schedule.max_running == option.max_running
    assert config.kv.max_context >= option.kinds[0].tokens.last
    pools = (config.kv.kv_cache_mib + config.kv.state_cache_mib + config.outputs.embed_cache_mib) << 20
    assert pools <= option.capacity.total - option.capacity.weight_bytes + (2 << 20)
    spec = tmp_path / "deploy.toml"
    spec.write_text(emit.deploy_toml(choice, workload, {"small-gpu": "H200-141GB"}), encoding="utf-8")
    deployment = read_spec(spec, known_settings())
    assert deployment.pools[0].replicas == option.replicas
    for target in ("docker", "compose", "kubernetes"):
        assert render(deployment, [target])
    assert tomllib.loads(spec.read_text())["pool"][0]["hardware"] in ("cpu", "cuda")


def test_a_plan_for_several_devices_says_how_the_model_is_divided() -> None:
    option = option_of(setup_of(devices=2))
    written = emit.deploy_toml(Choice(option, "none", ()), Workload((IMAGE,)), {})
    (pool,) = tomllib.loads(written)["pool"]
    assert pool["settings"]["tensor_parallel"] * pool["settings"]["pipeline_parallel"] == 2
