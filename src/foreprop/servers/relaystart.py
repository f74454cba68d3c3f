"""The start of a node's relays: one process, which leads to all servers of the session."""

from __future__ import annotations

import socket
from dataclasses import asdict
from typing import TYPE_CHECKING

from foreprop.cluster.world import World
from foreprop.config import Config
from foreprop.link.stream import listen
from foreprop.servers.launch import parse_address
from foreprop.servers.processes import ProcessServer
from foreprop.servers.relaytask import RelayTask

if TYPE_CHECKING:
    from foreprop.servers.launch import Connections


def start_relays(connections: Connections, world: World, config: Config) -> None:
    """Called by a node's first worker. The relays get connections that are made already."""
    servers = range(connections.servers)
    nonces: list[str] = []
    task = RelayTask(
        session_id=connections.session_id,
        world_size=world.size,
        config=asdict(config),
        node=connections.node,
        workers_per_node=connections.workers_per_node,
        server_names=connections.direct_names(),
        server_nodes=[connections.node_of(server) for server in servers],
        nonces=nonces,
    )
    upstreams: list[socket.socket] = []
    pulses: list[socket.socket] = []
    listeners: list[socket.socket] = []
    try:
        for server in servers:
            upstreams.append(connections.reach(server))
            if config.encryption is not None and connections.channel is not None:
                nonces.append(connections.channel.nonces.hex())
            if not world.in_process:
                about = (connections.session_id, f"server {server}")
                pulse = connections.pulse_beside(upstreams[-1], *about, whose="the relay of ")
                pulses.append(pulse[1])
            listeners.append(listen(connections.address, config.port_range))
    except BaseException:
        for sock in (*upstreams, *pulses, *listeners):
            sock.close()
        raise
    ports = [listener.getsockname()[1] for listener in listeners]
    if world.in_process:
        from foreprop.servers.main import ThreadServer, build_relays

        relays = build_relays(task, config, upstreams)
        connections.handles += map(ThreadServer, relays, listeners)
    else:
        connections.handles.append(ProcessServer(task, [*listeners, *upstreams, *pulses]))
    for server, port in enumerate(ports):
        name = f"relay/{connections.node}/{server}"
        connections.board.publish(name, f"{connections.address} {port}")


def reach_relay(connections: Connections, server: int) -> tuple[socket.socket, str]:
    """The node's to this server, and what its secret is for."""
    node = connections.node
    what = f"the relay of node {node}, which rank {connections.first_rank} starts"
    found = connections.board.lookup(f"relay/{node}/{server}", what)
    target = f"relay {node} to server {server}"
    return connections.greeted(connections.connect_to(*parse_address(found, what), target)), target
