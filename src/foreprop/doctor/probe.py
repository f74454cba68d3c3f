"""On each host: answers what it is asked. ``python -m foreprop.doctor.probe`` over pipes.

Started by ``foreprop doctor``, never by hand. Commands come in on standard input, one per line;
answers go out on standard output, each with the launcher's mark, so that what a shell's start-up
files print is not taken for one. The end of the input, a signal or a long silence ends it.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import msgspec

from foreprop.config import Config
from foreprop.doctor import records
from foreprop.doctor.facts import Place, find_address, gather_facts
from foreprop.doctor.records import PROTOCOL
from foreprop.errors import ForepropError
from foreprop.link.stream import listen
from foreprop.link.traffic import Endpoint, ProbeListener, listen_everywhere, ping, reach, send
from foreprop.run.host import Inbox
from foreprop.run.processes import exit_at_once, write_all
from foreprop.run.records import ALIVE, END, MARK
from foreprop.version import __version__

PROGRAM = ("-P", "-m", "foreprop.doctor.probe")

_Result = TypeVar("_Result")


class Probe:
    """One host's part. Used by one thread; `close` it in the end."""

    def __init__(self) -> None:
        self._host = 0
        self._token = b""
        self._listeners: list[ProbeListener] = []

    def answer(self, command: records.Command) -> records.Answer:
        """Within a time that the command bounds; what goes wrong is in the answer."""
        host, token = self._host, self._token
        try:
            match command:
                case records.Introduce():
                    return self._introduce(command)
                case records.Reach(peers=peers, timeout_s=timeout_s):
                    reach_to = partial(reach, host, token=token, timeout_s=timeout_s)
                    return records.Reached(attempts=_for_all(peers, reach_to))
                case records.Ping(peers=peers, seconds=seconds):
                    return records.Pinged(
                        trips=[ping(host, peer, token, seconds) for peer in peers]
                    )
                case records.Send(peers=peers, settle_s=settle_s, seconds=seconds):
                    send_to = partial(send, host, token=token, settle_s=settle_s, seconds=seconds)
                    return records.Sent(flows=_for_all(peers, send_to))
                case _:
                    return records.Defect(text=f"asked for {type(command).__name__}")
        except Exception as error:
            return records.Defect(text=f"{type(error).__name__}: {error}")

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def _introduce(self, asked: records.Introduce) -> records.Answer:
        self._host, self._token = asked.host, bytes.fromhex(asked.token)
        os.environ.update(asked.environment)
        config = Config.resolve()
        return gather_facts(asked, config, self._listen(asked, config))

    def _listen(self, asked: records.Introduce, config: Config) -> Place:
        address, address_error = find_address(asked.rendezvous, config)
        port = rendezvous_port = rendezvous_error = None
        if address is not None and address_error is None:
            try:
                port = self._serve(listen(address, config.port_range))
            except ForepropError as error:
                address_error = str(error)
        if asked.serve_rendezvous:
            try:
                rendezvous_port = self._serve(listen_everywhere(asked.port or 0))
            except ForepropError as error:
                rendezvous_error = str(error)
        return Place(address, address_error, port, rendezvous_port, rendezvous_error)

    def _serve(self, listening: socket.socket) -> int:
        listener = ProbeListener(listening, self._host, self._token)
        self._listeners.append(listener)
        return listener.port


def _for_all(peers: Sequence[Endpoint], work: Callable[[Endpoint], _Result]) -> list[_Result]:
    """At once, one thread each."""
    if not peers:
        return []
    with ThreadPoolExecutor(max_workers=len(peers)) as pool:
        return list(pool.map(work, peers))


def main() -> int:
    output = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    inbox, probe = Inbox(), Probe()
    _say(output, records.Hello(protocol=PROTOCOL, foreprop=__version__))
    try:
        while (line := inbox.next_line()) != END:
            if line != ALIVE:
                _say(output, _answer(probe, line))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is ending
        probe.close()
    return 0


def _answer(probe: Probe, line: bytes) -> records.Answer:
    try:
        return probe.answer(records.decode_command(line))
    except msgspec.MsgspecError as error:
        return records.Defect(text=f"a command cannot be read: {error}")


def _say(descriptor: int, answer: records.Answer) -> None:
    write_all(descriptor, MARK + msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    exit_at_once(main)
