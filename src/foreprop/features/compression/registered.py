"""A user's codec: three methods, to which this module adds what all codecs have.

Error feedback is around it, a gradient that is not finite does not reach it, and bytes that it
cannot decode are a `RemoteProtocolError`. See docs/extending.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from foreprop.core.codec import Place
from foreprop.core.codecfacts import CodecFacts, KnownCodec
from foreprop.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from foreprop.features.compression.kernels import Stateless, all_finite, generator_of

# The last byte of a code, and the only one of a slice that is not finite.
_FINITE, _BROKEN = b"\0", b"\1"


class OwnCodec(Protocol):
    """A codec whose class `foreprop.register_codec` takes; ``name`` is its name in the setting.

    It has no state of its own: several threads use one at once. It is made without arguments, or
    with the text that follows a colon in the setting. It may say more of itself: `Traits`.
    """

    name: str

    def most_bytes(self, elems: int) -> int:
        """The most bytes that `encode` gives for so many elements."""

    @property
    def encode(self) -> Callable[..., bytes]:
        """A method that gives the bytes of flat, finite float32 numbers on the host, unchanged."""

    def decode(self, data: memoryview, out: torch.Tensor) -> None:
        """Fill ``out``, of the values' shape; with the same bits in every process."""


class Traits(NamedTuple):
    """What a codec may say of itself, by attributes of these names, and what holds otherwise."""

    keeps_error: bool = True
    """Whether what it leaves out of a gradient is added to the next; no, if it is unbiased."""
    draws: bool = False
    """Whether `encode` also takes a `torch.Generator`, which step, slice and rank determine."""
    votes: bool = False
    """Whether it sends 1 and -1, and the update is the majority's (signSGD, majority vote)."""
    answer: str | None = None
    """The codec of answers where servers update, if its own does not bring differences nearer."""
    servers_update: bool = False
    """Whether servers update by default, as it loses much more of averages than of differences."""
    s_per_gb: tuple[float, float] | None = None
    """Seconds of a core to encode, and to decode, a GB of float32: planners go by them."""


class Registered(Stateless):
    """A user's codec, as foreprop's own are."""

    def __init__(self, own: OwnCodec, name: str) -> None:
        self._own = own
        self.name = name
        said = {trait: getattr(own, trait) for trait in Traits._fields if hasattr(own, trait)}
        self.traits = Traits(**said)

    def most_bytes(self, elems: int) -> int:
        return 1 + self._own.most_bytes(elems)

    def encode(self, values: torch.Tensor, state: object, place: Place) -> memoryview:
        if not all_finite(values):
            return memoryview(_BROKEN)
        drawn = [generator_of(place, of_rank=True)] if self.traits.draws else []
        data = bytearray(self._own.encode(values, *drawn)) + _FINITE
        if len(data) > self.most_bytes(len(values)):
            raise LocalProtocolError(
                f"codec {self.name} gave {len(data) - 1} bytes for {len(values)} elements, and its"
                f" most_bytes() says {self.most_bytes(len(values)) - 1}: foreprop.check_codec shows"
                " it"
            )
        return memoryview(data)

    def decode(self, data: memoryview, out: torch.Tensor, place: Place) -> None:
        rest, last = data[:-1], bytes(data[-1:])
        if last == _BROKEN and not len(rest):
            out.fill_(torch.nan)
            return
        try:
            if last != _FINITE:
                raise ValueError(f"it ends in {last!r}")
            self._own.decode(rest, out)
        except Exception as error:  # whatever a user's codec makes of bytes that are not its own
            raise RemoteProtocolError(
                f"{self.name}: {len(data)} bytes for {len(out)} elements cannot be decoded:"
                f" {error!r}"
            ) from error

    def known(self) -> KnownCodec | None:
        """What planners know of the codec; None if it does not say what it costs."""
        if self.traits.s_per_gb is None:
            return None
        facts = CodecFacts(
            False,
            lambda elems: self.most_bytes(elems) / elems,
            *self.traits.s_per_gb,
            state_arrays=int(self.traits.keeps_error),
        )
        return KnownCodec(self.name, facts, loss=1.0, answer=self.traits.answer)


def make_registered(codec: type[OwnCodec], name: str) -> Registered:
    """The user's codec by a name with its parameter; raises `ConfigError` if it takes none such."""
    _, colon, parameter = name.partition(":")
    try:
        return Registered(codec(*[parameter] * bool(colon)), name)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"compression is {name!r}; {codec.__name__}: {error}") from error
