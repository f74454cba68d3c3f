"""When parameters are reduced: ``ring``, ``hybrid`` and DistributedDataParallel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from foreprop.core.order import Chunk, Observation, cut_chunks, plan_order
from foreprop.core.parallax import ROW_NUMBER_BYTES
from foreprop.model.deployment import Deployment, Table
from foreprop.model.served import (
    arrays_of,
    priorities,
    relaying_s,
    row_updates_s,
    rows_of,
)
from foreprop.workload.setting import fill_buckets

# Collectives that share the links of a ring.
_ROUNDING = 1e-9
"""Seconds, and shares of a collective, that are as good as none."""


class Collective(NamedTuple):
    """One all-reduce, or what else passes every link alike."""

    ready_s: float
    link_s: float
    """How long it would have every link busy."""
    least_s: float
    """How long it takes with the links to itself: rounds that wait for each other."""
    elems: int


def ends_s(
    collectives: Sequence[Collective], *, in_flight: int, in_flight_elems: int | None = None
) -> list[float]:
    """When each is done. They are issued in the order given, each when it is ready.

    At most ``in_flight``, and unless it is one ``in_flight_elems``, are under way; those share the
    links evenly.
    """
    ended = [0.0] * len(collectives)
    left: dict[int, float] = {}  # share of those under way that is not done, by number
    now_s, following = 0.0, 0
    while following < len(collectives) or left:
        while following < len(collectives) and collectives[following].ready_s <= now_s:
            elems = sum(collectives[number].elems for number in left)
            too_many = elems + collectives[following].elems > (in_flight_elems or math.inf)
            if len(left) >= in_flight or (left and too_many):
                break
            left[following] = 1.0
            following += 1
        takes_s = _durations({number: collectives[number] for number in left})
        due_s = {number: now_s + left[number] * takes_s[number] for number in left}
        until_s = min(due_s.values(), default=math.inf)
        if following < len(collectives) and collectives[following].ready_s > now_s:
            until_s = min(until_s, collectives[following].ready_s)
        for number in list(left):
            left[number] -= (until_s - now_s) / takes_s[number]
            # What is left may take less than the clock's last digit.
            if left[number] <= _ROUNDING or due_s[number] <= until_s:
                ended[number] = until_s
                del left[number]
        now_s = until_s
    return ended


def _durations(under_way: dict[int, Collective]) -> dict[int, float]:
    """How long each would take from beginning to end if it went on as it does now.

    They get even shares of the links, but none more than it can use.
    """
    most = {n: c.link_s / _least_s(c) for n, c in under_way.items()}
    durations: dict[int, float] = {}
    rest = 1.0
    for place, number in enumerate(sorted(most, key=most.__getitem__)):
        share = min(most[number], rest / (len(most) - place))
        rest -= share
        collective = under_way[number]
        durations[number] = max(collective.link_s / share if share else 0.0, _least_s(collective))
    return durations


def _least_s(collective: Collective) -> float:
    return max(collective.least_s, collective.link_s, _ROUNDING)


_DDP_IN_FLIGHT = 2  # torch's default number of threads for gloo
_HALVES = 2  # of each part, as gloo sends them: one is on its way while the other is added up
_GATHERS = 3  # for one sparse gradient: how many rows each rank has, their numbers, their values


def all_reduce_s(deployment: Deployment, elems: float) -> tuple[float, float]:
    """How long it keeps every link busy, and how long it takes alone.

    2 (R - 1) rounds among R ranks, each of a part of 1/R. Ranks are ordered by node, so a node's
    link carries what one rank sends. A half that has arrived is added up before it goes on; if that
    takes longer than sending the other half, the link idles.
    """
    ranks, hosts = deployment.workers, deployment.hosts
    part_bytes = elems * deployment.bytes_per_elem / ranks
    rounds = 2 * (ranks - 1)
    carries = _carried_bytes_per_s(deployment)
    half_s = part_bytes / _HALVES / carries
    hop_s = deployment.message_s + elems / ranks / _HALVES * hosts.sum_elem_s
    return rounds * _HALVES * half_s, rounds * max(_HALVES * half_s, half_s + hop_s)


def all_gather_s(deployment: Deployment, table: Table) -> tuple[float, float]:
    """Of a sparse gradient, as DDP has gloo do it: how long it keeps every link busy, and takes.

    Each of R ranks hands what it has been given on to the next one, R - 1 times, so that all rows
    of all others pass every link: (R - 1) alpha W each way (`core.parallax`). Then all rows are
    added up.
    """
    others, hosts = deployment.workers - 1, deployment.hosts
    rows = table.alpha * table.elems / table.row_elems
    row_bytes = table.row_elems * deployment.bytes_per_elem + ROW_NUMBER_BYTES
    carries = _carried_bytes_per_s(deployment)
    link_s = others * rows * row_bytes / carries
    sum_s = others * rows * table.row_elems * hosts.sum_elem_s
    return link_s, link_s + _GATHERS * others * deployment.message_s + sum_s


def _carried_bytes_per_s(deployment: Deployment) -> float:
    """From one rank to the next: nodes' links decide, if there are several."""
    one_machine = deployment.nodes == 1
    return deployment.copied_bytes_per_s if one_machine else deployment.link_bytes_per_s()


def link_s(deployment: Deployment) -> float:
    """How long a step keeps every link busy."""
    elems, rows_s = sum(arrays_of(deployment)), 0.0
    if deployment.architecture == "hybrid":
        rows_s = sum(_rows_s(deployment))
    elif _gathers(deployment):
        rows_s = sum(all_gather_s(deployment, table)[0] for table in deployment.tables)
    else:
        elems += sum(table.elems for table in deployment.tables)
    return all_reduce_s(deployment, elems)[0] + rows_s


def _gathers(deployment: Deployment) -> bool:
    return deployment.architecture == "ddp" and not deployment.dense_gradients


def _rows_s(deployment: Deployment) -> list[float]:
    """By table: how long the touched rows keep each link busy, there and back."""
    nodes, each = deployment.nodes, deployment.pushes_per_node
    share = 2 * (nodes - 1) / nodes * each / deployment.link_bytes_per_s()
    pieces = rows_of(deployment, first=0, servers=1)
    return [share * piece.size_bytes for piece in pieces]


def ring_complete_s(deployment: Deployment, ready_s: Sequence[float]) -> list[float]:
    """When each array, and then each table, is updated on the workers.

    Chunks go in the order that `core.order` plans from the same times. A table of ``ring`` is an
    array like others; of ``hybrid`` its rows pass the same links beside the collectives.
    """
    sizes = arrays_of(deployment)
    hybrid = deployment.architecture == "hybrid"
    if not hybrid:
        sizes += [table.elems for table in deployment.tables]
    ranks = priorities(deployment)
    forward_order = sorted(range(len(sizes)), key=ranks.__getitem__)
    chunks = cut_chunks(sizes, deployment.chunk_elems, kinds=[None] * len(sizes))
    ordered = _planned(deployment, chunks, forward_order, ready_s)
    work: list[_Work] = []
    for chunk in ordered:
        ready = [ready_s[parameter] for parameter in chunk.parameters]
        work.append((_reduction(deployment, chunk.elems, ready), chunk.parameters))
    if hybrid:
        for collective, parameters in _rows(deployment, ready_s):
            late = (n for n, (c, _) in enumerate(work) if c.ready_s >= collective.ready_s)
            # before what would hold it up by not being ready
            work.insert(next(late, len(work)), (collective, parameters))
    done_s = ends_s(
        [collective for collective, _ in work],
        in_flight=2 * deployment.chunks_in_flight + len(work) - len(ordered),
        in_flight_elems=deployment.chunks_in_flight * deployment.chunk_elems,
    )
    complete = [0.0] * len(ready_s)
    for at_s, (_, parameters) in zip(done_s, work, strict=True):
        for parameter in parameters:
            elems = sizes[parameter] if parameter < len(sizes) else 0  # rows: updated by servers
            updated_s = at_s + (deployment.hosts.updating_s(elems, 1) if elems else 0.0)
            complete[parameter] = max(complete[parameter], updated_s)
    return complete


_Work = tuple[Collective, tuple[int, ...]]
"""And what it completes."""


def _reduction(deployment: Deployment, elems: int, ready_s: Sequence[float]) -> Collective:
    return Collective(max(ready_s), *all_reduce_s(deployment, elems), elems)


def _rows(deployment: Deployment, ready_s: Sequence[float]) -> Iterator[_Work]:
    """The tables' rows, on their way there and back beside the collectives."""
    first = len(ready_s) - len(deployment.tables)
    relayed_s = (relaying_s(deployment, p) for p in rows_of(deployment, first=0, servers=1))
    times = zip(_rows_s(deployment), row_updates_s(deployment), relayed_s, strict=True)
    busy_until_s = 0.0  # of the node's relays, which sum one table's after the other's
    for number, (rows_s, update_s, relay_s) in enumerate(times, start=first):
        busy_until_s = max(busy_until_s, ready_s[number]) + relay_s
        waited_s = busy_until_s - ready_s[number] if relay_s else 0.0
        least_s = rows_s + 2 * deployment.message_s + update_s + waited_s
        yield Collective(ready_s[number], rows_s, least_s, 0), (number,)


def _planned(
    deployment: Deployment,
    chunks: Sequence[Chunk],
    forward_order: Sequence[int],
    ready_s: Sequence[float],
) -> list[Chunk]:
    observed = Observation(
        ready_s=tuple(ready_s[: len(forward_order)]),
        needed_s=(0.0,) * len(forward_order),
        chunk_s=tuple(all_reduce_s(deployment, chunk.elems)[0] for chunk in chunks),
    )
    return [chunks[number] for number in plan_order(chunks, forward_order, observed)]


def ddp_complete_s(deployment: Deployment, ready_s: Sequence[float]) -> float:
    """When all buckets are reduced: the backward pass ends no earlier.

    A sparse gradient is a bucket by itself. Buckets go in the order of their first arrays.
    """
    ranks, work = priorities(deployment), []
    sizes = arrays_of(deployment)
    if _gathers(deployment):
        for number, table in enumerate(deployment.tables, start=len(sizes)):
            gathering = Collective(ready_s[number], *all_gather_s(deployment, table), 0)
            work.append((ranks[number], gathering))
    else:
        sizes += [table.elems for table in deployment.tables]
    in_order = sorted(range(len(sizes)), key=ranks.__getitem__)
    for places in fill_buckets([sizes[number] for number in in_order], deployment.bucket_bytes):
        members = [in_order[place] for place in places]
        elems = sum(sizes[number] for number in members)
        reduction = _reduction(deployment, elems, [ready_s[n] for n in members])
        work.append((max(ranks[number] for number in members), reduction))
    last_first = sorted(work, key=lambda item: item[0], reverse=True)
    return max(ends_s([collective for _, collective in last_first], in_flight=_DDP_IN_FLIGHT))
