"""What a session would be told for ``compression="auto"``."""

from __future__ import annotations

import pytest
from plan_example import GBIT, setting, sparse_profile

from foreprop.config import Config
from foreprop.core.codec import codec_of
from foreprop.core.manifest import ParameterInfo
from foreprop.plan import compressing
from foreprop.plan.compressing import choose_compression, codecs_as_setting
from foreprop.plan.deployment import Deployment
from foreprop.plan.profile import Profile, ProfiledArray

WITH_BIASES = Profile(
    name="biased",
    arrays=tuple(
        ProfiledArray(name=f"fc{n}.{part}", shape=shape, forward_flops=1e6 * len(shape))
        for n in range(6)
        for part, shape in (("weight", (500, 400)), ("bias", (500,)))
    ),
)


def test_exact_where_links_are_fast() -> None:
    assert choose_compression(setting(rate_bits_per_s=100 * GBIT), Config())[0] == {}


def test_names_and_codecs_where_they_are_slow() -> None:
    asked = setting(profile=WITH_BIASES, rate_bits_per_s=0.2 * GBIT)
    chosen, said = choose_compression(asked, Config(), allowed=("none", "lossless:0.7", "int8"))
    assert chosen
    assert set(chosen) <= {array.name for array in WITH_BIASES.arrays}
    assert set(chosen.values()) <= {"lossless", "int8"}  # not what lossless was measured to leave
    assert "int8" in chosen.values()
    assert all(codec == "lossless" for name, codec in chosen.items() if name.endswith("bias"))
    again = choose_compression(asked, Config(), allowed=("none", "lossless:0.7", "int8"))
    assert again == (chosen, said)
    assert "int8" in said


def test_nothing_where_a_session_refuses_codecs() -> None:
    slow = {"rate_bits_per_s": 0.1 * GBIT}
    assert choose_compression(setting(profile=sparse_profile(), **slow), Config())[0] == {}
    several = setting(workers_per_node=2, **slow)
    for alone in ({"local_aggregation": "off"}, {"elastic": True}, {"staleness": 2}):
        assert choose_compression(several, Config(**alone))[0] == {}
    chosen = choose_compression(setting(**slow), Config())
    assert chosen[0]
    relayed = choose_compression(several, Config())
    assert relayed[0] == chosen[0]  # a node's relays push what one would, a little later


@pytest.mark.parametrize("name", ["blocks[0].weight", "a=b.weight", "a,b.weight", "?.*"])
def test_names_of_any_letters_are_what_a_session_takes(name: str) -> None:
    profile = Profile(name="odd", arrays=(ProfiledArray(name=name, shape=(500, 400)),))
    infos = [ParameterInfo(name=name, shape=(500, 400), dtype="float32", group=0)]
    asked = setting(profile=profile, rate_bits_per_s=0.01 * GBIT)
    said, _ = codecs_as_setting(asked, Config(compression="auto"), infos, {})
    assert said is not None
    config = Config(compression=said)
    assert codec_of(name, config.codecs) != "none"
    assert codec_of("blocks0.weight", config.codecs) == "none"


def test_what_would_go_in_16_bits_is_left_to_the_cast() -> None:
    asked = setting(profile=WITH_BIASES, rate_bits_per_s=0.2 * GBIT)
    infos = [
        ParameterInfo(name=array.name, shape=array.shape, dtype="float32", group=0)
        for array in WITH_BIASES.arrays
    ]
    alone, _ = codecs_as_setting(asked, Config(compression="auto"), infos, {})
    both = Config(compression="auto", wire_dtype="bfloat16")
    found, said = codecs_as_setting(asked, both, infos, {})
    assert said.endswith("; the rest in bfloat16")
    assert alone is not None
    assert found is not None
    without = [choice for choice in alone.split(",") if not choice.endswith("=bf16")]
    assert found.split(",") == without


def test_where_answers_are_raw_pushes_are_coded_shorter() -> None:
    slow = {"rate_bits_per_s": 0.5 * GBIT}
    coded, raw = (
        choose_compression(setting(raw_answers=raw, **slow), Config())[0] for raw in (False, True)
    )
    assert coded.keys() == raw.keys()
    assert set(raw.values()) == {"int4"} < set(coded.values())


def test_of_large_models_larger_slices_are_modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait meanwhile for what rank 0 chooses."""
    asked: list[int | None] = []
    step_s = compressing.step_s

    def note(deployment: Deployment) -> float:
        asked.append(deployment.slice_elems)
        return step_s(deployment)

    monkeypatch.setattr(compressing, "step_s", note)
    array = ProfiledArray(name="words.weight", shape=(10_000_000, 100), forward_flops=1e6)
    choose_compression(setting(profile=Profile(name="large", arrays=(array,))), Config())
    assert set(asked) == {800_000}
    asked.clear()
    choose_compression(setting(), Config())
    assert set(asked) == {50_000}
