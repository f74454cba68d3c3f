"""Codes of a few bits in bytes, against plain integers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreprop.errors import RemoteProtocolError
from foreprop.features.compression.quantisers import pack, packed_bytes, unpack


def packed(codes: list[int], bits: int) -> npt.NDArray[np.uint8]:
    found = np.empty(packed_bytes(len(codes), bits), np.uint8)
    pack(np.array(codes, np.uint8), bits, found)
    return found


@given(bits=st.sampled_from([2, 4, 8]), data=st.data())
def test_a_byte_has_codes_that_follow_each_other(bits: int, data: st.DataObject) -> None:
    codes = data.draw(st.lists(st.integers(0, 2**bits - 1), max_size=100))
    found = packed(codes, bits)
    number = sum(code << bits * position for position, code in enumerate(codes))
    assert bytes(found.tolist()) == number.to_bytes(len(found), "little")
    assert unpack(found, bits, len(codes)).tolist() == codes


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_many_codes_come_back(bits: int) -> None:
    codes = np.random.default_rng(0).integers(2**bits, size=300_001, dtype=np.uint8)
    found = np.empty(packed_bytes(len(codes), bits), np.uint8)
    pack(codes, bits, found)
    assert np.array_equal(unpack(found, bits, len(codes)), codes)


@pytest.mark.parametrize(("bits", "elems"), [(2, 3), (2, 5), (4, 1), (4, 7)])
def test_a_bit_after_the_last_code_is_refused(bits: int, elems: int) -> None:
    found = packed([0] * elems, bits)
    found[-1] |= 0x80
    with pytest.raises(RemoteProtocolError, match="bits are set after the last one"):
        unpack(found, bits, elems)
