from __future__ import annotations

import json
import math
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreprop.errors import ConfigError
from foreprop.lab.profile import Profile, ProfiledArray, load_profile, profile_names, read_profile

NAMES = ["inceptionv3", "resnet110_cifar", "resnet50", "sockeye", "vgg19"]


def example(*arrays: tuple[str, tuple[int, ...], float]) -> Profile:
    return Profile(
        name="example",
        arrays=tuple(ProfiledArray(name=n, shape=s, forward_flops=f) for n, s, f in arrays),
    )


def file_of(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(content))
    return path


def test_names_of_those_that_come_with_the_package() -> None:
    assert profile_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_elements_are_the_parameters_that_the_file_states(name: str) -> None:
    profile = load_profile(name)
    text = resources.files("foreprop.profiles").joinpath(f"{name}.json").read_text()
    elements = sum(math.prod(array.shape) for array in profile.arrays)
    layers = profile.layers(scale=1, compute_s=1.0)
    assert profile.name == name
    assert elements == json.loads(text)["parameters"]
    assert sum(sum(layer.sizes_elems) for layer in layers) == elements


@pytest.mark.parametrize("name", NAMES)
def test_layers_share_the_compute_one_to_two(name: str) -> None:
    layers = load_profile(name).layers(scale=7, compute_s=1.5)
    forward_s = sum(layer.forward_s for layer in layers)
    backward_s = sum(layer.backward_s for layer in layers)
    assert forward_s == pytest.approx(0.5)
    assert backward_s == pytest.approx(1.0)
    assert all(layer.backward_s == pytest.approx(2 * layer.forward_s) for layer in layers)
    assert min(layer.forward_s for layer in layers) > 0  # the constant, even without FLOPs


def test_layers_share_the_compute_by_flops_beside_a_constant() -> None:
    profile = example(("a.weight", (4,), 30.0), ("b.weight", (4,), 10.0), ("c.weight", (4,), 0.0))
    a, b, c = (layer.forward_s for layer in profile.layers(scale=1, compute_s=3.0))
    assert (a - c) / (b - c) == pytest.approx(3.0)
    assert 0 < c < 0.05
    assert a + b + c == pytest.approx(1.0)


def test_without_flops_layers_take_the_same_time() -> None:
    profile = example(("a.weight", (4,), 0.0), ("b.weight", (400,), 0.0))
    layers = profile.layers(scale=1, compute_s=3.0)
    assert [layer.forward_s for layer in layers] == pytest.approx([0.5, 0.5])


@given(st.integers(1, 10**6), st.integers(1, 10**4))
def test_scale_divides_and_rounds_up(size: int, scale: int) -> None:
    layers = example(("a.weight", (size,), 1.0)).layers(scale=scale, compute_s=1.0)
    assert layers[0].sizes_elems == (math.ceil(size / scale),)


def test_scale_divides_elements_of_the_whole_shape() -> None:
    layers = example(("a.weight", (3, 5, 7), 1.0), ("b.scalar", (), 1.0)).layers(
        scale=10, compute_s=1.0
    )
    assert [layer.sizes_elems for layer in layers] == [(11,), (1,)]


@pytest.mark.parametrize(
    ("names", "layers"),
    [
        (("a.weight", "a.bias", "b.weight"), {"a": 2, "b": 1}),
        (("a_weight", "a_bias", "b_weight"), {"a": 2, "b": 1}),
        (("x.0.weight", "x.1.weight"), {"x_0": 1, "x_1": 1}),
        (("x_l0_i2h_weight", "x_l0_h2h_weight"), {"x_l0_i2h": 1, "x_l0_h2h": 1}),
        (("weight", "bias"), {"weight": 1, "bias": 1}),
        (("_weight", "_bias"), {"_weight": 1, "_bias": 1}),
        (("a.my_weight", "a.my_bias"), {"a": 2}),
        (("a.weight", "b.weight", "a.bias"), {"a": 2, "b": 1}),
    ],
)
def test_arrays_of_one_module_are_one_layer(names: tuple[str, ...], layers: dict[str, int]) -> None:
    profile = example(*((name, (2,), 1.0) for name in names))
    found = profile.layers(scale=1, compute_s=1.0)
    assert {layer.name: len(layer.sizes_elems) for layer in found} == layers


def test_unknown_model_names_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"model is 'vgg'; there are inceptionv3, .*vgg19"):
        load_profile("vgg")


def test_reads_a_file_of_the_same_form(tmp_path: Path) -> None:
    array = {"name": "a.weight", "shape": [2, 3], "forward_flops": 12, "unknown": 1}
    path = file_of(tmp_path, {"model": "mine", "arrays_in_forward_order": [array], "note": ""})
    assert read_profile(path) == Profile(
        name="mine", arrays=(ProfiledArray(name="a.weight", shape=(2, 3), forward_flops=12.0),)
    )


GOOD = {"name": "a.weight", "shape": [2, 3], "forward_flops": 12}


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ({"arrays_in_forward_order": [GOOD]}, "model"),
        ({"model": "mine"}, "arrays_in_forward_order"),
        ({"model": "mine", "arrays_in_forward_order": []}, "arrays_in_forward_order"),
        ({"model": 3, "arrays_in_forward_order": [GOOD]}, "model"),
        ([GOOD], "object"),
    ],
)
def test_bad_file_names_file_and_field(tmp_path: Path, content: Any, field: str) -> None:
    path = file_of(tmp_path, content)
    with pytest.raises(ConfigError, match=field) as caught:
        read_profile(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", 7),
        ("shape", "2x3"),
        ("shape", [2.5]),
        ("shape", [2, 0]),
        ("shape", [-2, -3]),
        ("forward_flops", "many"),
        ("forward_flops", -1),
    ],
)
def test_bad_array_names_file_and_field(tmp_path: Path, field: str, value: Any) -> None:
    array = GOOD | {field: value}
    path = file_of(tmp_path, {"model": "mine", "arrays_in_forward_order": [GOOD, array]})
    with pytest.raises(ConfigError, match=field) as caught:
        read_profile(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"{", b"not json", b'{"model": "\xff"}'])
def test_what_is_not_json_names_the_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"model\.json, which is not a profile"):
        read_profile(path)


def test_missing_file_and_folder_name_the_path(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ConfigError, match=r"cannot be read") as caught:
            read_profile(path)
        assert str(path) in str(caught.value)
