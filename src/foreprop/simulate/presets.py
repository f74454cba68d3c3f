"""foreprop's presets on a simulated cluster: a worker and a server on each node.

Servers that have no slices are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from foreprop.config import Config
from foreprop.core.slicing import Partition, plan_slices
from foreprop.lab.limit import BYTES_PER_ELEM
from foreprop.lab.systems import foreprop_config
from foreprop.simulate.cluster import Cluster, SimulatedSteps
from foreprop.simulate.connection import Connection, Kernel
from foreprop.simulate.hosts import Hosts
from foreprop.simulate.served import Agreement, Processor, ServedWorker, Server
from foreprop.simulate.setting import SimulatedSetting
from foreprop.simulate.symmetric import join_crowds

SEND_BUFFER_BYTES = 4_194_304
"""Linux's largest automatic send buffer, which the lab divides by the scale."""
_LEAST_WINDOW_BYTES = 8192  # engine.launch's


def simulate_preset(
    name: str,
    setting: SimulatedSetting,
    cluster: Cluster,
    hosts: Hosts,
    *,
    steps: int,
    **changes: Any,
) -> SimulatedSteps:
    """Train ``steps`` steps after a first forward pass; ``changes`` are fields of `Config`."""
    config = foreprop_config(name, setting, **changes)
    agreement = agree(config, setting)
    clock = cluster.clock
    workers = [
        ServedWorker(clock, agreement, hosts, rank, _processor(cluster, hosts.worker_frame_s))
        for rank in cluster.simulated
    ]
    servers = {
        index: Server(clock, agreement, hosts, index, _processor(cluster, hosts.server_frame_s))
        for index in agreement.busy_servers
    }
    kernels = _kernels(config, setting, cluster, hosts)
    if not cluster.is_symmetric:
        join(cluster, workers, servers, *kernels)
        return cluster.train(setting, workers, steps=steps)
    links = join_crowds(cluster, workers, servers, *kernels)
    trained = cluster.train(setting, workers, steps=steps)
    return replace(trained, sent_bytes=links.sent_bytes(cluster.crowds))


def _processor(cluster: Cluster, frame_s: float) -> Processor | None:
    if not frame_s:
        return None
    return Processor(cluster.clock, frame_s, 8 / cluster.link.rate_bits_per_s)


def agree(config: Config, setting: SimulatedSetting) -> Agreement:
    """What the manifest of such a session would say."""
    sizes = [size for layer in setting.layers for size in layer.sizes_elems]
    partition = Partition(
        granularity=config.granularity,
        placement=config.placement,
        servers=setting.nodes,
        slice_elems=config.slice_elems,
        big_array_elems=config.big_array_elems,
        seed=config.placement_seed,
    )
    return Agreement(
        slices=plan_slices(sizes, [BYTES_PER_ELEM] * len(sizes), partition),
        parameters=len(sizes),
        order=config.order,
        reply=config.reply,
        workers=setting.nodes,
        members=[crowd.members for crowd in setting.crowds],
        servers=setting.nodes,
        push_window_bytes=config.push_window_bytes,
    )


def _kernels(
    config: Config, setting: SimulatedSetting, cluster: Cluster, hosts: Hosts
) -> tuple[Kernel, Kernel]:
    """Of pushes, whose send buffer is bounded, and of replies."""
    pushed_bytes = max(_LEAST_WINDOW_BYTES, config.push_window_bytes // setting.nodes)
    replied_bytes = setting.scaled(SEND_BUFFER_BYTES)
    others = max(1, setting.nodes - 1)

    def kernel(buffer_bytes: int) -> Kernel:
        return hosts.kernel(
            cluster.link,
            connections=2 * others,  # pushes to the others' servers, replies to their workers
            unsent_bytes=config.unsent_bytes,
            buffer_bytes=buffer_bytes,
        )

    return kernel(pushed_bytes), kernel(replied_bytes)


def join(
    cluster: Cluster,
    workers: list[ServedWorker],
    servers: Mapping[int, Server],
    pushes: Kernel,
    replies: Kernel,
) -> None:
    """Connect every worker with every server."""
    for rank, worker in enumerate(workers):
        for index, server in servers.items():
            outlet, back = worker.outlet, server.outlet
            forth_way = cluster.connect(
                rank, index, pushes, peer=index, sent=outlet.taken, deliver=server.receive
            )
            back_way = cluster.connect(
                index, rank, replies, peer=rank, sent=back.taken, deliver=worker.receive
            )
            if isinstance(forth_way, Connection) and isinstance(back_way, Connection):
                forth_way.reverse, back_way.reverse = back_way, forth_way
            outlet.connections[index] = forth_way
            back.connections[rank] = back_way
