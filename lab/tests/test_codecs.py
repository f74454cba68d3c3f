"""The lab's codecs are a third party's: by entry points, public names alone, and the suite."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
from pathlib import Path

import pytest
import torch
from codec_runs import PLACE, SIZES, noise, there_and_back

import foreprop
import foreprop_lab.codecs
from foreprop.config.plugins import CODECS
from foreprop.core.codecfacts import CODEC_NAMES, LAB_CODECS, codec_named
from foreprop.errors import ConfigError
from foreprop.features.compression.codecs import make, make_for_replies, traits_of
from foreprop.plan.profile import load_profile
from foreprop_lab.setting.codecs import codecs_by_array
from tests.unit.features import test_compression_codecs as every

NAMES = [*LAB_CODECS, "qsgd:1", "qsgd:7"]
BYTES_PER_ELEM = {
    **dict.fromkeys(("1bit", "sign", "efsign"), 1 / 8),
    "terngrad": 0.25,
    "qsgd": 1 + 4 / 512,
    "qsgd:1": 0.25 + 4 / 512,
    "qsgd:7": 0.5 + 4 / 512,
}


def test_all_are_there_by_entry_points_and_none_is_foreprops() -> None:
    found = importlib.metadata.entry_points(group=CODECS)
    own = {entry.name: entry.load() for entry in found if entry.module.startswith("foreprop_lab.")}
    assert own.keys() == {*LAB_CODECS}
    assert all(codec.name == name for name, codec in own.items())
    assert not own.keys() & {*CODEC_NAMES}


def test_they_use_what_any_package_may() -> None:
    """foreprop's public names, numpy and torch."""
    allowed = {"foreprop", "numpy", "torch"} | sys.stdlib_module_names
    for path in Path(foreprop_lab.codecs.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert str(node.module).partition(".")[0] in allowed - {"foreprop"}, path.name
            elif isinstance(node, ast.Import):
                assert {a.name.replace("numpy.typing", "numpy") for a in node.names} <= allowed


@pytest.mark.parametrize("name", NAMES)
def test_a_third_partys_suite_passes(name: str) -> None:
    kind, _, parameter = name.partition(":")
    (entry,) = importlib.metadata.entry_points(group=CODECS, name=kind)
    foreprop.check_codec(entry.load(), parameter or None)


def test_without_the_lab_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreprop.config.plugins.entry_points", lambda group, name: ())
    monkeypatch.setattr("foreprop.features.compression.codecs._registered", {})
    monkeypatch.setattr("foreprop.core.codecfacts._declared", {})
    codec_named.cache_clear()
    told = r"codec.* of foreprop-lab, which is not installed: pip install \./lab"
    for name in NAMES:
        with pytest.raises(ConfigError, match=told):
            make(name)
        with pytest.raises(ConfigError, match=told):
            codecs_by_array(load_profile("vgg19"), [("*", name)])
    for name in ("onebit", "one-bit"):
        with pytest.raises(ConfigError, match=r"write '1bit', a codec of foreprop-lab \(pip inst"):
            make(name)


# What holds for foreprop's own.
@pytest.mark.parametrize("name", NAMES)
def test_every_element_of_any_size_is_filled(name: str) -> None:
    for elems in SIZES[NAMES.index(name) % 3 :: 3]:
        codec, values = make(name), noise(elems)
        state, before = codec.new_state(elems), values.clone()
        assert bool(there_and_back(codec, values, state).isfinite().all()), elems
        assert torch.equal(values, before), elems
        assert bool(state) == traits_of(name).keeps_error


@pytest.mark.parametrize("name", NAMES)
def test_bytes_states_and_replies_are_as_of_any_codec(name: str) -> None:
    every.test_the_same_gradients_give_the_same_bytes_and_states(name)
    every.test_what_is_not_finite_shows_and_is_not_remembered(name, 700)
    every.test_bytes_that_nobody_encoded_are_refused_or_decoded(name)
    every.test_replies_bring_the_image_to_the_master(name, 200)
    assert len(there_and_back(make(name), torch.zeros(0))) == 0


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros_but_of_signs(name: str) -> None:
    codec = make(name)
    for state in ({}, codec.new_state(1001)):
        out = there_and_back(codec, torch.zeros(1001), state)
        assert torch.equal(out, torch.full((1001,), float(name == "sign"))), name


def test_the_bytes_per_element() -> None:
    elems = 1_000_000
    for name in NAMES:
        codec = make(name)
        assert len(codec.encode(noise(elems), {}, PLACE)) == codec.most_bytes(elems), name
        assert codec.most_bytes(elems) / elems == pytest.approx(BYTES_PER_ELEM[name], rel=1e-3)


@pytest.mark.parametrize("name", ["sign", "terngrad", "qsgd:1"])
def test_what_must_not_answer_does_not_bring_it_nearer(name: str) -> None:
    assert every.drift(make(name), 20) > 0.5


@pytest.mark.long
def test_kernels_take_one_thread() -> None:
    every.check_one_thread(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_planners_know_what_a_session_sends(name: str) -> None:
    (codec, *_) = codecs_by_array(load_profile("vgg19"), [("*", name)])
    coded, elems = codec.coded(51_200, ranks=4), 51_200
    assert coded.push_bytes == make(name).most_bytes(elems)
    assert coded.reply_bytes == pytest.approx(make_for_replies(name, 4).most_bytes(elems), abs=1)
    assert 0 < coded.decode_s < coded.encode_s
    assert codec.facts.state_arrays == len(make(name).new_state(1))
