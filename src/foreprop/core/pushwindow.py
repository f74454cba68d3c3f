"""How far a worker's pushes may run ahead of the answers, where there are more than few servers.

Between few each connection holds little (`core.sendbound`), and pushes never wait.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Sequence

from foreprop.core.manifest import ITEMSIZE_BYTES, Manifest
from foreprop.core.sendqueue import Order, Reply
from foreprop.core.slicing import Slice

_Urgency = tuple[int, int, int]
"""(step, priority, slice): what is smaller is more urgent, and every worker agrees on it."""

_LEAST_SLICES = 2
"""One can be on its way to a server while another is on its way back."""
_MOST_SLICES = 4
"""However many servers there are: beyond, what is urgent comes too late."""


def may_hold_back(order: Order, reply: Reply, *, needs_norm: bool = False) -> bool:
    """Whether workers agree on what goes first, and their pushes are answered unasked.

    With ``needs_norm`` no push of a step is answered before all of them have left.
    """
    return (order, reply) == ("priority", "broadcast") and not needs_norm


def pushed_bytes(manifest: Manifest, slices: Sequence[Slice]) -> list[int]:
    """What a worker's push of each slice takes on the wire, the same on all workers.

    With compression it is what codecs are known to send; during a warm-up they send more.
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
    """Holds a push back while the server owes the answers to enough that are more urgent.

    A slice is updated when every worker has pushed it, so a worker that runs ahead of the others
    completes nothing; its pushes only fill the queues in front of links which the slices that
    the others wait for need as well. And what has left can be overtaken no more. So a push waits
    while enough that are more urgent are unanswered at its server: its share of ``window_bytes``,
    and two slices, or half as many as there are servers up to four; where they are many, a slice
    that is late at one of them holds up more. ``sizes_bytes`` are those of the slices, by number.

    An idle link is worse than that. So while it is short of pushes, only those wait whose own
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
        self._unanswered: defaultdict[int, list[_Urgency]] = defaultdict(list)
        """By server, most urgent first."""
        self._unanswered_bytes: defaultdict[int, int] = defaultdict(int)
        self._urgency_of: dict[int, _Urgency] = {}  # by slice

    def admits(
        self, server: int, step: int, priority: int, slice_: int, *, is_short: bool = False
    ) -> bool:
        """Whether the push may leave now; ``is_short``: too few are under way to any server."""
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
        """The push has left, with its gradient."""
        urgency = self._urgency_of[slice_] = (step, priority, slice_)
        insort(self._unanswered[server], urgency)
        self._unanswered_bytes[server] += self._sizes_bytes[slice_]

    def answered(self, server: int, slice_: int) -> None:
        """The slice's answer is in; of no consequence if its push has carried nothing."""
        urgency = self._urgency_of.pop(slice_, None)
        if urgency is not None:
            self._unanswered[server].remove(urgency)
            self._unanswered_bytes[server] -= self._sizes_bytes[slice_]

    def forget(self, server: int) -> None:
        """It is gone, and answers nothing more."""
        for _, _, slice_ in self._unanswered.pop(server, []):
            self._unanswered_bytes[server] -= self._sizes_bytes[slice_]
            del self._urgency_of[slice_]
