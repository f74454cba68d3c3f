"""All-reduce in a ring, as gloo does it, and DistributedDataParallel, which uses it.

An all-reduce takes 2 (N - 1) passes, each from every rank to the next one.

A collective's elements are cut into N parts, and each part into two halves, whose passes follow
each other independently: one is on its way while the other one is added up (Patarasuk and Yuan:
Bandwidth optimal all-reduce algorithms). A rank takes part from when it has issued the collective.

If nodes stand for others, the ring has one rank for each crowd, which makes all the 2 (N - 1)
passes of N. Where all ranks do the same at the same time that changes nothing: what a rank gets
from the one before it is what it sends itself. A rank that comes late holds up a small ring
sooner than a large one, in which others can make some passes first. Of very large rings, if every
node has one worker, several passes in a row are simulated as one message, that has their bytes and
takes as long as they all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foreprop.core.parallax import ROW_NUMBER_BYTES
from foreprop.plan.limit import BYTES_PER_ELEM, HEADERS_BYTES, PACKET_BYTES
from foreprop.plan.refined import fill_buckets
from foreprop_lab.setting.hosts import Kernel
from foreprop_lab.setting.links import wire_bytes
from foreprop_lab.simulate.cluster import Cluster, SimulatedSteps
from foreprop_lab.simulate.connection import Way
from foreprop_lab.simulate.device import Synchronisation
from foreprop_lab.simulate.presets import SEND_BUFFER_BYTES
from foreprop_lab.simulate.rowtables import RowTable
from foreprop_lab.simulate.setting import SimulatedSetting

_HALVES = (0, 1)
_MESSAGE_BYTES = 32  # gloo's own header
_MOST_MESSAGES = 512
"""The most messages of a rank and half in one collective: more passes are simulated together."""


@dataclass(slots=True)
class _Collective:
    halves: tuple[int, ...]
    """The parts that are passed independently."""
    messages: int
    """The number of messages of each rank and half; ``lumped`` passes are one message."""
    lumped: float
    added_s: float
    """The time that it takes to add up what a pass has brought."""
    message_bytes: int
    done: dict[int, Callable[[], None]]
    """The callbacks for the end, by the rank that has issued the collective."""
    received: dict[tuple[int, int], int]
    """Passes received, by rank and half."""


class Ring:
    """The collectives of a cluster; equal keys on all ranks are one collective.

    ``beside`` other connections share each link.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        buffer_bytes: int,
        bytes_per_elem: int = BYTES_PER_ELEM,
        beside: int = 0,
    ) -> None:
        self._clock, self._hosts = cluster.clock, cluster.hosts
        self._bytes_per_elem = bytes_per_elem
        self._size = cluster.workers
        self._simulated = len(cluster.ranks)
        passes = 2 * (self._size - 1)
        self._messages = passes
        if cluster.workers_per_node == 1:  # or passes over links and within nodes would differ
            self._messages = min(passes, _MOST_MESSAGES)
        self._lumped = passes / self._messages
        self._hop_s = 2 * cluster.link.latency_s
        self._under_way: dict[Hashable, _Collective] = {}
        self._processing_until_s: dict[int, float] = {}
        kernel = cluster.hosts.kernel(
            cluster.link,
            connections=1 + beside,
            unsent_bytes=buffer_bytes,
            buffer_bytes=buffer_bytes,
        )
        self._pipes = [_Pipe(cluster, kernel, rank, self._arrived) for rank in cluster.ranks]

    def issue(self, rank: int, key: Hashable, elems: int, done: Callable[[], None]) -> None:
        """Begin ``rank``'s part in the sum of so many elements; ``done`` when it has the sum."""
        if key not in self._under_way:
            part_bytes = -(-elems * self._bytes_per_elem // (self._size * len(_HALVES)))
            message_bytes = _MESSAGE_BYTES + part_bytes
            if self._lumped > 1:  # each pass has headers of its own
                share = PACKET_BYTES / (PACKET_BYTES + HEADERS_BYTES)
                message_bytes = round(self._lumped * wire_bytes(message_bytes) * share)
            added_s = part_bytes / self._bytes_per_elem * self._hosts.sum_elem_s
            self._under_way[key] = _Collective(
                _HALVES, self._messages, self._lumped, added_s, message_bytes, {}, {}
            )
        self._begin(rank, key, done)

    def gather(self, rank: int, key: Hashable, table: RowTable, done: Callable[[], None]) -> None:
        """Begin ``rank``'s part in gathering a table's touched rows, which each rank adds up.

        DDP has gloo do it: what a rank has been given it hands on, `_size` - 1 times. Before that
        row numbers are gathered, and before those their counts, which takes time, too. The time
        that gathered bytes take the rank's processor (`Hosts.gathered_byte_s`) comes last.
        """
        others = self._size - 1
        rows = round(table.alpha * table.rows)
        size_bytes = rows * (table.row_elems * self._bytes_per_elem + ROW_NUMBER_BYTES)
        if key not in self._under_way:
            message_bytes = _MESSAGE_BYTES + size_bytes
            self._under_way[key] = _Collective((0,), others, 1, 0.0, message_bytes, {}, {})
        pass_s = self._hop_s + self._hosts.receive_s
        after_s = (_GATHERS - 1) * others * pass_s
        after_s += others * rows * table.row_elems * self._hosts.sum_elem_s
        processed_s = others * size_bytes * self._hosts.gathered_byte_s

        def gathered() -> None:
            ends_s = self._clock.now_s + after_s
            if processed_s:
                ends_s = max(ends_s, self._processing_until_s.get(rank, 0.0)) + processed_s
                self._processing_until_s[rank] = ends_s
            self._clock.at(ends_s, lambda _: done())

        self._begin(rank, key, gathered)

    def _begin(self, rank: int, key: Hashable, done: Callable[[], None]) -> None:
        collective = self._under_way[key]
        collective.done[rank] = done
        for half in collective.halves:
            received = collective.received.setdefault((rank, half), 0)
            for number in range(received + 1):  # those that came before it was issued, too
                self._send(key, collective, rank, half, number)

    def _send(
        self, key: Hashable, collective: _Collective, rank: int, half: int, step: int
    ) -> None:
        if step < collective.messages:
            message = (key, (rank + 1) % self._simulated, half)
            self._pipes[rank].send(message, collective.message_bytes)

    def _arrived(self, message: Any) -> None:
        """Add what has arrived to the rank's part, which takes time, before it is passed on."""
        collective = self._under_way[message[0]]
        at_s = self._clock.now_s + self._hosts.receive_s + collective.added_s
        pass_s = self._hop_s + self._hosts.receive_s + collective.added_s
        at_s += (collective.lumped - 1) * pass_s
        self._clock.at(at_s, self._received, message)

    def _received(self, message: tuple[Hashable, int, int]) -> None:
        key, rank, half = message
        collective = self._under_way[key]
        passes = collective.received.get((rank, half), 0) + 1
        collective.received[rank, half] = passes
        if rank not in collective.done:
            return
        self._send(key, collective, rank, half, passes)
        messages = collective.messages
        if all(collective.received[rank, each] == messages for each in collective.halves):
            done = collective.done[rank]
            if all(count == messages for count in collective.received.values()):
                del self._under_way[key]
            done()


class _Pipe:
    """A rank's connection to the next one: messages wait in line, as in gloo's event loop."""

    def __init__(
        self, cluster: Cluster, kernel: Kernel, rank: int, arrived: Callable[[Any], None]
    ) -> None:
        following = (rank + 1) % len(cluster.ranks)
        connect = cluster.connect if following != rank else cluster.link_to  # another one like it
        self._waiting: deque[tuple[Any, int]] = deque()
        self._busy = False
        way = Way(following, self._taken, arrived, kernel)
        self._connection = connect(cluster.node_of(rank), cluster.node_of(following), way)

    def send(self, message: Any, size_bytes: int) -> None:
        self._waiting.append((message, size_bytes))
        self._next()

    def _taken(self, _: int) -> None:
        self._busy = False
        self._next()

    def _next(self) -> None:
        if self._waiting and not self._busy:
            self._busy = True
            self._connection.send(*self._waiting.popleft())


_IN_FLIGHT = 2  # torch's default number of threads for gloo
_GATHERS = 3  # for one sparse gradient: how many rows each rank has, their numbers, their values


def simulate_ddp(
    setting: SimulatedSetting,
    cluster: Cluster,
    *,
    steps: int,
    bucket_bytes: int,
    tables: Sequence[RowTable] = (),
) -> SimulatedSteps:
    """Train ``steps`` steps after a first forward pass with buckets of ``bucket_bytes``.

    This is a model of DDP, not its code, while the presets and ``ring`` run ours. Buckets are
    filled with the arrays in reverse order until they hold the bound, and reduced in that order,
    two at a time. Each of ``tables`` is a bucket by itself, and gathered. The backward pass ends
    when the last one is there. Copies and the optimizer are left out.
    """
    sizes_elems = [size for layer in setting.layers for size in layer.sizes_elems]
    by_number = {table.parameter: table for table in tables}
    dense = [number for number in range(len(sizes_elems)) if number not in by_number]
    buckets = [
        [dense[place] for place in places]
        for places in fill_buckets([sizes_elems[number] for number in dense], bucket_bytes)
    ]
    buckets += [[number] for number in by_number]
    buckets.sort(key=max, reverse=True)
    ring = Ring(cluster, buffer_bytes=setting.scaled(SEND_BUFFER_BYTES))
    ranks = [DdpWorker(ring, rank, sizes_elems, buckets, by_number) for rank in cluster.ranks]
    return cluster.train(setting, ranks, steps=steps)


class DdpWorker(Synchronisation):
    """A rank of DDP, whose parameters are complete whenever they are used."""

    def __init__(
        self,
        ring: Ring,
        rank: int,
        sizes_elems: Sequence[int],
        buckets: Sequence[Sequence[int]],
        tables: Mapping[int, RowTable],
    ) -> None:
        self._ring = ring
        self._rank = rank
        self._bucket_of = {array: i for i, arrays in enumerate(buckets) for array in arrays}
        self._tables = [tables.get(arrays[0]) for arrays in buckets]
        self._elems = [sum(sizes_elems[array] for array in arrays) for arrays in buckets]
        self._arrays = [len(arrays) for arrays in buckets]
        self._missing = list(self._arrays)
        self._issued = self._reduced = 0

    def is_complete(self, parameter: int) -> bool:
        del parameter
        return True

    def gradient_ready(self, parameter: int, step: int) -> None:
        self._missing[self._bucket_of[parameter]] -= 1
        self._issue(step)

    def end_step(self, step: int) -> bool:
        del step
        return False  # the backward pass ends when all buckets are reduced

    def _issue(self, step: int) -> None:
        while self._issued < len(self._arrays) and self._issued - self._reduced < _IN_FLIGHT:
            bucket = self._issued
            if self._missing[bucket]:
                return
            self._issued += 1
            about, table = (self._rank, (bucket, step)), self._tables[bucket]
            if table is not None:
                self._ring.gather(*about, table, lambda: self._after(step))
            else:
                self._ring.issue(*about, self._elems[bucket], lambda: self._after(step))

    def _after(self, step: int) -> None:
        self._reduced += 1
        if self._reduced < len(self._arrays):
            self._issue(step)
            return
        self._missing = list(self._arrays)
        self._issued = self._reduced = 0
        self.proceed()
