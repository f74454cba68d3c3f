"""What a codec is: fewer bytes for a slice, and what it keeps from step to step.

Theory of operation. A worker encodes each slice of its gradient when its turn to be sent has come,
the server decodes it before the sum in rank order. A server encodes the *difference* between the
new values and the image, the values that all workers have: of an exact codec the exclusive or of
the bits, of another one the arithmetic difference. Both sides then move the image by what was
decoded, so it is the same bits everywhere after every step. An error that stays between master and
image is in the next difference: replies need no error feedback of their own.

The bytes are the shell's (`foreprop.compression`); ``Array`` is ``torch.Tensor`` there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, TypeVar

Array = TypeVar("Array")


class Place(NamedTuple):
    """Where a gradient comes from: what is drawn depends on nothing else."""

    step: int
    slice: int
    rank: int


class Codec(Protocol[Array]):
    """Encodes flat float32 arrays. It has no state of its own: `new_state` is kept per slice.

    What is not finite never becomes finite: of a codec that is not exact it may become NaN, and
    make its whole slice NaN. The state does not remember it.
    """

    name: str
    exact: bool
    """What is decoded has the bits of what was encoded, NaN payloads included."""

    def most_bytes(self, elems: int) -> int:
        """No encoded array of so many elements is longer: what a receiver has room for."""

    def new_state(self, elems: int) -> Mapping[str, Array]:
        """Flat arrays of ``elems`` float32 elements by name, as of error feedback; may be empty."""

    def encode(self, values: Array, state: Mapping[str, Array], place: Place) -> memoryview:
        """Does not change ``values``; changes ``state`` in place.

        With an empty ``state`` nothing is remembered: a server encodes its differences so.
        """

    def decode(self, data: memoryview, out: Array, place: Place) -> None:
        """Fill ``out``. Raises `RemoteProtocolError` for anything that `encode` cannot give."""


class CodecFacts(NamedTuple):
    """What a planner and a simulator know of a codec, without its kernels."""

    exact: bool
    bytes_per_elem: Callable[[int], float]
    """Of a slice of so many elements; of float32 that is 4."""
    encode_s_per_gb: float
    """Of float32, on one core of the machine in docs/compression.md."""
    decode_s_per_gb: float
    state_arrays: int
    """How many arrays of the slice's size a worker keeps."""
