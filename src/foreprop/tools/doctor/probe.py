"""The probe on each host: ``python -m foreprop.tools.doctor.probe``, which answers over pipes.

It is started by ``foreprop doctor``, never by hand. Commands come in on standard input, one per
line; answers go out on standard output, each with the launcher's mark, so that what a shell's
start-up files print is not taken for one. The end of the input, a signal or a long silence ends it.
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
from foreprop.engine.stream import listen
from foreprop.engine.traffic import Endpoint, ProbeListener, listen_everywhere, ping, reach, send
from foreprop.errors import ForepropError
from foreprop.tools.doctor import records
from foreprop.tools.doctor.facts import Place, find_address, gather_facts
from foreprop.tools.doctor.records import PROTOCOL
from foreprop.tools.run.host import Inbox
from foreprop.tools.run.processes import exit_at_once, write_all
from foreprop.tools.run.records import ALIVE, END, MARK
from foreprop.version import __version__

PROGRAM = ("-P", "-m", "foreprop.tools.doctor.probe")

_Result = TypeVar("_Result")


class Probe:
    """One host's probe, for one thread; `close` it in the end."""

    def __init__(self) -> None:
        self._host = 0
        self._token = b""
        self._listeners: list[ProbeListener] = []

    def answer(self, command: records.Command) -> records.Answer:
        """Do what is asked, within a time that the command bounds; a defect is an answer, too."""
        host, token = self._host, self._token
        try:
            match command:
                case records.Introduce():
                    self._host, self._token = command.host, bytes.fromhex(command.token)
                    os.environ.update(command.environment)
                    config = Config.resolve()
                    return gather_facts(command, config, self._listen(command, config))
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
            if line == ALIVE:
                continue
            try:
                answer = probe.answer(records.decode_command(line))
            except msgspec.MsgspecError as error:
                answer = records.Defect(text=f"a command cannot be read: {error}")
            _say(output, answer)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is ending
        probe.close()
    return 0


def _say(descriptor: int, answer: records.Answer) -> None:
    write_all(descriptor, MARK + msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    exit_at_once(main)
