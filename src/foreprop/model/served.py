"""When parameters are back from the servers: pushes, updates and replies of one step.

Lanes 0 to S-1 are the pushes to each of S servers, S to 2S-1 what each of them sends; a lane is
as many connections as there are workers. Pieces go through them as the preset has it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreprop.config import PRESETS
from foreprop.core.codecfacts import Coded
from foreprop.core.justenough import MOST_CORES
from foreprop.core.parallax import ROW_NUMBER_BYTES
from foreprop.core.slicing import plan_slices
from foreprop.core.wire import HEADER_BYTES
from foreprop.model.deployment import Deployment
from foreprop.model.lanes import Lanes


class Piece(NamedTuple):
    """What one push carries: a slice of an array, or a server's share of a table's rows."""

    parameter: int
    server: int
    elems: float
    size_bytes: float
    is_rows: bool = False
    coded: Coded | None = None
    """What its codec makes of it, if it has one."""
    of_each: float = 1.0
    """Of what a node's relay pushes on, how much each of its workers has pushed."""

    @property
    def reply_bytes(self) -> float:
        return self.size_bytes if self.coded is None else self.coded.reply_bytes

    @property
    def encode_s(self) -> float:
        return 0.0 if self.coded is None else self.coded.encode_s

    @property
    def decode_s(self) -> float:
        return 0.0 if self.coded is None else self.coded.decode_s


def arrays_of(deployment: Deployment) -> list[int]:
    """Their elements, in forward order."""
    return [size for layer in deployment.layers for size in layer.sizes_elems]


def pieces_of(deployment: Deployment) -> list[Piece]:
    """Of all arrays, in order, and then of the tables, whose numbers follow the arrays'."""
    sizes = arrays_of(deployment)
    width = deployment.bytes_per_elem
    slices = plan_slices(sizes, [width] * len(sizes), deployment.partition())
    pieces = [Piece(s.parameter, s.server, s.elems, s.elems * width) for s in slices]
    if deployment.codecs:
        pieces = [_encoded(deployment, piece) for piece in pieces]
    return pieces + rows_of(deployment, first=len(sizes), servers=deployment.servers)


def _encoded(deployment: Deployment, piece: Piece) -> Piece:
    pushers = deployment.nodes * deployment.pushes_per_node
    codec = deployment.codecs[piece.parameter]
    coded = codec.coded(int(piece.elems), ranks=pushers)
    return piece._replace(size_bytes=coded.push_bytes, coded=coded)


def rows_of(deployment: Deployment, *, first: int, servers: int) -> list[Piece]:
    """The tables' touched rows; row r is on server r mod S, so each has an equal share."""
    pieces = []
    for number, table in enumerate(deployment.tables, start=first):
        rows = deployment.pushed_share(table) * table.elems / table.row_elems / servers
        elems = rows * table.row_elems
        numbers_bytes = rows * ROW_NUMBER_BYTES
        size_bytes, coded = elems * deployment.bytes_per_elem + numbers_bytes, None
        if deployment.row_codec is not None:
            code = deployment.row_codec.coded(int(elems), ranks=1)
            size_bytes = code.push_bytes + numbers_bytes
            coded = code._replace(push_bytes=int(size_bytes), reply_bytes=int(size_bytes))
        of_each = table.alpha / (deployment.pushed_share(table) or 1.0)
        piece = Piece(number, 0, elems, size_bytes, is_rows=True, coded=coded, of_each=of_each)
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
    """Links' capacities, bytes/s without headers, and how many of each lane's connections pass."""
    if deployment.dedicated_servers:
        return _to_dedicated(deployment)
    count, each = deployment.servers, deployment.pushes_per_node
    others = each * (count - 1)
    # Nodes have unequal shares, and what their workers do not get to push now they push later: so
    # a link that all pass, as an average node's, and each server's with an average worker's rest.
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
    """By table: how long each server takes for its touched rows."""
    servers = deployment.servers
    shares = rows_of(deployment, first=0, servers=servers)[::servers]
    return [_updating_s(deployment, piece) + _replying_s(deployment, piece) for piece in shares]


def _updating_s(deployment: Deployment, piece: Piece) -> float:
    pushers = deployment.nodes * deployment.pushes_per_node
    elems = int(piece.elems * (pushers if piece.is_rows else 1))  # at most: rows may be the same
    received_s = pushers * piece.size_bytes * deployment.hosts.server_byte_s
    return received_s + deployment.hosts.updating_s(elems, 1 if piece.is_rows else pushers)


def _replying_s(deployment: Deployment, piece: Piece) -> float:
    """What answers to all take the server's processor."""
    pushers = deployment.nodes * deployment.pushes_per_node
    return pushers * piece.reply_bytes * deployment.hosts.server_byte_s


def relays_s(deployment: Deployment) -> float:
    """How long the process of a node's relays computes in a step."""
    if not deployment.relayed:
        return 0.0
    rows_only = deployment.architecture == "hybrid"
    pieces = rows_of(deployment, first=0, servers=1) if rows_only else pieces_of(deployment)
    return sum(relaying_s(deployment, piece) for piece in pieces)


def relaying_s(deployment: Deployment, piece: Piece) -> float:
    """Of the processor, to sum and push on what a node's workers push, and to pass answers on.

    Between workers and relays nothing is encoded.
    """
    if not deployment.relayed:
        return 0.0
    hosts, workers = deployment.hosts, deployment.workers_per_node
    coded = piece.coded is not None
    whole_bytes = piece.elems * deployment.bytes_per_elem if coded else piece.size_bytes
    byte_s = hosts.relay_byte_s + workers * piece.of_each * hosts.relay_worker_byte_s
    return whole_bytes * byte_s


class _Relays:
    """Of a node: one process, whose work takes turns, the most urgent first."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._waiting: list[tuple[tuple[int, ...], float, Callable[[], None]]] = []
        self._busy = False

    def take(self, key: tuple[int, ...], seconds: float, then: Callable[[], None]) -> None:
        """``key``: unlike any other that waits."""
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
            self._lanes.at(self._lanes.now_s + seconds, partial(self._end, then))

    def _end(self, then: Callable[[], None]) -> None:
        then()
        self._begin()


def complete_s(deployment: Deployment, ready_s: Sequence[float], backward_s: float) -> list[float]:
    """When each array, and then each table, is back on the workers.

    ``ready_s``: when each one's gradient is there; ``backward_s``: when the backward pass ends.
    """
    exchange = _Exchange(deployment, ready_s, backward_s)
    exchange.lanes.run()
    return exchange.complete_s


class _Exchange:
    """One step, by a worker that stands for all."""

    def __init__(self, deployment: Deployment, ready_s: Sequence[float], backward_s: float) -> None:
        capacities, passing = connections(deployment)
        self.lanes = Lanes(capacities, passing, most_bytes_per_s=deployment.copied_bytes_per_s)
        self.complete_s = [0.0] * len(ready_s)
        self._relays = _Relays(self.lanes)
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
        self._busy_until_s = [0.0] * self._servers
        self._sent = 0
        self._relayed = 0
        self._coding_until_s: dict[tuple[str, int], float] = {}
        self._priorities = priorities(deployment)
        order = sorted(range(len(ready_s)), key=lambda p: (ready_s[p], self._priorities[p]))
        for parameter in order:
            self.lanes.at(ready_s[parameter], partial(self._push, parameter))
        if self._reply == "pull":
            for parameter in order:
                self.lanes.at(backward_s, partial(self._pull, parameter))

    def _push(self, parameter: int) -> None:
        for number in self._parts[parameter]:
            self._relay(number, partial(self._push_on, number))

    def _push_on(self, number: int) -> None:
        """From the node."""
        piece = self._pieces[number]
        send = partial(self._send, number, False, piece.size_bytes, self._received)
        self._after("encode pushes", piece.server % MOST_CORES, piece.encode_s, send)

    def _relay(self, number: int, then: Callable[[], None]) -> None:
        """By the node's relays, if it has some: half of their work is for a push."""
        piece = self._pieces[number]
        self._relayed += 1
        rank = self._priorities[piece.parameter] if self._by_priority else self._relayed
        self._relays.take((rank, self._relayed), relaying_s(self._deployment, piece) / 2, then)

    def _after(self, what: str, server: int, seconds: float, then: Callable[[], None]) -> None:
        """When a thread has done its work for this server, one thing after the other.

        Of the threads of a worker, one for each server, no more than so many have a core.
        """
        if not seconds:
            then()
            return
        begins_s = max(self.lanes.now_s, self._coding_until_s.get((what, server), 0.0))
        self._coding_until_s[what, server] = begins_s + seconds
        self.lanes.at(begins_s + seconds, then)

    def _received(self, number: int) -> None:
        piece = self._pieces[number]
        decoded = partial(self._pushed, number)
        seconds = piece.decode_s * max(1.0, self._pushers / MOST_CORES)
        self._after("decode pushes", piece.server, seconds, decoded)

    def _send(
        self, number: int, back: bool, size_bytes: float, done: Callable[[int], None]
    ) -> None:
        piece = self._pieces[number]
        self._sent += 1
        rank = self._priorities[piece.parameter] if self._by_priority else self._sent
        lane = piece.server + self._servers * back

        def arrive() -> None:
            self.lanes.at(self.lanes.now_s + self._deployment.message_s, partial(done, number))

        self.lanes.send(lane, (rank, number), HEADER_BYTES + size_bytes, arrive)

    def _pushed(self, number: int) -> None:
        """All workers' pushes are there."""
        takes_s = _updating_s(self._deployment, self._pieces[number])
        self._in_turn(number, takes_s, partial(self._after_update, number))

    def _in_turn(self, number: int, takes_s: float, then: Callable[[], None]) -> None:
        """What a server does, one thing after the other."""
        server = self._pieces[number].server
        begins_s = max(self.lanes.now_s, self._busy_until_s[server])
        self._busy_until_s[server] = begins_s + takes_s
        self.lanes.at(begins_s + takes_s, then)

    def _after_update(self, number: int) -> None:
        self._updated.add(number)
        if self._reply == "broadcast" or self._pieces[number].is_rows or number in self._asked:
            self._answer(number)
        elif self._reply == "notify":
            self._send(number, True, 0.0, self._notified)

    def _notified(self, number: int) -> None:
        """An array is pulled when all its parts have been announced."""
        parameter = self._pieces[number].parameter
        self._announced[parameter] += 1
        if self._announced[parameter] == len(self._parts[parameter]):
            self._pull(parameter)

    def _pull(self, parameter: int) -> None:
        for number in self._parts[parameter]:
            if not self._pieces[number].is_rows:
                self._send(number, False, 0.0, self._pulled)

    def _pulled(self, number: int) -> None:
        self._asked.add(number)
        if number in self._updated:
            self._answer(number)

    def _answer(self, number: int) -> None:
        takes_s = _replying_s(self._deployment, self._pieces[number])
        if takes_s:
            self._in_turn(number, takes_s, partial(self._reply_to, number))
        else:
            self._reply_to(number)

    def _reply_to(self, number: int) -> None:
        piece = self._pieces[number]
        send = partial(self._send, number, True, piece.reply_bytes, self._answered)
        self._after("encode replies", piece.server, piece.encode_s, send)

    def _answered(self, number: int) -> None:
        piece = self._pieces[number]
        arrive = partial(self._relay, number, partial(self._arrived, number))
        self._after("decode replies", piece.server % MOST_CORES, piece.decode_s, arrive)

    def _arrived(self, number: int) -> None:
        parameter = self._pieces[number].parameter
        self._missing[parameter] -= 1
        if not self._missing[parameter]:
            self.complete_s[parameter] = self.lanes.now_s


def priorities(deployment: Deployment) -> list[int]:
    """By parameter: its place in the forward pass."""
    order = [number for numbers in parameters_by_layer(deployment) for number in numbers]
    return sorted(range(len(order)), key=order.__getitem__)
