"""How far a worker's pushes may run ahead of the answers, where there are more than few servers.

With few servers each connection holds little (`core.sendqueue`), and pushes never wait.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Sequence

from foreprop.core.manifest import ITEMSIZE_BYTES, Manifest
from foreprop.core.sendqueue import Order, Reply, runs_ahead
from foreprop.core.slicing import Slice

_Urgency = tuple[int, int, int]
"""(step, priority, slice): the smaller is more urgent, and every worker agrees on it."""

_LEAST_SLICES = 2  # one slice can be on its way to a server while another one is on its way back
_MOST_SLICES = 4  # with more, however many servers there are, what is urgent comes too late


def may_hold_back(order: Order, reply: Reply, *, needs_norm: bool = False) -> bool:
    """Whether pushes may wait for answers.

    Workers must agree on what goes first, and servers must answer unasked. With ``needs_norm`` no
    push of a step is answered before all of them have left.
    """
    return (order, reply) == ("priority", "broadcast") and not needs_norm


def pushed_bytes(manifest: Manifest, slices: Sequence[Slice]) -> list[int]:
    """The bytes of a push of each slice on the wire, the same on all workers.

    With compression they are what codecs are known to send; during a warm-up they send more.
    """
    itemsizes = [ITEMSIZE_BYTES[dtype] for dtype in manifest.wire_dtypes()]
    raw = [piece.elems * itemsizes[piece.parameter] for piece in slices]
    choices = manifest.knobs.compression
    if not choices or manifest.workers_per_push > 1:  # on a node nothing is encoded
        return raw
    from foreprop.core.codecfacts import encoded_share

    infos = manifest.parameters
    shares = [
        encoded_share(choices, infos[piece.parameter].name, infos[piece.parameter].shape, piece)
        for piece in slices
    ]
    return [math.ceil(share * size) for share, size in zip(shares, raw, strict=True)]


class PushWindow:
    """Holds a push back while its server owes the answers to enough more urgent pushes.

    A slice is updated when every worker has pushed it, so a worker that runs ahead of the others
    completes nothing: its pushes only fill the queues in front of links, which the slices that the
    others wait for have to pass. And a push that has left cannot be overtaken any more. So a push
    waits while enough more urgent ones are unanswered at its server: the server's share of
    ``window_bytes``, and at least two slices; with many servers half as many slices as servers, up
    to four, for a slice that is late at one server holds up more there. ``sizes_bytes`` are those
    of the slices, by number.

    An idle link is worse than a queue. So while it is short of pushes, only those wait whose own
    parameter is the most urgent one that the server owes.

    Nobody waits for ever: of the slices that a server has not updated, no worker ever holds back
    the most urgent one, because all that are more urgent will be answered. This needs all workers
    to rank slices alike, which they do with rank 0's priorities, but not in fifo order
    (`may_hold_back`).
    """

    def __init__(self, sizes_bytes: Sequence[int], window_bytes: int, *, servers: int = 1) -> None:
        self._sizes_bytes = sizes_bytes
        self._window_bytes = window_bytes // servers
        self._least_slices = max(_LEAST_SLICES, min(_MOST_SLICES, servers // 2))
        self._unanswered: defaultdict[int, list[_Urgency]] = defaultdict(list)  # by server, sorted
        self._unanswered_bytes: defaultdict[int, int] = defaultdict(int)
        self._open: dict[int, tuple[int, _Urgency]] = {}  # by slice: server and urgency

    def admits(
        self, server: int, step: int, priority: int, slice_: int, *, is_short: bool = False
    ) -> bool:
        """Whether the push may leave now; with ``is_short`` the link is short of pushes."""
        if self._unanswered_bytes[server] < self._window_bytes:
            return True
        unanswered = self._unanswered[server]
        ahead = unanswered[: bisect_right(unanswered, (step, priority, slice_))]
        return (
            len(ahead) < self._least_slices
            or (is_short and ahead[0][:2] != (step, priority))
            or sum(self._sizes_bytes[urgency[2]] for urgency in ahead) < self._window_bytes
        )

    def left(self, server: int, step: int, priority: int, slice_: int) -> None:
        """Note that the push of a gradient has left."""
        self._close(slice_)  # it leaves once more, for its server has changed
        urgency = (step, priority, slice_)
        self._open[slice_] = (server, urgency)
        insort(self._unanswered[server], urgency)
        self._unanswered_bytes[server] += self._sizes_bytes[slice_]

    def answered(self, slice_: int) -> None:
        self._close(slice_)

    def _close(self, slice_: int) -> None:
        found = self._open.pop(slice_, None)
        if found is not None:  # else the push had no gradient
            server, urgency = found
            self._unanswered[server].remove(urgency)
            self._unanswered_bytes[server] -= self._sizes_bytes[slice_]

    def forget(self, server: int) -> None:
        """Note that a server is lost and answers nothing more."""
        for _, _, slice_ in self._unanswered.pop(server, []):
            self._unanswered_bytes[server] -= self._sizes_bytes[slice_]
            del self._open[slice_]


def push_window(
    manifest: Manifest, slices: Sequence[Slice], window_bytes: int, *, servers: int
) -> PushWindow | None:
    """The window of a session's workers; None if their pushes never wait."""
    knobs = manifest.knobs
    if knobs.lanes == "one" or knobs.staleness or runs_ahead(knobs.order, servers):
        return None
    if not may_hold_back(knobs.order, knobs.reply, needs_norm=manifest.needs_norm):
        return None
    return PushWindow(pushed_bytes(manifest, slices), window_bytes, servers=servers)
