"""The limit that no schedule can beat where nodes, steps and links differ: pure arithmetic.

`limit.limit_s` is the same for nodes, steps and links that are all alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreprop.core.slicing import Partition, plan_slices
from foreprop.plan.limit import BYTES_PER_ELEM, HEADER_FACTOR
from foreprop.plan.profile import Layer
from foreprop_lab.setting.links import Network
from foreprop_lab.setting.unevenness import Draw

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """The bytes of layers 1..k on the wire, for each k, by node and layer: never more than is sent.

    A node sends its gradients to the others' servers, and its own server sends new values to the
    others.
    """

    pushed: Floats
    """The bytes from the node to the others' servers; as many new values come back."""
    pushed_and_one_reply: Floats
    """Those bytes, and the ones that the node's server sends to one of the others."""
    replied: Floats
    """The bytes from the node's server to all others; as many gradients come to it."""
    sent: Floats
    """All bytes that the node sends, which is as many as it receives."""
    all_sent: Floats
    """All bytes that the nodes send together, by layer."""


def plan_passage(
    layers: Sequence[Layer], *, nodes: int, slice_elems: int, shares: tuple[int, ...] = ()
) -> Passage:
    """The fewer bytes of two placements: slices in turn, as by default, and even shares.

    So the passage holds for a ring, too, whose parts are even. With ``shares`` it is of those only.
    """
    sizes = [size for layer in layers for size in layer.sizes_elems]
    layer_of = [number for number, layer in enumerate(layers) for _ in layer.sizes_elems]
    elems = np.zeros((nodes, len(layers)))
    partition = Partition(servers=nodes, slice_elems=slice_elems, shares=shares)
    for piece in plan_slices(sizes, [BYTES_PER_ELEM] * len(sizes), partition):
        elems[piece.server, layer_of[piece.parameter]] += piece.elems
    placed = HEADER_FACTOR * BYTES_PER_ELEM * elems.cumsum(axis=1)
    if shares:
        return passage_of(placed)
    return passage_of(placed, np.broadcast_to(placed.sum(axis=0) / nodes, placed.shape))


def passage_of(*placed: Floats) -> Passage:
    """The fewest bytes in any of these placements, which say what each node's server owns."""
    nodes = len(placed[0])
    least, most = np.minimum.reduce(placed), np.maximum.reduce(placed)
    whole = placed[0].sum(axis=0)
    return Passage(
        pushed=whole - most,
        pushed_and_one_reply=np.broadcast_to(whole, least.shape),
        replied=(nodes - 1) * least,
        sent=whole + (nodes - 2) * least,
        all_sent=2 * (nodes - 1) * whole,
    )


class LinkTimes:
    """How long bytes take at least to pass the nodes' links, one direction of each."""

    def __init__(self, network: Network) -> None:
        nodes = range(network.nodes)
        self._rates: Floats = np.array([network.rate_of(node) for node in nodes])
        self._traffic = {each.node: each for each in network.cross_traffic}
        self.limits_received = network.shape_ingress

    def least_s(self, size_bytes: Floats) -> Floats:
        """The least time for bytes by node and layer, whenever they begin."""
        seconds = size_bytes * 8 / self._rates[:, None]
        for node, traffic in self._traffic.items():
            seconds[node] = [traffic.least_s(each_s) for each_s in seconds[node]]
        return seconds

    def usual_s(self, size_bytes: Floats) -> Floats:
        """The time for bytes by node in the long run."""
        seconds = size_bytes * 8 / self._rates
        for node, traffic in self._traffic.items():
            seconds[node] /= traffic.left
        return seconds

    def together_end_s(self, starts_s: Floats, size_bytes: Floats) -> Floats:
        """When, by layer, all links together can have passed so much, none before its start."""
        before = self._rates @ starts_s
        ends_s: Floats = (before + 8 * size_bytes) / self._rates.sum()
        return ends_s


def limit_s(
    draw: Draw, passage: Passage, network: Network, *, steps: int, workers_per_node: int = 1
) -> float:
    """The shortest possible mean of steps 1 to ``steps`` of exact synchronous training.

    It is the larger of `earliest_end_s` per step, and what the fullest link takes for its bytes in
    the long run. ``draw`` is that of all ranks.
    """
    links = LinkTimes(network)
    seconds = earliest_end_s(draw, passage, links, steps=steps, workers_per_node=workers_per_node)
    return max(seconds / steps, float(links.usual_s(passage.sent[:, -1]).max()))


def earliest_end_s(
    draw: Draw, passage: Passage, links: LinkTimes, *, steps: int, workers_per_node: int = 1
) -> float:
    """When the last rank can have done its last step, if all begin the first backward pass at 0.

    This holds of each step, for every k, with all headers:

    - No rank uses layer k before the last rank has its gradient.
    - Nor before every other node's pushes of layers 1..k, and the new values that its server sends
      to this one, have passed that node's link, from when it has layer k's gradients, and after
      what it had to send so in the steps before.
    - Nor before these layers' new values have come in over the rank's own link, from when the last
      rank has layer k's gradients; nor before these and the gradients for its node's own server
      have, from when one of the other nodes has layer k's, and after all that came in the steps
      before.
    - Some rank does not use layer k before every node's link has also passed the new values of
      layers 1..k that go from its server to all others, and all of the steps before; nor before all
      links together have passed all of this step's. Which rank that is a schedule may choose: after
      it come at least the shortest forward pass of layers k.., and the shortest backward pass of
      the next step.

    Shares of servers are those of ``passage``; a node's workers are pushed for as one. Not counted:
    latency, what hosts do, that a link waits for what is still on its way over another one, and of
    another job's bytes anything but the best moment (`LinkTimes.least_s`). A placement that spares
    a slow link can do better.
    """
    wire = _Wire(passage, links)
    someone_s = 0.0
    ends_s = np.zeros(1)
    for step in range(1, steps + 1):
        forward_s, backward_s = np.moveaxis(draw(step), 2, 0)
        left_s = backward_s[:, ::-1].cumsum(axis=1)[:, ::-1]  # of layers k..
        gradients_s = ends_s[:, None] + left_s
        of_nodes_s = gradients_s.reshape(-1, workers_per_node, left_s.shape[1]).max(axis=1)
        last_s = np.maximum(of_nodes_s.max(axis=0), someone_s + left_s.min(axis=0))
        each_s, some_s = wire.uses(of_nodes_s, last_s)
        each_s = np.repeat(each_s, workers_per_node, axis=0)
        used_s = forward_s[:, ::-1].cumsum(axis=1)[:, ::-1]
        ends_s = np.maximum(gradients_s[:, 0] + used_s[:, 0], (each_s + used_s).max(axis=1))
        some_end_s = float((some_s + used_s.min(axis=0)).max())
        someone_s = max(float(ends_s.max()), some_end_s)
    return someone_s


class _Wire:
    """The links' work in step after step; see `earliest_end_s`."""

    def __init__(self, passage: Passage, links: LinkTimes) -> None:
        self._passage = passage
        self._links = links
        self._pushed_s = links.least_s(passage.pushed)
        self._answered_s = links.least_s(passage.pushed_and_one_reply)
        self._replied_s = links.least_s(passage.replied)
        self._sent_s = links.least_s(passage.sent)
        self._out_until_s: Floats = np.zeros(len(passage.sent))  # of all steps so far
        self._answered_until_s: Floats = np.zeros(len(passage.sent))
        self._in_until_s: Floats = np.zeros(len(passage.sent))

    def uses(self, of_nodes_s: Floats, last_s: Floats) -> tuple[Floats, Floats]:
        """When, by layer, each node may use it at the earliest, and when some node may.

        A node has the layer's gradients at ``of_nodes_s``, the last one at ``last_s``.
        """
        sent_s, none = self._sent_s, self._passage.all_sent == 0  # so far: nothing is waited for
        begins_s = np.maximum(of_nodes_s, self._answered_until_s[:, None])
        self._answered_until_s = begins_s[:, -1] + self._answered_s[:, -1]
        each_s = np.maximum(last_s, -_least_of_others(-(begins_s + self._answered_s)))
        begins_s = np.maximum(of_nodes_s, self._out_until_s[:, None])
        some_s = np.maximum(begins_s + sent_s, last_s + self._replied_s).max(axis=0)
        together_s = self._links.together_end_s(of_nodes_s, self._passage.all_sent)
        some_s = np.maximum(some_s, together_s)
        self._out_until_s = begins_s[:, -1] + sent_s[:, -1]
        if self._links.limits_received:
            begins_s = np.maximum(_least_of_others(of_nodes_s), self._in_until_s[:, None])
            received_s = np.maximum(last_s + self._pushed_s, begins_s + sent_s)
            each_s = np.maximum(each_s, received_s)
            self._in_until_s = begins_s[:, -1] + sent_s[:, -1]
        return np.where(none, -np.inf, each_s), np.where(none, -np.inf, some_s)


def _least_of_others(values: Floats) -> Floats:
    """For each node and layer, the least value of the other nodes."""
    two = np.partition(values, 1, axis=0)[:2]
    is_least = np.arange(len(values))[:, None] == values.argmin(axis=0)
    least: Floats = np.where(is_least, two[1], two[0])
    return least
