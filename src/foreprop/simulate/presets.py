"""foreprop's presets on a simulated cluster: workers and a server on each node.

Servers that have no slices are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from foreprop.config import Config
from foreprop.core.frames import SERVER, workers_of_node
from foreprop.core.manifest import ITEMSIZE_BYTES, wire_dtype_of
from foreprop.core.sendbound import least_bytes
from foreprop.core.sendqueue import AT_ONCE, runs_ahead, takes_turns, window_share_bytes
from foreprop.core.slicing import Partition, plan_slices
from foreprop.errors import ConfigError
from foreprop.simulate.cluster import Cluster, End, Kernels, SimulatedSteps, connect_nodes, join
from foreprop.simulate.coder import of_relays, of_workers
from foreprop.simulate.relayed import Relay
from foreprop.simulate.served import Agreement, Processor, ServedWorker, Server, Site
from foreprop.simulate.setting import SimulatedSetting
from foreprop.simulate.symmetric import Links, connect_crowd
from foreprop.workload.hosts import Kernel
from foreprop.workload.systemconfig import foreprop_config

SEND_BUFFER_BYTES = 4_194_304
"""Linux's largest automatic send buffer, which the lab divides by the scale."""


def simulate_preset(
    name: str, setting: SimulatedSetting, cluster: Cluster, *, steps: int, **changes: Any
) -> SimulatedSteps:
    """Train ``steps`` steps after a first forward pass; ``changes`` are fields of `Config`."""
    config = simulated_config(name, setting, **changes)
    agreement = agree(config, setting)
    if setting.compression is not None:
        from foreprop.simulate.compressed import coded_slices

        agreement = replace(agreement, coded=coded_slices(config, setting, agreement.slices))
    site, hosts = Site(cluster.clock, cluster.hosts, agreement), cluster.hosts
    relayed = is_relayed(config, setting)
    own = site._replace(agreement=of_workers(agreement)) if relayed else site
    workers = [
        ServedWorker(own, rank, _processor(cluster, hosts.worker_frame_s)) for rank in cluster.ranks
    ]
    servers = {
        index: Server(site, index, _processor(cluster, hosts.server_frame_s))
        for index in agreement.busy_servers
    }
    ends = _ends(cluster, workers, servers)
    if relayed:
        at_relays = site._replace(agreement=of_relays(agreement))
        ends = _ends_at_relays(cluster, at_relays, workers, servers)
    kernels = _kernels(config, setting, cluster, pushers=agreement.workers)
    if not cluster.is_symmetric:
        for here, there in ends:
            join(here, there, connect_nodes(cluster, here, there, kernels))
        return cluster.train(setting, workers, steps=steps)
    links = Links(cluster.link, cluster.nodes), Links(cluster.link, cluster.nodes)
    for here, there in ends:
        join(here, there, connect_crowd(cluster, links, here, there, kernels))
    trained = cluster.train(setting, workers, steps=steps)
    return replace(trained, sent_bytes=links[0].sent_bytes(cluster.crowds))


def _processor(cluster: Cluster, frame_s: float) -> Processor | None:
    if not frame_s:
        return None
    return Processor(cluster.clock, frame_s, 8 / cluster.link.rate_bits_per_s)


def simulated_config(name: str, setting: SimulatedSetting, **changes: Any) -> Config:
    """As the lab's; raises `ConfigError` for what the environment asks for and is not simulated."""
    config = foreprop_config(name, setting, **changes)
    if config.servers_per_node != 1:
        raise ConfigError(
            f"servers_per_node is {config.servers_per_node}, which only `foreprop lab run` can do:"
            f" unset FOREPROP_SERVERS_PER_NODE to simulate {name} with 1"
        )
    if config.lanes == "one" and not _is_each(setting):
        raise ConfigError(
            f"lanes is 'one' with {name}, but a node stands for several of {setting.nodes}: whom"
            " its one consumer sends to next is another one on each; ask for symmetric=False"
            " (--every-node)"
        )
    return config


def bytes_per_elem(config: Config) -> int:
    """Of gradients and new values on the wire."""
    return ITEMSIZE_BYTES[wire_dtype_of("float32", config.wire_dtype)]


def is_relayed(config: Config, setting: SimulatedSetting) -> bool:
    sums = config.local_aggregation != "off" and not config.staleness
    return setting.workers_per_node > 1 and sums


def agree(config: Config, setting: SimulatedSetting) -> Agreement:
    """What the manifest of such a session would say."""
    pushers_per_node = 1 if is_relayed(config, setting) else setting.workers_per_node
    sizes = [size for layer in setting.layers for size in layer.sizes_elems]
    partition = Partition(
        granularity=config.granularity,
        placement=config.placement,
        servers=setting.nodes,
        slice_elems=config.cut_elems(setting.nodes),
        big_array_elems=config.big_array_elems,
        seed=config.placement_seed,
        shares=config.shares(setting.nodes),
    )
    return Agreement(
        slices=plan_slices(sizes, [bytes_per_elem(config)] * len(sizes), partition),
        parameters=len(sizes),
        order=config.order,
        reply=config.reply,
        members=[crowd.members for crowd in setting.crowds for _ in range(pushers_per_node)],
        servers=setting.nodes,
        push_window_bytes=config.push_window_bytes,
        bytes_per_elem=bytes_per_elem(config),
        lanes=config.lanes,
        at_once=_at_once(setting),
        needs_norm=config.aggregation.needs_norm,
        staleness=setting.staleness,
    )


def _at_once(setting: SimulatedSetting) -> int:
    """All peers where one worker stands for many: these would all send to the same ones."""
    return AT_ONCE if _is_each(setting) else sys.maxsize


def _is_each(setting: SimulatedSetting) -> bool:
    """Whether no node stands for others."""
    return all(crowd.members == 1 for crowd in setting.crowds)


def _kernels(
    config: Config, setting: SimulatedSetting, cluster: Cluster, *, pushers: int
) -> Kernels:
    """Of pushes, whose send buffer is bounded, and of replies, for which that depends."""
    others = max(1, setting.nodes - 1) * pushers // setting.nodes
    most, bounded = _at_once(setting), config.lanes == "peers"
    pushes_wait = bounded and takes_turns(config.order, setting.nodes, most)
    replies_wait = bounded and takes_turns(config.order, pushers, most)
    unsent_bytes = config.unsent_bytes if bounded else sys.maxsize

    def at_once(wait: bool) -> int:
        return min(others, most) if wait else others

    def kernel(buffer_bytes: int, settles: bool) -> Kernel:
        return cluster.hosts.kernel(
            cluster.link,
            # pushes to the others' servers, replies to their workers
            connections=at_once(pushes_wait) + at_once(replies_wait),
            unsent_bytes=unsent_bytes,
            buffer_bytes=buffer_bytes,
            settles=settles,
        )

    pushed_bytes = window_share_bytes(config.push_window_bytes, setting.nodes, config.order)
    if runs_ahead(config.order, setting.nodes):
        pushed_bytes = least_bytes(pushed_bytes)  # in the lab frames queue
    replied_bytes = setting.scaled(SEND_BUFFER_BYTES)
    if not bounded:
        pushed_bytes = replied_bytes
    if replies_wait:
        replied_bytes = window_share_bytes(config.push_window_bytes, pushers, config.order)
    return kernel(pushed_bytes, pushes_wait), kernel(replied_bytes, replies_wait)


def _ends(
    cluster: Cluster, workers: Sequence[ServedWorker], servers: Mapping[int, Server]
) -> Iterator[tuple[End, End]]:
    """Of every worker with every server."""
    for rank, worker in enumerate(workers):
        for index, server in servers.items():
            here = End(cluster.node_of(rank), index, worker.exchange, worker.receive)
            yield here, End(index, rank, server.exchange, server.receive)


def _ends_at_relays(
    cluster: Cluster, site: Site, workers: Sequence[ServedWorker], servers: Mapping[int, Server]
) -> Iterator[tuple[End, End]]:
    """Of every worker with its node's relays, and of these with their servers."""
    for node in range(cluster.nodes):
        own = workers_of_node(node, len(workers), cluster.workers_per_node)
        processor = _processor(cluster, site.hosts.server_frame_s)
        for index, server in servers.items():
            relay = Relay(site, node=node, server=index, workers=own, processor=processor)
            here = End(node, SERVER, relay.exchange, relay.receive_answer)
            yield here, End(index, node, server.exchange, server.receive)
            for number in range(own.count):
                worker = workers[own.first_rank(number)]
                here = End(node, index, worker.exchange, worker.receive)
                yield here, End(node, number, relay.exchange, relay.receive)
