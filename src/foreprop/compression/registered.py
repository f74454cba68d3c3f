"""A user's codec: three methods, to which this adds what all codecs have.

Error feedback is around it, a gradient that is not finite does not reach it, and bytes that it
cannot decode are a `RemoteProtocolError`. See docs/extending.md.
"""

from __future__ import annotations

from typing import Protocol

import torch

from foreprop.compression.payloads import Stateless, all_finite
from foreprop.core.codec import Place
from foreprop.errors import ConfigError, LocalProtocolError, RemoteProtocolError

_FINITE, _BROKEN = b"\0", b"\1"
"""The last byte of what is sent; of a slice that is not finite it is the only one."""


class OwnCodec(Protocol):
    """What `foreprop.register_codec` takes a class of; ``name`` is what the setting says.

    It has no state of its own: several threads use one at once. It is made without arguments, or
    with the text that follows a colon in the setting.
    """

    name: str

    def most_bytes(self, elems: int) -> int:
        """The most that `encode` gives for so many elements."""

    def encode(self, values: torch.Tensor) -> bytes:
        """Of flat float32 numbers on the host, all finite; does not change them."""

    def decode(self, data: memoryview, out: torch.Tensor) -> None:
        """Fill ``out``, which is as the values were; the same bits in every process."""


class Registered(Stateless):
    """A user's codec as foreprop's are."""

    def __init__(self, own: OwnCodec, name: str) -> None:
        self._own = own
        self.name = name

    def most_bytes(self, elems: int) -> int:
        return 1 + self._own.most_bytes(elems)

    def encode(self, values: torch.Tensor, state: object, place: Place) -> memoryview:
        if not all_finite(values):
            return memoryview(_BROKEN)
        data = bytearray(self._own.encode(values)) + _FINITE
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
        except Exception as error:  # whatever the user's makes of bytes that are not its own
            raise RemoteProtocolError(
                f"{self.name}: {len(data)} bytes for {len(out)} elements cannot be decoded:"
                f" {error!r}"
            ) from error


def make_registered(codec: type[OwnCodec], name: str) -> Registered:
    """Raises `ConfigError` for a parameter that it does not take."""
    _, colon, parameter = name.partition(":")
    try:
        return Registered(codec(*[parameter] * bool(colon)), name)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"compression is {name!r}; {codec.__name__}: {error}") from error
