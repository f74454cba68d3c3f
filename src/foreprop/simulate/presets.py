"""foreprop's presets on a simulated cluster: workers and a server on each node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from foreprop.config import Config
from foreprop.core.manifest import ITEMSIZE_BYTES, wire_dtype_of
from foreprop.core.peers import SERVER, workers_of_node
from foreprop.core.slicing import Partition, plan_slices
from foreprop.errors import ConfigError
from foreprop.lab.setting import LabSetting
from foreprop.lab.systems import foreprop_config
from foreprop.simulate.cluster import Cluster, SimulatedSteps
from foreprop.simulate.connection import Connection, Deliver, Kernel
from foreprop.simulate.hosts import Hosts
from foreprop.simulate.relayed import Relay
from foreprop.simulate.served import Agreement, Outlet, ServedWorker, Server

SEND_BUFFER_BYTES = 4_194_304
"""Linux's largest automatic send buffer, which the lab divides by the scale."""
_LEAST_WINDOW_BYTES = 8192  # engine.launch's


def simulate_preset(
    name: str,
    setting: LabSetting,
    cluster: Cluster,
    hosts: Hosts,
    *,
    steps: int,
    **changes: Any,
) -> SimulatedSteps:
    """Train ``steps`` steps after a first forward pass; ``changes`` are fields of `Config`."""
    config = simulated_config(name, setting, **changes)
    relayed = setting.workers_per_node > 1 and config.local_aggregation != "off"
    agreement = agree(config, setting, peers=setting.nodes if relayed else setting.workers)
    workers = [ServedWorker(cluster.clock, agreement, hosts, rank) for rank in cluster.ranks]
    servers = [Server(cluster.clock, agreement, hosts, index) for index in cluster.nodes]
    kernels = _kernels(config, setting, cluster, hosts, pushers=agreement.workers)
    if relayed:
        _join_by_relays(cluster, agreement, hosts, workers, servers, *kernels)
    else:
        _join(cluster, workers, servers, *kernels)
    return cluster.train(setting.layers, workers, steps=steps, jitter=setting.jitter)


def simulated_config(name: str, setting: LabSetting, **changes: Any) -> Config:
    """As the lab's; raises `ConfigError` for what the environment asks for and is not simulated."""
    config = foreprop_config(name, setting, **changes)
    if config.servers_per_node != 1:
        raise ConfigError(
            f"servers_per_node is {config.servers_per_node}, which only `foreprop lab run` can do:"
            f" unset FOREPROP_SERVERS_PER_NODE to simulate {name} with 1"
        )
    return config


def bytes_per_elem(config: Config) -> int:
    """Of gradients and new values on the wire."""
    return ITEMSIZE_BYTES[wire_dtype_of("float32", config.wire_dtype)]


def agree(config: Config, setting: LabSetting, *, peers: int) -> Agreement:
    """What the manifest of such a session would say; ``peers`` push to each server."""
    sizes = [size for layer in setting.layers for size in layer.sizes_elems]
    partition = Partition(
        granularity=config.granularity,
        placement=config.placement,
        servers=setting.nodes,
        slice_elems=config.cut_elems,
        big_array_elems=config.big_array_elems,
        seed=config.placement_seed,
    )
    return Agreement(
        slices=plan_slices(sizes, [bytes_per_elem(config)] * len(sizes), partition),
        parameters=len(sizes),
        order=config.order,
        reply=config.reply,
        workers=peers,
        servers=setting.nodes,
        push_window_bytes=config.push_window_bytes,
        bytes_per_elem=bytes_per_elem(config),
        needs_norm=config.aggregation.needs_norm,
    )


def _kernels(
    config: Config, setting: LabSetting, cluster: Cluster, hosts: Hosts, *, pushers: int
) -> tuple[Kernel, Kernel]:
    """Of pushes, whose send buffer is bounded, and of replies."""
    pushed_bytes = max(_LEAST_WINDOW_BYTES, config.push_window_bytes // setting.nodes)
    replied_bytes = setting.scaled(SEND_BUFFER_BYTES)
    others = max(1, setting.nodes - 1) * pushers // setting.nodes

    def kernel(buffer_bytes: int) -> Kernel:
        return hosts.kernel(
            cluster.link,
            connections=2 * others,  # pushes to the others' servers, replies to their workers
            unsent_bytes=config.unsent_bytes,
            buffer_bytes=buffer_bytes,
        )

    return kernel(pushed_bytes), kernel(replied_bytes)


class _End(NamedTuple):
    """Of two connections, one in each direction."""

    node: int
    peer: int
    """What who is at the other end is called here."""
    outlet: Outlet
    receive: Deliver


def _join(
    cluster: Cluster,
    workers: Sequence[ServedWorker],
    servers: Sequence[Server],
    pushes: Kernel,
    replies: Kernel,
) -> None:
    """Connect every worker with every server."""
    for rank, worker in enumerate(workers):
        for index, server in enumerate(servers):
            here = _End(cluster.node_of(rank), index, worker.outlet, worker.receive)
            there = _End(index, rank, server.outlet, server.receive)
            _connect(cluster, here, there, pushes, replies)


def _join_by_relays(
    cluster: Cluster,
    agreement: Agreement,
    hosts: Hosts,
    workers: Sequence[ServedWorker],
    servers: Sequence[Server],
    pushes: Kernel,
    replies: Kernel,
) -> None:
    """Connect every worker with its node's relays, and these with their servers."""
    for node in cluster.nodes:
        own = workers_of_node(node, len(workers), cluster.workers_per_node)
        for index, server in enumerate(servers):
            relay = Relay(cluster.clock, agreement, hosts, node=node, server=index, workers=own)
            here = _End(node, SERVER, relay.outlet, relay.receive_answer)
            there = _End(index, node, server.outlet, server.receive)
            _connect(cluster, here, there, pushes, replies)
            for number in range(own.count):
                worker = workers[own.first_rank(number)]
                here = _End(node, index, worker.outlet, worker.receive)
                there = _End(node, number, relay.outlet, relay.receive)
                _connect(cluster, here, there, pushes, replies)


def _connect(cluster: Cluster, here: _End, there: _End, forth: Kernel, back: Kernel) -> None:
    ways = [
        cluster.connect(
            one.node,
            other.node,
            kernel,
            peer=one.peer,
            sent=one.outlet.taken,
            deliver=other.receive,
        )
        for one, other, kernel in ((here, there, forth), (there, here, back))
    ]
    forth_way, back_way = ways
    if isinstance(forth_way, Connection) and isinstance(back_way, Connection):
        forth_way.reverse, back_way.reverse = back_way, forth_way
    here.outlet.connections[here.peer] = forth_way
    there.outlet.connections[there.peer] = back_way
