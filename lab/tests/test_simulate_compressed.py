"""The presets with codecs, simulated: bytes, processors, the choice of ``auto``, and its words."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foreprop.core.codec import choices_of
from foreprop.core.codecfacts import Coded, codec_named
from foreprop.core.frames import NO_TOKEN, SendFrame
from foreprop.core.justenough import MOST_CORES
from foreprop.core.wire import Flag, Kind
from foreprop.errors import ConfigError
from foreprop.plan.planner import Candidate, PlanSetting, deployment_for
from foreprop.plan.profile import Profile, ProfiledArray, load_profile
from foreprop.plan.refined import step_s
from foreprop.tools.cli.app import app
from foreprop_lab.setting.codecs import codecs_by_array
from foreprop_lab.setting.hosts import Hosts
from foreprop_lab.setting.records import Record
from foreprop_lab.simulate.coder import Coder
from foreprop_lab.simulate.compressed import array_codecs, choose_codecs, coded_limit_s
from foreprop_lab.simulate.run import simulate_lab, simulate_system
from foreprop_lab.simulate.setting import SimulatedSetting
from tests.tiers import long_cases

MODEL = Profile(
    name="small",
    arrays=tuple(
        array
        for i, elems in enumerate((20_000, 200_000, 400_000, 800_000, 1_000_000))
        for array in (
            ProfiledArray(name=f"{i}.weight", shape=(elems // 100, 100), forward_flops=elems),
            ProfiledArray(name=f"{i}.bias", shape=(100,), forward_flops=0.0),
        )
    ),
)


def setting(**changes: object) -> SimulatedSetting:
    fields: dict[str, object] = {
        "profile": MODEL,
        "systems": ("p3",),
        "scale": 1,
        "compute_s": 2.0,
        "iterations": 3,
        "warm_up": 1,
    }
    return SimulatedSetting(**(fields | changes))  # type: ignore[arg-type]


def record(**changes: object) -> Record:
    (made,) = simulate_lab(setting(**changes))
    return made


# Bytes.
@pytest.mark.parametrize("system", ["p3", *long_cases("slicing", "kvstore", "tensorflow")])
def test_without_a_codec_nothing_changes(system: str) -> None:
    exact = record(systems=(system,), balance=2.0)
    as_it_is = record(systems=(system,), balance=2.0, compression="none")
    assert as_it_is.iteration_s == exact.iteration_s
    assert as_it_is.limit_s == exact.limit_s
    assert as_it_is == exact


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(
    ("compression", "least", "most"), [("bf16", 0.49, 0.52), ("int4", 0.12, 0.15)]
)
def test_links_carry_what_is_left(
    compression: str, least: float, most: float, symmetric: bool
) -> None:
    asked = setting(balance=4.0, symmetric=symmetric)
    exact = simulate_system("p3", asked, Hosts(), steps=3)
    coded = simulate_system(
        "p3", setting(balance=4.0, symmetric=symmetric, compression=compression), Hosts(), steps=3
    )
    assert least <= coded.sent_bytes[0] / exact.sent_bytes[0] <= most
    means = [sum(each.step_s[0]) for each in (coded, exact)]
    assert means[0] < 0.65 * means[1]


def test_replies_to_sparse_pushes_are_their_union() -> None:
    codec, *_ = codecs_by_array(MODEL, [("*.weight", "topk:0.01")])
    coded = codec.coded(5_000, ranks=3)
    assert coded.reply_bytes == 3 * coded.push_bytes == 1200


@pytest.mark.parametrize("compression", ["lossless", "int8", "1bit", "dgc", "*.weight=int4"])
@pytest.mark.parametrize("balance", [4.0, *long_cases(0.1)])
def test_no_step_beats_the_limit_of_the_bytes_that_are_left(
    compression: str, balance: float
) -> None:
    made = record(compression=compression, balance=balance)
    assert 0 < made.efficiency <= 1.005
    assert made.compression == compression
    assert made.limit_s <= setting(balance=balance).limit_s


def test_ddp_sends_float32_beside_them() -> None:
    exact = simulate_lab(setting(systems=("p3", "ddp"), balance=2.0, iterations=1))
    coded = simulate_lab(
        setting(systems=("p3", "ddp"), balance=2.0, iterations=1, compression="int8")
    )
    assert coded[1:] == exact[1:]
    assert coded[0].iteration_s.median < 0.7 * exact[0].iteration_s.median


# Processors.
def frame(
    peer: int, slice_: int, kind: Kind = Kind.PUSH, step: int = 0, flags: int = 0
) -> SendFrame:
    return SendFrame(peer, kind, step, slice_, 0, flags, NO_TOKEN)


CODED = [Coded(100, 100, 0.5, 0.25), Coded(100, 100, 1.0, 0.5)]


def test_a_worker_encodes_each_push_in_the_thread_that_sends_it() -> None:
    coder = Coder(CODED, shared=False)
    assert coder.encoded_s(frame(0, 0), 1.0) == 1.5
    assert coder.encoded_s(frame(1, 1), 1.0) == 2.0
    assert coder.encoded_s(frame(0, 0, flags=Flag.NO_GRADIENT), 1.0) == 1.0


def test_a_server_encodes_a_reply_once_for_all() -> None:
    coder = Coder(CODED, shared=True)
    assert coder.encoded_s(frame(0, 0, Kind.REPLY), 1.0) == 1.5
    assert coder.encoded_s(frame(1, 0, Kind.REPLY), 1.25) == 1.5
    assert coder.encoded_s(frame(2, 0, Kind.REPLY), 3.0) == 3.0
    assert coder.encoded_s(frame(0, 0, Kind.REPLY, step=1), 4.0) == 4.5


def test_what_a_peer_sends_is_decoded_one_after_the_other() -> None:
    coder = Coder(CODED, shared=False)
    assert coder.decoded_s(0, frame(0, 1, Kind.REPLY), 1.0) == 1.5
    assert coder.decoded_s(0, frame(0, 0, Kind.REPLY), 1.25) == 1.75
    assert coder.decoded_s(1, frame(0, 0, Kind.REPLY), 1.25) == 1.5
    assert coder.decoded_s(0, frame(0, 0, Kind.NOTIFY), 1.3) == 1.75  # behind what came before


def test_threads_beyond_the_cores_share_them() -> None:
    coder = Coder(CODED, shared=False)
    assert coder.encoded_s(frame(0, 0), 1.0) == 1.5
    assert coder.encoded_s(frame(MOST_CORES, 0), 1.0) == 2.0
    assert coder.decoded_s(0, frame(0, 0, Kind.REPLY), 1.0) == 1.25
    assert coder.decoded_s(MOST_CORES, frame(0, 0, Kind.REPLY), 1.0) == 1.5
    assert coder.decoded_s(1, frame(0, 0), 1.0, 2 * MOST_CORES) == 1.5


def test_many_nodes_do_not_make_a_machine_s_codecs_quicker() -> None:
    """On endlessly fast links a step still takes what its own gradients take to be encoded."""
    exact = codec_named("lossless")
    plan = PlanSetting(
        profile=MODEL, compute_s=1e-4, nodes=64, rate_bits_per_s=1e13, latency_s=1e-6
    )
    deployment = deployment_for(plan, Candidate("p2p", "p3"))
    coded_s = step_s(replace(deployment, codecs=[exact] * len(MODEL.arrays)))
    whole = exact.coded(sum(math.prod(array.shape) for array in MODEL.arrays), ranks=64)
    assert coded_s >= whole.encode_s / MOST_CORES > step_s(deployment)


def test_codecs_that_are_slower_than_the_link_make_steps_longer() -> None:
    quick = {"compute_s": 0.001, "rate_bits_per_s": 40e9, "iterations": 2}
    assert record(compression="lossless", **quick).iteration_s.median > (
        1.1 * record(**quick).iteration_s.median
    )


# Relays.
@pytest.mark.parametrize("compression", ["int8", "topk:0.01", *long_cases("lossless", "bf16")])
def test_a_relays_link_carries_what_one_workers_does(compression: str) -> None:
    """Inside the node gradients are as they are; of sparse sums the union is of two nodes'."""
    alone = setting(nodes=2, balance=4.0, compression=compression)
    sent = [
        simulate_system("p3", replace(alone, workers_per_node=count), Hosts(), steps=3).sent_bytes
        for count in (1, 3)
    ]
    assert sent[0] == pytest.approx(sent[1], rel=1e-3)
    steps_s = [
        record(nodes=2, balance=4.0, compression=compression, workers_per_node=count).iteration_s
        for count in (1, 3)
    ]
    assert steps_s[0].median <= steps_s[1].median < 1.1 * steps_s[0].median


def test_without_relays_every_worker_sends_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREPROP_LOCAL_AGGREGATION", "off")
    one, two = (
        simulate_system(
            "p3",
            setting(nodes=2, balance=4.0, compression="int8", workers_per_node=count),
            Hosts(),
            steps=3,
        ).sent_bytes[0]
        for count in (1, 2)
    )
    assert two == pytest.approx(2 * one, rel=0.02)


def test_auto_counts_a_node_of_several_workers_as_one() -> None:
    chosen = choose_codecs(setting(nodes=2, balance=2.0, workers_per_node=2))
    assert not chosen.enough.is_exact
    assert chosen.enough.step_s <= 1.07 * 2.0


# Just enough.
@pytest.mark.parametrize("balance", [1.0, *long_cases(2.0)])
def test_auto_is_in_time_where_exact_is_not(balance: float) -> None:
    chosen = choose_codecs(setting(balance=balance))
    assert chosen.enough.step_s <= 1.05 * 2.0
    assert not chosen.enough.is_exact or "lossless" in chosen.compression
    assert record(balance=balance).iteration_s.median > 1.05 * 2.0
    made = record(balance=balance, compression="auto")
    assert made.iteration_s.median == pytest.approx(chosen.enough.step_s, rel=0.01)
    assert made.compression == "auto"


def test_auto_is_exact_where_exact_is_in_time() -> None:
    chosen = choose_codecs(setting(balance=0.2))
    assert chosen.compression == "none"
    assert chosen.enough.is_exact


def test_all_weights_in_one_vector_are_no_bias() -> None:
    arrays = (
        ProfiledArray(name="params", shape=(4_000_000,), forward_flops=1e6),
        ProfiledArray(name="bias", shape=(500_000,), forward_flops=1e6),
    )
    chosen = choose_codecs(setting(profile=Profile(name="vector", arrays=arrays), balance=4.0))
    assert [codec.facts.exact for codec in chosen.enough.codecs] == [False, True]


def test_auto_can_be_limited_to_nothing_lossier() -> None:
    names = {codec.name for codec in array_codecs(setting(balance=4.0, compression="auto:int8"))}
    assert "int8" in names
    assert names <= {"none", "lossless", "bf16", "int8"}


def test_auto_leaves_biases_exact_and_takes_the_least_lossy_that_is_allowed() -> None:
    chosen = choose_codecs(setting(balance=4.0), allowed=("none", "int8"))
    names = {
        array.name: codec.name
        for array, codec in zip(MODEL.arrays, chosen.enough.codecs, strict=True)
    }
    assert {name for name, codec in names.items() if codec == "int8"} <= {
        f"{i}.weight" for i in range(5)
    }
    assert set(names.values()) == {"none", "int8"}


# What cannot be.
@pytest.mark.parametrize(
    ("compression", "what"),
    [
        ("int7", "codec 'int7'"),
        ("", "compression is ''"),
        ("conv*=int8", "pattern 'conv\\*', which no array of small matches"),
        ("=int8", "'=int8' is no PATTERN=CODEC"),
        ("topk:2", "at most 1"),
        ("auto:int7", "after auto: comes the lossiest codec"),
    ],
)
def test_what_cannot_be_is_named(compression: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        setting(compression=compression)


def test_half_precision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREPROP_WIRE_DTYPE", "bfloat16")
    with pytest.raises(ConfigError, match="wire_dtype is 'bfloat16'"):
        record(compression="int8")


def test_the_first_pattern_that_matches_counts() -> None:
    choices = choices_of("0.*=none, *.weight=int8, *=bf16")
    names = [codec.name for codec in codecs_by_array(MODEL, choices)]
    assert names == ["none", "none"] + ["int8", "bf16"] * 4
    dgc = [codec.name for codec in codecs_by_array(MODEL, [("*", "dgc")])]
    assert dgc == ["dgc", "none"] * 5  # biases stay dense (Lin 2018)


# The command.
def test_the_command_says_what_is_not_exact(tmp_path: Path) -> None:
    arguments = ["lab", "simulate", "--model", "resnet110_cifar", "--compute", "1s", "--steps", "2"]
    arguments += ["--balance", "2", "--scale", "1", "--systems", "p3", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, "--compression", "int8"])
    assert result.exit_code == 0, result.output
    assert "p3: all of the bytes in int8; step 1" in result.output
    assert "of it compute" in result.output
    (kept,) = json.loads((tmp_path / "results.json").read_text())
    assert (kept["compression"], kept["coded"]) == ("int8", "all of the bytes in int8")
    wrong = CliRunner().invoke(app, [*arguments, "--compression", "int7"])
    assert wrong.exit_code != 0
    assert "there are none, lossless" in wrong.output
    CliRunner().invoke(app, arguments)
    (exact,) = json.loads((tmp_path / "results.json").read_text())
    assert not {"compression", "coded"} & exact.keys()


# The refined model beside it.
@pytest.mark.parametrize("compression", ["none", "bf16", "int8", "dgc", "*.weight=int4"])
@pytest.mark.parametrize("balance", [4.0, *long_cases(1.0)])
def test_the_model_says_what_the_simulator_does(compression: str, balance: float) -> None:
    asked = setting(balance=balance, compression=compression, iterations=2)
    (simulated,) = simulate_lab(asked)
    plan = PlanSetting(
        profile=MODEL, compute_s=2.0, nodes=4, rate_bits_per_s=asked.rate, latency_s=100e-6
    )
    deployment = deployment_for(plan, Candidate("p2p", "p3"))
    modelled_s = step_s(replace(deployment, codecs=array_codecs(asked)))
    assert modelled_s == pytest.approx(simulated.iteration_s.median, rel=0.08)
    assert modelled_s >= 0.999 * coded_limit_s(asked)


LAB: dict[str, object] = {"scale": 16, "compute_s": 2.0}


@pytest.mark.long
@pytest.mark.parametrize("balance", [1.0, 2.0, 4.0])
@pytest.mark.parametrize(
    ("model", "compression"),
    [
        ("resnet50", "auto"),
        ("inceptionv3", "auto"),
        ("vgg19", "auto"),
        ("sockeye", "auto:dgc"),  # a third of its bytes comes last and is needed first
    ],
)
def test_just_enough_for_the_models_of_the_lab(
    model: str, compression: str, balance: float
) -> None:
    """Issue 25: at most 1.05 of the compute."""
    made = record(**LAB, profile=load_profile(model), balance=balance, compression=compression)
    assert made.iteration_s.median <= 1.05 * 2.0


@pytest.mark.long
@pytest.mark.parametrize("model", ["resnet50", "inceptionv3", "sockeye", "vgg19"])
def test_dgc_where_links_are_sixteen_times_too_slow(model: str) -> None:
    """Issue 25: at least 6.5 times as fast as exact p3."""
    profile = load_profile(model)
    exact, dgc = (
        record(**LAB, profile=profile, balance=16.0, compression=name).iteration_s.median
        for name in (None, "dgc")
    )
    assert exact >= 6.5 * dgc
