from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreprop.errors import ConfigError
from foreprop.plan.profile import (
    Layer,
    Profile,
    ProfiledArray,
    load_profile,
    profile_names,
    read_profile,
)

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
    text = resources.files("foreprop.plan.profiles").joinpath(f"{name}.json").read_text()
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


# Measured times.
MEASURED = Profile(
    name="mine",
    arrays=(
        ProfiledArray(name="words.weight", shape=(50, 4), forward_s=1.0, backward_s=2.0, alpha=0.1),
        ProfiledArray(name="fc.weight", shape=(3, 4), forward_s=0.0, backward_s=4.0),
        ProfiledArray(name="fc.bias", shape=(3,), forward_s=2.0, backward_s=0.5, dtype="bfloat16"),
    ),
    note="measured here",
    before_first_use_s=0.25,
    after_last_gradient_s=0.125,
)


def test_a_measured_profile_knows_its_compute() -> None:
    assert MEASURED.measured_s == 0.25 + 3.0 + 6.5 + 0.125
    assert (MEASURED.forward_s, MEASURED.backward_s) == (3.25, 6.625)
    assert load_profile("vgg19").measured_s is None


def test_measured_arrays_are_layers_with_their_own_times() -> None:
    """Forward to backward is as measured, and what is outside of arrays is a layer without any."""
    assert MEASURED.measured_s is not None
    layers = MEASURED.layers(scale=1, compute_s=MEASURED.measured_s)
    assert layers == [
        Layer(name="input", sizes_elems=(), forward_s=0.25, backward_s=0.125),
        Layer(name="words_weight", sizes_elems=(200,), forward_s=1.0, backward_s=2.0),
        Layer(name="fc_weight", sizes_elems=(12,), forward_s=0.0, backward_s=4.0),
        Layer(name="fc_bias", sizes_elems=(2,), forward_s=2.0, backward_s=0.5),  # 6 bytes
    ]


def test_another_compute_stretches_measured_times_alike() -> None:
    assert MEASURED.measured_s is not None
    layers = MEASURED.layers(scale=10, compute_s=2 * MEASURED.measured_s)
    assert [layer.forward_s for layer in layers] == pytest.approx([0.5, 2.0, 0.0, 4.0])
    assert [layer.backward_s for layer in layers] == pytest.approx([0.25, 4.0, 8.0, 1.0])
    assert [layer.sizes_elems for layer in layers] == [(), (20,), (2,), (1,)]


@pytest.mark.parametrize(
    "profile",
    [
        MEASURED,
        example(("a.weight", (4, 3), 3.0), ("a.bias", (4,), 1.0), ("b.weight", (9, 5), 8.0)),
    ],
)
def test_arrays_of_which_a_share_is_counted_leave_times_as_they_are(profile: Profile) -> None:
    """A table's rows are counted apart: its layer is computed all the same."""
    whole = profile.layers(scale=1, compute_s=2.0)
    *_, chosen = profile.arrays
    for share in (0.0, 0.1, 0.5):
        layers = profile.layers(
            scale=1,
            compute_s=2.0,
            counted=lambda array, share=share: share if array is chosen else 1.0,
        )
        *sizes, size = whole[-1].sizes_elems
        counted = [math.ceil(share * size)] if share else []
        assert layers[-1].sizes_elems == (*sizes, *counted)
        assert [replace(layer, sizes_elems=()) for layer in layers] == [
            replace(layer, sizes_elems=()) for layer in whole
        ]
        assert layers[:-1] == whole[:-1]
    by_layer = [len(layer.sizes_elems) for layer in whole]
    assert [len(arrays) for arrays in profile.arrays_by_layer()] == by_layer
    assert [array for arrays in profile.arrays_by_layer() for array in arrays] == [*profile.arrays]


def test_a_row_is_in_elements_of_four_bytes() -> None:
    array = ProfiledArray(name="a", shape=(10, 3, 4), forward_flops=1.0)
    assert (array.rows, array.row_elems) == (10, 12)
    half = ProfiledArray(name="a", shape=(10, 3), forward_flops=1.0, dtype="bfloat16")
    assert (half.rows, half.row_elems) == (10, 2)
    assert ProfiledArray(name="a", shape=(10,), forward_flops=1.0).row_elems == 1


def test_without_time_outside_of_arrays_every_layer_has_one() -> None:
    profile = replace(MEASURED, before_first_use_s=0.0, after_last_gradient_s=0.0)
    layers = profile.layers(scale=1, compute_s=1.0)
    assert [len(layer.sizes_elems) for layer in layers] == [1, 1, 1]


def test_a_saved_profile_is_read_as_it_was(tmp_path: Path) -> None:
    for profile in (MEASURED, load_profile("resnet50")):
        path = tmp_path / f"{profile.name}.json"
        profile.save(path)
        assert read_profile(path) == profile
        lines = path.read_text().splitlines()
        assert len(lines) == len(profile.arrays) + 2  # one for each array


def test_a_profile_that_cannot_be_saved_names_the_path(tmp_path: Path) -> None:
    path = tmp_path / "none" / "mine.json"
    with pytest.raises(ConfigError, match=r"none/mine\.json, which cannot be written: No such"):
        MEASURED.save(path)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.replace("┃", "│").split("│")[1:-1]]


def test_the_table_of_a_measured_profile_has_times_and_shares_of_rows() -> None:
    lines = str(MEASURED).splitlines()
    assert lines[0].strip() == "mine"
    assert [cells(line) for line in lines if line[:1] in ("│", "┃")] == [
        ["array", "shape", "MB", "forward ms", "backward ms", "rows touched"],
        ["(no array)", "", "", "250.000", "125.000", ""],
        ["words.weight", "50 x 4", "0.00", "1000.000", "2000.000", "10.00%"],
        ["fc.weight", "3 x 4", "0.00", "0.000", "4000.000", ""],
        ["fc.bias", "3", "0.00", "2000.000", "500.000", ""],
        ["3 arrays", "", "0.00", "3250.000", "6625.000", ""],
    ]
    assert lines[-1].strip() == "measured here"


def test_the_table_of_a_profile_with_flops_has_those() -> None:
    lines = [cells(line) for line in str(load_profile("vgg19")).splitlines() if "│" in line]
    assert lines[0] == ["features.0.weight", "64 x 3 x 3 x 3", "0.01", "173.408"]
    assert lines[-1] == ["38 arrays", "", "574.67", ""]


TIMED = {"name": "b.weight", "shape": [2], "forward_s": 1.0, "backward_s": 2.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forward_s": None}, "b.weight has only one of forward_s and backward_s"),
        ({"forward_s": -1}, "forward_s of b.weight is -1.0; it must not be negative"),
        ({"backward_s": "long"}, "backward_s"),
        ({"alpha": 1.5}, "alpha of b.weight is 1.5; it is a share"),
        ({"alpha": -0.5}, "alpha of b.weight is -0.5"),
        ({"alpha": 0.5, "shape": []}, "alpha of b.weight is given, but it has no rows"),
        ({"dtype": "int8"}, r"dtype of b.weight is 'int8'; it must be one of \['bfloat16', .*'"),
        (
            {"forward_s": None, "backward_s": None},
            "b.weight has neither forward_flops nor forward_s",
        ),
        (
            {"forward_s": None, "backward_s": None, "forward_flops": 7},
            "a.weight has forward_s and b.weight has not: all arrays must have times, or none",
        ),
    ],
)
def test_bad_measured_array_says_what_is_wrong(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    array = {key: value for key, value in (TIMED | changes).items() if value is not None}
    arrays = [TIMED | {"name": "a.weight"}, array]
    path = file_of(tmp_path, {"model": "mine", "arrays_in_forward_order": arrays})
    with pytest.raises(ConfigError, match=message) as caught:
        read_profile(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["before_first_use_s", "after_last_gradient_s"])
def test_bad_time_outside_of_arrays_is_named(tmp_path: Path, name: str) -> None:
    path = file_of(tmp_path, {"model": "mine", "arrays_in_forward_order": [TIMED], name: -1.0})
    with pytest.raises(ConfigError, match=f"{name} is -1.0"):
        read_profile(path)


def test_times_of_nothing_but_zeros_are_refused(tmp_path: Path) -> None:
    array = TIMED | {"forward_s": 0, "backward_s": 0}
    path = file_of(tmp_path, {"model": "mine", "arrays_in_forward_order": [array]})
    with pytest.raises(ConfigError, match="forward_s and backward_s are 0 for all arrays"):
        read_profile(path)


def timed(*arrays: tuple[str, float]) -> list[tuple[str, ...]]:
    """Which arrays are a layer, by name and forward time."""
    profile = Profile(
        name="timed",
        arrays=tuple(
            ProfiledArray(name=name, shape=(2,), forward_s=time_s, backward_s=time_s)
            for name, time_s in arrays
        ),
    )
    layers = profile.layers(scale=1, compute_s=2.0)
    names = [tuple(array.name for array in own) for own in profile.arrays_by_layer()]
    assert sum(layer.forward_s + layer.backward_s for layer in layers) == pytest.approx(2.0)
    assert [len(layer.sizes_elems) for layer in layers] == [*map(len, names)]
    return names


def test_arrays_without_times_of_their_own_belong_to_their_module_s_operation() -> None:
    assert timed(("a.weight", 1.0), ("a.bias", 0.0), ("b.weight", 2.0)) == [
        ("a.weight", "a.bias"),
        ("b.weight",),
    ]
    assert timed(("a.bias", 0.0), ("a.weight", 1.0), ("a.late", 0.0)) == [
        ("a.bias", "a.weight", "a.late")
    ]
    assert timed(("a.one", 1.0), ("a.two", 2.0)) == [("a.one",), ("a.two",)]
    assert timed(("words", 0.0), ("b.weight", 2.0), ("c.bias", 0.0)) == [
        ("words",),
        ("b.weight",),
        ("c.bias",),
    ]
