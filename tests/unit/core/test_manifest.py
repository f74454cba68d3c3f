"""What all processes must agree on: the same after the wire, and differences with both sides."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreprop.config import Config
from foreprop.core.agreement import decode_manifest, decode_ring_manifest, describe_mismatch
from foreprop.core.manifest import (
    Aggregation,
    Manifest,
    OptimizerInfo,
    ParameterInfo,
    RingKnobs,
    RingManifest,
)
from foreprop.errors import RemoteProtocolError


def parameter(name: str, *shape: int, **changes: Any) -> ParameterInfo:
    fields: dict[str, Any] = {"dtype": "float32", "group": 0, **changes}
    return ParameterInfo(name=name, shape=shape, **fields)


def make(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "foreprop": "1.0",
        "torch": "2.13",
        "byteorder": "little",
        "session": "s",
        "world_size": 4,
        "knobs": Config().knobs(2),
        "optimizer": OptimizerInfo(
            name="Adam",
            groups=({"lr": 0.1, "betas": [0.9, 0.999], "amsgrad": False, "step": 3, "foo": None},),
        ),
        "parameters": (parameter("a", 300, 400), parameter("b", dtype="bfloat16")),
        "blob_bytes": (0, 12),
    }
    return Manifest(**{**fields, **changes})


def test_a_manifest_is_the_same_after_the_wire() -> None:
    manifest = make()
    again = decode_manifest(memoryview(manifest.encode()))
    assert again == manifest
    assert again.slices() == manifest.slices()
    group = again.optimizer.groups[0]
    assert [type(value) for value in group.values()] == [float, list, bool, int, type(None)]


def make_ring(**changes: Any) -> RingManifest:
    fields: dict[str, Any] = {
        "chunk_elems": 7,
        "chunks_in_flight": 2,
        "aggregation": Aggregation(clip_grad_norm=1.0),
        "wire_dtype": None,
        "settings": ({"lr": 0.1, "fused": None, "name": "any"},),
    }
    whole = msgspec.structs.asdict(make())
    shared = {**whole, "knobs": RingKnobs(**{**fields, **changes})}
    return RingManifest(**{**shared, "optimizer": OptimizerInfo(name="Adam")})


def test_a_rings_manifest_is_the_same_after_the_wire() -> None:
    manifest = make_ring()
    again = decode_ring_manifest(memoryview(manifest.encode()))
    assert again == manifest
    text = describe_mismatch(again, make_ring(settings=({"lr": 0.2},)), us="a", them="b")
    assert text is not None
    assert text.startswith("knobs.settings[0].lr: a has 0.1, b has 0.2; ")
    with pytest.raises(RemoteProtocolError, match="not a manifest"):
        decode_ring_manifest(make().encode())
    with pytest.raises(RemoteProtocolError, match="not a manifest"):
        decode_manifest(manifest.encode())


@given(st.floats(allow_nan=False, allow_infinity=False))
@settings(max_examples=100, deadline=None)
def test_numbers_travel_exactly(number: float) -> None:
    manifest = make(optimizer=OptimizerInfo(name="SGD", groups=({"lr": number},)))
    got = decode_manifest(manifest.encode()).optimizer.groups[0]["lr"]
    assert isinstance(got, float)
    assert got.hex() == number.hex()


def test_elements_and_slices() -> None:
    assert [info.elems for info in make().parameters] == [120_000, 1]
    assert parameter("x", 3, 0, 5).elems == 0
    assert [(p.parameter, p.elems, p.server) for p in make().slices()] == [
        (0, 50_000, 0),
        (0, 50_000, 1),
        (0, 20_000, 0),
        (1, 1, 1),
    ]


def test_only_float32_is_cast_and_slices_are_dealt_by_bytes_on_the_wire() -> None:
    parameters = tuple(
        parameter(name, 100, dtype=dtype)
        for name, dtype in (("a", "float64"), ("b", "float32"), ("c", "float32"), ("d", "bfloat16"))
    )
    plain = make(parameters=parameters)
    cast = make(parameters=parameters, knobs=Config(wire_dtype="float16").knobs(2))
    assert plain.wire_dtypes() == ["float64", "float32", "float32", "bfloat16"]
    assert cast.wire_dtypes() == ["float64", "float16", "float16", "bfloat16"]
    assert [piece.server for piece in plain.slices()] == [0, 1, 1, 0]
    assert [piece.server for piece in cast.slices()] == [0, 1, 1, 1]


@given(st.one_of(st.binary(max_size=100), st.text(max_size=50).map(str.encode)))
@settings(max_examples=150, deadline=None)
def test_any_bytes_decode_or_raise_remote_protocol_error(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="not a manifest"):
        decode_manifest(data)


@given(st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_a_damaged_manifest_decodes_or_raises_and_can_then_be_used(seed: int) -> None:
    chance = random.Random(seed)
    data = bytearray(make(parameters=(parameter("a", 3), parameter("b", 2))).encode())
    for _ in range(chance.randint(1, 3)):
        data[chance.randrange(len(data))] = chance.choice(b'0123456789-"[]{},.:enul' + b"\xff")
    try:
        manifest = decode_manifest(data)
    except RemoteProtocolError:
        return
    assert all(0 <= p.server < manifest.knobs.servers for p in manifest.slices())


@pytest.mark.parametrize(
    "changes",
    [
        {"staleness": -1},
        {"staleness": 1, "delay_compensation": -0.5},
        {"staleness": 1, "aggregation": Config(clip_grad_norm=1.0).aggregation},
    ],
)
def test_workers_apart_that_cannot_be_are_no_manifest(changes: dict[str, Any]) -> None:
    knobs = msgspec.structs.replace(Config().knobs(2), **changes)
    decode_manifest(make(knobs=Config(staleness="async", delay_compensation=0.5).knobs(2)).encode())
    with pytest.raises(RemoteProtocolError, match="not a manifest: staleness"):
        decode_manifest(make(knobs=knobs).encode())


def test_workers_that_may_come_have_places() -> None:
    whole = decode_manifest(make(knobs=Config(elastic=True, max_workers=9).knobs(2)).encode())
    assert (whole.most_workers, whole.peers().count) == (9, 9)
    assert whole.peers().present == [0, 1, 2, 3]
    assert make().most_workers == make_ring().most_workers == 4


@pytest.mark.parametrize(("elastic", "most"), [(False, 9), (True, -1), (True, 3)])
def test_most_workers_that_cannot_be_are_no_manifest(elastic: bool, most: int) -> None:
    knobs = msgspec.structs.replace(Config(elastic=elastic).knobs(2), max_workers=most)
    with pytest.raises(RemoteProtocolError, match=f"not a manifest: max_workers {most} of 4"):
        decode_manifest(make(knobs=knobs).encode())


def test_more_workers_than_a_header_can_name_are_no_manifest() -> None:
    knobs = msgspec.structs.replace(Config(elastic=True).knobs(2), max_workers=2**40)
    with pytest.raises(RemoteProtocolError, match=f"max_workers {2**40}; at most 65536"):
        decode_manifest(make(knobs=knobs).encode())


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"foreprop":' + b'{"a":' * 100_000])
def test_deep_nesting_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="not a manifest"):
        decode_manifest(data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world_size": 0}, "world_size 0"),
        ({"blob_bytes": (0, -1)}, r"blob_bytes \(0, -1\)"),
        ({"knobs": msgspec.structs.replace(Config().knobs(1), servers=0)}, "servers=0"),
        ({"knobs": msgspec.structs.replace(Config().knobs(1), slice_elems=0)}, "slice_elems=0"),
        ({"parameters": (parameter("a", -1),)}, r"parameter 'a': float32 \(-1,\)"),
        ({"parameters": (parameter("a", dtype="int8"),)}, r"parameter 'a': int8 \(\)"),
        ({"parameters": (parameter("a", group=1),)}, "parameter 'a' is in no group: 1"),
        (
            {"knobs": msgspec.structs.replace(Config().knobs(1), wire_dtype="int8")},  # type: ignore[arg-type]
            r"Invalid enum value 'int8' .*wire_dtype",
        ),
    ],
)
def test_numbers_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RemoteProtocolError, match=message):
        decode_manifest(make(**changes).encode())


def test_unknown_fields_are_refused() -> None:
    fields = json.loads(make().encode())
    with pytest.raises(RemoteProtocolError, match=r"not a manifest: .*surprise"):
        decode_manifest(json.dumps({**fields, "surprise": 1}).encode())


ADAM = make().optimizer
DIFFERENCES = {
    "world_size: rank 0 has 4, rank 3 has 5": {"world_size": 5},
    "torch: rank 0 has '2.13', rank 3 has '2.12'": {"torch": "2.12"},
    "foreprop: rank 0 has '1.0', rank 3 has '1.1'": {"foreprop": "1.1"},
    "byteorder: rank 0 has 'little', rank 3 has 'big'": {"byteorder": "big"},
    "knobs.slice_elems: rank 0 has 50000, rank 3 has 9": {"knobs": Config(slice_elems=9).knobs(2)},
    "knobs.order: rank 0 has 'priority', rank 3 has 'fifo'": {
        "knobs": Config(order="fifo").knobs(2)
    },
    "knobs.wire_dtype: rank 0 has None, rank 3 has 'float16'": {
        "knobs": Config(wire_dtype="float16").knobs(2)
    },
    "parameters[0] (a).shape: rank 0 has (300, 400), rank 3 has (400, 300)": {
        "parameters": (parameter("a", 400, 300), make().parameters[1])
    },
    "parameters[1] (b).dtype: rank 0 has 'bfloat16', rank 3 has 'float16'": {
        "parameters": (make().parameters[0], parameter("b", dtype="float16"))
    },
    "parameters[0] (a).name: rank 0 has 'a', rank 3 has 'c'": {
        "parameters": (parameter("c", 300, 400), make().parameters[1])
    },
    "number of parameters: rank 0 has 2, rank 3 has 1": {"parameters": make().parameters[:1]},
    "optimizer.name: rank 0 has 'Adam', rank 3 has 'SGD'": {
        "optimizer": OptimizerInfo(name="SGD", groups=ADAM.groups)
    },
    "optimizer.groups[0].lr: rank 0 has 0.1, rank 3 has 0.2": {
        "optimizer": OptimizerInfo(name="Adam", groups=({**ADAM.groups[0], "lr": 0.2},))
    },
    "blob_bytes: rank 0 has (0, 12), rank 3 has (0, 13)": {"blob_bytes": (0, 13)},
}


@pytest.mark.parametrize("message", DIFFERENCES)
def test_a_difference_names_the_field_and_both_values(message: str) -> None:
    assert describe_mismatch(make(), make(**DIFFERENCES[message]), us="rank 0", them="rank 3") == (
        message
    )


def test_equal_manifests_do_not_differ() -> None:
    assert describe_mismatch(make(), decode_manifest(make().encode()), us="a", them="b") is None


def test_other_hyperparameters_are_named_too() -> None:
    other = make(optimizer=OptimizerInfo(name="Adam", groups=({**ADAM.groups[0], "new": 1},)))
    text = describe_mismatch(make(), other, us="a", them="b")
    assert text == "optimizer.groups[0].new: a has 'nothing', b has 1"
    other = make(optimizer=OptimizerInfo(name="Adam", groups=(*ADAM.groups, {"lr": 1.0})))
    text = describe_mismatch(make(), other, us="a", them="b")
    assert text is not None
    assert text.startswith("optimizer.groups: a has ")


def test_the_first_five_of_many_differences_are_told_in_order() -> None:
    many = [parameter(f"p{i}", 1) for i in range(8)]
    other = [parameter(f"p{i}", 2) for i in range(8)]
    ours = make(parameters=tuple(many), world_size=4)
    theirs = make(parameters=tuple(other), world_size=5, torch="3")
    text = describe_mismatch(ours, theirs, us="a", them="b")
    assert text is not None
    fields = [part.partition(":")[0] for part in text.split("; ")]
    assert fields == ["torch", "world_size", *(f"parameters[{i}] (p{i}).shape" for i in range(3))]
    assert text.endswith("(and 5 more)")
