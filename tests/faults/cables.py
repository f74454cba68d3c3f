"""Nodes that are network namespaces, and cables between them that can be unplugged."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator

import pytest


class Cables:
    """A network namespace per node, and a cable from each to a switch in a namespace of its own."""

    def __init__(self, nodes: int) -> None:
        self.tag = uuid.uuid4().hex[:6]
        self.switch = f"fp{self.tag}s"
        self.nodes = [f"fp{self.tag}n{i}" for i in range(nodes)]

    def build(self) -> None:
        for name in (self.switch, *self.nodes):
            ip("netns", "add", name)
        self._in(self.switch, "ip", "link", "add", "br0", "type", "bridge")
        self._in(self.switch, "ip", "link", "set", "br0", "up")
        for i, node in enumerate(self.nodes):
            ends = ("type", "veth", "peer", "name", f"port{i}", "netns", self.switch)
            self._in(node, "ip", "link", "add", "eth0", *ends)
            self._in(node, "ip", "address", "add", f"{self.address(i)}/24", "dev", "eth0")
            self._in(node, "ip", "link", "set", "eth0", "up")
            self._in(node, "ip", "link", "set", "lo", "up")
            self._in(self.switch, "ip", "link", "set", f"port{i}", "master", "br0", "up")

    def address(self, node: int) -> str:
        return f"10.231.77.{node + 1}"

    def unplug(self, node: int) -> None:
        """No packet comes or goes any more, and nobody says so."""
        self._in(self.switch, "ip", "link", "set", f"port{node}", "down")

    def plug_in(self, node: int) -> None:
        self._in(self.switch, "ip", "link", "set", f"port{node}", "up")

    def _in(self, namespace: str, *command: str) -> None:
        ip("netns", "exec", namespace, *command)

    def remove(self) -> None:
        for name in (*self.nodes, self.switch):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def cables(nodes: int) -> Iterator[Cables]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    made = Cables(nodes)
    try:
        try:
            made.build()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        yield made
    finally:
        made.remove()
