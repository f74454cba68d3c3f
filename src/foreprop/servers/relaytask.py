"""What a relay process is told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayTask:
    """What a node's relay process is told on its command line."""

    session_id: str
    world_size: int
    config: dict[str, object]
    node: int
    workers_per_node: int
    server_names: list[str]
    """Of all servers, by index, for messages."""
    server_nodes: list[int]
    """Which (emulated) node each is on."""
    nonces: list[str]
    """Of the connections to them, in hexadecimal, if those are to be encrypted; else none."""
