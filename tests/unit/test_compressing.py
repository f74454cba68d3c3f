"""What a session would be told for ``compression="auto"``."""

from __future__ import annotations

from plan_example import GBIT, setting, sparse_profile

from foreprop.auto.compressing import choose_compression
from foreprop.config import Config
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
    assert choose_compression(setting(workers_per_node=2, **slow), Config())[0] == {}
    assert choose_compression(setting(**slow), Config())[0]
