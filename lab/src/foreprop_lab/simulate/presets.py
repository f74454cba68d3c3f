"""foreprop's presets on a simulated cluster: workers and a server on each node.

Servers that have no slices are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from foreprop.config import Config
from foreprop.core.frames import SERVER, Peers
from foreprop.core.manifest import ITEMSIZE_BYTES, wire_dtype_of
from foreprop.core.relay_machine import workers_of_node
from foreprop.core.sendqueue import (
    AT_ONCE,
    least_bytes,
    runs_ahead,
    takes_turns,
    window_share_bytes,
)
from foreprop.core.slicing import Partition, plan_slices
from foreprop.errors import ConfigError
from foreprop_lab.setting.hosts import Kernel
from foreprop_lab.setting.labsetting import HYBRID, foreprop_config
from foreprop_lab.simulate.cluster import Cluster, End, Kernels, SimulatedSteps, connect_nodes, join
from foreprop_lab.simulate.coder import at_relays, between_workers_and_relays
from foreprop_lab.simulate.device import Synchronisation
from foreprop_lab.simulate.relayed import Relay, RowRelay
from foreprop_lab.simulate.rowtables import RowServer, RowWorker, Tables, tables_of
from foreprop_lab.simulate.served import Agreement, Processor, ServedWorker, Server, Site
from foreprop_lab.simulate.setting import SimulatedSetting
from foreprop_lab.simulate.symmetric import Links, connect_crowd

SEND_BUFFER_BYTES = 4_194_304
"""Linux's largest automatic send buffer, which the lab divides by the scale."""


def simulate_preset(
    name: str, setting: SimulatedSetting, cluster: Cluster, *, steps: int, **changes: Any
) -> SimulatedSteps:
    """Train ``steps`` steps after a first forward pass; ``changes`` are fields of `Config`."""
    config = simulated_config(name, setting, **changes)
    agreement = agree(config, setting)
    if setting.compression is not None:
        from foreprop_lab.simulate.compressed import coded_slices

        agreement = replace(agreement, coded=coded_slices(config, setting, agreement.slices))
    return train_served(config, agreement, setting, cluster, steps=steps)


def train_served(
    config: Config,
    agreement: Agreement,
    setting: SimulatedSetting,
    cluster: Cluster,
    *,
    steps: int,
    beside: int = 0,
    synchronised: Callable[[Sequence[ServedWorker]], Sequence[Synchronisation]] = list,
) -> SimulatedSteps:
    """Train with workers and servers; ``beside`` other connections share each link.

    ``synchronised`` makes of the workers the objects that their devices ask.
    """
    site = Site(cluster.clock, cluster.hosts, agreement)
    relayed = is_relayed(config, setting)
    own = site
    if relayed:
        own = site._replace(agreement=between_workers_and_relays(agreement))
    workers = [_worker(own, rank, cluster) for rank in cluster.ranks]
    servers = {index: _server(site, index, cluster) for index in agreement.busy_servers}
    ends = _ends(cluster, workers, servers)
    if relayed:
        relay_site = site._replace(agreement=at_relays(agreement))
        ends = _ends_at_relays(cluster, relay_site, workers, servers)
    kernels = _kernels(config, setting, cluster, agreement, beside=beside)
    if not cluster.is_symmetric:
        for here, there in ends:
            join(here, there, connect_nodes(cluster, here, there, kernels))
        trained = cluster.train(setting, synchronised(workers), steps=steps)
        return replace(trained, backup_workers=agreement.backup_workers)
    links = Links(cluster.link, cluster.nodes), Links(cluster.link, cluster.nodes)
    for here, there in ends:
        join(here, there, connect_crowd(cluster, links, here, there, kernels))
    trained = cluster.train(setting, synchronised(workers), steps=steps)
    return replace(trained, sent_bytes=links[0].sent_bytes(cluster.crowds))


def _worker(site: Site, rank: int, cluster: Cluster) -> ServedWorker:
    processor = _processor(cluster, cluster.hosts.worker_frame_s)
    if site.agreement.tables is None:
        return ServedWorker(site, rank, processor)
    return RowWorker(site, rank, processor, site.agreement.tables)


def _server(site: Site, index: int, cluster: Cluster) -> Server:
    hosts = cluster.hosts
    costs = (hosts.server_frame_s, hosts.server_byte_s, hosts.server_row_byte_s)
    processor = _processor(cluster, *costs)
    if site.agreement.tables is None:
        return Server(site, index, processor)
    return RowServer(site, index, processor, site.agreement.tables)


def _relay(
    site: Site, node: int, server: int, workers: Peers, processor: Processor | None
) -> Relay:
    about: dict[str, Any] = {"node": node, "server": server, "workers": workers}
    if site.agreement.tables is None:
        return Relay(site, **about, processor=processor)
    return RowRelay(site, **about, processor=processor, tables=site.agreement.tables)


def _processor(
    cluster: Cluster, frame_s: float, byte_s: float = 0.0, row_byte_s: float | None = None
) -> Processor | None:
    if not frame_s and not byte_s and not row_byte_s:
        return None
    return Processor(
        clock=cluster.clock,
        link_byte_s=8 / cluster.link.rate_bits_per_s,
        frame_s=frame_s,
        byte_s=byte_s,
        row_byte_s=row_byte_s,
    )


def simulated_config(name: str, setting: SimulatedSetting, **changes: Any) -> Config:
    """The lab's `Config`; raises `ConfigError` for what is not simulated."""
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
    if config.backup_workers and setting.rows:
        raise ConfigError(
            f"backup_workers is {config.backup_workers} with {name}, and rows is True: servers of"
            " rows wait for every worker; leave one of them out"
        )
    return config


def bytes_per_elem(config: Config) -> int:
    return ITEMSIZE_BYTES[wire_dtype_of("float32", config.wire_dtype)]


def is_relayed(config: Config, setting: SimulatedSetting) -> bool:
    sums = config.local_aggregation != "off" and not (config.staleness or config.counts_some)
    return setting.workers_per_node > 1 and sums


def agree(config: Config, setting: SimulatedSetting) -> Agreement:
    """The agreement that the manifest of such a session would contain."""
    pushers_per_node = 1 if is_relayed(config, setting) else setting.workers_per_node
    sizes = [size for layer in setting.layers for size in layer.sizes_elems]
    servers = setting.dedicated_servers or setting.nodes
    partition = Partition(
        granularity=config.granularity,
        placement=config.placement,
        servers=servers,
        slice_elems=config.cut_elems(servers),
        big_array_elems=config.big_array_elems,
        shares=config.shares(servers),
    )
    # what servers have in slices: not tables, and nothing where all is reduced
    reduced = range(len(sizes)) if config.architecture == HYBRID else setting.table_arrays
    served = [0 if number in reduced else size for number, size in enumerate(sizes)]
    slices = plan_slices(served, [bytes_per_elem(config)] * len(sizes), partition)
    tables = None
    if setting.rows:
        tables = Tables(
            tables_of(setting),
            servers=servers,
            first_number=len(slices),
            part_elems=partition.slice_elems,
            bytes_per_elem=bytes_per_elem(config),
        )
    return Agreement(
        slices=slices,
        parameters=len(sizes),
        order=config.order,
        reply=config.reply,
        members=[crowd.members for crowd in setting.crowds for _ in range(pushers_per_node)],
        servers=servers,
        push_window_bytes=config.push_window_bytes,
        bytes_per_elem=bytes_per_elem(config),
        lanes=config.lanes,
        at_once=_at_once(setting),
        needs_norm=config.aggregation.needs_norm,
        staleness=setting.staleness,
        backup_workers=config.backup_workers,
        tables=tables,
    )


def _at_once(setting: SimulatedSetting) -> int:
    return AT_ONCE if _is_each(setting) else sys.maxsize


def _is_each(setting: SimulatedSetting) -> bool:
    return all(crowd.members == 1 for crowd in setting.crowds)


def _kernels(
    config: Config,
    setting: SimulatedSetting,
    cluster: Cluster,
    agreement: Agreement,
    *,
    beside: int,
) -> Kernels:
    """The kernels for pushes, whose send buffer is bounded, and for replies, where it may be."""
    pushers, servers = agreement.workers, agreement.servers
    others = max(1, setting.nodes - 1) * pushers // setting.nodes
    most, bounded = _at_once(setting), config.lanes == "peers"
    pushes_wait = bounded and takes_turns(config.order, servers, most)
    replies_wait = bounded and takes_turns(config.order, pushers, most)
    unsent_bytes = config.unsent_bytes if bounded else sys.maxsize

    def at_once(wait: bool) -> int:
        return min(others, most) if wait else others

    # pushes to the others' servers, replies to their workers
    connections = at_once(pushes_wait) + at_once(replies_wait)
    if setting.dedicated_servers:  # one of them to or from each: a server's link has more
        connections = max(servers, pushers)

    pushed_bytes = window_share_bytes(config.push_window_bytes, servers, config.order)
    if runs_ahead(config.order, servers):
        pushed_bytes = least_bytes(pushed_bytes)  # in the lab frames queue
    replied_bytes = setting.scaled(SEND_BUFFER_BYTES)
    if not bounded:
        pushed_bytes = replied_bytes
    if replies_wait:
        replied_bytes = window_share_bytes(config.push_window_bytes, pushers, config.order)
    held_bytes = at_once(pushes_wait) * pushed_bytes + at_once(replies_wait) * replied_bytes
    spread = 0.0 if cluster.is_symmetric else cluster.hosts.spread_of(cluster.link, held_bytes)

    def kernel(buffer_bytes: int, settles: bool) -> Kernel:
        return cluster.hosts.kernel(
            cluster.link,
            connections=connections + beside,
            unsent_bytes=unsent_bytes,
            buffer_bytes=buffer_bytes,
            settles=settles,
            window_spread=spread,
        )

    return kernel(pushed_bytes, pushes_wait), kernel(replied_bytes, replies_wait)


def _ends(
    cluster: Cluster, workers: Sequence[ServedWorker], servers: Mapping[int, Server]
) -> Iterator[tuple[End, End]]:
    for rank, worker in enumerate(workers):
        for index, server in servers.items():
            here = End(cluster.node_of(rank), index, worker.exchange, worker.receive)
            where = cluster.node_of_server(index)
            yield here, End(where, rank, server.exchange, server.receive)


def _ends_at_relays(
    cluster: Cluster, site: Site, workers: Sequence[ServedWorker], servers: Mapping[int, Server]
) -> Iterator[tuple[End, End]]:
    for node in range(cluster.nodes):
        own = workers_of_node(node, len(workers), cluster.workers_per_node)
        processor = _processor(cluster, site.hosts.server_frame_s)
        for index, server in servers.items():
            relay = _relay(site, node, index, own, processor)
            here = End(node, SERVER, relay.exchange, relay.receive_answer)
            where = cluster.node_of_server(index)
            yield here, End(where, node, server.exchange, server.receive)
            for number in range(own.count):
                worker = workers[own.first_rank(number)]
                here = End(node, index, worker.exchange, worker.receive)
                yield here, End(node, number, relay.exchange, relay.receive)
