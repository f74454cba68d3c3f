"""Another job's bytes on a node's link: processes that send datagrams at a fixed rate.

Datagrams do not make way for TCP as TCP makes way for them. So they take their share of the link
while they are sent, and TCP what is left. One process sends from the node to the switch, one from
the switch to the node, which pass no other link.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import time
from collections.abc import Callable

from foreprop.backends.processes import die_with_parent
from foreprop_lab.setting.links import SWITCH_ADDRESS, CrossTraffic, Network

PROCESS_NAME = "lab-traffic"
_PR_SET_NAME = 15
_PORT = 29500
_PAYLOAD_BYTES = 1472
_WIRE_BYTES = 1514
"""A packet with the headers of Ethernet, IP and UDP, as the shaper counts them."""
_PAUSE_S = 0.002
"""The time between two looks at what is due."""
_MOST_LATE_S = 0.02
"""Bytes that are later than this, on a busy processor, are left out: they would fill the queue."""


def fork_node_traffic(network: Network, node: int, leave: Callable[[], None]) -> None:
    """Send from the node's own network to the switch, if the node has such traffic.

    ``leave`` closes what the child has inherited and must not hold open.
    """
    traffic = network.traffic_of(node)
    if traffic is not None:
        _fork(network, traffic, network.address(node), SWITCH_ADDRESS, leave)


def fork_switch_traffic(network: Network, leave: Callable[[], None]) -> None:
    """Send from the switch's network to the nodes, if their links are shaped that way."""
    for traffic in network.cross_traffic if network.shape_ingress else ():
        _fork(network, traffic, SWITCH_ADDRESS, network.address(traffic.node), leave)


def _fork(
    network: Network, traffic: CrossTraffic, here: str, there: str, leave: Callable[[], None]
) -> None:
    """Make a process that sends until its parent ends."""
    if os.fork():
        return
    try:
        die_with_parent()
        ctypes.CDLL(None).prctl(_PR_SET_NAME, PROCESS_NAME.encode(), 0, 0, 0)
        leave()
        bytes_per_s = traffic.share * network.rate_of(traffic.node) / 8
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            # nobody reads what the other end sends here: the kernel drops it
            sender.bind((here, _PORT + traffic.node))
            sender.setblocking(False)
            _send(sender, (there, _PORT + traffic.node), traffic, bytes_per_s)
    finally:
        sys.stderr.flush()
        os._exit(0)


def _send(
    sender: socket.socket, target: tuple[str, int], traffic: CrossTraffic, bytes_per_s: float
) -> None:
    """Send for ever: what is due in the period's share that has traffic, and nothing outside it."""
    payload = bytes(_PAYLOAD_BYTES)
    began_s = time.monotonic()
    while True:
        on_s, sent_bytes = traffic.duty * traffic.period_s, 0.0
        while (past_s := time.monotonic() - began_s) < on_s:
            sent_bytes = max(sent_bytes, (past_s - _MOST_LATE_S) * bytes_per_s)
            while sent_bytes < past_s * bytes_per_s:
                with contextlib.suppress(OSError):  # its queue is full: it is dropped
                    sender.sendto(payload, target)
                sent_bytes += _WIRE_BYTES
            time.sleep(_PAUSE_S)
        began_s += traffic.period_s
        time.sleep(max(0.0, began_s - time.monotonic()))
