"""The emulated network interface of a node, for trying things out on one machine."""

from __future__ import annotations

import tempfile
from pathlib import Path

from foreprop.config import Config
from foreprop.link.stream import Stream


class NodeLinks:
    """The emulated network interface of one node, shared by its processes."""

    def __init__(self, session_id: str, node: int, workers_per_node: int, rate: float) -> None:
        from foreprop.link.pacing import Link

        self._paths = _link_paths(session_id, node)
        self._links = [Link(rate, path) for path in self._paths]
        self._node = node
        self._workers_per_node = workers_per_node

    def wrap(self, stream: Stream, rank: int) -> Stream:
        """Put the links around a stream to a worker, unless it is on the same node."""
        return self.wrap_to_node(stream, rank // self._workers_per_node)

    def wrap_to_node(self, stream: Stream, node: int) -> Stream:
        if node == self._node:
            return stream
        from foreprop.link.pacing import PacedStream

        return PacedStream(stream, egress=self._links[0], ingress=self._links[1])

    def unlink(self) -> None:
        """Remove the files' names once every process of the node has opened them."""
        for path in self._paths:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        self.unlink()
        for link in self._links:
            link.close()


def _link_paths(session_id: str, node: int) -> list[Path]:
    folder = Path(tempfile.gettempdir())
    return [folder / f"foreprop-{session_id}-{node}-{way}" for way in ("egress", "ingress")]


def unlink_links(session_id: str, node: int | None) -> None:
    """Remove what a node that has died on the way may have left."""
    if node is not None:
        for path in _link_paths(session_id, node):
            path.unlink(missing_ok=True)


def node_links(
    config: Config, session_id: str, node: int | None, workers_per_node: int
) -> NodeLinks | None:
    if config.link_rate_bits_per_s is None or node is None:
        return None
    return NodeLinks(session_id, node, workers_per_node, config.link_rate_bits_per_s)
