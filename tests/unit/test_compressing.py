"""What a session would be told for ``compression="auto"``."""

from __future__ import annotations

from typing import Any

import pytest
from plan_example import GBIT, setting, sparse_profile

from foreprop.auto import compressing
from foreprop.auto.compressing import choose_compression, codecs_as_setting
from foreprop.config import Config
from foreprop.core.codec import codec_of
from foreprop.core.manifest import ParameterInfo
from foreprop.simulate.compressed import CodecChoice
from foreprop.simulate.setting import SimulatedSetting
from foreprop.workload.profile import Profile, ProfiledArray

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
    assert choose_compression(several, Config(local_aggregation="off"))[0] == {}
    chosen = choose_compression(setting(**slow), Config())
    assert chosen[0]
    assert choose_compression(several, Config()) == chosen  # a node's relays push what one would


@pytest.mark.parametrize("name", ["blocks[0].weight", "a=b.weight", "a,b.weight", "?.*"])
def test_names_of_any_letters_are_what_a_session_takes(name: str) -> None:
    profile = Profile(name="odd", arrays=(ProfiledArray(name=name, shape=(500, 400)),))
    infos = [ParameterInfo(name=name, shape=(500, 400), dtype="float32", group=0)]
    asked = setting(profile=profile, rate_bits_per_s=0.01 * GBIT)
    said, _ = codecs_as_setting(asked, Config(compression="auto"), None, infos, {})
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
    alone, _ = codecs_as_setting(asked, Config(compression="auto"), None, infos, {})
    both = Config(compression="auto", wire_dtype="bfloat16")
    found, said = codecs_as_setting(asked, both, None, infos, {})
    assert said.endswith("; the rest in bfloat16")
    assert alone is not None
    assert found is not None
    without = [choice for choice in alone.split(",") if not choice.endswith("=bf16")]
    assert found.split(",") == without


class Asked(Exception):
    """With how many elements to a slice."""


def test_of_large_models_larger_slices_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait meanwhile for what rank 0 chooses."""

    def note(simulated: SimulatedSetting, **changes: Any) -> CodecChoice:
        assert simulated.slice_elems == 50_000  # of which is chosen
        raise Asked(changes["slice_elems"])

    monkeypatch.setattr(compressing, "choose_codecs", note)
    array = ProfiledArray(name="words.weight", shape=(10_000_000, 100), forward_flops=1e6)
    large = setting(profile=Profile(name="large", arrays=(array,)))
    with pytest.raises(Asked) as asked:
        choose_compression(large, Config())
    assert asked.value.args == (800_000,)
    with pytest.raises(Asked) as asked:
        choose_compression(setting(), Config())
    assert asked.value.args == (50_000,)
