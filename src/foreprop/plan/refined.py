"""How long a step takes, and what limits it: our own model, pure arithmetic.

It has what the published formulas leave out: full-duplex links, servers beside the workers or on
machines of their own with links of their own and unequal shares, headers, latency, updates,
overlap with the backward and with the next forward pass, slices, several workers per node and the
processor of their relays, rows of sparse tables, other types than float32. Three things make it
short. All workers do the same at the same time, so one of them stands for all. Links are a fluid
that their connections share (`plan.parameterserver`). And whatever a step has pushed is back before
its forward pass ends, so steps do not meet and one is enough.

It leaves out lost packets, queues in front of links, bounds of windows and buffers, jitter, and
all other work of processors. lab/docs/model.md says how far off that makes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from foreprop.core.parallax import ROW_NUMBER_BYTES
from foreprop.core.slicing import SLICE_ELEMS
from foreprop.features.collectives.order import Observation, cut_chunks, plan_order
from foreprop.plan import limit, parameterserver
from foreprop.plan.deployment import RESOURCES, Deployment, Resource, Table, without
from foreprop.plan.parameterserver import arrays_of, priorities, relaying_s, row_updates_s, rows_of
from foreprop.plan.profile import Layer

_FULL_SHARE = 0.95  # a resource that is busy for this share of a step limits it


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """One step, and how long each resource is busy in it."""

    step_s: float
    compute_s: float
    wire_s: float
    """The busiest node's link, the busier way, headers counted."""
    server_s: float
    """The busiest server: a dedicated one's link, or updates if these take longer."""
    relays_s: float
    """The process of a node's relays, counted as one processor; 0: there is none."""
    saved_s: Mapping[Resource, float]
    """How much shorter the step would be if a resource cost nothing."""
    limited_by: Resource
    """The resource that is busy nearly from end to end; if none is, that which would save most."""


def predict(deployment: Deployment) -> Prediction:
    """The step from the end of a forward pass to the end of the next one, as in the lab."""
    whole_s = step_s(deployment)
    relays_s = parameterserver.relays_s(deployment)
    saved_s = {
        resource: max(0.0, whole_s - step_s(without(deployment, resource)))
        if relays_s or resource != "relays"
        else 0.0
        for resource in RESOURCES
    }
    compute_s = limit.compute_s(deployment.layers)
    if deployment.architecture in ("p2p", "ps"):
        wire_s, server_link_s = parameterserver.link_s(deployment)
        server_s = max(server_link_s, parameterserver.updates_s(deployment))
    else:
        by_rows = deployment.architecture == "hybrid"
        wire_s = collectives_s(deployment)
        server_s = sum(parameterserver.row_updates_s(deployment)) if by_rows else 0.0
    busy_s: dict[Resource, float] = {
        "compute": compute_s,
        "wire": wire_s,
        "server": server_s,
        "relays": relays_s,
    }
    busiest = max(busy_s, key=busy_s.__getitem__)
    # two resources that are equally busy hide each other: neither alone would save anything
    full = busy_s[busiest] >= _FULL_SHARE * whole_s
    return Prediction(
        step_s=whole_s,
        compute_s=compute_s,
        wire_s=wire_s,
        server_s=server_s,
        relays_s=relays_s,
        saved_s=saved_s,
        limited_by=busiest if full else max(RESOURCES, key=saved_s.__getitem__),
    )


def step_s(deployment: Deployment) -> float:
    """`Prediction.step_s` alone, at a fifth of the work."""
    backward_s, ready_s = _backward(deployment)
    if deployment.architecture == "ddp":
        reduced_s = ddp_complete_s(deployment, ready_s)
        return max(backward_s, reduced_s) + sum(layer.forward_s for layer in deployment.layers)
    if deployment.architecture in ("ring", "hybrid"):
        complete_s = ring_complete_s(deployment, ready_s)
    else:
        complete_s = parameterserver.complete_s(deployment, ready_s, backward_s)
    now_s = backward_s
    parameters_by_layer = parameterserver.parameters_by_layer(deployment)
    for layer, parameters in zip(deployment.layers, parameters_by_layer, strict=True):
        now_s = max([now_s, *(complete_s[parameter] for parameter in parameters)])
        now_s += layer.forward_s
    return now_s


def _backward(deployment: Deployment) -> tuple[float, list[float]]:
    numbers = parameterserver.parameters_by_layer(deployment)
    ready_s = [0.0] * sum(map(len, numbers))
    now_s = 0.0
    for layer, parameters in zip(reversed(deployment.layers), reversed(numbers), strict=True):
        now_s += layer.backward_s
        for parameter in parameters:
            ready_s[parameter] = now_s
    return now_s, ready_s


# When parameters are reduced by collectives that share the links of a ring: ``ring``, ``hybrid``
# and DistributedDataParallel.
_ROUNDING = 1e-9  # seconds, and shares of a collective, that are as good as none


class Collective(NamedTuple):
    """One all-reduce, or what else passes every link alike.

    It keeps every link busy for ``link_s``, and takes at least ``least_s``: its rounds wait for
    each other.
    """

    ready_s: float
    link_s: float
    least_s: float
    elems: int


def ends_s(
    collectives: Sequence[Collective], *, in_flight: int, in_flight_elems: int | None = None
) -> list[float]:
    """When each collective is done. They are issued in the order given, each when it is ready.

    At most ``in_flight`` are under way, with at most ``in_flight_elems`` unless it is one alone;
    they share the links evenly.
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
            # the rest may take less than the clock's last digit
            if left[number] <= _ROUNDING or due_s[number] <= until_s:
                ended[number] = until_s
                del left[number]
        now_s = until_s
    return ended


def _durations(under_way: dict[int, Collective]) -> dict[int, float]:
    """How long each would take from beginning to end with the share of the links that it has now.

    Shares are even, but none is more than a collective can use.
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
    """How long an all-reduce keeps every link busy, and how long it takes alone.

    It has 2 (R - 1) rounds among R ranks, each of a part of 1/R. Ranks are ordered by node, so a
    node's link carries what one rank sends. A half that has arrived is added up before it goes on;
    if that takes longer than sending the other half, the link idles.
    """
    ranks, hosts = deployment.workers, deployment.hosts
    part_bytes = elems * deployment.bytes_per_elem / ranks
    rounds = 2 * (ranks - 1)
    carries = _carried_bytes_per_s(deployment)
    half_s = part_bytes / _HALVES / carries
    hop_s = deployment.message_s + elems / ranks / _HALVES * hosts.sum_elem_s
    return rounds * _HALVES * half_s, rounds * max(_HALVES * half_s, half_s + hop_s)


def all_gather_s(deployment: Deployment, table: Table) -> tuple[float, float]:
    """How long gathering a sparse gradient keeps every link busy, and takes, as gloo does it.

    Each of R ranks passes what it has got on to the next one, R - 1 times, so that all rows of all
    others pass every link: (R - 1) alpha W each way (`core.parallax`). Then all rows are added up.
    """
    others, hosts = deployment.workers - 1, deployment.hosts
    rows = table.alpha * table.elems / table.row_elems
    row_bytes = table.row_elems * deployment.bytes_per_elem + ROW_NUMBER_BYTES
    carries = _carried_bytes_per_s(deployment)
    link_s = others * rows * row_bytes / carries
    sum_s = others * rows * table.row_elems * hosts.sum_elem_s
    return link_s, link_s + _GATHERS * others * deployment.message_s + sum_s


def _carried_bytes_per_s(deployment: Deployment) -> float:
    """The rate from one rank to the next: of nodes' links, if there are several nodes."""
    one_machine = deployment.nodes == 1
    return deployment.copied_bytes_per_s if one_machine else deployment.link_bytes_per_s()


def collectives_s(deployment: Deployment) -> float:
    """How long a step's collectives keep every link busy."""
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
    """How long each table's touched rows keep each link busy, there and back."""
    nodes, each = deployment.nodes, deployment.pushes_per_node
    share = 2 * (nodes - 1) / nodes * each / deployment.link_bytes_per_s()
    pieces = rows_of(deployment, first=0, servers=1)
    return [share * piece.size_bytes for piece in pieces]


def ring_complete_s(deployment: Deployment, ready_s: Sequence[float]) -> list[float]:
    """When each array, and then each table, is updated on the workers.

    Chunks go in the order that `collectives.order` plans from the same times. With ``ring`` a table
    is an array like others; with ``hybrid`` its rows pass the same links beside the collectives.
    """
    sizes = arrays_of(deployment)
    hybrid = deployment.architecture == "hybrid"
    if not hybrid:
        sizes += [table.elems for table in deployment.tables]
    ranks = priorities(deployment)
    forward_order = sorted(range(len(sizes)), key=ranks.__getitem__)
    chunks = cut_chunks(sizes, deployment.chunk_elems, kinds=[None] * len(sizes))
    observed = Observation(
        ready_s=tuple(ready_s[: len(forward_order)]),
        needed_s=(0.0,) * len(forward_order),
        chunk_s=tuple(all_reduce_s(deployment, chunk.elems)[0] for chunk in chunks),
    )
    ordered = [chunks[number] for number in plan_order(chunks, forward_order, observed)]
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


_Work = tuple[Collective, tuple[int, ...]]  # a collective, and the parameters that it completes


def _reduction(deployment: Deployment, elems: int, ready_s: Sequence[float]) -> Collective:
    return Collective(max(ready_s), *all_reduce_s(deployment, elems), elems)


def _rows(deployment: Deployment, ready_s: Sequence[float]) -> Iterator[_Work]:
    """The tables' rows, which pass the links both ways beside the collectives."""
    first = len(ready_s) - len(deployment.tables)
    relayed_s = (relaying_s(deployment, p) for p in rows_of(deployment, first=0, servers=1))
    times = zip(_rows_s(deployment), row_updates_s(deployment), relayed_s, strict=True)
    busy_until_s = 0.0  # of the node's relays, which sum one table's rows after the other's
    for number, (rows_s, update_s, relay_s) in enumerate(times, start=first):
        busy_until_s = max(busy_until_s, ready_s[number]) + relay_s
        waited_s = busy_until_s - ready_s[number] if relay_s else 0.0
        least_s = rows_s + 2 * deployment.message_s + update_s + waited_s
        yield Collective(ready_s[number], rows_s, least_s, 0), (number,)


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


def fill_buckets(sizes_elems: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """The arrays in DDP's buckets, last first; one is closed when it holds ``bucket_bytes``."""
    buckets: list[list[int]] = []
    held_bytes = bucket_bytes
    for number in reversed(range(len(sizes_elems))):
        if held_bytes >= bucket_bytes:
            buckets.append([])
            held_bytes = 0
        buckets[-1].append(number)
        held_bytes += sizes_elems[number] * limit.BYTES_PER_ELEM
    return buckets


# Which slice size suits a model and its links, by the steps of several sizes.
# Large slices hold up others, and few of them fill the window of pushes, which the model does not
# know; small ones cost hosts more. So of the sizes whose steps are as short the smallest one is
# taken that hosts have time for.
CANDIDATES: tuple[int, ...] = tuple(SLICE_ELEMS * 2**power // 16 for power in range(9))
"""The sizes, in elements: 3,125 to 800,000."""
_MOST_SLICES = 4096  # of a model: more cost hosts too much, whatever the steps
_SAME = 0.01  # steps that differ by a smaller share are as good
_SLICE_CPU_S = 60e-6
"""What a slice costs a node's worker and server beyond its bytes (`foreprop bench overhead`)."""
_MOST_CPU = 0.5  # the share of a step for which slices may keep one of a node's cores busy


def choose_slice_elems(deployment: Deployment) -> int:
    """The best of `CANDIDATES`; deterministic.

    If all that are as good cost hosts too much, it is the largest of them.
    """
    counts = {size: slices_of(deployment.layers, size) for size in CANDIDATES}
    sizes = [size for size in CANDIDATES if counts[size] <= _MOST_SLICES] or CANDIDATES[-1:]
    steps_s = {size: step_s(replace(deployment, slice_elems=size)) for size in sizes}
    enough_s = (1 + _SAME) * min(steps_s.values())
    good = [size for size in sizes if steps_s[size] <= enough_s]
    cheap = (size for size in good if counts[size] * _SLICE_CPU_S <= _MOST_CPU * steps_s[size])
    return min(cheap, default=good[-1])


def slices_of(layers: Sequence[Layer], slice_elems: int) -> int:
    return sum(math.ceil(size / slice_elems) for layer in layers for size in layer.sizes_elems)
