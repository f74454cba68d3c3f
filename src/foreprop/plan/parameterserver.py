"""When parameters are back from the servers: pushes, updates and replies of one modelled step.

A *lane* is a class of connections that do the same at the same time, as those of all workers to
one server do. Lanes 0 to S-1 are the pushes to each of S servers, and S to 2S-1 what each of them
sends. Pieces go through them in the order of the preset.

Links are a fluid: each gives its connections equal rates, and what one cannot use, because another
link holds it up, goes to the others (max-min fairness): TCP's rates in the long run.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreprop.config import PRESETS
from foreprop.core.justenough import MOST_CORES
from foreprop.core.parallax import ROW_NUMBER_BYTES
from foreprop.core.slicing import plan_slices
from foreprop.core.wire import HEADER_BYTES
from foreprop.plan.deployment import Deployment


class Carried(NamedTuple):
    """One push: a slice of an array, or a server's share of a table's rows.

    If it ``is_coded``, a codec makes the bytes of both ways, and takes these times.
    """

    parameter: int
    server: int
    elems: float
    size_bytes: float
    reply_bytes: float
    is_rows: bool = False
    is_coded: bool = False
    encode_s: float = 0.0
    decode_s: float = 0.0
    of_each: float = 1.0
    """The share of what a node's relay pushes on that each of its workers has pushed."""


def arrays_of(deployment: Deployment) -> list[int]:
    return [size for layer in deployment.layers for size in layer.sizes_elems]


def pieces_of(deployment: Deployment) -> list[Carried]:
    """The pieces of all arrays, in their order, and then of the tables, whose numbers follow."""
    sizes = arrays_of(deployment)
    width = deployment.bytes_per_elem
    pushers = deployment.nodes * deployment.pushes_per_node
    pieces = []
    for cut in plan_slices(sizes, [width] * len(sizes), deployment.partition()):
        piece = Carried(cut.parameter, cut.server, cut.elems, cut.elems * width, cut.elems * width)
        if deployment.codecs:
            codec = deployment.codecs[cut.parameter]
            coded = codec.coded(int(cut.elems), ranks=pushers)
            piece = piece._replace(
                size_bytes=coded.push_bytes,
                reply_bytes=coded.reply_bytes,
                is_coded=True,
                encode_s=coded.encode_s,
                decode_s=coded.decode_s,
            )
        pieces.append(piece)
    return pieces + rows_of(deployment, first=len(sizes), servers=deployment.servers)


def rows_of(deployment: Deployment, *, first: int, servers: int) -> list[Carried]:
    """The pieces of the tables' touched rows; row r is on server r mod S: shares are equal."""
    pieces = []
    for number, table in enumerate(deployment.tables, start=first):
        rows = deployment.pushed_share(table) * table.elems / table.row_elems / servers
        elems = rows * table.row_elems
        numbers_bytes = rows * ROW_NUMBER_BYTES
        size_bytes = elems * deployment.bytes_per_elem + numbers_bytes
        of_each = table.alpha / (deployment.pushed_share(table) or 1.0)
        piece = Carried(number, 0, elems, size_bytes, size_bytes, is_rows=True, of_each=of_each)
        if deployment.row_codec is not None:
            coded = deployment.row_codec.coded(int(elems), ranks=1)
            piece = piece._replace(
                size_bytes=coded.push_bytes + numbers_bytes,
                reply_bytes=int(coded.push_bytes + numbers_bytes),
                is_coded=True,
                encode_s=coded.encode_s,
                decode_s=coded.decode_s,
            )
        pieces += [piece._replace(server=server) for server in range(servers)]
    return pieces


def parameters_by_layer(deployment: Deployment) -> list[list[int]]:
    """The numbers of each layer's arrays and tables."""
    numbers: list[list[int]] = []
    count = 0
    for layer in deployment.layers:
        numbers.append(list(range(count, count + len(layer.sizes_elems))))
        count += len(layer.sizes_elems)
    for number, table in enumerate(deployment.tables, start=count):
        numbers[table.layer].append(number)
    return numbers


def connections(deployment: Deployment) -> tuple[list[float], NDArray[np.float64]]:
    """The links' capacities, bytes/s without headers, and how many of a lane's connections pass."""
    if deployment.dedicated_servers:
        return _to_dedicated(deployment)
    count, each = deployment.servers, deployment.pushes_per_node
    others = each * (count - 1)
    # Nodes have unequal shares, and workers push later what they cannot push now. So there is one
    # link that all pass, an average node's, and each server's link with an average worker's rest.
    all_ = np.full((1, count), others / count)
    rest = (np.ones((count, count)) - np.eye(count)) * each / max(1, count - 1)
    own = others * np.eye(count)
    rows = [np.hstack([all_, all_]), np.hstack([own, rest]), np.hstack([rest, own])]
    return [deployment.link_bytes_per_s()] * (2 * count + 1), np.vstack(rows)


def _to_dedicated(deployment: Deployment) -> tuple[list[float], NDArray[np.float64]]:
    count, each = deployment.servers, deployment.pushes_per_node
    node = np.full((1, count), float(each))
    server = float(deployment.nodes * each) * np.eye(count)
    rows = [
        np.hstack([node, 0 * node]),  # what a node sends
        np.hstack([0 * node, node]),  # and receives
        np.hstack([server, 0 * server]),  # what each server receives
        np.hstack([0 * server, server]),  # and sends
    ]
    worker_bytes_per_s = deployment.link_bytes_per_s()
    server_bytes_per_s = deployment.link_bytes_per_s(server=True)
    return [worker_bytes_per_s] * 2 + [server_bytes_per_s] * (2 * count), np.vstack(rows)


def link_s(deployment: Deployment) -> tuple[float, float]:
    """How long a step keeps the busiest node's link busy, and the busiest dedicated server's."""
    pushed_bytes, replied_bytes = np.zeros(deployment.servers), np.zeros(deployment.servers)
    for piece in pieces_of(deployment):
        pushed_bytes[piece.server] += piece.size_bytes
        replied_bytes[piece.server] += piece.reply_bytes
    each, nodes = deployment.pushes_per_node, deployment.nodes
    node_s, ways = 1 / deployment.link_bytes_per_s(), (pushed_bytes, replied_bytes)
    if not deployment.dedicated_servers:  # what its workers push, and its server sends; or gets
        out_bytes, in_bytes = (
            mine.sum() - mine.max() + (nodes - 1) * others.max()
            for mine, others in (ways, ways[::-1])
        )
        return float(node_s * each * max(out_bytes, in_bytes)), 0.0
    most = max(way.max() for way in ways)
    server_s = nodes * each * most / deployment.link_bytes_per_s(server=True)
    return float(node_s * each * max(way.sum() for way in ways)), float(server_s)


def updates_s(deployment: Deployment) -> float:
    """How long the busiest server sums and updates in a step."""
    busy_s = [0.0] * deployment.servers
    for piece in pieces_of(deployment):
        busy_s[piece.server] += _updating_s(deployment, piece) + _replying_s(deployment, piece)
    return max(busy_s)


def row_updates_s(deployment: Deployment) -> list[float]:
    """How long each server sums and updates the touched rows of each table."""
    servers = deployment.servers
    shares = rows_of(deployment, first=0, servers=servers)[::servers]
    return [_updating_s(deployment, piece) + _replying_s(deployment, piece) for piece in shares]


def _updating_s(deployment: Deployment, piece: Carried) -> float:
    pushers = deployment.nodes * deployment.pushes_per_node
    elems = int(piece.elems * (pushers if piece.is_rows else 1))  # at most: rows may be the same
    received_s = pushers * piece.size_bytes * deployment.hosts.server_byte_s
    return received_s + deployment.hosts.updating_s(elems, 1 if piece.is_rows else pushers)


def _replying_s(deployment: Deployment, piece: Carried) -> float:
    pushers = deployment.nodes * deployment.pushes_per_node
    return pushers * piece.reply_bytes * deployment.hosts.server_byte_s


def relays_s(deployment: Deployment) -> float:
    """How long the process of a node's relays computes in a step."""
    if not deployment.relayed:
        return 0.0
    rows_only = deployment.architecture == "hybrid"
    pieces = rows_of(deployment, first=0, servers=1) if rows_only else pieces_of(deployment)
    return sum(relaying_s(deployment, piece) for piece in pieces)


def relaying_s(deployment: Deployment, piece: Carried) -> float:
    """How long a node's relay sums and pushes on what its workers push, and passes answers on."""
    if not deployment.relayed:
        return 0.0
    hosts, workers = deployment.hosts, deployment.workers_per_node
    whole_bytes = piece.size_bytes
    if piece.is_coded:  # between workers and relays nothing is encoded
        whole_bytes = piece.elems * deployment.bytes_per_elem
    byte_s = hosts.relay_byte_s + workers * piece.of_each * hosts.relay_worker_byte_s
    return whole_bytes * byte_s


_LEAST_BYTES = 1e-3  # a message that has ended may have so much left, by rounding


def fair_rates(
    capacities_bytes_per_s: NDArray[np.float64],
    connections: NDArray[np.float64],
    active: NDArray[np.bool_],
    most_bytes_per_s: float,
) -> NDArray[np.float64]:
    """The rate of one connection of each active lane, in bytes/s; the others have 0.

    ``connections`` (links, lanes) has how many of a lane's connections pass a link. None gets more
    than ``most_bytes_per_s``, even if no link holds it up.
    """
    rates = np.zeros(len(active))
    growing = active.copy()
    left = capacities_bytes_per_s.astype(np.float64)
    while growing.any():
        load = connections[:, growing].sum(axis=1)
        used = load > 0
        growth = float((left[used] / load[used]).min()) if used.any() else math.inf
        rates[growing] += growth
        left -= np.where(used, growth, 0.0) * load
        full = used & (left <= 1e-9 * capacities_bytes_per_s)
        growing &= ~(connections[full] > 0).any(axis=0)
        if math.isinf(growth):
            break
    return np.minimum(rates, most_bytes_per_s)


class Lanes:
    """Simulates messages in lanes, one at a time in each, and what happens at fixed times.

    A lane's messages go in the order of their keys, the smaller first, and are not interrupted.
    Each begins at least ``apart_s`` after the bytes of the one before could have been copied.
    """

    def __init__(
        self,
        capacities_bytes_per_s: Sequence[float],
        connections: NDArray[np.float64],
        *,
        most_bytes_per_s: float,
        apart_s: float = 0.0,
    ) -> None:
        lanes = connections.shape[1]
        self.now_s = 0.0
        self._capacities = np.asarray(capacities_bytes_per_s, dtype=np.float64)
        self._connections = connections
        self._most = most_bytes_per_s
        self._apart_s = apart_s
        self._next_s = [-math.inf] * lanes
        self._left_bytes = np.full(lanes, np.inf)
        self._waiting: list[list[tuple[tuple[int, ...], int, float, Callable[[], None]]]]
        self._waiting = [[] for _ in range(lanes)]
        self._ended: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._known: dict[bytes, NDArray[np.float64]] = {}

    def at(self, time_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), happen))

    def send(
        self, lane: int, key: tuple[int, ...], size_bytes: float, ended: Callable[[], None]
    ) -> None:
        """Send ``size_bytes`` on each of a lane's connections; then call ``ended``."""
        heapq.heappush(self._waiting[lane], (key, next(self._numbers), size_bytes, ended))
        self._begin(lane)

    def run(self) -> None:
        while True:
            active = np.isfinite(self._left_bytes)
            busy = bool(active.any())
            if not busy and not self._events:
                return
            rates = self._rates(active) if busy else np.ones(len(active))
            ends_s = self.now_s + float((self._left_bytes / rates).min())
            if self._events and self._events[0][0] < ends_s:
                due_s, _, happen = heapq.heappop(self._events)
                self._flow(rates, active, due_s)
                happen()
            else:
                self._flow(rates, active, ends_s)
                self._end()

    def _flow(self, rates: NDArray[np.float64], active: NDArray[np.bool_], until_s: float) -> None:
        if until_s > self.now_s:
            self._left_bytes[active] -= rates[active] * (until_s - self.now_s)
            self.now_s = until_s

    def _end(self) -> None:
        ready = np.flatnonzero(self._left_bytes <= _LEAST_BYTES)
        for lane in map(int, ready if len(ready) else [self._left_bytes.argmin()]):
            ended = self._ended.pop(lane)
            self._left_bytes[lane] = np.inf
            self._begin(lane)
            ended()

    def _begin(self, lane: int) -> None:
        if not self._waiting[lane] or math.isfinite(self._left_bytes[lane]):
            return
        if self._next_s[lane] > self.now_s:
            self.at(self._next_s[lane], partial(self._begin, lane))
            return
        _, _, size_bytes, self._ended[lane] = heapq.heappop(self._waiting[lane])
        self._left_bytes[lane] = size_bytes
        self._next_s[lane] = self.now_s + size_bytes / self._most + self._apart_s

    def _rates(self, active: NDArray[np.bool_]) -> NDArray[np.float64]:
        key = active.tobytes()
        rates = self._known.get(key)
        if rates is None:
            shares = fair_rates(self._capacities, self._connections, active, self._most)
            rates = self._known[key] = np.where(active, shares, 1.0)
        return rates


class _Processor:
    """The processor of a server, a node's relays or a coder; the most urgent work goes first.

    All ``key``s that wait must differ.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._waiting: list[tuple[tuple[int, ...], float, Callable[[], None]]] = []
        self._busy = False

    def take(self, key: tuple[int, ...], seconds: float, then: Callable[[], None]) -> None:
        if not seconds:
            then()
            return
        heapq.heappush(self._waiting, (key, seconds, then))
        if not self._busy:
            self._begin()

    def _begin(self) -> None:
        self._busy = bool(self._waiting)
        if self._busy:
            _, seconds, then = heapq.heappop(self._waiting)

            def end() -> None:
                then()
                self._begin()

            self._lanes.at(self._lanes.now_s + seconds, end)


def complete_s(deployment: Deployment, ready_s: Sequence[float], backward_s: float) -> list[float]:
    """When each array, and then each table, is back on the workers.

    Gradients are ready at ``ready_s``, and the backward pass ends at ``backward_s``.
    """
    exchange = _Exchange(deployment, ready_s, backward_s)
    exchange.lanes.run()
    return exchange.complete_s


_Stage = Callable[[Callable[[], None]], None]
"""Begins a stage of a piece's way, and calls what it is given at the stage's end."""


class _Exchange:
    """One step of one worker that stands for all.

    A piece's way is an iterator of stages (`_pushed`): each begins when the one before has ended.
    """

    def __init__(self, deployment: Deployment, ready_s: Sequence[float], backward_s: float) -> None:
        capacities, passing = connections(deployment)
        self.lanes = Lanes(
            capacities,
            passing,
            most_bytes_per_s=deployment.copied_bytes_per_s,
            apart_s=deployment.hosts.send_s,
        )
        self.complete_s = [0.0] * len(ready_s)
        self._relays = _Processor(self.lanes)
        self._updaters = [_Processor(self.lanes) for _ in range(deployment.servers)]
        preset = PRESETS[deployment.preset]
        self._deployment = deployment
        self._reply = preset["reply"]
        self._by_priority = preset["order"] == "priority"
        self._servers = deployment.servers
        self._pushers = deployment.nodes * deployment.pushes_per_node
        self._pieces = pieces_of(deployment)
        self._parts: list[list[int]] = [[] for _ in ready_s]
        for number, piece in enumerate(self._pieces):
            self._parts[piece.parameter].append(number)
        self._missing = [len(parts) for parts in self._parts]
        self._announced = [0] * len(ready_s)
        self._updated: set[int] = set()
        self._asked: set[int] = set()
        self._sent = 0
        self._taken = 0
        self._coders: dict[tuple[str, int], _Processor] = {}
        self._priorities = priorities(deployment)
        order = sorted(range(len(ready_s)), key=lambda p: (ready_s[p], self._priorities[p]))
        for parameter in order:
            self.lanes.at(ready_s[parameter], partial(self._push, parameter))
        if self._reply == "pull":
            for parameter in order:
                self.lanes.at(backward_s, partial(self._pull, parameter))

    def _run(self, stages: Iterator[_Stage]) -> None:
        stage = next(stages, None)
        if stage is not None:
            stage(partial(self._run, stages))

    def _push(self, parameter: int) -> None:
        for number in self._parts[parameter]:
            self._run(self._pushed(number))

    def _pull(self, parameter: int) -> None:
        for number in self._parts[parameter]:
            if not self._pieces[number].is_rows:
                self._run(self._pulled(number))

    def _pushed(self, number: int) -> Iterator[_Stage]:
        piece = self._pieces[number]
        yield self._relay(number)
        encoding_s = self._encoding_s(piece, self._servers)
        yield self._code(number, "encode pushes", piece.server % MOST_CORES, encoding_s)
        yield self._send(number, False, piece.size_bytes)
        decoding_s = piece.decode_s * max(1.0, self._pushers / MOST_CORES)
        yield self._code(number, "decode pushes", piece.server, decoding_s)
        yield self._serve(number, _updating_s(self._deployment, piece))
        self._updated.add(number)
        if self._reply == "broadcast" or piece.is_rows or number in self._asked:
            yield from self._answered(number)
        elif self._reply == "notify":
            yield self._send(number, True, 0.0)
            # an array is pulled when all its parts have been announced
            self._announced[piece.parameter] += 1
            if self._announced[piece.parameter] == len(self._parts[piece.parameter]):
                self._pull(piece.parameter)

    def _pulled(self, number: int) -> Iterator[_Stage]:
        yield self._send(number, False, 0.0)
        self._asked.add(number)
        if number in self._updated:
            yield from self._answered(number)

    def _answered(self, number: int) -> Iterator[_Stage]:
        piece = self._pieces[number]
        yield self._serve(number, _replying_s(self._deployment, piece))
        encoding_s = self._encoding_s(piece, self._pushers)
        yield self._code(number, "encode replies", piece.server, encoding_s)
        yield self._send(number, True, piece.reply_bytes)
        yield self._code(number, "decode replies", piece.server % MOST_CORES, piece.decode_s)
        yield self._relay(number)
        self._missing[piece.parameter] -= 1
        if not self._missing[piece.parameter]:
            self.complete_s[piece.parameter] = self.lanes.now_s

    def _relay(self, number: int) -> _Stage:
        takes_s = relaying_s(self._deployment, self._pieces[number]) / 2  # half is for a push
        return partial(self._relays.take, self._turn(number), takes_s)

    def _serve(self, number: int, takes_s: float) -> _Stage:
        updater = self._updaters[self._pieces[number].server]
        return partial(updater.take, self._turn(number), takes_s)

    def _code(self, number: int, what: str, thread: int, takes_s: float) -> _Stage:
        # a process has a thread for each peer, of which at most `MOST_CORES` work at once
        coder = self._coders.setdefault((what, thread), _Processor(self.lanes))
        return partial(coder.take, self._turn(number), takes_s)

    def _send(self, number: int, back: bool, size_bytes: float) -> _Stage:
        piece = self._pieces[number]
        self._sent += 1
        rank = self._priorities[piece.parameter] if self._by_priority else self._sent
        lane = piece.server + self._servers * back

        def stage(then: Callable[[], None]) -> None:
            def left() -> None:
                self.lanes.at(self.lanes.now_s + self._deployment.message_s, then)

            self.lanes.send(lane, (rank, number), HEADER_BYTES + size_bytes, left)

        return stage

    def _turn(self, number: int) -> tuple[int, int]:
        self._taken += 1
        rank = self._priorities[self._pieces[number].parameter] if self._by_priority else 0
        return rank, self._taken

    def _encoding_s(self, piece: Carried, peers: int) -> float:
        """How long until a thread can encode the next piece.

        It sends this one first, but where several threads share a core another one encodes then.
        """
        if not piece.encode_s:
            return 0.0
        shared = max(1.0, peers / MOST_CORES)
        hosts = self._deployment.hosts
        sent_s = piece.size_bytes * hosts.copy_byte_s + hosts.send_s
        return max(piece.encode_s, (piece.encode_s + sent_s) / shared)


def priorities(deployment: Deployment) -> list[int]:
    """Each parameter's place in the forward pass."""
    order = [number for numbers in parameters_by_layer(deployment) for number in numbers]
    return sorted(range(len(order)), key=order.__getitem__)
