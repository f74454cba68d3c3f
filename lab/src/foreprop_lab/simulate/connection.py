"""The simulated clock, and one direction of a TCP connection between two processes.

Theory of operation. Bytes are handed over message by message, as the shell does it: a message has
been sent when the kernel has taken its last byte. What the kernel has taken nothing can overtake.
It passes the queue in front of the sender's link and the one in front of the receiver's, first in,
first out; at most a window of it is under way, until it is acknowledged. The windows of all
connections of a link together fill its queue, so those that have data share it evenly, as TCP
connections do in the long run, without its losses and its slow start.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from foreprop.errors import InternalError
from foreprop.plan.limit import HEADERS_BYTES
from foreprop_lab.setting.hosts import Kernel
from foreprop_lab.setting.links import Queue, wire_bytes

Action = Callable[[Any], None]


class Clock:
    """Runs actions at their times; those due at once in the order in which they were set."""

    __slots__ = ("_connections", "_due", "_events", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Action, Any]] = []
        self._due = self._connections = 0

    def number_connection(self) -> int:
        """A new number each time, so that each connection draws by itself."""
        self._connections += 1
        return self._connections

    def at(self, time_s: float, action: Action, argument: Any = None) -> None:
        """Call ``action(argument)`` at ``time_s``, which must not be past."""
        self._due += 1
        heapq.heappush(self._events, (time_s, self._due, action, argument))

    def run(self, finished: Callable[[], bool]) -> None:
        """Run until ``finished``, asked after each event; raises `InternalError` in a deadlock.

        If nothing is left to come, a state machine or this simulation has a bug.
        """
        events, pop = self._events, heapq.heappop
        while not finished():
            if not events:
                raise InternalError(f"nothing happens any more at {self.now_s:.6f} s: a deadlock")
            self.now_s, _, action, argument = pop(events)
            action(argument)

    @property
    def events(self) -> int:
        """How many actions have been set so far."""
        return self._due


Sent = Callable[[int], None]
Deliver = Callable[[Any], None]

_UNEVEN_S = 2.0
"""How long a connection's share is smaller or larger than others': CUBIC grows back in about
cbrt(0.75 W) s after a loss, 2.4 to 3.3 s for windows W of 19 to 48 packets (RFC 8312)."""
_WRITABLE_SHARE = 2 / 3
"""Linux wakes a sender that waits for its buffer when no more than this share of it is held."""


class Way(NamedTuple):
    """One direction of a connection: the peer at its end, and the callbacks of both ends."""

    peer: int
    sent: Sent
    deliver: Deliver
    kernel: Kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The queues that the bytes pass, and those that their acknowledgements pass."""

    egress: Queue
    port: Queue
    back_egress: Queue
    back_port: Queue


class Connection:
    """One direction of a TCP connection.

    It calls ``sent(peer)`` when the last message was taken, and ``deliver`` with each that is in.
    ``reverse`` is the other direction, if there is one: its bytes carry acknowledgements for free.
    """

    __slots__ = (
        "_acknowledgements _back_egress _back_port _burst_bytes _clock _deliver _drawn_until_s"
        " _egress _end_bytes _in_flight_bytes _kernel _latency_s _messages _peer _port _random"
        " _received_bytes _sent _settling _unsent_bytes _untaken_bytes _waiting _window_bytes"
        " reverse"
    ).split()

    def __init__(self, clock: Clock, path: Path, way: Way) -> None:
        self._clock = clock
        self._egress, self._port = path.egress, path.port
        self._back_egress, self._back_port = path.back_egress, path.back_port
        self._peer, self._sent, self._deliver, kernel = way
        self._kernel = kernel
        self._window_bytes = kernel.window_bytes
        self._burst_bytes = kernel.burst_bytes
        self._latency_s = kernel.latency_s
        self._messages: deque[tuple[int, Any]] = deque()  # with the number of its last byte
        self._end_bytes = 0
        self._received_bytes = 0
        self._untaken_bytes = 0  # of the last message
        self._unsent_bytes = 0
        self._in_flight_bytes = 0
        self._acknowledgements: deque[tuple[float, int]] = deque()  # when, bytes
        self._waiting = False  # for the first of them
        self._settling = False  # taken, and not yet sent
        self._drawn_until_s = 0.0
        self._random: random.Random | None = None
        if kernel.window_spread:
            self._random = random.Random(clock.number_connection())
        self.reverse: Connection | None = None

    @property
    def is_backlogged(self) -> bool:
        """Whether bytes wait to be sent, which can carry the other direction's acknowledgements."""
        return self._unsent_bytes > 0

    def send(self, message: Any, size_bytes: int) -> None:
        """Send one message; the next one may follow when ``sent`` was called."""
        self._end_bytes += size_bytes
        self._untaken_bytes = size_bytes
        self._messages.append((self._end_bytes, message))
        self._take_acknowledgements()
        if self._random is not None and self._clock.now_s >= self._drawn_until_s:
            # Who loses packets has a smaller share for a while, and then somebody else has.
            kernel = self._kernel
            self._drawn_until_s = self._clock.now_s + _UNEVEN_S
            factor = math.exp(kernel.window_spread * self._random.gauss(0.0, 1.0))
            self._window_bytes = max(round(kernel.window_bytes * factor), kernel.burst_bytes)
        self._take(self._kernel.buffer_bytes)
        self._transmit()

    def _take(self, bound_bytes: float) -> None:
        kernel = self._kernel
        while self._untaken_bytes:
            free_bytes = kernel.segment_bytes - self._unsent_bytes
            if not self._unsent_bytes or free_bytes <= 0:
                held_bytes = self._unsent_bytes + self._in_flight_bytes
                if self._unsent_bytes >= kernel.unsent_bytes or held_bytes >= bound_bytes:
                    return
                free_bytes = kernel.segment_bytes
            taken = min(self._untaken_bytes, free_bytes)
            self._untaken_bytes -= taken
            self._unsent_bytes += taken
            if not self._untaken_bytes:
                self._settling = True
                self._settle()

    def _settle(self) -> None:
        """Call ``sent`` if the message counts as sent."""
        kernel = self._kernel
        held_bytes = self._unsent_bytes + self._in_flight_bytes
        if not kernel.settles or held_bytes <= kernel.buffer_bytes * _WRITABLE_SHARE:
            self._settling = False
            self._clock.at(self._clock.now_s, self._sent, self._peer)

    def _transmit(self) -> None:
        while self._unsent_bytes:
            size = min(self._burst_bytes, self._unsent_bytes)
            if self._in_flight_bytes and self._in_flight_bytes + size > self._window_bytes:
                break
            self._unsent_bytes -= size
            self._in_flight_bytes += size
            self._leave(size)
            if self._untaken_bytes and not self._unsent_bytes:
                self._take(self._kernel.buffer_bytes)
        self._await_acknowledgement()

    def _leave(self, size: int) -> None:
        left_s = self._egress.accept(self._clock.now_s, wire_bytes(size))
        self._clock.at(left_s + self._latency_s, self._reach_port, size)

    def _reach_port(self, size: int) -> None:
        left_s = self._port.accept(self._clock.now_s, wire_bytes(size))
        self._clock.at(left_s + self._latency_s, self._arrive, size)

    def _arrive(self, size: int) -> None:
        self._acknowledge(size)
        self._receive(size)

    def _receive(self, size: int) -> None:
        self._received_bytes += size
        messages = self._messages
        while messages and messages[0][0] <= self._received_bytes:
            self._deliver(messages.popleft()[1])

    def _acknowledge(self, size: int) -> None:
        """Acknowledge with what goes the other way, or a packet of its own, in its queues."""
        reverse = self.reverse
        extra = 0 if reverse is not None and reverse.is_backlogged else HEADERS_BYTES
        at_port_s = self._back_egress.accept(self._clock.now_s, extra) + self._latency_s
        back_s = at_port_s + self._back_port.delay_s(at_port_s) + self._latency_s
        waiting = self._acknowledgements
        if waiting and back_s < waiting[-1][0]:
            back_s = waiting[-1][0]
        waiting.append((back_s, size))
        self._await_acknowledgement()

    def _await_acknowledgement(self) -> None:
        """Act again when the next acknowledgement is in, if that can make a difference."""
        if self._waiting or not self._acknowledgements:
            return
        if self._unsent_bytes or self._untaken_bytes or self._settling:
            self._waiting = True
            due_s = max(self._acknowledgements[0][0], self._clock.now_s)
            self._clock.at(due_s, self._acknowledged)

    def _acknowledged(self, _: None) -> None:
        self._waiting = False
        self._take_acknowledgements()
        if self._untaken_bytes:
            self._take(self._kernel.buffer_bytes * _WRITABLE_SHARE)
        elif self._settling:
            self._settle()
        self._transmit()

    def _take_acknowledgements(self) -> None:
        waiting, now_s = self._acknowledgements, self._clock.now_s
        while waiting and waiting[0][0] <= now_s:
            self._in_flight_bytes -= waiting.popleft()[1]


class Loopback:
    """A connection between processes of one node: no link, only time to copy."""

    __slots__ = ("_busy_until_s", "_byte_s", "_clock", "_deliver", "_latency_s", "_peer", "_sent")

    def __init__(self, clock: Clock, way: Way, *, byte_s: float) -> None:
        self._clock = clock
        self._byte_s = byte_s
        self._peer, self._sent, self._deliver, kernel = way
        self._latency_s = kernel.latency_s
        self._busy_until_s = 0.0

    def send(self, message: Any, size_bytes: int) -> None:
        started_s = max(self._busy_until_s, self._clock.now_s)
        self._busy_until_s = started_s + size_bytes * self._byte_s
        self._clock.at(self._busy_until_s, self._sent, self._peer)
        self._clock.at(self._busy_until_s + self._latency_s, self._deliver, message)
