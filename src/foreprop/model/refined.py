"""How long a step takes, and what limits it: our own model, pure arithmetic.

It has what the published formulas leave out: full-duplex links, servers beside the workers or on
machines of their own with links of their own and unequal shares, headers, latency, updates,
overlap with the backward and with the next forward pass, slices, several workers per node and the
processor that their relays have, rows of sparse tables, other types than float32. Three things make
it short. All workers do the same at the same time, so one of them stands for all. Links are a fluid
that their connections share (`foreprop.model.lanes`). And whatever a step has pushed is back before
its forward pass ends, so steps do not meet and one is enough.

It leaves out lost packets, queues in front of links, bounds of windows and buffers, jitter, and
all other work of processors. docs/model.md says how far off that makes it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from foreprop.model import reduced, served
from foreprop.model.deployment import RESOURCES, Deployment, Resource, Table, without
from foreprop.workload import limit

__all__ = ["Deployment", "Prediction", "Table", "predict"]

_FULL_SHARE = 0.95
"""Of a step: what is busy for so long limits it."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """One step, seconds."""

    step_s: float
    compute_s: float
    """Of the device."""
    wire_s: float
    """How long the busiest worker's node has its link busy, the busier way, headers counted."""
    server_s: float
    """How long the busiest server is: a dedicated one's link, or updates if these take longer."""
    relays_s: float
    """How long the process of a node's relays computes, counted as one processor; 0: none."""
    saved_s: Mapping[Resource, float]
    """How much shorter the step would be if that cost nothing."""
    limited_by: Resource
    """What keeps the step busy nearly from end to end; or if nothing does, what would save most."""


def predict(deployment: Deployment) -> Prediction:
    """The step from the end of a forward pass to the end of the next one, as in the lab."""
    whole_s = step_s(deployment)
    relays_s = served.relays_s(deployment)
    saved_s = {
        resource: max(0.0, whole_s - step_s(without(deployment, resource)))
        if relays_s or resource != "relays"
        else 0.0
        for resource in RESOURCES
    }
    compute_s = limit.compute_s(deployment.layers)
    wire_s, server_s = _busy_s(deployment)
    busy_s: dict[Resource, float] = {
        "compute": compute_s,
        "wire": wire_s,
        "server": server_s,
        "relays": relays_s,
    }
    busiest = max(busy_s, key=busy_s.__getitem__)
    # Two that are equally busy hide each other: neither alone would save anything.
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
        reduced_s = reduced.ddp_complete_s(deployment, ready_s)
        return max(backward_s, reduced_s) + sum(layer.forward_s for layer in deployment.layers)
    if deployment.architecture in ("ring", "hybrid"):
        complete_s = reduced.ring_complete_s(deployment, ready_s)
    else:
        complete_s = served.complete_s(deployment, ready_s, backward_s)
    return _forward_s(deployment, backward_s, complete_s)


def _backward(deployment: Deployment) -> tuple[float, list[float]]:
    """When it ends, and when each array's and table's gradient is there."""
    numbers = served.parameters_by_layer(deployment)
    ready_s = [0.0] * sum(map(len, numbers))
    now_s = 0.0
    for layer, parameters in zip(reversed(deployment.layers), reversed(numbers), strict=True):
        now_s += layer.backward_s
        for parameter in parameters:
            ready_s[parameter] = now_s
    return now_s, ready_s


def _forward_s(deployment: Deployment, starts_s: float, complete_s: list[float]) -> float:
    """When it ends; each layer waits for its own arrays."""
    now_s = starts_s
    for layer, parameters in zip(
        deployment.layers, served.parameters_by_layer(deployment), strict=True
    ):
        now_s = max([now_s, *(complete_s[parameter] for parameter in parameters)])
        now_s += layer.forward_s
    return now_s


def _busy_s(deployment: Deployment) -> tuple[float, float]:
    if deployment.architecture not in ("p2p", "ps"):
        by_rows = deployment.architecture == "hybrid"
        return reduced.link_s(deployment), sum(served.row_updates_s(deployment)) if by_rows else 0.0
    wire_s, server_link_s = served.link_s(deployment)
    return wire_s, max(server_link_s, served.updates_s(deployment))
