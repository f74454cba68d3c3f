"""The way of a frame out of a process and into it: stages that composition names, once.

What leaves has its payload from one source, may be encoded by one codec, and is told of when it
has left. What comes goes to its kind's receiver: one that stands in front of another one's, such
as a codec, hands the frame on to it. A stage that does not fit is a defect: `InternalError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from foreprop.core.frames import PACE_STEPS, SendFrame
from foreprop.core.wire import Kind
from foreprop.errors import InternalError
from foreprop.link.connection import Connection, FrameOwner, Service, owners_of

Payload = Callable[[SendFrame], memoryview]
"""Of a frame that is about to be sent. In its sending thread."""
Encode = Callable[[SendFrame, memoryview], memoryview]
"""The bytes that cross for a frame and its payload. In the same thread."""
Sent = Callable[[SendFrame, int, int], None]
"""Told of a frame that has left, its bytes, and when it began, ns."""


class Pipeline:
    """What happens to frames as they leave, by kind; without a payload they are empty."""

    def __init__(
        self,
        *,
        payload: Mapping[Kind, Payload],
        encode: Mapping[Kind, Encode] | None = None,
        sent: Mapping[Kind, Sent] | None = None,
    ) -> None:
        self.payload: dict[int, Payload] = {int(kind): each for kind, each in payload.items()}
        self.sent: dict[int, Sent] = {int(kind): each for kind, each in (sent or {}).items()}
        for kind, each in (encode or {}).items():
            if kind not in self.payload:
                raise InternalError(f"{kind.name} is encoded and has no payload")
            self.payload[kind] = _encoding(self.payload[kind], each)


def _encoding(payload: Payload, encode: Encode) -> Payload:
    return lambda frame: encode(frame, payload(frame))


NOTHING_LEAVES = Pipeline(payload={})
"""Before composition has ended, but for frames whose payload is at hand."""


class Receivers(dict[int, FrameOwner]):
    """Who gets each kind of frame that comes, in the order in which they were put there."""

    def add(self, *services: Service) -> None:
        """Kinds that nobody has yet."""
        for kind, service in owners_of(services).items():
            if self.setdefault(kind, service) is not service:
                raise InternalError(f"frames of kind {Kind(kind).name} have a receiver")

    def put_before(self, service: Service) -> None:
        """It has been made with those that are there, and hands on to them."""
        self.update(dict.fromkeys(service.kinds, service))


# A worker's.
def _no_norm(step: int) -> float:
    raise InternalError(f"nobody knows the norm of step {step}")


class Losses(Protocol):
    """What is done about servers that are gone."""

    def outlives(self, peer: Connection) -> bool:
        """Whether the session goes on without this server."""

    def cut(self, peer: Connection) -> None:
        """End a connection for this side; its receiving thread then says that it is lost."""

    def undelivered(self, server: int) -> bool:
        """A connection has not taken a frame: whether that will be outlived."""


@dataclass(frozen=True, kw_only=True)
class Features:
    """What a session asks of its engine beside its slices; composition names each."""

    encode: Encode | None = None
    """Of a push's gradient."""
    flags_of: Callable[[int], int] | None = None
    """More flags of a step's pushes."""
    norm_of: Callable[[int], float] = _no_norm
    """Of a step; blocks until it is known."""
    end_window: Callable[[int], None] | None = None
    """Told every so many steps how many are done: to tell the servers this rank's pace."""
    window_steps: int = PACE_STEPS
    losses: Losses | None = None
    before_goodbye: Callable[[], None] | None = None
