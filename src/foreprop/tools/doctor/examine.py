"""Who measures what, and when: one examination, over any `Panel`.

A host that fails is noted with the panel's failures and asked nothing more; all others go on.
"""

from __future__ import annotations

import abc
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from foreprop.engine.traffic import Attempt, Endpoint, Flow, Trip
from foreprop.tools.doctor import records

_Kind = TypeVar("_Kind", records.Facts, records.Reached, records.Pinged, records.Sent)
Pair = tuple[int, int]
"""One host, which connects or sends, and another one."""

_FEW_HOSTS = 6
"""Up to so many hosts are measured one pair at a time; of more, disjoint pairs go together."""
_REACH_S = 5.0
_MARGIN_S = 25.0
"""How much longer than its work a probe may take to answer."""
_SETTLE_SHARE = 0.25
_LEAST_SETTLE_S = 0.1
_START_SKEW_S = 0.3
"""How far apart hosts begin that are to send all at once."""


class Panel(abc.ABC):
    """The probes on all hosts; leaving the context ends them. It raises nothing for a host."""

    def __init__(self) -> None:
        self.failures: dict[int, records.Failure] = {}
        """Why a host has no probe, or has one no more."""

    def __enter__(self) -> Self:
        return self

    @abc.abstractmethod
    def __exit__(self, *_: object) -> None: ...

    @abc.abstractmethod
    def ask(
        self, commands: Mapping[int, records.Command], *, within_s: float
    ) -> dict[int, records.Answer]:
        """Ask some hosts and wait; one that does not answer in time is added to ``failures``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What is to be examined; ``names``, ``workers`` and ``environments`` are by host."""

    names: tuple[str, ...]
    workers: tuple[int, ...]
    rendezvous: str
    look_up: tuple[str, ...]
    serve_rendezvous: bool
    port: int | None = None
    """The rendezvous' port, if it is fixed."""
    directory: str | None = None
    environments: tuple[Mapping[str, str], ...]
    seconds: float
    wait_s: float


def examine(panel: Panel, asked: Questions, say: Callable[[str], None]) -> records.Examination:
    """Measure all, within a time that ``seconds`` and ``wait_s`` bound."""
    return _Examination(panel, asked, say).run()


class _Examination:
    def __init__(self, panel: Panel, asked: Questions, say: Callable[[str], None]) -> None:
        self._panel = panel
        self._asked = asked
        self._say = say
        self._facts: dict[int, records.Facts] = {}
        self._servers: dict[int, Endpoint] = {}
        self._attempts: list[Attempt] = []

    def run(self) -> records.Examination:
        self._introduce()
        self._reach()
        trips = self._ping()
        seconds = self._asked.seconds
        settle_s = max(_LEAST_SETTLE_S, _SETTLE_SHARE * seconds)
        rounds = plan_rounds(self._connected(), len(self._asked.names))
        if rounds:
            expected_s = (len(rounds) + 1) * (seconds + settle_s)
            self._say(f"measuring {sum(map(len, rounds))} directions, about {expected_s:.0f} s")
        alone = [flow for pairs in rounds for flow in self._send(self._able(pairs), settle_s)]
        together = self._together()
        return records.Examination(
            rendezvous=self._asked.rendezvous,
            hosts=[
                records.Examined(
                    name=name,
                    workers=self._asked.workers[host],
                    facts=self._facts.get(host),
                    failure=self._panel.failures.get(host),
                )
                for host, name in enumerate(self._asked.names)
            ],
            attempts=self._attempts,
            trips=trips,
            alone=alone,
            together=together,
        )

    def _introduce(self) -> None:
        asked, token = self._asked, secrets.token_hex(16)
        commands = {
            host: records.Introduce(
                host=host,
                token=token,
                names=list(asked.look_up),
                rendezvous=asked.rendezvous,
                serve_rendezvous=asked.serve_rendezvous and host == 0,
                port=asked.port,
                directory=asked.directory,
                environment=dict(asked.environments[host]),
            )
            for host in range(len(asked.names))
        }
        self._facts = self._ask(commands, records.Facts, within_s=asked.wait_s)

    def _ask(
        self, commands: Mapping[int, records.Command], kind: type[_Kind], *, within_s: float
    ) -> dict[int, _Kind]:
        """The answers of hosts that have not failed; a defect counts as a failure."""
        failures = self._panel.failures
        able = {host: command for host, command in commands.items() if host not in failures}
        answers = self._panel.ask(able, within_s=within_s) if able else {}
        for host, answer in answers.items():
            if isinstance(answer, records.Defect):
                failures[host] = records.Failure(kind="defect", text=answer.text)
        return {host: answer for host, answer in answers.items() if isinstance(answer, kind)}

    def _reach(self) -> None:
        self._servers = {
            host: Endpoint(host=host, address=facts.address, port=facts.port)
            for host, facts in self._facts.items()
            if facts.address is not None and facts.port is not None
        }
        peers = list(self._servers.values())
        first = self._facts.get(0)
        if first is not None and first.rendezvous_port is not None:
            address, port = self._asked.rendezvous, first.rendezvous_port
            peers.append(Endpoint(host=0, address=address, port=port, purpose="rendezvous"))
        commands = {
            host: records.Reach(peers=[p for p in peers if p.host != host], timeout_s=_REACH_S)
            for host in self._facts
        }
        answers = self._ask(commands, records.Reached, within_s=2 * _REACH_S + _MARGIN_S)
        self._attempts += [one for answer in answers.values() for one in answer.attempts]

    def _connected(self) -> list[Pair]:
        """The pairs whose first host can connect to the second, of hosts that still answer."""
        found = self._attempts
        connected = [a for a in found if a.purpose == "server" and a.outcome == "connected"]
        return self._able(sorted((a.source, a.to) for a in connected))

    def _able(self, pairs: Sequence[Pair]) -> list[Pair]:
        return [pair for pair in pairs if not self._panel.failures.keys() & set(pair)]

    def _ping(self) -> list[Trip]:
        """The round trips of all pairs: milliseconds for each, unless messages take long."""
        seconds, pairs = self._asked.seconds, self._connected()
        one_way = [(a, b) for a, b in pairs if a < b or (b, a) not in pairs]
        trips: list[Trip] = []
        for together in plan_rounds(one_way, len(self._asked.names)):
            pings = {
                source: records.Ping(peers=[self._servers[to]], seconds=seconds)
                for source, to in self._able(together)
            }
            answers = self._ask(pings, records.Pinged, within_s=seconds + _MARGIN_S)
            trips += [trip for answer in answers.values() for trip in answer.trips]
        return trips

    def _together(self) -> list[Flow]:
        """Have everybody send to everybody, as in training."""
        pairs = self._connected()
        if len({host for pair in pairs for host in pair}) < 2:
            return []
        settle_s = _START_SKEW_S + max(_LEAST_SETTLE_S, _SETTLE_SHARE * self._asked.seconds)
        return self._send(pairs, settle_s)

    def _send(self, pairs: Sequence[Pair], settle_s: float) -> list[Flow]:
        seconds = self._asked.seconds
        commands = {
            source: records.Send(
                peers=[self._servers[to] for s, to in pairs if s == source],
                settle_s=settle_s,
                seconds=seconds,
            )
            for source in {source for source, _ in pairs}
        }
        answers = self._ask(commands, records.Sent, within_s=settle_s + seconds + _MARGIN_S)
        return [flow for answer in answers.values() for flow in answer.flows]


def plan_rounds(pairs: Sequence[Pair], hosts: int) -> list[list[Pair]]:
    """Pairs one by one if there are few hosts; else rounds of pairs that share no host.

    The circle method of round-robin tournaments makes the fewest rounds.
    """
    if hosts <= _FEW_HOSTS:
        return [[pair] for pair in pairs]
    last = hosts + hosts % 2 - 1  # this seat stays
    slots: dict[tuple[int, bool], list[Pair]] = {}
    for source, to in pairs:
        met = 2 * min(source, to) if last in (source, to) else source + to
        slots.setdefault((met % last, source < to), []).append((source, to))
    return [slots[key] for key in sorted(slots)]
