"""What holds for every codec: sizes, memory, determinism, NaN, and bytes that nobody encoded."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from codec_runs import PLACE, SIZES, are_equal, copied, noise, there_and_back
from hypothesis import given, settings
from hypothesis import strategies as st

from foreprop.core.codec import Place, takes
from foreprop.errors import ConfigError, RemoteProtocolError
from foreprop.features.compression import kernels
from foreprop.features.compression.codecs import PARAMETERS, make, make_for_replies
from foreprop.features.compression.dgc import DgcTraining
from tests.tiers import long_cases

LOSSY = ["bf16", "fp16", "int8", "int4", "int2", "topk", "randomk", "dgc"]
NAMES = [*LOSSY, "topk:0.3", "randomk:0.3", "dgc:0.3"]
BYTES_PER_ELEM = {
    "bf16": 2.0,
    "fp16": 2.0,
    "int8": 1 + 4 / 128,
    "int4": 0.5 + 4 / 128,
    "int2": 0.25 + 4 / 128,
    "topk": 0.08,
    "topk:0.3": 2.4,
    "randomk": 0.04,
    "randomk:0.3": 1.2,
    "dgc": 0.008,
    "dgc:0.3": 2.4,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("all_sizes", [False, *long_cases(True)])
def test_every_element_of_any_size_is_filled_and_the_gradient_stays(
    name: str, all_sizes: bool
) -> None:
    """In the usual run each size has a third of the codecs, and each codec a third of the sizes."""
    for elems in SIZES if all_sizes else SIZES[NAMES.index(name) % 3 :: 3]:
        codec, values = make(name), noise(elems)
        state, before = codec.new_state(elems), values.clone()
        for _ in range(2):
            assert bool(there_and_back(codec, values, state).isfinite().all()), elems
        assert torch.equal(values, before), elems
        arrays = state.values()
        assert all(len(array) == elems and array.dtype == torch.float32 for array in arrays), elems
        assert not codec.exact


def test_the_bytes_per_element() -> None:
    elems = 1_000_000
    values = noise(elems)
    for name in NAMES:
        codec = make(name)
        assert len(codec.encode(values, {}, PLACE)) == codec.most_bytes(elems), name
        assert codec.most_bytes(elems) / elems == pytest.approx(BYTES_PER_ELEM[name], rel=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_gradients_give_the_same_bytes_and_states(name: str) -> None:
    runs = []
    for codec in (make(name), make(name)):
        state = codec.new_state(5000)
        sent = [bytes(codec.encode(noise(5000, t), state, Place(t, 2, 1))) for t in range(4)]
        runs.append((sent, copied(state)))
    assert runs[0][0] == runs[1][0]
    assert are_equal(runs[0][1], runs[1][1])


def test_zeros_stay_zeros() -> None:
    for name in NAMES:
        codec = make(name)
        for state in ({}, codec.new_state(1001)):
            out = there_and_back(codec, torch.zeros(1001), state)
            assert torch.equal(out, torch.zeros(1001)), name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", [700, *long_cases(0, 999)])
def test_what_is_not_finite_shows_and_is_not_remembered(name: str, where: int) -> None:
    codec = make(name)
    state = codec.new_state(1000)
    there_and_back(codec, noise(1000, 1), state)
    for bad in (torch.nan, torch.inf, -torch.inf):
        before, values = copied(state), noise(1000, 2)
        values[where] = bad
        for given_state in (state, {}):
            out = there_and_back(codec, values, given_state)
            assert not bool(out.isfinite().all()), bad
        assert are_equal(state, before), bad
        assert bool(there_and_back(codec, noise(1000, 3), state).isfinite().all()), bad


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15)
@given(data=st.data())
def test_bytes_that_nobody_encoded_are_refused_or_decoded(name: str, data: Any) -> None:
    codec, elems = make(name), data.draw(st.integers(1, 300))
    sent = bytearray(codec.encode(noise(elems), {}, PLACE))
    if data.draw(st.booleans()):
        sent = bytearray(data.draw(st.binary(min_size=len(sent), max_size=len(sent))))
    for position in data.draw(st.lists(st.integers(0, len(sent) - 1), max_size=4)):
        sent[position] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RemoteProtocolError):
        codec.decode(memoryview(sent), torch.empty(elems), PLACE)


@pytest.mark.parametrize("elems", [1, 9, 1000])
def test_bytes_of_a_wrong_length_are_refused_before_anything_is_read(
    elems: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    goods = {name: bytes(make(name).encode(noise(elems), {}, PLACE)) for name in NAMES}
    monkeypatch.setattr(torch, "frombuffer", None)
    monkeypatch.setattr(torch, "empty", None)
    for name, good in goods.items():
        codec, out = make(name), torch.zeros(elems)
        for bad in (b"", good[:-1], good + b"\0", good * 2, bytes(10_000_001)):
            with pytest.raises(RemoteProtocolError, match=f"^{codec.name}: {len(bad)} bytes for"):
                codec.decode(memoryview(bad), out, PLACE)
        assert torch.equal(out, torch.zeros(elems)), name


def test_a_slice_of_nothing() -> None:
    assert [name for name in NAMES if len(there_and_back(make(name), torch.zeros(0)))] == []


def test_parts_are_whole_blocks() -> None:
    assert kernels.AT_ONCE_ELEMS % 128 == kernels.AT_ONCE_ELEMS % 512 == 0
    assert kernels.AT_ONCE_ELEMS < 32_768  # from where torch starts threads


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("topc", "compression: no codec is called 'topc'; there are ['none', 'bf16', 'dgc'"),
        ("int8:3", "compression is 'int8:3'; int8 takes no parameter: say 'int8'"),
        ("topk:", "compression is 'topk:'; topk takes a share above 0 and at most 1"),
        ("topk:0", "topk takes a share above 0 and at most 1, as in topk:0.01"),
        ("topk:1.5", "topk takes a share above 0"),
        ("topk:nan", "topk takes a share above 0"),
        ("randomk:-1", "randomk takes a share above 0"),
        ("dgc:ten", "dgc takes a share above 0"),
    ],
)
def test_a_name_that_there_is_not(name: str, says: str) -> None:
    for make_it in (make, lambda name: make_for_replies(name, 2)):
        with pytest.raises(ConfigError) as caught:
            make_it(name)
        assert says in str(caught.value)


def test_every_parameter_is_explained_and_nothing_else() -> None:
    for kind in LOSSY:
        if kind not in PARAMETERS:
            with pytest.raises(ConfigError, match="takes no parameter"):
                make(f"{kind}:0.5")
        else:
            assert make(PARAMETERS[kind].rpartition(" ")[2]).most_bytes(100) > 0


THREADS = """
import os, sys, torch
from foreprop.features.compression.codecs import make
from foreprop.core.codec import Place

torch.set_num_threads(1)
values, out, place = torch.linspace(-1, 1, 50_000), torch.empty(50_000), Place(1, 2, 3)
torch.set_num_threads(4)
threads = len(os.listdir("/proc/self/task"))
for name in sys.argv[1:]:
    codec = make(name)
    codec.decode(codec.encode(values, codec.new_state(50_000), place), out, place)
    codec.decode(codec.encode(values, {}, place), out, place)
    assert len(os.listdir("/proc/self/task")) == threads, name
values.clone()  # as much at once as a slice has
assert len(os.listdir("/proc/self/task")) > threads
"""


@pytest.mark.long
def test_kernels_take_one_thread() -> None:
    check_one_thread(NAMES)


def check_one_thread(names: Sequence[str]) -> None:
    """Else each of the threads that send and receive would get a team of its own."""
    subprocess.run([sys.executable, "-c", THREADS, *names], check=True, timeout=100)


# Replies
def drift(codec: Any, rounds: int) -> float:
    """How far an image is from its master, relative to the start, after so many replies."""
    master, image = noise(4096), torch.zeros(4096)
    for step in range(rounds):
        image += there_and_back(codec, master - image, {}, Place(step, 0, -1))
    return float((master - image).norm() / master.norm())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rounds", [200, *long_cases(1000)])
def test_replies_bring_the_image_to_the_master(name: str, rounds: int) -> None:
    codec = make_for_replies(name, 4)
    assert drift(codec, 1) < 1
    assert drift(codec, 1000 if name == "randomk" else rounds) < 0.05


@pytest.mark.parametrize(
    ("name", "elems"), [("topk:0.01", 40), ("dgc:0.01", 40), ("topk:0.5", 500)]
)
def test_a_reply_has_room_for_what_all_workers_pushed(name: str, elems: int) -> None:
    """Workers push disjoint elements, which are answered without any loss."""
    codec, differences = make_for_replies(name, 4), torch.zeros(1000)
    differences[torch.randperm(1000)[:elems]] = 1.0
    assert codec.most_bytes(1000) == (8 * elems if elems < 500 else 4 * 1000)
    assert torch.equal(there_and_back(codec, differences), differences)


def test_replies_of_random_k_have_the_elements_of_the_pushes() -> None:
    pushes, replies = make("randomk:0.1"), make_for_replies("randomk:0.1", 4)
    pushed = there_and_back(pushes, noise(1000), {}, Place(8, 2, 3))
    assert torch.equal(there_and_back(replies, pushed, {}, Place(8, 2, -1)), pushed)


def test_replies_follow_the_warm_up() -> None:
    codec = make_for_replies("dgc", 2, DgcTraining(warmup_steps=10))
    for step, count in ((0, 5000), (9, 5000), (10, 1250), (40, 20), (10**9, 20)):
        assert len(codec.encode(noise(10_000), {}, Place(step, 0, -1))) == 8 * count


def test_dgc_leaves_out_parameters_of_one_dimension() -> None:
    assert not takes("dgc", (64,))
    assert not takes("dgc:0.01", ())
    assert takes("dgc", (64, 3))
    assert takes("topk", (64,))
