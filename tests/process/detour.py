"""A node's packets take a detour through this process, which delays or drops them.

The kernels at hand have no netem and no firewall. What the node sends to the lab's network goes to
a tun device instead; what is not dropped leaves by the node's link after ``delay_s``.
"""

from __future__ import annotations

import fcntl
import os
import queue
import socket
import struct
import threading
import time
from pathlib import Path

from pyroute2 import IPRoute

from foreprop_lab.lab.network import INTERFACE

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_DEVICE = "detour"
_NARROWER_PREFIX = "10.213.0.0/25"  # than the lab's own route, so it is preferred
_SO_BINDTODEVICE = 25
_SYN, _ACK = 0x02, 0x10


class Detour:
    """Of all that the calling node sends from now on; ``dropped`` counts.

    ``drop_port``: drop attempts to connect to it; ``drop_all``: drop everything.
    """

    def __init__(
        self,
        address: str,
        *,
        delay_s: float = 0.0,
        drop_port: int | None = None,
        drop_all: bool = False,
    ) -> None:
        self.passed = self.dropped = 0
        self._delay_s = delay_s
        self._drop_port = drop_port
        self._drop_all = drop_all
        self._queue: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        for name in ("all", INTERFACE):  # answers come in by another device than they are sent by
            Path(f"/proc/sys/net/ipv4/conf/{name}/rp_filter").write_text("0")
        self._tun = os.open("/dev/net/tun", os.O_RDWR)
        request = struct.pack("16sH22x", _DEVICE.encode(), _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(self._tun, _TUNSETIFF, request)
        self._out = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
        self._out.setsockopt(socket.SOL_SOCKET, _SO_BINDTODEVICE, INTERFACE.encode() + b"\0")
        with IPRoute() as routes:
            (index,) = routes.link_lookup(ifname=_DEVICE)
            routes.link("set", index=index, state="up")
            routes.route("add", dst=_NARROWER_PREFIX, oif=index, prefsrc=address, scope="link")
            self._index = index
        for work in (self._take, self._pass_on):
            threading.Thread(target=work, daemon=True).start()

    def end(self) -> None:
        """Packets take the straight way again."""
        with IPRoute() as routes:
            routes.link("del", index=self._index)

    def _take(self) -> None:
        while True:
            try:
                packet = os.read(self._tun, 65_536)
            except OSError:
                os.close(self._tun)  # its device is gone
                return
            if self._is_dropped(packet):
                self.dropped += 1
            else:
                self._queue.put((time.monotonic() + self._delay_s, packet))

    def _is_dropped(self, packet: bytes) -> bool:
        if packet[0] >> 4 != 4:
            return True
        header_bytes = (packet[0] & 0x0F) * 4
        if self._drop_all or packet[9] != socket.IPPROTO_TCP:
            return self._drop_all
        port = int.from_bytes(packet[header_bytes + 2 : header_bytes + 4], "big")
        return port == self._drop_port and packet[header_bytes + 13] & (_SYN | _ACK) == _SYN

    def _pass_on(self) -> None:
        while True:
            due_s, packet = self._queue.get()
            time.sleep(max(0.0, due_s - time.monotonic()))
            self._out.sendto(packet, (socket.inet_ntoa(packet[16:20]), 0))
            self.passed += 1
